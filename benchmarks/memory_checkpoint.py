"""Checkpoints in memory on a GPU: what a save costs the loop, and how fast a killed run trains again.

    python benchmarks/memory_checkpoint.py --work quickstart        z2all-1b with AdamW, some minutes on an H200

WORK is a workspace with packed data. Three runs of the config: without memory checkpoints, with one every 10 steps, and
one that is killed (SIGKILL) and started again. Needs 3 times 12 bytes per parameter of host memory, two thirds of it in
/dev/shm, and no disk: the runs are killed before their last step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import BILLION, save_result
from zero2all.resilience.slots import remove

EVERY, WARM_STEPS, STEPS = 10, 5, 32


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--config", default=BILLION)
    parser.add_argument("words", nargs="*", help="more words for z2a train, after --")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"config": arguments.config, "every_steps": EVERY}
    for name, every in (("without", 0), ("with", EVERY)):
        rows = measured(arguments, f"memory-{name}", every, STEPS)
        late = [row for row in rows if row["step"] > WARM_STEPS]
        steps = {row["step"]: row["values"]["time/step"] for row in late if "time/step" in row["values"]}
        results[f"step_seconds_{name}"] = statistics.median(steps.values())
        results[f"mean_step_seconds_{name}"] = statistics.mean(steps.values())
        # A save after step n is copied during step n + 1.
        copied = [seconds for step, seconds in steps.items() if step % EVERY == 1]
        results[f"copied_step_seconds_{name}"] = statistics.median(copied)
        key = "memory/checkpoint_stall"
        stalls = [row["values"][key] for row in late if key in row["values"]]
        results[f"stall_seconds_{name}"] = stalls
    started = time.time()
    rows = measured(arguments, "memory-with", EVERY, STEPS + 2, is_new=False)
    results["resumed_at"] = min(row["step"] for row in rows if "loss" in row["values"]) - 1
    first = min(row["time"] for row in rows if "loss" in row["values"])
    results["seconds_to_first_step_again"] = first - started
    for name in ("memory-without", "memory-with"):
        run = arguments.work / "runs" / name
        remove(run)
        shutil.rmtree(run)
    print(json.dumps(results, indent=1))
    save_result("memory_checkpoint", results)


def measured(
    arguments: argparse.Namespace, name: str, every: int, until: int, is_new: bool = True
) -> list[dict[str, Any]]:
    """Train until a step is logged, then kill; the metric rows of this start."""
    run = arguments.work / "runs" / name
    words = ["train", arguments.config, "--work", str(arguments.work), "--train.name", name, "--train.steps", "1000"]
    words += ["--checkpoint.every_steps", "0", "--validation.every_steps", "0", "--track.log_every_steps", "1"]
    words += ["--train.tokens_per_step", "65536", "--resilience.memory_every_steps", str(every), *arguments.words]
    words += ["--no-supervisor", *(["--fresh"] if is_new and run.exists() else [])]
    before = set(run.glob("metrics/train-*.jsonl")) if not is_new else set()
    trainer = subprocess.Popen([sys.executable, "-m", "zero2all", *words])
    rows: list[dict[str, Any]] = []
    while max((row["step"] for row in rows), default=0) < until:
        if trainer.poll() is not None:
            sys.exit(f"z2a {' '.join(words)} ended with code {trainer.returncode}")
        time.sleep(0.2)
        files = sorted(set(run.glob("metrics/train-*.jsonl")) - before)
        rows = _rows(files[-1]) if files else []
    trainer.kill()
    trainer.wait()
    return rows


def _rows(path: Path) -> list[dict[str, Any]]:
    """The metric rows so far; the last line may not be whole yet."""
    rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if "values" in row]


if __name__ == "__main__":
    main()
