"""Random (fault, moment) pairs against the real trainer: what is drawn, how it is injected, how the end is judged.

    python -m tests.resilience.random_faults 17 18       # only these pairs, with what the run printed
    python -m tests.resilience.random_faults --all 200   # 200 pairs, one line each

Pair `number` follows from SEED and its number alone. A pair is one fault at one moment of a run of STEPS steps of a
tiny model: before the start, at a named point of a step, a save or a deletion (the run is stopped there with SIGSTOP
while the damage is done), at the n-th file operation, between a stop and the resume, in a rollback, or while another
process reads. Afterwards the run is started again, as a supervisor or the person on duty would, until it ends. Where
the run asks for something (a damaged shard, a lock of another host), that is done, once, and nothing else.

The oracle. `undisturbed` is a run of the same config that was left alone, with all of its checkpoints.

1. Code 0 is right only with the right weights. The last checkpoint must have the bits of the undisturbed run, unless
   - the run recorded data that it skips (incidents/skipped.json): then the bits must be those of a run that begins at
     the undisturbed checkpoint of the last rollback and has the same record. So nothing of the damaged state is left;
   - or a value was changed and the checkpoint sealed again, and the guards found nothing at all: no check could tell
     such a state from a real one. Its held-out loss must still be near that of the undisturbed run. These are counted;
   - or the run ended before the slow check of its packed data did, and said so.
2. A checkpoint is good when it lies in its place, is whole, and has the bits of the undisturbed run at its step; while
   a shard is damaged, only those from before count. Before each rename of a checkpoint (deletion, withdrawal,
   quarantine) the run itself notes which good ones stay: a good one may never go while no other one stays. Between two
   starts there must be a good one if there was one before. For a state that cannot be told (see 1) this does not hold.
3. The exit codes are the documented ones, a signal only where the pair sends it, and nothing prints a traceback.
4. A run must not stop itself (3 or 12) while a good checkpoint is left: a supervisor does not start it again. Once it
   may where a file rots in the moment between its check and its use; the next start must then go on.
5. A lock or a claim that a living process holds is respected, in whichever PID namespace it lives.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import psutil
import torch
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


# ---- what is drawn ----

POINTS = ("start", "step", "update", "memory", "file", "manifest", "rename", "renamed", "delete", "validate")
LIVE = ("step", "update", "file", "manifest", "rename", "renamed", "delete")
"""Points at which a run is stopped while something else is damaged."""
CHECKPOINT_DAMAGE = ("flip", "cut", "delete file", "empty file", "lose folder", "lose manifest")
HINTS = ("latest.json", "pins.json", "memory.json", "skipped.json", "quarantine.json", "metrics", "claims")
VALUES = (1e30, 1e4, 1e4, 30.0, 30.0, float("nan"), float("inf"))
FAMILIES = (
    *("kill", "stop", "full", "checkpoint", "sealed", "sealed", "sealed", "rotten", "memory", "shard", "lock", "claim"),
    "hint",
)
TENSORS = ("norm", "blocks.0.attention_norm", "blocks.0.feed_forward_norm", "head", "blocks.0.attention.out")
"""Weights that every step reads; a value that no step reads cannot be told from a real one."""


INTERRUPTS = {"memory": "SIGKILL", "sealed": "SIGTERM", "rotten": "SIGTERM", "kill": "SIGTERM"}
"""Where it matters: after SIGTERM the newest state is on the disk, after SIGKILL in memory."""


@dataclass(frozen=True)
class Pair:
    """One fault at one moment."""

    number: int
    family: str
    fault: str
    moment: str
    step: int
    """Of the moment."""
    operation: int
    """Which file operation, where the moment is one."""
    target: str
    """Which checkpoint: newest, older or all."""
    tensor: str
    value: float
    interrupt: str
    """How the run ends before the damage, where that is between two starts."""
    every_steps: int
    keep_last: int
    memory_every: int
    again: int
    """A second kill, at this file operation of the resumed run; 0: none."""
    check_bytes_per_second: int
    """How fast the packed data is checked beside the run: ours is small, and real data takes hours."""

    def __str__(self) -> str:
        detail = {
            "checkpoint": f" of the {self.target} checkpoint",
            "sealed": f" {self.value:g} in {self.tensor} of the newest checkpoint",
            "shard": f", checked at {self.check_bytes_per_second:,} B/s",
            "memory": f" of the {self.target} buffer" + (f", {self.value:g}" if self.fault == "sealed" else ""),
        }.get(self.family, "")
        where = f"operation {self.operation}" if self.moment == "operation" else f"{self.moment}"
        resumed = f"every_steps {self.every_steps}, keep_last {self.keep_last}, memory {self.memory_every}"
        again = f", killed again at operation {self.again}" if self.again else ""
        return f"{self.family}: {self.fault}{detail} / {where} at step {self.step} ({resumed}{again})"


def draw(number: int, seed: int = SEED) -> Pair:
    """The pair of this number."""
    rng = random.Random(f"{seed}/{number}")
    family = rng.choice(FAMILIES)
    moments, faults = {
        "kill": ((*POINTS, "operation", "operation", "operation", "rollback"), ("SIGKILL",)),
        "stop": (("start", "step", "update", "file", "renamed", "validate"), ("SIGTERM", "SIGINT")),
        "full": (("file", "manifest", "rename", "memory"), ("disk_full", "io_error")),
        "checkpoint": (("between", "between", *LIVE), CHECKPOINT_DAMAGE),
        "sealed": (("between",), ("weight", "weight", "weight", "first moment", "second moment", "negative moment")),
        "rotten": (("between", "rollback"), ("flip", "cut", "lose manifest")),
        "memory": (("between",), ("flip data", "flip head", "cut", "delete", "sealed", "mode")),
        "shard": (("before", "between", "between", "start"), ("flip", "flip", "flip", "cut", "delete")),
        "lock": (("before", "between", "step"), ("stale", "other host", "garbage", "alive", "other namespace", "lost")),
        "claim": (("read",), ("same namespace", "other namespace", "stale", "reader killed")),
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


# ---- the lab: a workspace, and the undisturbed run ----


@dataclass
class Lab:
    """Where pairs are tried."""

    warm: WarmProcess
    source: Path
    """A workspace with packed data; copied for every pair."""
    folder: Path
    asking: threading.Lock = field(default_factory=threading.Lock)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    held_out: float = 0.0

    def undisturbed(self) -> None:
        """Train the run that is left alone, with a checkpoint at every step."""
        trial = Trial(self, self.folder / "undisturbed", {"every_steps": 1, "keep_every_steps": 1})
        assert trial.start({}).wait() == 0, trial.text()
        assert not (trial.run / "incidents").exists(), "the undisturbed run has no incident"
        self.held_out = held_out(trial.run)
        self.digests = {step_of(folder): digests(folder) for folder in list_checkpoints(trial.run)}
        assert sorted(self.digests) == list(range(1, STEPS + 1))
        (self.folder / "digests.json").write_text(json.dumps(self.digests))

    def is_good(self, folder: Path) -> bool:
        """See 2 of the oracle."""
        with contextlib.suppress(Exception):
            return verified_checkpoint(folder) is not None and digests(folder) == self.digests.get(step_of(folder))
        return False


def digests(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def held_out(run: Path) -> float:
    series = read_run(run).series
    return max(float(series[name].value[-1]) for name in series if name.startswith("eval/valid/loss/"))


class WrongError(Exception):
    """The oracle's verdict."""


class Trial:
    """One run in a workspace of its own."""

    def __init__(self, lab: Lab, folder: Path, checkpoint: dict[str, int], memory_every: int = 0) -> None:
        self.lab, self.folder = lab, folder
        shutil.copytree(lab.source, folder / "work")
        (folder / "ram").mkdir()
        self.workspace = Workspace(folder / "work")
        self.run = self.workspace.run(RUN)
        self.checkpoint, self.memory_every = checkpoint, memory_every
        self.check_bytes_per_second = 32_000_000
        self.good_until = STEPS
        """Later checkpoints may have been trained on damaged data, whatever their bits."""
        self.programs: list[Program] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def text(self) -> str:
        """What all starts printed."""
        parts = [f"--- start {number}\n{program.text()}" for number, program in enumerate(self.programs, 1)]
        return "\n".join([*parts, "--- notes", *self.notes])

    def start(self, job: dict[str, Any], *words: str) -> Program:
        """Start the run, or go on with it."""
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
        job = {
            **job,
            "plan": str(plan) if job.get("plan") else None,
            "run": str(self.run),
            "check_bytes_per_second": self.check_bytes_per_second,
            "good_until": self.good_until,
            "journal": str(self.folder / "journal.jsonl"),
            "digests": str(self.lab.folder / "digests.json"),
            "words": ["train", str(path), "--work", str(self.workspace.root), *words],
        }
        with self.lab.asking:
            program = _Locked(self.lab, CODE, [json.dumps(job)], self.folder / f"output-{number}.txt")
        self.programs.append(program)
        return program

    def good(self) -> list[int]:
        """The steps of good checkpoints, newest first."""
        good = [step_of(folder) for folder in list_checkpoints(self.run) if self.lab.is_good(folder)]
        return [step for step in good if step <= self.good_until]

    def journal(self) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ram_files(self) -> list[Path]:
        """The buffers in memory that are whole, newest first."""
        found = [one for folder in (self.folder / "ram").glob("*/*") for one in slots.whole_slots(folder)]
        return [one.path for one in sorted(found, key=lambda one: -one.step)]

    def close(self) -> None:
        """Kill what still runs."""
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

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300.0
        while not condition():
            if time.monotonic() > deadline:
                raise WrongError(f"waited too long; it printed: {self.text()}")
            time.sleep(0.01)


# ---- inside the trainer's process ----


def child() -> None:
    """Be the trainer, as sys.argv[1] describes; only watched, and killed at the chosen file operation."""
    job = json.loads(sys.argv[1])
    if job.get("namespace"):
        _enter_namespace()
    if job["plan"]:
        os.environ["Z2A_FAULTS"] = job["plan"]
    if job.get("without_flock"):
        _break_flock()
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
    left, is_armed, is_inside = int(job.get("kill_at") or 0), job.get("armed", True), threading.local()
    operations = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree"}

    def is_good(folder: Path) -> bool:
        if step_of(folder) > job["good_until"]:
            return False
        with contextlib.suppress(Exception):
            return verified_checkpoint(folder) is not None and digests(folder) == good.get(step_of(folder))
        return False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in operations or getattr(is_inside, "is_set", False):
            return
        path = Path(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes | os.PathLike) else Path()
        is_ours = run == path or run in path.parents
        if event == "os.rename" and FOLDER_NAME.fullmatch(path.name) and path.parent == run / "checkpoints":
            is_inside.is_set = True
            try:
                others = [step_of(one) for one in list_checkpoints(run) if one != path and is_good(one)]
                target = os.path.relpath(os.fsdecode(arguments[1]), path.parent)
                entry = {"step": step_of(path), "to": target, "was_good": is_good(path), "left": others}
                with open(job["journal"], "a") as file:
                    file.write(json.dumps(entry) + "\n")
            finally:
                is_inside.is_set = False
        if left and is_armed and is_ours:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if job.get("rollback"):
        from zero2all.train.checkpoints.store import CheckpointStore

        go_back_to = CheckpointStore.go_back_to

        def stop_first(store: CheckpointStore, *arguments: Any) -> list[int]:
            nonlocal is_armed
            if not is_armed:
                is_armed = True
                if job["rollback"] == "stop":
                    store.wait()
                    os.kill(os.getpid(), signal.SIGSTOP)
            return go_back_to(store, *arguments)

        CheckpointStore.go_back_to = stop_first  # type: ignore[method-assign]
        is_armed = False
    sys.addaudithook(watch)


def _break_flock() -> None:
    """As on a network disk without locks."""
    import fcntl

    flock = fcntl.flock

    def fail(file: Any, operation: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if Path(f"/proc/self/fd/{number}").readlink().name == "lock":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(file, operation)

    fcntl.flock = fail  # type: ignore[assignment]


NEW_PID_AND_MOUNTS, PRIVATE, DEATH_SIGNAL = 0x20000000 | 0x20000, 0x40000 | 0x4000, 1


def _enter_namespace() -> None:
    """Go on in a PID namespace with a /proc of its own, as in a container; the outer processes wait and pass on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_PID_AND_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    _fork_and_wait(libc)
    libc.mount(b"none", b"/", None, PRIVATE, None)
    if libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise OSError(ctypes.get_errno(), "mount /proc")
    _fork_and_wait(libc)  # the first process of a namespace gets no signals


def _fork_and_wait(libc: Any) -> None:
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)


def has_namespaces() -> bool:
    """Whether this user may make a PID namespace."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


# ---- damage ----


def checkpoints_of(trial: Trial, target: str) -> list[Path]:
    folders = list_checkpoints(trial.run)
    return {"newest": folders[:1], "older": folders[1:2], "all": folders}[target]


def damage_checkpoint(trial: Trial, rng: random.Random, fault: str, folder: Path) -> None:
    """What crc32c, sizes or names show."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = rng.choice(files)
    if fault == "lose folder":
        shutil.rmtree(folder)
    elif fault == "lose manifest":
        (folder / "manifest.json").unlink()
    elif fault == "delete file":
        path.unlink()
    elif fault == "empty file":
        path.write_bytes(b"")
    else:
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data))
        if fault == "cut":
            path.write_bytes(data[:place])
        else:
            data[place] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
    trial.note(f"{fault}: {folder.name}/{path.name}")


def seal_value(folder: Path, kind: str, tensor: str, value: float) -> None:
    """Change a value of a checkpoint, and seal it again: nothing tells that it was not written so."""
    group, name = {
        "weight": ("model", f"{tensor}.weight"),
        "first moment": ("optimizer", f"exp_avg/{tensor}.weight"),
        "second moment": ("optimizer", f"exp_avg_sq/{tensor}.weight"),
        "negative moment": ("optimizer", f"exp_avg_sq/{tensor}.weight"),
    }[kind]
    path = folder / f"{group}-00000-00000.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[0] = -abs(value) if kind == "negative moment" else value
    save_file(tensors, path, metadata={"format": "pt"})
    reseal(folder)


def damage_memory(trial: Trial, rng: random.Random, pair: Pair) -> None:
    paths = trial.ram_files()
    paths = {"newest": paths[:1], "older": paths[1:2], "all": paths}[pair.target]
    for path in paths:
        if pair.fault == "delete":
            path.unlink()
        elif pair.fault == "cut":
            os.truncate(path, rng.randrange(path.stat().st_size))
        elif pair.fault == "mode":
            path.parent.chmod(0o755)
        elif pair.fault == "sealed":
            _seal_memory(path, f"model/{pair.tensor}.weight", pair.value)
        else:
            data = bytearray(path.read_bytes())
            data[rng.randrange(64) if pair.fault == "flip head" else rng.randrange(slots.PAGE, len(data))] ^= 0x10
            path.write_bytes(data)
        trial.note(f"{pair.fault}: {path.name} in memory")


def _seal_memory(path: Path, tensor: str, value: float) -> None:
    found, data = slots.read_slot(path), bytearray(path.read_bytes())
    begin = slots.PAGE + next(box[5] for box in found.about["boxes"] if box[0] == tensor)
    data[begin : begin + 4] = torch.tensor([value]).numpy().tobytes()
    end = slots.PAGE + found.data_bytes
    text = bytes(data[end:])
    crcs = (google_crc32c.value(bytes(data[slots.PAGE : end])), google_crc32c.value(text))
    data[: slots.PAGE] = slots._head(slots.VALID, found.step, found.data_bytes, len(text), *crcs)
    path.write_bytes(data)


class Shard:
    """A damaged file of the packed data, which can be mended."""

    def __init__(self, trial: Trial, rng: random.Random, fault: str) -> None:
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
        trial.note(f"{fault}: {self.path}")

    def mend(self) -> None:
        self.path.write_bytes(self.whole)


def spoil_hint(trial: Trial, rng: random.Random, name: str, fault: str) -> None:
    """A file that only helps, or that can be rebuilt."""
    folder = {"memory.json": trial.run, "metrics": trial.run}.get(name, trial.run / "checkpoints")
    folder = trial.run / "incidents" if name in ("skipped.json", "quarantine.json") else folder
    path = folder / name
    if name == "metrics":
        for file in path.glob("*"):
            file.unlink() if fault == "missing" else file.write_bytes(b"" if fault == "empty" else b"\xff{")
    elif name == "claims":
        path.mkdir(exist_ok=True)
        (path / "step-00000012.json").write_bytes(b"" if fault == "empty" else b"\xff{")
    elif fault == "missing":
        path.unlink(missing_ok=True)
    else:
        folder.mkdir(exist_ok=True)
        path.write_bytes(b"" if fault == "empty" else rng.choice((b"\xff{", b"[]", b'{"step": 999}', b"null")))
    trial.note(f"{fault}: {path}")


# ---- a trial ----


def supervise(trial: Trial, pair: Pair, rng: random.Random) -> None:
    """Inject the fault, start the run until it ends, and judge; WrongError where the oracle says no."""
    fault = _inject(trial, pair, rng)
    job = fault.job or ({"kill_at": pair.again} if pair.again else {})
    running, words, had, lost = fault.running, list[str](), trial.good(), ""
    for _ in range(MOST_STARTS):
        program = running or trial.start(job, *words)
        code = program.wait()
        check_end(program.text(), code, may_be_killed=bool(job))
        if fault.must_refuse and code != RunLockedError.exit_code:
            raise WrongError(f"exit code {code} instead of 13, while a living process holds the run ({pair.fault})")
        lost = lost or lost_good(trial, had)
        if lost and not fault.is_sealed:
            raise WrongError(lost)
        if fault.reader is not None:
            check_reader(trial, fault.reader, pair)
        if code == 0:
            judge_end(trial, fault.is_sealed, lost)
            return
        running, words, job, had, fault.must_refuse = None, [], {}, trial.good(), False
        if code == BadInputError.exit_code and fault.shard is not None:
            mend_shard(trial, fault.shard)
            fault.shard, had = None, trial.good()
        elif code == BadInputError.exit_code and pair.family == "shard" and "Start over with --fresh" in program.text():
            words, had = ["--fresh"], []  # all of its checkpoints may have been trained on the damage
        elif code == BadInputError.exit_code and "Correct it." in program.text():
            (trial.run / "checkpoints/pins.json").unlink()  # a person's own list, which the message asks to correct
        elif code == RunLockedError.exit_code:
            words = release_lock(trial, fault.holder)
            fault.holder = None
        elif code in (BadInputError.exit_code, AnomalyError.exit_code):
            if lost:
                raise WrongError(lost)
            judge_stop(trial, code, fault.may_stop)
            if not fault.may_stop:
                return
            fault.may_stop = False
    raise WrongError(f"it did not end within {MOST_STARTS} starts")


@dataclass
class Fault:
    """What `supervise` needs to know of a fault that was injected."""

    job: dict[str, Any] = field(default_factory=dict)
    """For the next start."""
    running: Program | None = None
    """A start that has not ended yet."""
    is_sealed: bool = False
    shard: Shard | None = None
    holder: Program | None = None
    """A process that holds the run's lock."""
    must_refuse: bool = False
    """Whether the next start must be refused."""
    reader: Program | None = None
    may_stop: bool = False
    """Whether the run may stop itself once although a good checkpoint is left: a file rots after it was checked."""


def _inject(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    if pair.family == "rotten":
        trial.checkpoint = {**trial.checkpoint, "keep_last": 4}  # or a rollback has no second choice
    if pair.moment in ("between", "rollback", "read"):
        word = {"SIGKILL": "kill", "SIGTERM": "terminate"}[pair.interrupt]
        first = trial.start({"plan": [{"fault": word, "point": "step", "step": pair.step}]})
        check_end(first.text(), first.wait(), may_be_killed=True)
        trial.checkpoint = {"every_steps": pair.every_steps, "keep_last": pair.keep_last}
    return INJECTED[pair.family](trial, pair, rng)


def _kill(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    if pair.moment == "operation":
        return Fault({"kill_at": pair.operation})
    if pair.moment == "rollback":
        seal_value(list_checkpoints(trial.run)[0], "weight", pair.tensor, float("nan"))
        return Fault({"kill_at": 1 + pair.operation % 20, "rollback": "kill"})
    return Fault({"plan": at_point(pair, "kill", rng.randrange(5))})


def _signal(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    number = signal.Signals[pair.fault]
    return Fault(running=held(trial, at_point(pair, "stop", rng.randrange(3)), lambda one: one.signal(number)))


def _no_space(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    return Fault({"plan": [{"fault": pair.fault, "point": pair.moment, "times": rng.randrange(1, 9)}]})


def _damaged_checkpoint(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    def damage(_program: Any = None) -> None:
        for folder in checkpoints_of(trial, pair.target):
            damage_checkpoint(trial, rng, pair.fault, folder)

    return _now_or_at_point(trial, pair, damage)


def _spoilt_hint(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    return _now_or_at_point(trial, pair, lambda _program: spoil_hint(trial, rng, pair.tensor, pair.fault))


def _now_or_at_point(trial: Trial, pair: Pair, damage: Callable[[Any], None]) -> Fault:
    """Do it between two starts, or while a run is held, which is then killed near its end."""
    if pair.moment == "between":
        damage(None)
        return Fault()
    plan = [*at_point(pair, "stop", 3), {"fault": "kill", "point": "step", "step": STEPS - 3}]
    program = held(trial, plan, damage)
    check_end(program.text(), program.wait(), may_be_killed=True)
    trial.checkpoint = {"every_steps": pair.every_steps, "keep_last": pair.keep_last}
    return Fault()


def _sealed(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    seal_value(list_checkpoints(trial.run)[0], pair.fault, pair.tensor, pair.value)
    return Fault(is_sealed=True)


def _rotten_target(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    """The newest checkpoint is useless, and what the rollback goes back to rots, before the start or before it is
    read."""
    seal_value(list_checkpoints(trial.run)[0], "weight", pair.tensor, pair.value)

    def rot(_program: Any = None) -> None:
        for folder in [one for one in list_checkpoints(trial.run)[1:] if trial.lab.is_good(one)][:1]:
            damage_checkpoint(trial, rng, pair.fault, folder)

    if pair.moment == "rollback":
        return Fault(running=held(trial, [], rot, rollback="stop"), is_sealed=True, may_stop=True)
    rot()
    return Fault(is_sealed=True)


def _damaged_memory(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    damage_memory(trial, rng, pair)
    return Fault(is_sealed=pair.fault == "sealed")


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


def held(trial: Trial, plan: list[dict[str, Any]], work: Callable[[Any], None], **job: Any) -> Program:
    """Start the run, do something while it is stopped where the plan says, and let it go on."""
    program = trial.start({"plan": plan, **job})
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


def judge_stop(trial: Trial, code: int, may_stop: bool) -> None:
    """4 of the oracle. `may_stop`: once, the run could not know better."""
    if trial.good() and not may_stop:
        raise WrongError(f"exit code {code}, although {trial.good()} are good")


def mend_shard(trial: Trial, shard: Shard) -> None:
    """What the message asks for."""
    shard.mend()
    trial.good_until = STEPS


def judge_end(trial: Trial, is_sealed: bool, lost: str) -> None:
    """1 of the oracle."""
    last = checkpoint_folder(trial.run, STEPS)
    is_right = trial.lab.is_good(last)
    if is_right and not lost:
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
        trial.note("the run said that its shards were not all checked")
        return
    if is_sealed and not found and loss < trial.lab.held_out + NEAR_NATS:
        trial.note(UNTOLD)
        return
    if lost:
        raise WrongError(lost)
    if skipped and replayed(trial, skipped, events) == digests(last):
        trial.note("the record of skipped data explains the bits")
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


# ---- locks and claims ----


def _locked(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    trial.run.mkdir(parents=True, exist_ok=True)
    lock = trial.run / "lock"
    if pair.fault in ("alive", "other namespace"):
        is_apart = pair.fault == "other namespace" and has_namespaces()
        if lock.exists():
            os.utime(lock, (time.time() - 3600,) * 2)  # the process that was killed is long gone
        plan = [{"fault": "sleep", "point": "step", "step": STEPS - 4}]
        holder = trial.start({"plan": plan, "namespace": is_apart, "without_flock": True})
        holder.wait_until(lambda: holder.poll() is not None or "sleep in rank 0" in holder.text())
        return Fault({"without_flock": True}, holder=holder, must_refuse=True)
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


def release_lock(trial: Trial, holder: Program | None) -> list[str]:
    """What a person does about code 13: end the process, or, where it is gone, take over."""
    if holder is not None:
        holder.signal(signal.SIGKILL)
        holder.wait()
    with contextlib.suppress(FileNotFoundError):
        os.utime(trial.run / "lock", (time.time() - 3600,) * 2)
    return [] if holder is not None else ["--take-over"]


READER = """
import sys, time
from pathlib import Path
from tests.resilience.random_faults import _enter_namespace
run, ready, done = map(Path, sys.argv[1:4])
step, is_apart = int(sys.argv[4]), sys.argv[5] == "True"
if is_apart:
    _enter_namespace()
from zero2all.train.checkpoints.retention import claim_step
with claim_step(run, step, heartbeat_seconds=0.2) as claim:
    assert claim is not None
    ready.write_text("")
    while not done.exists():
        time.sleep(0.01)
"""


def _claimed(trial: Trial, pair: Pair, rng: random.Random) -> Fault:
    """A process reads the oldest checkpoint for as long as the run trains."""
    step = step_of(list_checkpoints(trial.run)[-1])
    ready, done = trial.folder / "ready", trial.folder / "done"
    is_apart = pair.fault == "other namespace" and has_namespaces()
    arguments = [str(trial.run), str(ready), str(done), str(step), str(is_apart)]
    with trial.lab.asking:
        reader = _Locked(trial.lab, READER, arguments, trial.folder / "reader.txt")
    trial.programs.insert(0, reader)
    reader.wait_until(lambda: ready.exists() or reader.poll() is not None)
    trial.note(f"a process reads step {step}" + (" in another PID namespace" if is_apart else ""))
    if pair.fault in ("stale", "reader killed"):
        reader.signal(signal.SIGKILL)
        reader.wait()
        return Fault()
    return Fault(reader=reader)


def check_reader(trial: Trial, reader: Program, pair: Pair) -> None:
    """5 of the oracle."""
    if reader.poll() is not None:
        raise WrongError(f"the reader ended: {reader.text()}")
    step = int(re.findall(r"a process reads step (\d+)", " ".join(trial.notes))[0])
    if not checkpoint_folder(trial.run, step).is_dir():
        raise WrongError(f"the checkpoint of step {step} was deleted while a process read it ({pair.fault})")


INJECTED: dict[str, Callable[[Trial, Pair, random.Random], Fault]] = {
    "kill": _kill,
    "stop": _signal,
    "full": _no_space,
    "checkpoint": _damaged_checkpoint,
    "hint": _spoilt_hint,
    "sealed": _sealed,
    "rotten": _rotten_target,
    "memory": _damaged_memory,
    "shard": _damaged_shard,
    "lock": _locked,
    "claim": _claimed,
}


# ---- the command ----


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


@contextlib.contextmanager
def open_lab(folder: Path, source: Path | None = None, warm: WarmProcess | None = None) -> Iterator[Lab]:
    """A lab with the undisturbed run."""
    if source is None:
        source = _packed_workspace(folder / "source")
    process = warm or WarmProcess()
    lab = Lab(process, source, folder)
    try:
        lab.undisturbed()
        yield lab
    finally:
        if warm is None:
            process.process.communicate()


def _packed_workspace(root: Path) -> Path:
    from tests.train.conftest import build_small_corpus
    from zero2all.common.workspace import open_workspace
    from zero2all.packed.writer import pack_corpus
    from zero2all.tokenizer.config import TokenizerConfig
    from zero2all.tokenizer.stage import train_on_corpus

    work = open_workspace(root, create=True)
    build_small_corpus(work)
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=400))
    pack_corpus(work.corpus, work.tokenizer, work.packed)
    return work.root


def main() -> int:
    """See the module docstring."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    words = sys.argv[1:]
    numbers = range(int(words[1])) if words[:1] == ["--all"] else [int(word) for word in words]
    memory = Path("/dev/shm")
    in_memory = memory if os.access(memory, os.W_OK) else None
    failed = 0
    with (
        tempfile.TemporaryDirectory(dir=in_memory) as folder,
        open_lab(Path(folder)) as lab,
        ThreadPoolExecutor(2) as pool,
    ):
        for pair, problem, text in pool.map(lambda number: try_pair(lab, draw(number)), numbers):
            failed += bool(problem)
            verdict = f"FAILED {problem}" if problem else "ok, untold" if UNTOLD in text else "ok"
            print(f"{pair.number:4} {verdict} | {pair}", flush=True)
            if words[:1] != ["--all"]:
                print(text)
    print(f"{failed} of {len(numbers)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
