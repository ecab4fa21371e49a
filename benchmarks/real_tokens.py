"""Does it learn alike? The same run on real text by two implementations, each twice, so that the noise is known too.

    python benchmarks/real_tokens.py --work WORKSPACE --against eager     auto against every operator by its formula
    python benchmarks/real_tokens.py --work WORKSPACE --against fp8       bfloat16 against float8 in the block linears

Every run is `z2a train` with the same config, seed and data, so weights begin alike and samples come in the same order.
What is compared is the training loss of each step. Two runs of one implementation differ on a GPU as well, because some
kernels add in whichever order comes: that is what a difference between two implementations has to be held against.
Runs are written below --work/runs and removed afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ablate import NAIVE
from benchmarks.machine import BILLION, environment, save_result
from zero2all.track.reader import read_run

AUTO: dict[str, str] = {}
COMPARISONS: dict[str, tuple[str, dict[str, str], str, dict[str, str]]] = {
    "eager": ("auto", AUTO, "eager", NAIVE),
    "fp8": ("bf16", AUTO, "fp8", {"ops.linear": "fp8"}),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "eager": {"steps": 50, "tokens_per_step": 8192, "micro_batch": 2, "lr": 4e-5, "warmup": 50},
    "fp8": {"steps": 300, "tokens_per_step": 16384, "micro_batch": 8, "lr": 4e-4, "warmup": 50},
}
"""For z2all-1b on one card. A rate at which the loss spikes tells nothing: one run meets a spike, the next does not."""
RESULTS = {"eager": "auto_against_eager", "fp8": "fp8_real_tokens"}
WINDOW = 50


def main() -> None:
    """Train, compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a workspace with packed data")
    parser.add_argument("--against", choices=COMPARISONS, required=True)
    parser.add_argument("--config", default=BILLION, help="a preset or the path of a YAML file")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokens-per-step", type=int)
    parser.add_argument("--micro-batch", type=int, help="samples a pass")
    parser.add_argument("--lr", type=float, help="at the end of the warmup")
    parser.add_argument("--warmup", type=int, help="steps")
    parser.add_argument("--no-save", action="store_true", help="leave benchmarks/results alone")
    arguments = parser.parse_args()
    asked = {name: getattr(arguments, name) for name in DEFAULTS[arguments.against]}
    settings = DEFAULTS[arguments.against] | {name: value for name, value in asked.items() if value is not None}
    first, first_ops, second, second_ops = COMPARISONS[arguments.against]
    runs = [(first, first_ops), (f"{first} again", first_ops), (second, second_ops), (f"{second} again", second_ops)]
    losses = {name: losses_of(arguments.work, arguments.config, settings, ops) for name, ops in runs}
    figures = {
        "config": arguments.config,
        "environment": environment(),
        "settings": settings,
        "differences": {f"{a} - {b}": difference(losses[a], losses[b]) for a, b in itertools.combinations(losses, 2)},
        "losses": {name: values.round(5).tolist() for name, values in losses.items()},
    }
    print(json.dumps(figures["differences"], indent=2))
    if not arguments.no_save:
        save_result(RESULTS[arguments.against], figures)


def losses_of(work: Path, config: str, settings: dict[str, Any], ops: dict[str, str]) -> np.ndarray:
    """The loss of every step of one run."""
    name = "benchmark-real-tokens"
    words = [
        *("--train.name", name, "--train.steps", settings["steps"]),
        *("--train.tokens_per_step", settings["tokens_per_step"]),
        *("--train.micro_batch_samples", settings["micro_batch"]),
        *("--optim.lr_max", settings["lr"], "--schedule.warmup_steps", settings["warmup"]),
        *("--checkpoint.every_steps", 0, "--validation.every_steps", 0, "--model.vocab_size", "null"),
        *(word for field, chosen in ops.items() for word in (f"--{field}", chosen)),
    ]
    command = [sys.executable, "-m", "zero2all", "train", config, "--work", work, "--fresh", *words]
    run = work / "runs" / name
    try:
        subprocess.run([str(word) for word in command], check=True)
        return np.asarray(read_run(run).series["loss"].value, dtype=np.float64)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def difference(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Of two curves: step by step, and between the means of each WINDOW steps and of the last."""
    apart = a - b
    return {
        "largest": float(np.abs(apart).max()),
        "mean": float(np.abs(apart).mean()),
        f"means_of_{WINDOW}": [float(apart[at : at + WINDOW].mean()) for at in range(0, len(apart), WINDOW)],
        f"last_{WINDOW}": float(apart[-WINDOW:].mean()),
    }


if __name__ == "__main__":
    main()
