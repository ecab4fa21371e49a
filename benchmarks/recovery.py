"""How fast a supervised run trains again after SIGKILL, and what the supervisor costs a start.

    python benchmarks/recovery.py --work quickstart --config quickstart --kills 100     some 20 minutes on two cores

WORK is a workspace with packed data. One run on the CPU, with checkpoints in memory, loses one random rank (four times
out of five) or all of them at random moments. Printed: the seconds from the kill to the next finished step and where
they go, how often the state came from memory, and whether the losses of all steps equal those of a run that nobody
killed. Then a run of one step, with and without the supervisor, by turns: the seconds of the whole command.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from zero2all.resilience.slots import remove
from zero2all.track.reader import read_run

ALL_SHARE = 0.2
"""Of the kills, those that hit all ranks."""
LATEST_KILL_SECONDS = 3.0
"""After the first step of an attempt."""
PATIENCE_SECONDS = 300.0
STARTS = 7


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--starts", type=int, default=STARTS, help="pairs of starts for the cost of the supervisor")
    parser.add_argument("words", nargs="*", help="more words for z2a train, after --")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"config": arguments.config, "processes": arguments.processes}
    for name in ("recovery", "recovery-whole"):
        _forget(arguments.work / "runs" / name)
    if arguments.kills:
        results |= killed_run(arguments)
    results |= start_cost(arguments)
    print(json.dumps(results, indent=1))
    save_result("recovery", results)


def killed_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The run that is killed, and the one that is not."""
    run, rng = arguments.work / "runs" / "recovery", random.Random(0)
    trainer = _start(arguments, "recovery", arguments.processes, "--resilience.memory_every_steps", "2")
    parts: list[dict[str, float]] = []
    everyone = 0
    _wait(trainer, lambda: _first_step(run, set()))
    for _ in range(arguments.kills):
        time.sleep(rng.uniform(0.0, LATEST_KILL_SECONDS))
        before, incidents = set(_files(run, "train")), len(_events(run, "supervisor", "incident"))
        ranks = _ranks(trainer)
        victims = ranks if rng.random() < ALL_SHARE else [rng.choice(ranks)]
        everyone += len(victims) > 1
        killed = time.time()
        for victim in victims:
            victim.kill()
        path, first = _wait(trainer, partial(_first_step, run, before))
        (prepared,) = [row for row in _rows(path) if row.get("kind") == "prepared"]
        named = _events(run, "supervisor", "incident")[incidents]["time"]
        began = prepared["time"] - prepared["data"]["seconds"]
        parts.append(
            {
                "seconds": first - killed,
                "until named, with its page": named - killed,
                "until the ranks have met": began - named,
                "until the state is loaded": prepared["time"] - began,
                "until a step is finished": first - prepared["time"],
            }
        )
        print(json.dumps(parts[-1]), flush=True)
    _stop(trainer)
    text = "".join(path.read_text() for path in _files(run, "train"))
    losses = read_run(run).series["loss"]
    step = int(losses.step[-1])
    same = _start(arguments, "recovery-whole", arguments.processes, "--no-supervisor")
    whole = arguments.work / "runs" / "recovery-whole"
    _wait(same, lambda: any(row["step"] >= step for path in _files(whole, "train") for row in _rows(path)))
    _stop(same)
    expected = read_run(whole).series["loss"]
    return {
        "kills": len(parts),
        "of all ranks": everyone,
        "from memory": text.count("from memory"),
        "steps": step,
        "median": {name: statistics.median(part[name] for part in parts) for name in parts[0]},
        "worst": {name: max(part[name] for part in parts) for name in parts[0]},
        "losses are bit-equal": (losses.step.tolist(), losses.value.tolist())
        == (expected.step[: len(losses.step)].tolist(), expected.value[: len(losses.step)].tolist()),
    }


def start_cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a command with one step, with and without the supervisor."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(arguments.starts):
        for name, words in (("without", ["--no-supervisor"]), ("with", [])):
            _forget(arguments.work / "runs" / "recovery-start")
            started = time.monotonic()
            trainer = _start(arguments, "recovery-start", 1, "--train.steps", "1", *words)
            if trainer.wait() != 0:
                sys.exit(f"a start {name} supervisor ended with code {trainer.returncode}")
            found[name].append(time.monotonic() - started)
    medians = {name: statistics.median(seconds) for name, seconds in found.items() if seconds}
    return {"start seconds": medians} if medians else {}


def _start(arguments: argparse.Namespace, name: str, processes: int, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "zero2all", "train", arguments.config, "--work", str(arguments.work)]
    command += ["--train.name", name, "--train.steps", "1000000", "--validation.every_steps", "0"]
    command += ["--checkpoint.every_steps", "1000", "--track.log_every_steps", "1", "--parallel.device", "cpu"]
    command += ["--parallel.cpu_threads", "1", "--parallel.processes", str(processes)]
    command += ["--resilience.supervise", "true", "--resilience.restarts", "10", *words, *arguments.words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _wait(trainer: subprocess.Popen[bytes], find: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := find()):
        if trainer.poll() is not None or time.monotonic() > end:
            sys.exit(f"no step within {PATIENCE_SECONDS:g} s; the exit code of the run is {trainer.poll()}")
        time.sleep(0.02)
    return found


def _ranks(trainer: subprocess.Popen[bytes]) -> list[psutil.Process]:
    family = psutil.Process(trainer.pid).children(recursive=True)
    return [child for child in family if child.name().startswith("z2a rank")]


def _stop(trainer: subprocess.Popen[bytes]) -> None:
    trainer.send_signal(signal.SIGTERM)
    if trainer.wait() != 10:
        sys.exit(f"the run did not stop as asked: exit code {trainer.returncode}")


def _first_step(run: Path, before: set[Path]) -> tuple[Path, float] | None:
    """The metrics file that is not among those `before`, and when its first step was finished."""
    for path in _files(run, "train"):
        if path not in before:
            for row in _rows(path):
                if "loss" in row.get("values", {}):
                    return path, row["time"]
    return None


def _files(run: Path, writer: str) -> list[Path]:
    return sorted(run.glob(f"metrics/{writer}-*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))


def _events(run: Path, writer: str, kind: str) -> list[dict[str, Any]]:
    return [row for path in _files(run, writer) for row in _rows(path) if row.get("kind") == kind]


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows so far; the last line may not be whole yet."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _forget(run: Path) -> None:
    remove(run)
    shutil.rmtree(run, ignore_errors=True)


if __name__ == "__main__":
    main()
