"""The simulated long run (`long_run.py`) beside closed forms and published runs; writes results/simulate.json.

    python -m benchmarks.simulate

What a report does not say is assumed, and the assumption stands in its row. Where the published figure was used to
find an unknown (a failure rate, a stall), the row is marked `fitted`, and the row after it uses what was found.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.long_run import DAY, HOUR, Outcome, Plan, band, simulate
from benchmarks.machine import save_result
from zero2all.estimate.run_calculators import goodput as closed_goodput

LLAMA3_MEAN = 54 * DAY / 419
ONE_KIND: dict[str, Any] = {"shares": {"process": 1.0}, "hang_share": 0.0}
FLASH: dict[str, Any] = {"stall_seconds": 2.0, "save_seconds": 60.0, "memory_interval_seconds": 60.0}


def main() -> None:
    """Simulate all rows, print them, write them."""
    rows = [*closed_forms(), *published_runs()]
    for row in rows:
        figures = f"{row['simulated']:.3f} ({row['p10']:.3f} … {row['p90']:.3f})"
        print(f"{row['run']}: {row['figure']} {row['published']}; {figures} {row['difference']}  [{row['basis']}]")
    save_result("simulate", {"repetitions": 200, "seed": 0, "rows": rows, "speed": speed()})


def row(run: str, figure: str, published: float | str, values: Any, basis: str) -> dict[str, Any]:
    """One line of the table: the band of `values` beside the published figure."""
    low, middle, high = band(np.asarray(values))
    off = "" if isinstance(published, str) else f"{100 * (middle / published - 1):+.2f} %"
    return {
        "run": run,
        "figure": figure,
        "published": published,
        "simulated": middle,
        "p10": low,
        "p90": high,
        "difference": off,
        "basis": basis,
    }


def of_rate(gpus: int, mean: float) -> dict[str, Any]:
    """Fields of a plan with `gpus` GPUs and this many seconds between failures of all of them."""
    return {"nodes": gpus // 8, "failures_per_gpu_hour": HOUR / mean / gpus}


def closed_forms() -> list[dict[str, Any]]:
    """Daly's expected goodput: one kind of failure, blocking saves."""
    cases = [
        ("Llama 3 rate, save 60 s, restart 600 s, Daly", LLAMA3_MEAN, None, 60.0, 600.0, 200),
        ("Llama 3 rate, save 2 s, restart 300 s, Daly", LLAMA3_MEAN, None, 2.0, 300.0, 200),
        ("failure every 5 d, save 40 s, restart 900 s, Daly", 5 * DAY, None, 40.0, 900.0, 2000),
        ("the same, a save every 3 h", 5 * DAY, 3 * HOUR, 40.0, 900.0, 2000),
        ("half an hour of restart, a save every 2 h", LLAMA3_MEAN, 2 * HOUR, 300.0, 1800.0, 200),
    ]
    rows = []
    for name, mean, interval, save, restart, days in cases:
        plan = Plan(
            work_seconds=days * DAY,
            **of_rate(16_384, mean),
            **ONE_KIND,
            interval_seconds=interval,
            save_seconds=save,
            restart_seconds=restart,
        )
        exact = closed_goodput(plan.interval, save, restart, mean)
        rows.append(row(name, "goodput", round(exact, 5), simulate(plan).goodput, "closed form (Daly 2006)"))
    return rows


def published_runs() -> list[dict[str, Any]]:
    """Runs of others, with what their reports say."""
    return [*llama3(), *dlrover(), *meta_rsc(), *ft_hsdp(), *byterobust()]


def llama3() -> list[dict[str, Any]]:
    """54 days, 16,384 GPUs, 419 unexpected interruptions, more than 90 % effective training time."""
    plan = Plan(work_seconds=50 * DAY, nodes=2048, restart_seconds=600.0, spare_nodes=64, **FLASH)
    outcome = simulate(plan)
    per_54 = outcome.failures / outcome.wall_seconds * 54 * DAY
    without = simulate(dataclasses.replace(plan, stall_seconds=60.0, memory_interval_seconds=None))
    assumed = "assumed: restart 10 min, 10 % hangs of 10 min, 64 spare nodes"
    name = "Llama 3 405B, 16,384 H100, 54 days"
    return [
        row(name, "interruptions", 419, per_54, "rate 1.97e-5 per GPU-hour from the same report"),
        row(name, "goodput", "> 0.9", outcome.goodput, f"{assumed}; saves in the background, copies in memory"),
        row(name, "goodput", "> 0.9", without.goodput, f"{assumed}; blocking saves of 60 s at Daly's interval"),
    ]


def dlrover() -> list[dict[str, Any]]:
    """0.27 % of cards fail per day; GLM-65B on 1,536 H800: a save stalls 102 s, then 0.2 s; goodput 90 to 95 %."""
    daily = Plan(DAY, 125, failures_per_gpu_hour=0.0027 / 24, restart_seconds=1.0, save_seconds=0.1, **ONE_KIND)
    failed = np.array([float((simulate(daily, 400, seed).failures > 0).mean()) for seed in range(10)])
    glm: dict[str, Any] = {"nodes": 192, "failures_per_gpu_hour": 0.0027 / 24, "spare_nodes": 8, "hang_share": 0.1}
    before = Plan(30 * DAY, **glm, save_seconds=102.0, restart_seconds=115.0 + 300.0)
    after = Plan(
        30 * DAY,
        **glm,
        save_seconds=102.0,
        stall_seconds=0.2,
        memory_interval_seconds=60.0,
        memory_stall_seconds=0.2,
        restart_seconds=56.0 + 120.0,
    )
    name = "GLM-65B, 1,536 H800 (DLRover)"
    rest = "rate 0.27 % per card and day; assumed: 10 % hangs of 10 min, 8 spare nodes"
    return [
        row("1,000 cards, 0.27 % per card and day", "days with a failure", 0.93, failed, "share of 400 days, 10 seeds"),
        row(name, "goodput", 0.90, simulate(before).goodput, f"save 102 s, load 115 s, pod 5 min; {rest}"),
        row(name, "goodput", 0.95, simulate(after).goodput, f"stall 0.2 s, load 56 s, pod 2 min; {rest}"),
    ]


def meta_rsc() -> list[dict[str, Any]]:
    """Mean time to failure 1.8 h at 16,384 GPUs and 0.23 h at 131,072: one rate per GPU gives both."""
    rate = 1 / 1.8 / 16_384
    rows = []
    for gpus, published in ((16_384, 1.8), (131_072, 0.23)):
        plan = Plan(5 * DAY, gpus // 8, failures_per_gpu_hour=rate, restart_seconds=0.0, save_seconds=0.1, **ONE_KIND)
        outcome = simulate(plan)
        hours = outcome.wall_seconds / HOUR / np.maximum(outcome.failures, 1)
        basis = "fitted" if gpus == 16_384 else "rate of the row above"
        rows.append(row(f"Meta RSC, {gpus:,} GPUs", "hours to failure", published, hours, basis))
    return rows


def ft_hsdp() -> list[dict[str, Any]]:
    """About 100,000 GPUs: the stall per failure falls from 10 to 3 minutes, effective time rises from 44 to 80 %."""

    def run(mean: float, minutes: float) -> Outcome:
        plan = Plan(
            4 * DAY, **of_rate(100_000, mean), **ONE_KIND, restart_seconds=60 * minutes, save_seconds=1.0,
            stall_seconds=0.0, interval_seconds=20.0,
        )  # fmt: skip
        return simulate(plan, 50)

    mean = bisect(lambda mean: float(run(mean, 10.0).goodput.mean()) - 0.44, 200.0, 3000.0)
    name = "FT-HSDP, about 100,000 GPUs"
    return [
        row(name, "goodput", 0.44, run(mean, 10.0).goodput, f"fitted: a failure every {mean / 60:.1f} min"),
        row(name, "goodput", 0.80, run(mean, 3.0).goodput, "the same failures, a stall of 3 min"),
    ]


def byterobust() -> list[dict[str, Any]]:
    """97 % effective time over 3 months on 9,600 GPUs."""
    plan = Plan(87 * DAY, 1200, restart_seconds=300.0, spare_nodes=24, memory_copies=2, hang_seconds=300.0, **FLASH)
    basis = "assumed: Llama 3's rate, restart 5 min, hangs found in 5 min, copies on another node"
    return [row("ByteRobust, 9,600 GPUs, 3 months", "goodput", 0.97, simulate(plan).goodput, basis)]


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0."""
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return math.sqrt(low * high)


def speed() -> dict[str, float]:
    """Seconds for 200 repetitions."""
    found = {}
    for name, nodes in (("16,384 GPUs, 54 days", 2048), ("131,072 GPUs, 90 days", 16_384)):
        plan = Plan((54 if nodes == 2048 else 90) * DAY, nodes, spare_nodes=nodes // 32, restart_seconds=120.0, **FLASH)
        started = time.perf_counter()
        simulate(plan)
        found[name] = round(time.perf_counter() - started, 2)
    return found


if __name__ == "__main__":
    main()
