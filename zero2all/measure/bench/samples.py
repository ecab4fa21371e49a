"""Times of several cases, taken in turn, and when two of them really differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from zero2all.measure.step_timer import wait_for
from zero2all.parallel.device import pick_device, set_cpu_threads

LEAST_ROUNDS, MOST_ROUNDS = 5, 200
LEAST_DIFFERENCE = 0.03
"""Below this share no difference is called one, however small the spread."""
WITHIN_NOISE = "No case is faster than the first by more than the noise: change nothing for speed."


@dataclass(frozen=True)
class Row:
    """One case: its times, and what one time stands for."""

    what: str
    seconds: list[float]
    amount: float = 0.0
    """Bytes, tokens or parameters per time; 0: there is no rate."""
    unit: str = ""
    """Of the rate, such as GB/s; `amount` is in it."""
    more: dict[str, str] = field(default_factory=dict)
    """Other columns."""

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        low, high = self.quartiles
        return (high - low) / self.median if self.median else 0.0

    @property
    def rate(self) -> float | None:
        """Amount per second."""
        return self.amount / self.median if self.amount and self.median else None


@dataclass
class Bench:
    """The result of one measurement."""

    name: str
    about: str
    """What was measured, in a line."""
    rows: list[Row] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What could not be measured here, and why."""

    def as_json(self) -> dict[str, object]:
        """JSON values: seconds, the rate in its unit, the spread as a share."""
        rows = [
            {
                **{"what": row.what, "median_seconds": row.median, "spread": row.spread, "samples": row.seconds},
                **({"rate": row.rate, "unit": row.unit} if row.rate else {}),
                **row.more,
            }
            for row in self.rows
        ]
        return {
            **{"bench": self.name, "about": self.about, "rows": rows},
            "advice": self.advice,
            "left_out": self.left_out,
        }


def is_faster(one: Row, other: Row) -> bool:
    """Whether `one` takes less time than `other` beyond the noise: their quartile ranges do not overlap, and the
    medians differ by more than 3 %. One or two times prove nothing."""
    if min(len(one.seconds), len(other.seconds)) < 3:
        return False
    return one.quartiles[1] < other.quartiles[0] and one.median < (1 - LEAST_DIFFERENCE) * other.median


def times_faster(one: Row, other: Row) -> str:
    """`2.1`: how many times as fast `one` is."""
    return f"{other.median / one.median:.2f}"


def in_turn(
    cases: Mapping[str, Callable[[], object]], seconds: float, device: torch.device, least: int = LEAST_ROUNDS
) -> dict[str, list[float]]:
    """Times of each case. They take turns, so that a machine that gets slower or faster does so for all; each is warmed
    up once. Ends after `seconds` and `least` rounds, or after three times `seconds`."""
    for run in cases.values():
        run()
    wait_for(device)
    times: dict[str, list[float]] = {name: [] for name in cases}
    started = time.perf_counter()
    for number in range(MOST_ROUNDS):
        for name, run in cases.items():
            begun = time.perf_counter()
            run()
            wait_for(device)
            times[name].append(time.perf_counter() - begun)
        spent = time.perf_counter() - started
        if (spent > seconds and number + 1 >= least) or spent > 3 * seconds:
            break
    return times


def device_and_threads(asked: str) -> torch.device:
    """The device that --device names; on the host, all CPUs that this process may use."""
    set_cpu_threads(None, None)
    return pick_device(asked, "--device")


def best_of(rows: list[Row]) -> Row | None:
    """The case that is faster than the first beyond the noise; None: there is none."""
    fastest = min(rows, key=lambda row: row.median)
    return fastest if is_faster(fastest, rows[0]) else None
