"""Rates for a large model from small ones: where the best factor lies at each size, and where it goes.

A sweep over sizes and factors on a field (`--over size=… --over optim.lr_max=x0.5,x1,x2`) gives a curve per size. Its
minimum is that of a parabola in log2 of the factor through the best value and its neighbours; a line through the minima
over log2 of the parameters is followed to the large model, never beyond the factors that were tried. Where the rules
hold on this data, the minima stay at x1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from zero2all.common.errors import UsageError
from zero2all.common.progress import human_count
from zero2all.experiments.statistics import mean_interval
from zero2all.experiments.sweep import SIZE, Axis, Sweep

FAR = 10


@dataclass(frozen=True)
class Transfer:
    """What a factor should be for a large model, and why."""

    field: str
    factor: float
    words: tuple[str, ...]


def best_factor(losses: Mapping[float, float]) -> tuple[float, bool]:
    """log2 of the factor with the least loss, and whether it lies inside the factors that were tried."""
    factors = sorted(losses)
    place = min(range(len(factors)), key=lambda each: losses[factors[each]])
    if place in (0, len(factors) - 1):
        return math.log2(factors[place]), len(factors) < 2
    x = [math.log2(factor) for factor in factors[place - 1 : place + 2]]
    a, b, _ = np.polyfit(x, [losses[factor] for factor in factors[place - 1 : place + 2]], 2)
    return float(-b / (2 * a)), True


def place_of_factors(axes: Sequence[Axis]) -> int:
    """Which of the two axes has the factors; UsageError where a sweep can say nothing of another size."""
    factors = [place for place, axis in enumerate(axes) if axis.is_factor]
    if len(axes) != 2 or len(factors) != 1 or axes[1 - factors[0]].field != SIZE:
        raise UsageError(
            "--transfer needs a sweep over sizes and over factors on one field, such as --over size=2M,4M,8M --over "
            "optim.lr_max=x0.5,x1,x2."
        )
    return factors[0]


def transfer(sweep: Sweep, parameters: float) -> Transfer:
    """The factor for a model with so many parameters in matrix products."""
    axes, place = sweep.plan.axes, place_of_factors(sweep.plan.axes)
    field, by_size = axes[place].field, _losses(sweep, place)
    x, optima, words = [], [], []
    for count, seeds in sorted(by_size.items()):
        found = [best_factor(losses) for losses in seeds.values() if len(losses) > 1]
        if not found:
            continue
        interval = mean_interval([log for log, _ in found])
        x.append(math.log2(count))
        optima.append(fmean(log for log, _ in found))
        spread = "" if math.isinf(interval.high) else f" ({2**interval.low:.2f} to {2**interval.high:.2f})"
        edge = "" if all(inside for _, inside in found) else ", at the end of the factors tried: try further"
        words.append(f"{human_count(count)} parameters in products: best {field} x{2 ** optima[-1]:.2f}{spread}{edge}")
    if not x:
        raise UsageError("--transfer: no size has two factors that were trained to their end.")
    tried = [math.log2(value) for value in axes[place].values]
    target = math.log2(parameters)
    slope = float(np.polyfit(x, optima, 1)[0]) if len(x) > 1 else 0.0
    log = min(max(fmean(optima) + slope * (target - fmean(x)), min(tried)), max(tried))
    words.append(f"{human_count(parameters)} parameters in products: {field} x{2**log:.2f}, from a line through these")
    if target - max(x) > math.log2(FAR):
        words.append(
            f"this is {2 ** (target - max(x)):.0f} times the largest size tried: confirm it with a short run at the "
            f"target size"
        )
    return Transfer(field, 2**log, tuple(words))


def _losses(sweep: Sweep, place: int) -> dict[int, dict[int, dict[float, float]]]:
    """Parameters in products -> seed -> factor -> metric."""
    assert sweep.study is not None
    found: dict[int, dict[int, dict[float, float]]] = {}
    for trial in sweep.trials:
        value = sweep.value_of(trial)
        if value is not None and math.isfinite(value):
            count = sweep.study.results[trial.run]["parameters"]["matmul"]
            found.setdefault(count, {}).setdefault(trial.seed, {})[trial.settings[place]] = value
    return found


def transferred_overrides(config: Any, found: Transfer) -> Sequence[str]:
    """The override that sets the field of the large config."""
    section, _, leaf = found.field.partition(".")
    value = getattr(getattr(config, section), leaf)
    return [f"--{found.field}={type(value)(float(f'{value * found.factor:.4g}'))}"]
