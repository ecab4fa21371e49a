"""Faults of runs on one GPU: what the page says, and the seconds until the next step.

    python benchmarks/gpu_faults.py --work quickstart               z2all-1b with AdamW: kill, kill in a save,
                                                                    out of memory, assert, hung kernel
    python benchmarks/gpu_faults.py --work quickstart --ranks 4     z2all-100m in four NCCL ranks on the one card:
                                                                    kill, SIGSTOP, a collective that one rank skips
    python benchmarks/gpu_faults.py --work W --config quickstart --device cpu --ranks 2         a trial without a GPU

WORK is a workspace with packed data. One run with checkpoints in memory meets one fault after the other; it is ended
after the last one, before it would write to the disk. NCCL refuses two ranks on one card only when they claim the same
host, so each of several ranks gets a host id of its own: this program starts itself as a supervisor, and as each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import BILLION, save_result
from zero2all.common.fault import FAULTS
from zero2all.resilience.chaos import PlannedFault, happened, install_plan
from zero2all.resilience.slots import remove

FIRST, BETWEEN, EVERY = 20, 20, 12
"""Steps: of the first fault, from one to the next, and between two saves to memory, which take some seconds. A limit is
known after ten."""
LIMITS = {"step": 20.0, "first_step": 240.0, "start": 240.0}
PATIENCE_SECONDS = 420
ALONE = {
    "cuda": ("kill", "kill@memory", "out_of_memory", "device_assert", "hung_kernel"),
    "cpu": ("kill", "kill@memory", "out_of_memory", "stop"),
}
TOGETHER = ("kill", "stop", "sleep")
"""Kinds of faults, some with the point of the program where they happen: `memory` is the copy of a save."""
WORDS, SUPERVISED = "Z2A_BENCHMARK_WORDS", "Z2A_BENCHMARK_SUPERVISED"
"""In the environment of a rank: its command line. In that of the supervisor of ranks: their number and their run."""


def main() -> None:
    """Measure, print, save."""
    if SUPERVISED in os.environ:
        sys.exit(_supervise(*json.loads(os.environ.pop(SUPERVISED))))
    if WORDS in os.environ:
        sys.exit(_rank())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--config", help="z2all-1b, or with several ranks z2all-100m")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--faults", help="some of them, separated by commas")
    parser.add_argument("words", nargs="*", help="more words for z2a train, after --")
    arguments = parser.parse_args()
    arguments.config = arguments.config or (BILLION if arguments.ranks == 1 else "z2all-100m")
    kinds = ALONE[arguments.device] if arguments.ranks == 1 else TOGETHER
    kinds = tuple(arguments.faults.split(",")) if arguments.faults else kinds
    rows = faulty_run(arguments, kinds)
    print(json.dumps(rows, indent=1))
    name = "gpu_faults" if arguments.ranks == 1 else "gpu_faults_ranks"
    if arguments.device == "cuda":
        save_result(name, {"config": arguments.config, "ranks": arguments.ranks, "faults": rows})


def faulty_run(arguments: argparse.Namespace, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """One run that meets the faults, and what became of each."""
    name = f"faults-{arguments.ranks}"
    run = arguments.work.absolute() / "runs" / name
    remove(run)
    shutil.rmtree(run, ignore_errors=True)
    victim, plan, steps = arguments.ranks - 1, [], []
    for number, text in enumerate(kinds):
        kind, _, point = text.partition("@")
        step = FIRST + BETWEEN * number
        steps.append(-(-step // EVERY) * EVERY if point else step)  # a save is made there
        plan.append(PlannedFault(kind, victim, point=point or None, step=steps[-1]))
    path = install_plan(plan, arguments.work / "chaos", run, None, fresh=True)
    environment = {**os.environ, FAULTS: str(path)}
    words = ["train", arguments.config, "--work", str(arguments.work), "--train.name", name, "--train.steps", "1000000"]
    words += ["--checkpoint.every_steps", "0", "--validation.every_steps", "0", "--track.log_every_steps", "1"]
    words += ["--parallel.device", arguments.device, "--resilience.memory_every_steps", str(EVERY), *arguments.words]
    command = [sys.executable, "-m", "zero2all", *words, "--resilience.supervise", "true"]
    command += ["--resilience.limits", json.dumps(LIMITS)]
    if arguments.ranks > 1:
        environment[WORDS] = json.dumps(words)
        environment[SUPERVISED] = json.dumps([arguments.ranks, str(run)])
        command = [sys.executable, __file__]
    trainer = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    rows = []
    for number, (kind, step) in enumerate(zip(kinds, steps, strict=True)):
        again = _wait(trainer, lambda: _next_step(run, happened(path).get(number)))  # noqa: B023
        resumed, seconds = again
        pages = sorted((run / "incidents").glob("*.json"), key=lambda page: page.stat().st_mtime)
        page = json.loads(pages[-1].read_text()) if pages else {}
        rows.append(
            {
                "fault": kind,
                "step": step,
                "seconds to the next step": round(seconds, 2),
                "of them until it was noticed": round(page.get("waited_seconds", 0.0), 2),
                "went on after step": resumed - 1,
                "page": page.get("text", "none"),
                "advice": page.get("advice", []),
            }
        )
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    family = psutil.Process(trainer.pid).children(recursive=True)
    for process in [*family, psutil.Process(trainer.pid)]:  # nobody is asked to save
        process.kill()
    trainer.wait()
    return rows


def _next_step(run: Path, fault: dict[str, Any] | None) -> tuple[int, float] | None:
    """The first step that a start after the fault has finished, and the seconds since the fault."""
    if fault is None:
        return None
    for path in run.glob("metrics/train-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        steps = [(row["step"], row["time"]) for row in lines if "loss" in row.get("values", {})]
        if steps and lines[0]["time"] > fault["time"]:
            return steps[0][0], steps[0][1] - fault["time"]
    return None


def _wait(trainer: subprocess.Popen[bytes], find: Any) -> Any:
    end = time.monotonic() + PATIENCE_SECONDS
    while (found := find()) is None:
        if trainer.poll() is not None or time.monotonic() > end:
            sys.exit(f"no step within {PATIENCE_SECONDS} s; the exit code of the run is {trainer.poll()}")
        time.sleep(0.1)
    return found


def _supervise(ranks: int, run: str) -> int:
    from zero2all.parallel.launch import run_processes
    from zero2all.resilience.config import ResilienceConfig
    from zero2all.resilience.supervisor import Watch

    watch = Watch(ResilienceConfig(limits=LIMITS), Path(run), watches_phases=True)
    return run_processes(ranks, [sys.executable, __file__], watch, module=False)


def _rank() -> int:
    """One of several ranks on the same card, for NCCL each on a machine of its own."""
    from zero2all.cli import main as z2a

    variables = {"NCCL_HOSTID": f"host-{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ.update(variables, LOCAL_RANK="0")
    return z2a(json.loads(os.environ[WORDS]))


if __name__ == "__main__":
    main()
