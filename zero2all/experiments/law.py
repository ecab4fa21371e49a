"""The loss that parameters and tokens give, fitted to one's own runs: L = E + A / N^alpha + B / D^beta.

N are the parameters in matrix products, head included (`parameter_counts(config)["matmul"]`). Repeated text counts
less: D > U tokens of U unique ones are worth U + 15.4 U (1 - exp(-(D / U - 1) / 15.4)) (2305.16264), and that is D.

*Fit.* Least is the sum of Huber's loss (delta 1e-3) of log L. For given exponents E, A, B >= 0 are a linear problem,
solved by reweighted least squares, so that only two numbers are searched: a grid, then finer ones around its best.

*Intervals.* 100 more fits, 10th to 90th percentile of whatever follows: to the law's own losses with the residuals
dealt out anew, the mean of each run with its branches among the runs, the rest among the points. Every size stays;
drawing whole runs loses some, and gave intervals 10 times too wide with three sizes. In simulated designs (3 to 6
sizes, 2 to 5 budgets, noise of the runs or of the points) 70 to 85 % held the truth.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import UsageError
from zero2all.estimate.run_calculators import ScalingLaw
from zero2all.experiments.statistics import Interval, refit_scale

Array = NDArray[np.float64]
DELTA, REPEATS = 1e-3, 15.4
UNLIMITED = 1e30  # unique tokens of text that is never repeated
EXPONENTS = (math.log(0.04), math.log(1.6))
GRID = np.array(list(itertools.product(np.linspace(*EXPONENTS, 16), repeat=2)))
AROUND = np.array(list(itertools.product((-2.0, -1.0, 0.0, 1.0, 2.0), repeat=2)))
SUBSETS = np.array(list(itertools.product((0.0, 1.0), repeat=3))[1:])  # which of E, A, B are above 0
SAME = 0.05  # sizes closer than this are one


@dataclass(frozen=True)
class Point:
    """The held-out loss at the end of a run, or of a branch of it."""

    run: str  # with its branches
    n: float
    tokens: float
    unique_tokens: float
    loss: float
    name: str = ""

    @property
    def flops(self) -> float:
        """6 N D."""
        return 6 * self.n * self.tokens


@dataclass(frozen=True)
class Choice:
    """A size and its tokens at some FLOPs, and the FLOPs with which this size reaches the loss of the best one."""

    n: float
    tokens: float
    loss: float
    flops_for_best: float


@dataclass(frozen=True)
class Fit:
    """The law of some points, and those of their resamples."""

    points: Sequence[Point]
    law: ScalingLaw
    resampled: Sequence[ScalingLaw]

    def intervals(self, of: Callable[[ScalingLaw], Any]) -> dict[str, Interval]:
        """The numbers of whatever follows from the law, by field, 10th to 90th percentile."""
        here, *others = (asdict(of(law)) for law in (self.law, *self.resampled))
        ranges = {name: np.percentile([other[name] for other in others], (10, 90)).tolist() for name in here}
        return {name: Interval(value, *ranges[name]) for name, value in here.items()}

    def within(self, best: Mapping[str, Interval]) -> float:
        """How many times the largest measured size or tokens a choice (as of `intervals`) is, whichever is more."""
        largest = {name: max(getattr(point, name) for point in self.points) for name in ("n", "tokens")}
        return max(best[name].value / most for name, most in largest.items())


def worth(tokens: Any, unique: Any) -> Any:
    """The fresh tokens that some, of which so many are unique, are worth."""
    return np.minimum(tokens, unique) - REPEATS * unique * np.expm1(-np.maximum(tokens / unique - 1, 0) / REPEATS)


def predicted(law: ScalingLaw, point: Point) -> float:
    """The loss the law gives a point."""
    return law.loss(point.n, float(worth(point.tokens, point.unique_tokens)))


def fit(points: Sequence[Point], resamples: int = 100, seed: int = 0) -> Fit:
    """The law of at least three sizes and two budgets; UsageError where they do not determine it."""
    check_design(points)
    log_losses = np.log([point.loss for point in points])
    law = _fit(points, log_losses)
    expected = np.log([predicted(law, point) for point in points])
    runs, run = np.unique([point.run for point in points], return_inverse=True)
    means, branches = np.bincount(run, log_losses - expected) / np.bincount(run), len(points) - len(runs)
    random, rest = np.random.default_rng(seed), refit_scale(branches, 2) * (log_losses - expected - means[run])
    means, found = means * refit_scale(len(runs), 3 if branches else 5), list[ScalingLaw]()
    for _ in range(resamples):
        found.append(_fit(points, expected + random.permutation(means)[run] + random.permutation(rest), near=law))
    return Fit(points, law, found)


def check_design(points: Sequence[Point]) -> None:
    """Refuse points that leave the law open, and say what to add."""
    sizes = _different([point.n for point in points])
    budgets = _different([float(worth(point.tokens, point.unique_tokens)) for point in points])
    ratios = sorted(point.tokens / point.n for point in points) or [1.0]
    missing = [] if sizes >= 3 else [f"models of 3 sizes, each about twice the one before (now {sizes})"]
    if budgets < 2:
        missing.append("each size with 2 numbers of tokens, best 4 times apart")
    elif ratios[-1] < 4 * ratios[0]:
        missing.append(
            f"tokens per parameter that lie 4 times apart (now {ratios[0]:.3g} to {ratios[-1]:.3g}), by "
            "small models with more tokens or large ones with fewer, or size and tokens cannot be told apart"
        )
    if len(points) < 6:
        missing.append(f"6 finished runs (now {len(points)})")
    if missing:
        raise UsageError("These runs do not determine a scaling law. It needs at least:\n  " + "\n  ".join(missing))


def held_out_check(points: Sequence[Point]) -> list[tuple[Point, float]]:
    """The points of the largest size, with what the law of all others predicts; UsageError where these have none."""
    largest = (1 - SAME) * max(point.n for point in points)
    law = fit([point for point in points if point.n < largest], resamples=0).law
    return [(point, predicted(law, point)) for point in points if point.n >= largest]


def at(law: ScalingLaw, n: float, tokens: float, unique: float = UNLIMITED, best_loss: float | None = None) -> Choice:
    """What the law says of a size and tokens (`best_loss`: the loss of the best size; None: its own)."""
    loss = law.loss(n, float(worth(tokens, unique)))
    room = (loss if best_loss is None else best_loss) - law.E - law.A / n**law.alpha
    fresh = (law.B / room) ** (1 / law.beta) if room > 0 else math.inf
    spent = max(0.0, fresh / unique - 1) / REPEATS
    needed = math.inf if spent >= 1 else min(fresh, unique) - unique * REPEATS * math.log1p(-spent)
    return Choice(n, tokens, loss, 6 * n * needed)


def best_for(law: ScalingLaw, flops: float, unique: float = UNLIMITED) -> Choice:
    """The size of least loss for 6 N D FLOPs, with so many unique tokens."""
    n = law.best_parameters(flops)
    if flops / (6 * n) > unique:  # then the formula does not hold: more parameters and fewer repetitions are better
        sizes = np.geomspace(n, max(n, flops / (6 * unique)) * 1.01, 2001)
        losses: Any = law.loss(sizes, worth(flops / (6 * sizes), unique))  # type: ignore[arg-type]
        n = float(sizes[losses.argmin()])
    return at(law, n, flops / (6 * n), unique)


def flops_for_tokens(law: ScalingLaw, tokens: float, unique: float = UNLIMITED) -> float:
    """The FLOPs for which so many tokens are best."""
    fresh = float(worth(tokens, unique))
    share = tokens * math.exp(-max(tokens / unique - 1, 0) / REPEATS) / fresh  # by which the worth of D grows with D
    n = (law.alpha * law.A / (law.beta * law.B * fresh**-law.beta * share)) ** (1 / law.alpha)
    return float(6 * n * tokens)


def table_for_budget(law: ScalingLaw, flops: float, unique: float = UNLIMITED) -> list[Choice]:
    """A quarter of the best size to four times it at equal FLOPs, and the FLOPs with which each has the best's loss."""
    best = best_for(law, flops, unique)
    return [at(law, k * best.n, best.tokens / k, unique, best.loss) for k in (0.25, 0.5, 1, 2, 4)]


def scaled_to(law: ScalingLaw, points: Sequence[Point]) -> ScalingLaw:
    """The law of another text from a few runs on it: all losses times one number, exponents and ratios kept."""
    factor = math.exp(float(np.median([math.log(point.loss / predicted(law, point)) for point in points])))
    return ScalingLaw(factor * law.E, factor * law.A, factor * law.B, law.alpha, law.beta)


def _different(values: Sequence[float]) -> int:
    return min(len(values), 1) + int((np.diff(np.log(np.sort(values))) > SAME).sum())


def _fit(points: Sequence[Point], log_losses: Array, near: ScalingLaw | None = None) -> ScalingLaw:
    """The law of these losses; `near`: the search begins there."""
    logs = np.log([(point.n, worth(point.tokens, point.unique_tokens)) for point in points])
    center = logs.mean(axis=0)
    if near is None:
        at = GRID[_solve(GRID, logs - center, log_losses, passes=4)[0].argmin()]
    else:
        at = np.log([near.alpha, near.beta])
    step = 0.3
    while step > (1e-4 if near is None else 5e-3):
        tried = np.clip(at + step * AROUND, *EXPONENTS)
        costs, coefficients = _solve(tried, logs - center, log_losses, passes=10)
        best, before = int(costs.argmin()), at
        at = tried[best]
        step /= 2.5 if abs(at - before).max() < 1.9 * step else 1.02
    (e, a, b), (alpha, beta) = coefficients[best].tolist(), np.exp(at).tolist()
    return ScalingLaw(e, a * math.exp(alpha * center[0]), b * math.exp(beta * center[1]), alpha, beta)


def _solve(exponents: Array, logs: Array, log_losses: Array, passes: int) -> tuple[Array, Array]:
    """For each (log alpha, log beta), the least cost and its E, A, B in units of the center."""
    terms = np.exp(-np.exp(exponents)[:, None, :] * logs)
    terms = np.concatenate((np.ones_like(terms[..., :1]), terms), axis=2)  # (pairs, points, 3)
    off, value = np.zeros(terms.shape[:2]), np.broadcast_to(np.exp(log_losses), terms.shape[:2])
    is_in = SUBSETS[:, None, :]
    for _ in range(passes):  # Gauss and Newton: log of the law is log value + terms / value (new - old)
        slopes = terms / value[..., None]
        weighted = np.minimum(1, DELTA / np.maximum(abs(off), DELTA))[..., None] * slopes
        matrix = slopes.swapaxes(1, 2) @ weighted
        right = (weighted * (off + 1)[..., None]).sum(axis=1)
        alone = np.eye(3) * (1 + 1e-12 - is_in[..., None])  # what is 0 has an equation of its own
        masked = matrix * (is_in[..., None] * is_in[..., None, :]) + alone
        found = np.linalg.solve(masked, (right * is_in)[..., None])[..., 0]
        cost = np.einsum("spi,pij,spj->sp", found, matrix, found) - 2 * (found * right).sum(axis=-1)
        chosen = np.where((found < 0).any(axis=-1), np.inf, cost).argmin(axis=0)
        coefficients = np.maximum(found[chosen, np.arange(len(chosen))], 1e-9)
        value = (terms @ coefficients[..., None])[..., 0]
        off = log_losses - np.log(value)
    size = abs(off)
    return np.where(size < DELTA, size**2 / 2, DELTA * (size - DELTA / 2)).sum(axis=1), coefficients
