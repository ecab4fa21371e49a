"""Random (fault, moment) pairs against the real trainer: what is drawn, how it is injected, how the end is judged.

Pair `number` follows from SEED and its number alone: one fault at one moment of a run of STEPS steps of a tiny model.
The moment is before the start, a named point of a step, a save or a deletion (the run is stopped there with SIGSTOP
while the damage is done), the n-th file operation, or between a stop and the resume. Afterwards the run is started
again, as a supervisor or the person on duty would, until it ends; what its messages ask for is done once.

The oracle. `undisturbed` is a run of the same config that was left alone, with all of its checkpoints.

1. Code 0 is right only with the right weights. The last checkpoint must have the bits of the undisturbed run, unless
   - the run recorded data that it skips (incidents/skipped.json): then the bits must be those of a run that begins at
     the undisturbed checkpoint of the last rollback and has the same record;
   - or a value was changed and the checkpoint sealed again, and the guards found nothing at all: no check could tell
     such a state from a real one. Its held-out loss must still be near that of the undisturbed run. These are counted;
   - or the run ended before the slow check of its packed data did, and said so.
2. A checkpoint is good when it lies in its place, is whole, and has the bits of the undisturbed run at its step; while
   a shard is damaged, only those from before count. Before each rename of a checkpoint (deletion, withdrawal,
   quarantine) the run itself notes which good ones stay: a good one may never go while no other one stays. Between two
   starts there must be a good one if there was one before. For a state that cannot be told (see 1) this does not hold.
3. The exit codes are the documented ones, a signal only where the pair sends it, and nothing prints a traceback.
4. A run must not stop itself (3 or 12) while a good checkpoint is left: a supervisor does not start it again.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file, save_file

from tests.processes import Program, WarmProcess
from tests.train.checkpoints.conftest import reseal
from tests.train.conftest import small_config
from zero2all.common.errors import AnomalyError, BadInputError, RunLockedError
from zero2all.common.workspace import Workspace
from zero2all.config import config_yaml
from zero2all.resilience import slots
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.layout import FOLDER_NAME, checkpoint_folder, list_checkpoints, step_of
from zero2all.train.checkpoints.load import verified_checkpoint

SEED = 20261118
STEPS, EVERY = 60, 4
CODE = "from tests.resilience import random_faults; random_faults.child()"
MOST_STARTS = 10
DOCUMENTED = (0, 3, 4, 10, 12, 13, 14)
NEAR_NATS = 0.5
GUARDS = {"spike_window_steps": 16, "spike_min_steps": 8, "rollback_margin_steps": 2, "skip_steps_after": 1}
RUN = "run"
UNCHECKED = "ends before all of its shards were checked"
UNTOLD = "the guards found nothing: it cannot be told from a real state"


POINTS = ("start", "step", "update", "memory", "file", "manifest", "rename", "renamed", "delete", "validate")
LIVE = ("step", "update", "file", "manifest", "rename", "renamed", "delete")  # stopped there while there is damage done
CHECKPOINT_DAMAGE = ("flip", "cut", "delete file", "empty file", "lose folder", "lose manifest")
HINTS = ("latest.json", "pins.json", "memory.json", "skipped.json", "quarantine.json", "metrics")
VALUES = (1e30, 1e4, 1e4, 30.0, 30.0, float("nan"), float("inf"))
FAMILIES = ("kill", "stop", "full", "checkpoint", "sealed", "sealed", "sealed", "memory", "shard", "lock", "hint")
TENSORS = ("norm", "blocks.0.attention_norm", "blocks.0.feed_forward_norm", "head", "blocks.0.attention.out")
"""Weights that every step reads; a value that no step reads cannot be told from a real one."""
INTERRUPTS = {"memory": "SIGKILL", "sealed": "SIGTERM"}
"""Where it matters: after SIGTERM the newest state is on the disk, after SIGKILL in memory."""


@dataclass(frozen=True)
class Pair:
    number: int
    family: str
    fault: str
    moment: str
    step: int  # of the moment
    operation: int  # which file operation, where the moment is one
    target: str  # which checkpoint: newest, older or all
    tensor: str
    value: float
    interrupt: str  # how the run ends before the damage, where that is between two starts
    every_steps: int
    keep_last: int
    memory_every: int
    again: int  # a second kill, at this file operation of the resumed run; 0: none
    check_bytes_per_second: int  # how fast the packed data is checked: ours is small, and real data takes hours


def draw(number: int, seed: int = SEED) -> Pair:
    rng = random.Random(f"{seed}/{number}")
    family = rng.choice(FAMILIES)
    moments, faults = {
        "kill": ((*POINTS, "operation", "operation", "operation"), ("SIGKILL",)),
        "stop": (("start", "step", "update", "file", "renamed", "validate"), ("SIGTERM", "SIGINT")),
        "full": (("file", "manifest", "rename", "memory"), ("disk_full", "io_error")),
        "checkpoint": (("between", "between", *LIVE), CHECKPOINT_DAMAGE),
        "sealed": (("between",), ("weight", "weight", "weight", "first moment", "second moment", "negative moment")),
        "memory": (("between",), ("flip data", "flip head", "cut", "delete", "mode")),
        "shard": (("before", "between", "between", "start"), ("flip", "flip", "flip", "cut", "delete")),
        "lock": (("before", "between", "step"), ("stale", "other host", "garbage", "lost")),
        "hint": (("between", "step", "renamed"), ("garbage", "empty", "missing")),
    }[family]
    fault, moment = rng.choice(faults), rng.choice(moments)
    return Pair(
        number=number,
        family=family,
        fault=fault,
        moment=moment,
        step=rng.randrange(36, 49),
        operation=rng.randrange(1, 400),
        target=rng.choice(("newest", "newest", "older", "all")) if family in ("checkpoint", "memory") else "newest",
        tensor=rng.choice(HINTS if family == "hint" else TENSORS),
        value=rng.choice(VALUES),
        interrupt=INTERRUPTS.get(family) or rng.choice(("SIGKILL", "SIGTERM")),
        every_steps=rng.choice((1, 1, 2, 3, 4, 5, 8)),
        keep_last=rng.choice((2, 2, 3)),
        memory_every=rng.choice((1, 2) if family in ("memory", "shard") else (0, 1, 2)),
        again=rng.choice((0, 0, 0, rng.randrange(1, 200))),
        check_bytes_per_second=rng.choice((32_000_000, 100_000, 30_000, 10_000)),
    )


@dataclass
class Lab:
    warm: WarmProcess
    source: Path  # a workspace with packed data; copied for every pair
    folder: Path
    asking: threading.Lock = field(default_factory=threading.Lock)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    held_out: float = 0.0

    def undisturbed(self) -> None:
        trial = Trial(self, self.folder / "undisturbed", {"every_steps": 1, "keep_every_steps": 1})
        assert trial.start({}).wait() == 0, trial.text()
        assert not (trial.run / "incidents").exists(), "the undisturbed run has no incident"
        self.held_out = held_out(trial.run)
        self.digests = {step_of(folder): digests(folder) for folder in list_checkpoints(trial.run)}
        assert sorted(self.digests) == list(range(1, STEPS + 1))
        (self.folder / "digests.json").write_text(json.dumps(self.digests))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def is_good(folder: Path, right: dict[int, dict[str, str]], until: int = STEPS) -> bool:
    """See 2 of the oracle."""
    with contextlib.suppress(Exception):
        whole = verified_checkpoint(folder) is not None
        return whole and step_of(folder) <= until and digests(folder) == right.get(step_of(folder))
    return False


def held_out(run: Path) -> float:
    series = read_run(run).series
    return max(float(series[name].value[-1]) for name in series if name.startswith("eval/valid/loss/"))


class WrongError(Exception):
    """The oracle's verdict."""


class Trial:
    def __init__(self, lab: Lab, folder: Path, checkpoint: dict[str, int], memory_every: int = 0) -> None:
        self.lab, self.folder = lab, folder
        shutil.copytree(lab.source, folder / "work")
        (folder / "ram").mkdir()
        self.workspace = Workspace(folder / "work")
        self.run = self.workspace.run(RUN)
        self.checkpoint, self.memory_every = checkpoint, memory_every
        self.check_bytes_per_second = 32_000_000
        self.good_until = STEPS  # later checkpoints may have been trained on damaged data, whatever their bits
        self.programs: list[Program] = []
        self.notes: list[str] = []

    def text(self) -> str:
        parts = [f"--- start {number}\n{program.text()}" for number, program in enumerate(self.programs, 1)]
        return "\n".join([*parts, "--- notes", *self.notes])

    def start(self, job: dict[str, Any], *words: str) -> Program:
        number = len(self.programs)
        config = small_config(
            train={"name": RUN, "steps": STEPS},
            checkpoint=self.checkpoint,
            validation={"every_steps": 12, "tokens_per_source": 128},
            guards=GUARDS,
            resilience={"memory_every_steps": self.memory_every, "memory_folder": str(self.folder / "ram")},
        )
        path = self.folder / f"config-{number}.yaml"
        path.write_text(config_yaml(config))
        plan = self.folder / f"plan-{number}.json"
        plan.write_text(json.dumps(job.get("plan", [])))
        places = {"run": self.run, "journal": self.folder / "journal.jsonl"}
        places["digests"] = self.lab.folder / "digests.json"
        job = {**job, "plan": str(plan) if job.get("plan") else None, "good_until": self.good_until}
        job |= {name: str(place) for name, place in places.items()}
        job["check_bytes_per_second"] = self.check_bytes_per_second
        job["words"] = ["train", str(path), "--work", str(self.workspace.root), *words]
        with self.lab.asking:
            program = _Locked(self.lab, CODE, [json.dumps(job)], self.folder / f"output-{number}.txt")
        self.programs.append(program)
        return program

    def good(self) -> list[int]:
        folders = list_checkpoints(self.run)
        return [step_of(folder) for folder in folders if is_good(folder, self.lab.digests, self.good_until)]

    def journal(self) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ram_files(self) -> list[Path]:
        found = [one for folder in (self.folder / "ram").glob("*/*") for one in slots.whole_slots(folder)]
        return [one.path for one in sorted(found, key=lambda one: -one.step)]

    def close(self) -> None:
        for program in self.programs:
            program.signal(signal.SIGKILL)
            program.wait()


class _Locked(Program):
    """A program that several threads may have one each of: they share the process that forks."""

    def __init__(self, lab: Lab, code: str, arguments: list[str], output: Path) -> None:
        self._lab = lab
        super().__init__(lab.warm, code, arguments, output)

    def poll(self) -> int | None:
        with self._lab.asking:
            return super().poll()


def child() -> None:
    """Be the trainer, as sys.argv[1] describes; only watched, and killed at the chosen file operation."""
    job = json.loads(sys.argv[1])
    if job["plan"]:
        os.environ["Z2A_FAULTS"] = job["plan"]
    from zero2all.packed import verify

    verify.BYTES_PER_SECOND = job["check_bytes_per_second"]
    _watch_files(job)
    sys.argv[1:] = job["words"]
    from zero2all.cli import main

    sys.exit(main())


def _watch_files(job: dict[str, Any]) -> None:
    """Note each checkpoint that leaves its place, and which good ones stay; kill at an operation that was asked for."""
    run, good = Path(job["run"]), {}
    if Path(job["digests"]).exists():
        good = {int(step): each for step, each in json.loads(Path(job["digests"]).read_text()).items()}
    left, is_inside = int(job.get("kill_at") or 0), threading.local()
    operations = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree"}

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in operations or getattr(is_inside, "is_set", False):
            return
        path = Path(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes | os.PathLike) else Path()
        is_ours = run == path or run in path.parents
        if event == "os.rename" and FOLDER_NAME.fullmatch(path.name) and path.parent == run / "checkpoints":
            is_inside.is_set = True
            try:
                others = [one for one in list_checkpoints(run) if one != path]
                left_good = [step_of(one) for one in others if is_good(one, good, job["good_until"])]
                target = os.path.relpath(os.fsdecode(arguments[1]), path.parent)
                was_good = is_good(path, good, job["good_until"])
                entry = {"step": step_of(path), "to": target, "was_good": was_good, "left": left_good}
                with open(job["journal"], "a") as file:
                    file.write(json.dumps(entry) + "\n")
            finally:
                is_inside.is_set = False
        if left and is_ours:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def chosen(paths: list[Path], target: str) -> list[Path]:
    return {"newest": paths[:1], "older": paths[1:2], "all": paths}[target]


def damage_checkpoint(trial: Trial, rng: random.Random, fault: str, folder: Path) -> None:
    """What crc32c, sizes or names show."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    if fault == "lose folder":
        shutil.rmtree(folder)
    elif fault == "lose manifest":
        (folder / "manifest.json").unlink()
    elif fault == "delete file":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data)) if fault != "empty file" else 0
        if fault == "flip":
            data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data if fault == "flip" else data[:place])
    trial.notes.append(f"{fault}: {folder.name}/{path.name}")


def seal_value(folder: Path, kind: str, tensor: str, value: float) -> None:
    """Change a value of a checkpoint, and seal it again: nothing tells that it was not written so."""
    group = "model" if kind == "weight" else "optimizer"
    part = {"weight": "", "first moment": "exp_avg/"}.get(kind, "exp_avg_sq/")
    path = folder / f"{group}-00000-00000.safetensors"
    tensors = load_file(path)
    tensors[f"{part}{tensor}.weight"].view(-1)[0] = -abs(value) if kind == "negative moment" else value
    save_file(tensors, path, metadata={"format": "pt"})
    reseal(folder)


def damage_memory(trial: Trial, rng: random.Random, pair: Pair) -> None:
    for path in chosen(trial.ram_files(), pair.target):
        if pair.fault == "delete":
            path.unlink()
        elif pair.fault == "cut":
            os.truncate(path, rng.randrange(path.stat().st_size))
        elif pair.fault == "mode":
            path.parent.chmod(0o755)
        else:
            data = bytearray(path.read_bytes())
            data[rng.randrange(64) if pair.fault == "flip head" else rng.randrange(slots.PAGE, len(data))] ^= 0x10
            path.write_bytes(data)
        trial.notes.append(f"{pair.fault}: {path.name} in memory")


class Shard:
    def __init__(self, trial: Trial, rng: random.Random, fault: str) -> None:
        self.trial = trial
        trial.good_until = max(trial.good(), default=0)
        self.path = trial.workspace.packed / rng.choice(("en", "zh")) / "train" / "tokens-00000.bin"
        self.whole = self.path.read_bytes()
        data = bytearray(self.whole)
        if fault == "delete":
            self.path.unlink()
        elif fault == "cut":
            self.path.write_bytes(data[: 2 * rng.randrange(len(data) // 2)])
        else:
            for _ in range(200):  # of 16 bits each, so that the run reads some of them
                data[2 * rng.randrange(len(data) // 2)] ^= 1 << rng.randrange(6)
            self.path.write_bytes(data)
        trial.notes.append(f"{fault}: {self.path}")

    def mend(self) -> None:
        self.path.write_bytes(self.whole)
        self.trial.good_until = STEPS


def spoil_hint(trial: Trial, rng: random.Random, name: str, fault: str) -> None:
    """A file that only helps, or that can be rebuilt."""
    folder = {"memory.json": trial.run, "metrics": trial.run}.get(name, trial.run / "checkpoints")
    folder = trial.run / "incidents" if name in ("skipped.json", "quarantine.json") else folder
    path = folder / name
    if name == "metrics":
        for file in path.glob("*"):
            file.unlink() if fault == "missing" else file.write_bytes(b"" if fault == "empty" else b"\xff{")
    elif fault == "missing":
        path.unlink(missing_ok=True)
    else:
        folder.mkdir(exist_ok=True)
        path.write_bytes(b"" if fault == "empty" else rng.choice((b"\xff{", b"[]", b'{"step": 999}', b"null")))
    trial.notes.append(f"{fault}: {path}")


def supervise(trial: Trial, pair: Pair, rng: random.Random) -> None:
    """Inject the fault, start the run until it ends, and judge; WrongError where the oracle says no."""
    fault = _inject(trial, pair, rng)
    job = fault.job or ({"kill_at": pair.again} if pair.again else {})
    running, words, had, lost = fault.running, list[str](), trial.good(), ""
    for _ in range(MOST_STARTS):
        program = running or trial.start(job, *words)
        code = program.wait()
        check_end(program.text(), code, may_be_killed=bool(job))
        lost = lost or lost_good(trial, had)
        if lost and not fault.is_sealed:
            raise WrongError(lost)
        if code == 0:
            judge_end(trial, fault.is_sealed, lost)
            return
        running, words, job, had = None, [], {}, trial.good()
        if code == BadInputError.exit_code and fault.shard is not None:
            fault.shard.mend()
            fault.shard, had = None, trial.good()
        elif code == BadInputError.exit_code and pair.family == "shard" and "Start over with --fresh" in program.text():
            words, had = ["--fresh"], []  # all of its checkpoints may have been trained on the damage
        elif code == BadInputError.exit_code and "Correct it." in program.text():
            (trial.run / "checkpoints/pins.json").unlink()  # a person's own list, which the message asks to correct
        elif code == RunLockedError.exit_code:
            os.utime(trial.run / "lock", (time.time() - 3600,) * 2)  # the process is gone, and a person takes over
            words = ["--take-over"]
        elif code in (BadInputError.exit_code, AnomalyError.exit_code):
            if lost:
                raise WrongError(lost)
            if trial.good():
                raise WrongError(f"exit code {code}, although {trial.good()} are good")
            return
    raise WrongError(f"it did not end within {MOST_STARTS} starts")


@dataclass
class Fault:
    job: dict[str, Any] = field(default_factory=dict)  # for the next start
    running: Program | None = None  # a start that has not ended yet
    is_sealed: bool = False
    shard: Shard | None = None


def _inject(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    if pair.moment == "between":
        word = {"SIGKILL": "kill", "SIGTERM": "terminate"}[pair.interrupt]
        first = trial.start({"plan": [{"fault": word, "point": "step", "step": pair.step}]})
        check_end(first.text(), first.wait(), may_be_killed=True)
        trial.checkpoint = {"every_steps": pair.every_steps, "keep_last": pair.keep_last}
    if pair.family == "kill" and pair.moment == "operation":
        return Fault({"kill_at": pair.operation})
    if pair.family == "kill":
        return Fault({"plan": at_point(pair, "kill", rng.randrange(5))})
    if pair.family == "stop":
        number = signal.Signals[pair.fault]
        return Fault(running=held(trial, at_point(pair, "stop", rng.randrange(3)), lambda one: one.signal(number)))
    if pair.family == "full":
        return Fault({"plan": [{"fault": pair.fault, "point": pair.moment, "times": rng.randrange(1, 9)}]})
    if pair.family in ("checkpoint", "hint"):
        return _now_or_at_point(trial, pair, rng)
    if pair.family == "sealed":
        seal_value(list_checkpoints(trial.run)[0], pair.fault, pair.tensor, pair.value)
        return Fault(is_sealed=True)
    if pair.family == "memory":
        damage_memory(trial, rng, pair)
        return Fault()
    return (_damaged_shard if pair.family == "shard" else _locked)(trial, pair, rng)


def _now_or_at_point(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    """Damage between two starts, or while a run is held, which is then killed near its end."""

    def damage(_program: Any = None) -> None:
        if pair.family == "hint":
            spoil_hint(trial, rng, pair.tensor, pair.fault)
        else:
            for folder in chosen(list_checkpoints(trial.run), pair.target):
                damage_checkpoint(trial, rng, pair.fault, folder)

    if pair.moment == "between":
        damage()
        return Fault()
    plan = [*at_point(pair, "stop", 3), {"fault": "kill", "point": "step", "step": STEPS - 3}]
    program = held(trial, plan, damage)
    check_end(program.text(), program.wait(), may_be_killed=True)
    trial.checkpoint = {"every_steps": pair.every_steps, "keep_last": pair.keep_last}
    return Fault()


def _damaged_shard(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    trial.check_bytes_per_second = pair.check_bytes_per_second  # from here on: the check before has ended
    if pair.moment == "start":
        shards: list[Shard] = []
        plan = [{"fault": "stop", "point": "start"}]
        program = held(trial, plan, lambda _program: shards.append(Shard(trial, rng, pair.fault)))
        return Fault(running=program, shard=shards[0])
    shard = Shard(trial, rng, pair.fault)
    kill = {"plan": [{"fault": "kill", "point": "step", "step": pair.step}]}
    return Fault(kill if pair.again else {}, shard=shard)


def held(trial: Trial, plan: list[dict[str, Any]], work: Callable[[Any], None]) -> Program:
    """Start the run, do something while it is stopped where the plan says, and let it go on."""
    program = trial.start({"plan": plan})
    program.wait_until(lambda: program.poll() is not None or psutil.Process(program.pid).status() == "stopped")
    if program.poll() is None:
        work(program)
        program.signal(signal.SIGCONT)
    return program


def at_point(pair: Pair, fault: str, passes: int) -> list[dict[str, Any]]:
    """The plan of a fault at the moment of a pair: at its step, or in a save after so many others."""
    step = pair.step if pair.moment in ("step", "update") else None
    if pair.moment in ("file", "manifest", "rename", "renamed"):
        step = EVERY * (1 + passes)
    return [{"fault": fault, "point": pair.moment, **({} if step is None else {"step": step})}]


def check_end(text: str, code: int, may_be_killed: bool) -> None:
    """3 of the oracle."""
    if "Traceback (most recent call last)" in text:
        raise WrongError("a traceback")
    if code not in DOCUMENTED and not (code == -signal.SIGKILL and may_be_killed):
        raise WrongError(f"exit code {code}")


def lost_good(trial: Trial, had: list[int]) -> str:
    """2 of the oracle; empty where nothing is lost."""
    for entry in trial.journal():
        if entry["was_good"] and not entry["left"]:
            return f"the good checkpoint of step {entry['step']} went to {entry['to']}, and no other is left"
    return f"there were good checkpoints, {had}, and now there are none" if had and not trial.good() else ""


def judge_end(trial: Trial, is_sealed: bool, lost: str) -> None:
    """1 of the oracle."""
    last = checkpoint_folder(trial.run, STEPS)
    if is_good(last, trial.lab.digests) and not lost:
        return
    try:
        verified_checkpoint(last)
    except Exception as error:
        raise WrongError(f"code 0, and the last checkpoint is not whole: {error}") from error
    record = trial.run / "incidents/skipped.json"
    skipped = json.loads(record.read_bytes())["skipped"] if record.exists() else []
    events = read_run(trial.run).events
    found = [event for event in events if event.kind in ("spike", "drop", "skip", "rollback")]
    loss = held_out(trial.run)
    if UNCHECKED in trial.programs[-1].text():
        trial.notes.append("the run said that its shards were not all checked")
        return
    if is_sealed and not found and loss < trial.lab.held_out + NEAR_NATS:
        trial.notes.append(UNTOLD)
        return
    if lost:
        raise WrongError(lost)
    if skipped and replayed(trial, skipped, events) == digests(last):
        trial.notes.append("the record of skipped data explains the bits")
        return
    raise WrongError(
        f"code 0, and the weights are not those of the undisturbed run: {len(skipped)} ranges skipped, {len(found)} "
        f"findings, held-out loss {loss:.3f}, undisturbed {trial.lab.held_out:.3f}"
    )


def replayed(trial: Trial, skipped: list[dict[str, Any]], events: Any) -> dict[str, str]:
    """The end of a run that begins at the undisturbed checkpoint of the last rollback, with the same record."""
    backs = [event.data["to_step"] for event in events if event.kind == "rollback"]
    first = min(entry["first"] for entry in skipped) // 128  # tokens of a step
    step = backs[-1] if backs else min(first, STEPS - 1)
    twin = Trial(trial.lab, trial.folder / "replay", {"every_steps": EVERY, "keep_last": 2})
    try:
        (twin.run / "checkpoints").mkdir(parents=True)
        source = trial.lab.folder / "undisturbed/work/runs" / RUN
        if step:
            shutil.copytree(checkpoint_folder(source, step), checkpoint_folder(twin.run, step))
        shutil.copy(source / "config.yaml", twin.run)
        shutil.copytree(trial.run / "incidents", twin.run / "incidents")
        code = twin.start({}).wait()
        return digests(checkpoint_folder(twin.run, STEPS)) if code == 0 else {"replay": str(code)}
    finally:
        twin.close()


def _locked(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    trial.run.mkdir(parents=True, exist_ok=True)
    lock = trial.run / "lock"
    if pair.fault == "lost":
        plan = [{"fault": "stop", "point": "step", "step": pair.step}]
        return Fault(running=held(trial, plan, lambda _program: lock.unlink()))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    dead = {"host": socket.gethostname(), "boot": boot, "pid": 2**22 - 1, "started": 1.0, "token": "x"}
    if pair.fault == "garbage":
        lock.write_bytes(b"\xff{")
    else:
        lock.write_text(json.dumps(dead if pair.fault == "stale" else {**dead, "host": "another-host"}))
        if pair.fault == "stale":
            os.utime(lock, (time.time() - 3600,) * 2)
    return Fault()


def try_pair(lab: Lab, pair: Pair) -> tuple[Pair, str, str]:
    """The pair, why the oracle says no (empty where it does not), and what the run printed."""
    folder = lab.folder / f"pair-{pair.number}"
    trial = Trial(lab, folder, {"every_steps": EVERY, "keep_last": 2}, pair.memory_every)
    problem = ""
    try:
        supervise(trial, pair, random.Random(f"{SEED}/{pair.number}/details"))
    except WrongError as failure:
        problem = str(failure)
    except Exception:
        problem = f"the test itself failed: {traceback.format_exc()}"
    finally:
        trial.close()
        text = trial.text()
        shutil.rmtree(folder, ignore_errors=True)
    return pair, problem, text
