"""Weights of sources from small runs: mixtures to try, what they say of others, and the best of these.

For each channel, held-out bits per byte are L(r) = c + exp(w . r) in the shares r of the mixture (2403.16952; of
RegMix's runs over 17 domains 24 rank the others with 0.84, a straight line with 0.70). The floor c is searched on a
grid, w follows by Gauss-Newton with a little ridge towards a loss that no share changes. The objective, a weighted mean
over channels, is convex in r, so that going downhill finds its least. The surrogate is judged by leaving each run out
in turn. Intervals: refits to its own losses with the residuals of the runs dealt out anew, 10th to 90th percentile.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import UsageError
from zero2all.experiments.statistics import Interval, refit_scale

Array = NDArray[np.float64]
Shares = Mapping[str, float]
LEAST_SHARE = 0.01  # a source without any weight would not be scored either
STRENGTHS = (1.0, 3.0, 10.0)  # how close Dirichlet draws stay to their middle, the root of the natural mixture
FLOORS = np.geomspace(0.03, 30.0, 24)  # tried below the lowest loss of a channel, in units of its range


@dataclass(frozen=True)
class Trial:
    """A run: its mixture, and its held-out bits per byte by channel."""

    mixture: Shares
    bits_per_byte: Shares


@dataclass(frozen=True)
class Choice:
    """The mixture that the surrogate prefers."""

    mixture: dict[str, Interval]
    objective: Interval  # predicted for it
    tried: dict[str, float]  # the best mixture of the runs, by the surrogate
    gain: float  # by which the objective lies below the predicted one of `tried`
    error: float  # of the objective, root mean square over the runs, each predicted from the others
    rank_correlation: float  # Spearman's, of the same predictions

    def words(self) -> list[str]:
        """For a person: whether to believe it."""
        lines = [f"Runs left out: off by {self.error:.4f} bits per byte, rank correlation {self.rank_correlation:.2f}."]
        lines.append(f"The chosen mixture is {self.gain:.4f} bits per byte better than the best tried.")
        if self.gain <= self.error:
            lines.append("That is less than the surrogate's own error: the best tried is as good a choice.")
        if not self.rank_correlation >= 0.7:
            lines.append("The surrogate orders the runs badly: try more mixtures, or longer runs.")
        return lines


def caps_for(unique_tokens: Shares, tokens: float) -> dict[str, float]:
    """The largest share of each source in a run of so many tokens that reads none more than 4 times."""
    return {name: min(1.0, 4.0 * unique / tokens) for name, unique in unique_tokens.items()}


def propose(natural: Shares, count: int = 0, seed: int = 0, caps: Shares | None = None) -> list[dict[str, float]]:
    """Mixtures to try (0: 3 for each source and 3): the natural one, each source alone heavy, random ones."""
    count = count or 3 * len(natural) + 3
    highest = _highest(list(natural), caps)
    center = _within(np.array([[natural[name] for name in natural]], dtype=np.float64), highest)[0]
    heavy = 0.7 * np.eye(len(center)) + 0.3 * center
    random, middle = np.random.default_rng(seed), np.sqrt(center) / np.sqrt(center).mean()
    strengths = itertools.islice(itertools.cycle(STRENGTHS), max(0, count - 1 - len(heavy)))
    rows = [center, *heavy, *(random.dirichlet(strength * middle) for strength in strengths)]
    return [dict(zip(natural, row.tolist(), strict=True)) for row in _within(np.array(rows[:count]), highest)]


def choose(trials: Sequence[Trial], caps: Shares | None = None, weights: Shares | None = None, seed: int = 0) -> Choice:
    """The mixture with the least predicted mean over channels (`weights`: of each; None: equal)."""
    names, channels = list(trials[0].mixture), list(trials[0].bits_per_byte)
    if len(trials) < len(names) + 2:
        raise UsageError(f"{len(trials)} runs are too few for {len(names)} sources: try {3 * len(names) + 3} mixtures.")
    shares = np.array([[trial.mixture[name] for name in names] for trial in trials], dtype=np.float64)
    shares /= shares.sum(axis=1, keepdims=True)
    losses = np.array([[trial.bits_per_byte[name] for name in channels] for trial in trials])
    wanted = np.array([1.0 if weights is None else weights[name] for name in channels])
    wanted, highest = wanted / wanted.sum(), _highest(names, caps)
    surrogate = _fit(shares, losses)
    expected, measured = surrogate(shares), losses @ wanted
    start = _within(shares[(expected @ wanted).argmin()][None], highest)[0]
    best = _least(surrogate, wanted, start, highest)
    predicted = surrogate(np.array([best, start])) @ wanted
    random, scale = np.random.default_rng(seed), refit_scale(len(trials), len(names) + 1)
    refits = [_fit(shares, expected + scale * random.permutation(losses - expected)) for _ in range(100)]
    spread = np.array([_least(refit, wanted, best, highest) for refit in refits])
    others = ~np.eye(len(trials), dtype=bool)
    alone = np.array([_fit(shares[kept], losses[kept])(shares[~kept])[0] @ wanted for kept in others])
    ranks = [values.argsort().argsort() for values in (alone, measured)]
    return Choice(
        {name: _interval(best[place], spread[:, place]) for place, name in enumerate(names)},
        _interval(predicted[0], [refit(best[None])[0] @ wanted for refit in refits]),
        dict(zip(names, start.tolist(), strict=True)),
        float(predicted[1] - predicted[0]),
        float(np.sqrt(np.mean((alone - measured) ** 2))),
        float(np.corrcoef(ranks)[0, 1]),
    )


@dataclass(frozen=True)
class _Surrogate:
    floors: Array  # (channels)
    slopes: Array  # (channels, sources)

    def __call__(self, shares: Array) -> Array:
        """(mixtures, sources) -> (mixtures, channels)."""
        return self.floors + np.exp(shares @ self.slopes.T)


def _fit(shares: Array, losses: Array) -> _Surrogate:
    uneven = np.eye(shares.shape[1]) - 1 / shares.shape[1]  # of slopes, what is not alike
    floors, slopes = [], []
    for of_channel in losses.T:
        span = max(np.ptp(of_channel), 1e-6 * abs(of_channel.mean()))
        tried = of_channel.min() - span * FLOORS
        above = of_channel - tried[:, None]  # (floors, runs)
        logs, value = np.log(above), above
        for _ in range(6):
            slope = value[..., None] * shares
            matrix = slope.swapaxes(1, 2) @ slope
            matrix += 1e-4 * np.trace(matrix, axis1=1, axis2=2)[:, None, None] * uneven
            right = (slope * (value * logs + above - value)[..., None]).sum(axis=1)
            found = np.linalg.solve(matrix, right[..., None])[..., 0]
            logs = found @ shares.T
            value = np.exp(logs)
        best = int(((above - value) ** 2).sum(axis=1).argmin())
        floors.append(tried[best])
        slopes.append(found[best])
    return _Surrogate(np.array(floors), np.array(slopes))


def _least(surrogate: _Surrogate, wanted: Array, start: Array, highest: Array) -> Array:
    """Downhill from `start`, moving a share from one source to another."""
    at, step, one = start, 0.25, np.eye(len(start))
    giver, taker = np.array(list(itertools.permutations(range(len(start)), 2)), dtype=np.int64).reshape(-1, 2).T
    while step > 1e-3:
        sizes = np.minimum(step, np.minimum(at[giver] - LEAST_SHARE, highest[taker] - at[taker]))
        tried = np.array([at, *(at + sizes[:, None] * (one[taker] - one[giver]))])
        best = int((surrogate(tried) @ wanted).argmin())
        at, step = tried[best], step if best else step / 2
    return at


def _highest(names: Sequence[str], caps: Shares | None) -> Array:
    highest = np.array([min(1.0, max(LEAST_SHARE, (caps or {}).get(name, 1.0))) for name in names])
    if highest.sum() < 1:
        most = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, highest, strict=True))
        raise UsageError(f"The sources may give at most {most}, not a whole run: train on fewer tokens, or add text.")
    return highest


def _within(rows: Array, highest: Array) -> Array:
    """The rows scaled to a sum of 1, each share from LEAST_SHARE to its highest."""
    low, high = np.full((len(rows), 1), 1e-9), np.full((len(rows), 1), 1e9)
    for _ in range(100):
        scale = np.sqrt(low * high)
        is_less = np.clip(scale * (rows + 1e-6), LEAST_SHARE, highest).sum(axis=1, keepdims=True) < 1
        low, high = np.where(is_less, scale, low), np.where(is_less, high, scale)
    return np.clip(high * (rows + 1e-6), LEAST_SHARE, highest)


def _interval(value: float, values: Any) -> Interval:
    return Interval(float(value), *np.percentile(values, (10, 90)).tolist())
