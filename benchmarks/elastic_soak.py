"""A run whose machines leave and come back: two network namespaces as two machines, `z2a train --nodes 1:2` on each.

    sudo python benchmarks/elastic_soak.py --work WORK --minutes 10      needs root and iproute2

First a run that nobody disturbs, on both machines; its length is chosen so that the disturbed run lasts about as long
as asked. Then the same run, in which one machine at a time is lost and comes back: its cable is cut, its supervisor and
ranks are killed, it is asked to leave (SIGTERM), or machine 0, which holds the meeting, is killed. Each machine has its
own host name and its own /dev/shm, which is lost with it.

Every process records the rows that it trained on, by their content. Of the steps that survived (the last time that a
step was done), the rows of all processes together must be those of the same step of the undisturbed run, each once.
Printed: that check, the held-out losses of both runs, the attempts with their number of machines, the goodput. The
exit code is 1 if a row is missing or repeated, or a loss differs by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.two_machines import ADDRESSES, WIRE, Machines, two_machines, why_not
from zero2all.track.goodput import run_goodput
from zero2all.track.reader import RunReader, read_run

PORT = 29500
AWAY_SECONDS = (12.0, 25.0)
"""How long a machine stays away."""
RECORDER = """
import os, sys
if "RANK" in os.environ and "SOAK_RECORD" in os.environ:
    import importlib.machinery

    class Recorder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            spec = super().find_spec(name, path, target)
            if name == "zero2all.train.trainer" and spec is not None:
                run = spec.loader.exec_module

                def exec_module(module):
                    run(module)
                    record(module)

                spec.loader.exec_module = exec_module
            return spec

    def record(trainer):
        import hashlib, json, time
        train_step = trainer.train_step
        paths = {}  # of this process, which may have been forked after the import

        def recorded(state, batch, *rest):
            path = paths.setdefault(os.getpid(), f"{os.environ['SOAK_RECORD']}/{time.time_ns()}-{os.getpid()}")
            pending = train_step(state, batch, *rest)
            step = pending.result().step
            rows = [hashlib.sha256(row.tobytes()).hexdigest() for row in batch.tokens[: batch.samples].numpy()]
            with open(path, "a") as file:
                file.write(json.dumps([step, os.environ.get("Z2A_ATTEMPT"), rows]) + "\\n")
            return pending

        trainer.train_step = recorded

    sys.meta_path.insert(0, Recorder)
"""


class Soak:
    """Starts machines of a run and disturbs them."""

    def __init__(self, machines: Machines, folder: Path, config: str, work: Path) -> None:
        self.machines, self.folder, self.config, self.work = machines, folder, config, work
        (folder / "sitecustomize.py").write_text(RECORDER)
        self.started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int, name: str, steps: int) -> None:
        """`z2a train` on one machine."""
        (self.folder / name).mkdir(exist_ok=True)
        words = [sys.executable, "-m", "zero2all", "train", self.config, "--work", str(self.work)]
        words += ["--train.name", name, "--train.steps", str(steps), "--nodes", "1:2", "--node-rank", str(node)]
        words += ["--rendezvous", f"{ADDRESSES[0]}:{PORT}", "--interface", WIRE, "--parallel.device", "cpu"]
        words += ["--resilience.supervise", "true", "--resilience.node_silence_seconds", "8"]
        words += ["--resilience.join_after_seconds", "5"]
        words += ["--resilience.memory_every_steps", "10", "--checkpoint.every_steps", "100"]
        words += ["--parallel.cpu_threads", "1", "--data.verify_shards", "false"]
        own = f"hostname node{node}; mount -t tmpfs tmpfs /dev/shm; exec {shlex.join(words)}"
        command = self.machines.command(node, "unshare", "--uts", "--mount", "sh", "-c", own)
        paths = os.pathsep.join([str(self.folder), str(Path(__file__).resolve().parent.parent)])
        variables = {"PYTHONPATH": paths, "SOAK_RECORD": str(self.folder / name), "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{name}-{node}.log", "ab") as log:
            self.started[node] = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self, node: int) -> None:
        """The machine is switched off."""
        process = self.started.pop(node)
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
        process.wait()

    def cable(self, is_up: bool) -> None:
        """Both directions."""
        state = "up" if is_up else "down"
        subprocess.run(["ip", "-n", self.machines.spaces[1], "link", "set", "dev", WIRE, state], check=True)

    def wait(self, name: str, patience: float) -> float:
        """Until all machines have ended well; the seconds since the call."""
        begun = time.monotonic()
        while any(process.poll() is None for process in self.started.values()):
            if time.monotonic() - begun > patience:
                raise SystemExit(f"{name} did not end within {patience:.0f} s: see {self.folder}")
            time.sleep(0.1)
        codes = {node: process.returncode for node, process in self.started.items()}
        if set(codes.values()) != {0}:
            raise SystemExit(f"{name} ended with {codes}: see {self.folder}")
        return time.monotonic() - begun


@contextmanager
def soak_on(config: str, work: Path) -> Iterator[Soak]:
    """Two machines, and an end to all that was started on them."""
    with ExitStack() as stack:
        machines = stack.enter_context(two_machines())
        soak = Soak(machines, Path(tempfile.mkdtemp(prefix="z2a-soak-")), config, work)
        try:
            yield soak
        finally:
            for node in list(soak.started):
                soak.kill(node)


def disturb(soak: Soak, name: str, steps: int, every: float, rng: random.Random) -> list[str]:
    """Let machines leave and come back until the run has ended; what was done."""
    done: list[str] = []
    begun, seen = time.monotonic(), 0
    faults = ["cut", "kill", "leave", "kill 0"]
    while True:
        until = time.monotonic() + every
        while time.monotonic() < until:
            if all(process.poll() is not None for process in soak.started.values()):
                return done
            time.sleep(0.2)
        now = newest_step(soak.work / "runs" / name)
        if now <= seen:  # on a busy machine it may not have begun again
            continue
        if now > 0.9 * steps:
            soak.wait(name, 600)
            return done
        seen = now
        fault = faults[len(done) % len(faults)]
        away = rng.uniform(*AWAY_SECONDS)
        done.append(f"{time.monotonic() - begun:.0f} s: {fault}, away for {away:.0f} s")
        print(done[-1], flush=True)
        if fault == "cut":
            soak.cable(False)
            time.sleep(away)
            soak.cable(True)
        elif fault == "leave":
            process = soak.started.pop(1)
            process.send_signal(signal.SIGTERM)
            print(f"  it left with code {process.wait(120)}", flush=True)
            time.sleep(away)
            soak.start(1, name, steps)
        else:
            node = int(fault[-1] == "0") ^ 1
            soak.kill(node)
            time.sleep(away if node else 2.0)
            soak.start(node, name, steps)


def newest_step(run: Path) -> int:
    """The last step that was logged."""
    series = read_run(run).series.get("loss") if (run / "metrics").exists() else None
    return int(series.step[-1]) if series is not None and len(series.step) else 0


def surviving_rows(folder: Path) -> tuple[dict[int, Counter[str]], list[int]]:
    """Of each step, the rows of the attempt that did it last; and of the attempts, how many processes they had."""
    attempts: dict[str, tuple[int, dict[int, list[list[str]]]]] = {}
    for path in sorted(folder.iterdir()):
        for line in path.read_text().splitlines():
            step, attempt, rows = json.loads(line)
            _, steps = attempts.setdefault(attempt, (int(path.name.partition("-")[0]), {}))
            steps.setdefault(step, []).append(rows)
    found: dict[int, Counter[str]] = {}
    ordered = sorted(attempts.values(), key=lambda one: one[0])
    for _, steps in ordered:
        for step, parts in steps.items():
            found[step] = Counter(row for part in parts for row in part)
    return found, [max(map(len, steps.values())) for _, steps in ordered]


def main() -> None:
    """Run both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=40.0, help="seconds of training between two faults")
    parser.add_argument("--work", type=Path, required=True, help="a workspace with packed data")
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--steps", type=int, help="steps of both runs (default: as many as the minutes allow)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if problem := why_not():
        raise SystemExit(problem)
    rng = random.Random(arguments.seed)
    with soak_on(
        str(Path(arguments.config).resolve() if "/" in arguments.config else arguments.config), arguments.work.resolve()
    ) as soak:
        steps = arguments.steps or measured_steps(soak, arguments.minutes)
        results: dict[str, Any] = {"steps": steps}
        for node in (0, 1):
            soak.start(node, "soak-whole", steps)
        results["undisturbed_seconds"] = round(soak.wait("soak-whole", 3600), 1)
        soak.started.clear()
        begun = time.monotonic()
        for node in (0, 1):
            soak.start(node, "soak", steps)
        results["faults"] = disturb(soak, "soak", steps, arguments.every, rng)
        soak.wait("soak", 600)
        results["disturbed_seconds"] = round(time.monotonic() - begun, 1)
        soak.started.clear()
        whole, _ = surviving_rows(soak.folder / "soak-whole")
        rows, results["processes of the attempts"] = surviving_rows(soak.folder / "soak")
        wrong = [step for step in range(1, steps + 1) if rows.get(step) != whole.get(step) or step not in rows]
        results["rows"] = sum(count.total() for count in rows.values())
        results["steps with other rows than undisturbed"] = wrong[:10]
        losses = [last_losses(soak.work / "runs" / name) for name in ("soak-whole", "soak")]
        results["losses"] = losses
        worst = max(abs(losses[1][name] / losses[0][name] - 1) for name in losses[0])
        results["largest difference of a loss"] = worst
        goodput = run_goodput(RunReader(soak.work / "runs" / "soak"))
        results["lost_steps"], results["goodput_seconds"] = goodput.lost_steps, goodput.seconds
        print(json.dumps(results, indent=1))
        raise SystemExit(int(bool(wrong) or worst > 0.01))


def measured_steps(soak: Soak, minutes: float) -> int:
    """How many steps fill two thirds of the time, by a short run; faults take the rest."""
    for node in (0, 1):
        soak.start(node, "soak-measure", 50)
    soak.wait("soak-measure", 600)
    soak.started.clear()
    times = read_run(soak.work / "runs" / "soak-measure").series["time/step"].value[10:]
    return max(100, int(minutes * 60 * 0.6 / float(sum(times) / len(times))))


def last_losses(run: Path) -> dict[str, float]:
    """The held-out losses at the end, and the mean training loss of the last ten steps."""
    series = read_run(run).series
    found = {name: float(each.value[-1]) for name, each in series.items() if name.startswith("eval/valid/loss")}
    return {**found, "loss": float(series["loss"].value[-10:].mean())}


if __name__ == "__main__":
    main()
