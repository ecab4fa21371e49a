"""How far a step moves the weights: the length of the update over the length of the weights, per kind of parameter.

About 1e-3 is healthy for matrices under AdamW; far below, nothing is learned; far above, training is about to break.
It is computed from a sample of the values (every n-th), before and after the update, so it costs little memory and
works with every optimizer. The result stays on the device; the metrics writer reads it when it has arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero2all.config.training import ParameterKind
from zero2all.parallel.world import World
from zero2all.train.optimizers.roles import model_roles
from zero2all.train.state import TrainState

MOST_VALUES = 1 << 16
"""Most values sampled from one parameter."""


class UpdateRatios:
    """Create it before a step, call `after` when the step is queued."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._before = _samples(state)

    @torch.no_grad()
    def after(self, world: World) -> dict[str, Tensor]:
        """`update_ratio/<kind>`; called by every process."""
        now = _samples(self._state)
        kinds = sorted(self._before)
        sums = torch.stack(
            [
                torch.stack(((now[kind] - old).square().sum(), old.square().sum()))
                for kind, old in ((kind, self._before[kind]) for kind in kinds)
            ]
        )
        moved, lengths = world.sum(sums).unbind(1)
        ratios = (moved / lengths.clamp(min=1e-30)).sqrt()
        return {f"update_ratio/{kind}": ratio for kind, ratio in zip(kinds, ratios, strict=True)}


@torch.no_grad()
def _samples(state: TrainState) -> dict[ParameterKind, Tensor]:
    samples = state.weights.master_samples(MOST_VALUES)
    roles = model_roles(state.model.config, samples)
    found: dict[ParameterKind, list[Tensor]] = {}
    for name, values in samples.items():
        found.setdefault(roles[name].kind, []).append(values.double())
    return {kind: torch.cat(parts) for kind, parts in found.items()}
