"""What the trainer costs beside the bare step, and what a checkpoint costs beside the trainer. For one GPU.

    python benchmarks/trainer.py --work WORKSPACE                       z2all-1b with AdamW, on the packed data there
    python benchmarks/trainer.py --work WORKSPACE --config quickstart   any other config

A/B/A: the bare step (`zero2all.measure.child`, random tokens), then `z2a train` on packed data, then the
bare step again; each in a process of its own, as a user would start it. Medians over steps; steps during which a
checkpoint was being written are told apart, and the stall of a save is what its event says. Runs are written below
--work/runs and removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import BILLION, save_result

RUN = "benchmark-trainer"
FIRST_STEPS = 5
"""Left out: clocks, caches and the allocator settle."""


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a workspace with packed data")
    parser.add_argument("--config", default=BILLION, help="a preset or the path of a YAML file")
    parser.add_argument("--batch", default="16x2048x4", help="samples a pass x tokens x passes a step")
    parser.add_argument("--steps", type=int, default=30, help="of the trainer")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each bare measurement")
    parser.add_argument("--no-save", action="store_true", help="leave benchmarks/results alone")
    arguments = parser.parse_args()
    samples, seq_len, passes = (int(part) for part in arguments.batch.split("x"))
    before = bare(arguments.config, arguments.batch, arguments.seconds)
    trained = trainer(arguments, samples, samples * seq_len * passes)
    after = bare(arguments.config, arguments.batch, arguments.seconds)
    figures = {"batch": arguments.batch, "bare_before": before, "bare_after": after, **trained}
    figures["ratio"] = trained["tokens_per_second"] / statistics.mean((before, after))
    print(json.dumps(figures, indent=2))
    if not arguments.no_save:
        save_result("trainer", figures)


def bare(config: str, batch: str, seconds: float) -> float:
    """Tokens per second of the step alone: the median step."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        words = ["--batch", batch, "--seconds", str(seconds), "--no-anatomy", "--result", str(result)]
        subprocess.run([sys.executable, "-m", "zero2all.measure.child", config, *words], check=True)
        row: dict[str, Any] = json.loads(result.read_text())
    return float(row["tokens_per_second"])


def trainer(arguments: argparse.Namespace, samples: int, tokens_per_step: int) -> dict[str, Any]:
    """Speed of the trainer, and what its checkpoints cost."""
    steps = arguments.steps
    words = [
        *("--train.name", RUN, "--train.steps", str(steps), "--train.tokens_per_step", str(tokens_per_step)),
        *("--train.micro_batch_samples", str(samples), "--schedule.warmup_steps", "2"),
        *("--checkpoint.every_steps", str(steps // 2), "--validation.every_steps", "0"),
    ]
    command = [sys.executable, "-m", "zero2all", "train", arguments.config, "--work", str(arguments.work), "--fresh"]
    run = arguments.work / "runs" / RUN
    try:
        subprocess.run([*command, *words], check=True)
        return read_run(run, tokens_per_step)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def read_run(run: Path, tokens_per_step: int) -> dict[str, Any]:
    """From the metrics of the run: steps with and without a checkpoint being written, and the stalls."""
    lines = [line for path in sorted((run / "metrics").glob("train-*.jsonl")) for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    steps = {row["step"]: row for row in rows if "values" in row and "time/step" in row["values"]}
    saves = [row["data"] for row in rows if row.get("kind") == "checkpoint"]
    writing = [(save["ended_at"] - save["seconds"], save["ended_at"]) for save in saves]
    quiet: list[float] = []
    busy: list[float] = []
    for step, row in steps.items():
        if step <= FIRST_STEPS:
            continue
        seconds, ended = row["values"]["time/step"], row["time"]
        if any(begin <= ended - seconds and ended <= end for begin, end in writing):
            busy.append(seconds)
        elif not any(begin < ended and ended - seconds < end for begin, end in writing):
            quiet.append(seconds)  # a step that a save began or ended in is neither
    usual = statistics.median(quiet)
    return {
        "tokens_per_second": tokens_per_step / usual,
        "step_seconds": usual,
        "step_seconds_while_writing": statistics.median(busy) if busy else None,
        "data_wait_seconds": statistics.median(row["values"]["time/data_wait"] for row in steps.values()),
        "anatomy": {
            name: statistics.median(row["values"][name] for row in steps.values())
            for name in next(iter(steps.values()))["values"]
            if name.startswith("time/")
        },
        "checkpoint_bytes": max((save["bytes"] for save in saves), default=0),
        "checkpoint_stall_seconds": [save["stall_seconds"] for save in saves],
        "checkpoint_write_seconds": [save["seconds"] for save in saves],
    }


if __name__ == "__main__":
    main()
