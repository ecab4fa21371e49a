"""Suggestions of Optuna, from results that we keep: its study is made anew from the ledger each time.

The ledger is the truth: a suggestion is a function of the plan, its number and the results before its batch, so that a
sweep that was killed goes on with the suggestions it would have made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zero2all.common.errors import UsageError

WIDE = 8
"""A range whose ends are this many times apart is searched by its logarithm."""


def suggest(plan: Any, number: int, known: Mapping[tuple[Any, ...], float]) -> tuple[Any, ...]:
    """The values of trial `number` of a SweepPlan; `known`: settings -> the metric to be minimised."""
    try:
        import optuna

        if plan.search == "gp":
            import scipy  # noqa: F401  # which it needs
    except ImportError as error:
        raise UsageError(f"--search needs the package {error.name}: pip install 'zero2all[search]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space: dict[str, Any] = {}
    for axis in plan.axes:
        if axis.is_range:
            is_wide = axis.high / axis.low >= WIDE
            space[axis.field] = optuna.distributions.FloatDistribution(axis.low, axis.high, log=is_wide)
        else:
            space[axis.field] = optuna.distributions.CategoricalDistribution(axis.values)
    samplers = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
    kind = samplers.get(plan.search or "", optuna.samplers.RandomSampler)
    study = optuna.create_study(sampler=kind(seed=number + 1))
    for settings, value in known.items():
        parameters = dict(zip(space, settings, strict=True))
        finite = value if math.isfinite(value) else 1e9
        study.add_trial(optuna.trial.create_trial(params=parameters, distributions=space, value=finite))
    asked = study.ask(space).params
    ends = {axis.field: (axis.low, axis.high) for axis in plan.axes if axis.is_range}
    rounded = {name: min(max(float(f"{asked[name]:.4g}"), low), high) for name, (low, high) in ends.items()}
    return tuple((asked | rounded)[name] for name in space)
