"""A long run for the benchmarks of tracking: a million rows, with a spike of one step."""

from __future__ import annotations

import random
from pathlib import Path

from zero2all.common import jsonio

ROWS = 1_000_000
SPIKE_STEP = 654_321


def write_long_run(folder: Path, digits: int | None) -> Path:
    """1 M rows with 6 values each and one spike of one step; `digits` None writes every double in full."""
    rng = random.Random(0)
    (folder / "metrics").mkdir(parents=True)
    path = folder / "metrics" / "train-1.jsonl"
    names = ("loss", "lr", "grad_norm", "tokens_per_second", "loss/zh", "loss/en")
    with open(path, "wb", buffering=1 << 20) as file:
        for step in range(ROWS):
            level = 2 + 3 / (1 + step / 5_000) ** 0.5
            numbers = [level + 0.1 * rng.random(), 3e-4, 1.0 + rng.random(), 1e5, level + rng.random(), level]
            if step == SPIKE_STEP:
                numbers[0] = 9.5
            if digits is not None:
                numbers = [float(f"{number:.{digits}g}") for number in numbers]
            else:
                numbers = [number * (1 + 1e-12 * step) for number in numbers]
            row_time = 1.7e9 + 0.5 * step
            row = {
                "step": step,
                "time": row_time,
                "tokens": 4096 * step,
                "values": dict(zip(names, numbers, strict=True)),
            }
            file.write(jsonio.dumps_line(row))
    return path
