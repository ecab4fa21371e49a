"""What a few seeds say: means with intervals, differences of two settings, and how many seeds would decide.

Settings are compared over common seeds where there are any: a pair has the same data order and, where shapes allow, the
same initial weights, so its difference has less noise than its runs. Intervals and p are Student's t, Welch's without
common seeds. Seeds of each setting that show a difference d with 80 % power at 5 % (2.8 = 1.96 + 0.84):
(2.8 sd / d)^2 pairs, sd of the differences; without pairs 2 (2.8 sd / d)^2, sd of one run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import NamedTuple

LEVEL = 0.05


class Interval(NamedTuple):
    """A value and the range it lies in."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """How much higher the losses of one setting are than those of another: with 95 % interval, p, sd (see above; nan:
    one seed says nothing), and how many pairs, or runs of the setting with fewer, there are."""

    difference: Interval
    p: float
    sd: float
    seeds: int
    is_paired: bool

    @property
    def is_significant(self) -> bool:
        """Whether chance alone would rarely give so much."""
        return self.p < LEVEL

    def words(self, name: str, other: str) -> str:
        """For a person."""
        size, seen = abs(self.difference.value), f"(p {self.p:.2g}, seeds: {self.seeds})"
        if math.isnan(self.sd):
            return f"{name} against {other}: one seed says nothing about chance. Give each at least 3 seeds."
        if self.is_significant:
            better, worse = (name, other) if self.difference.value < 0 else (other, name)
            return f"{better} is better than {worse} by {size:.4g} {seen}."
        said = f"{name} against {other}: a difference of {size:.4g} is not significant {seen}."
        needed = max(self.seeds + 1, seeds_needed(self.sd, size, self.is_paired))
        return f"{said} If it is real, about {needed:,} seeds each would show it." if size else said


def seeds_needed(sd: float, difference: float, is_paired: bool = True) -> int:
    """Seeds of each setting that show a difference with 80 % power at 5 %, at most 10,000."""
    return max(2, math.ceil(min(1e4, (1 if is_paired else 2) * (2.8 * sd / max(abs(difference), 1e-30)) ** 2)))


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean and its 95 % interval, which is infinite for one value."""
    mean, count = fmean(values), len(values)
    half = t_quantile(count - 1) * math.sqrt(variance(values) / count) if count > 1 else math.inf
    return Interval(mean, mean - half, mean + half)


def compare(first: Mapping[int, float], second: Mapping[int, float]) -> Comparison:
    """The finite losses of two settings by seed: those of the first minus those of the second."""
    common, sides = sorted(first.keys() & second.keys()), [list(first.values()), list(second.values())]
    if is_paired := len(common) > 1 or (bool(common) and min(map(len, sides)) == 1):
        sides = [[first[seed] - second[seed] for seed in common]]
    mean, seeds = fmean(sides[0]) - sum(map(fmean, sides[1:])), min(map(len, sides))
    squares = [variance(side) if seeds > 1 else math.nan for side in sides]
    parts = [(square / len(side), max(1, len(side) - 1)) for square, side in zip(squares, sides, strict=True)]
    error, spread = math.sqrt(sum(part for part, _ in parts)), sum(part**2 / free for part, free in parts)
    degrees = error**4 / spread if spread else float(sum(free for _, free in parts))
    half = math.inf if math.isnan(error) else t_quantile(degrees) * error
    p = two_sided_p(mean / error, degrees) if error > 0 else float(math.isnan(error) or mean == 0)
    return Comparison(Interval(mean, mean - half, mean + half), p, math.sqrt(fmean(squares)), seeds, is_paired)


def compare_with_best(losses: Mapping[str, Mapping[int, float]]) -> tuple[str, dict[str, Comparison]]:
    """The setting with the lowest mean, and the others beside it. The best of many looks better than it is: p is
    corrected (Holm) for all pairs, not only those with it, or 16 % of sweeps over 20 equal settings had a winner."""
    best = min(losses, key=lambda name: fmean(losses[name].values()))
    found = {name: compare(values, losses[best]) for name, values in losses.items() if name != best}
    highest = 0.0
    for place, name in enumerate(sorted(found, key=lambda name: found[name].p)):
        highest = min(1.0, max(highest, (math.comb(len(losses), 2) - place) * found[name].p))
        found[name] = replace(found[name], p=highest)
    return best, found


def refit_scale(count: int, fitted: int) -> float:
    """By which residuals of a fit are multiplied so that refits to them scatter like new data (80 % of Student's t)."""
    free = max(1, count - fitted)
    return math.sqrt(count / free) * t_quantile(free, 0.2) / 1.2816


def two_sided_p(t: float, degrees: float) -> float:
    """The chance that Student's t is at least so far from 0."""
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def t_quantile(degrees: float, p: float = LEVEL) -> float:
    """The t whose two-sided chance is p."""
    low, high = 0.0, 1e4 / p  # which is beyond that of one degree, the widest
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees) > p else (low, middle)
    return high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (Lentz)."""
    if x > (a + 1) / (a + b + 2):  # here the other side converges sooner
        return 1 - incomplete_beta(b, a, 1 - x)
    c, fraction = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    d, m = fraction, 0
    while abs(c * d - 1) > 1e-15 and m < 1000:
        m += 1
        for step in (m * (b - m) / (a + 2 * m - 1), -(a + m) * (a + b + m) / (a + 2 * m + 1)):
            c, d = 1 + step * x / (a + 2 * m) / c, 1 / (1 + step * x / (a + 2 * m) * d)
            fraction *= c * d
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + b * math.log1p(-x)
    return math.exp(logs) * x**a * fraction / a
