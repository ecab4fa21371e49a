"""How far a step moves the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from zero2all.model.config import ParameterKind
from zero2all.packed.loader import Batch
from zero2all.parallel.parameter_table import layout_table
from zero2all.parallel.world import World
from zero2all.train.hooks import Hook, is_multiple
from zero2all.train.hooks.reports import RunLog
from zero2all.train.state import TrainState
from zero2all.train.step_stats import PendingStep
from zero2all.train.train_step import StepPlan

MOST_SAMPLED_VALUES = 1 << 16
"""Of one parameter, for its update ratio."""


class UpdateRatios(Hook):
    """How far a step moves the weights, every `track.update_ratios_every_steps`.

    The length of the update over that of the weights, per kind of parameter: about 1e-3 is healthy for matrices under
    AdamW. Computed from every n-th value before and after the update; the result stays on the device.
    """

    def __init__(self, state: TrainState, world: World, log: RunLog, every_steps: int = 1) -> None:
        self._state, self._world, self._log, self._every_steps = state, world, log, every_steps
        self._before: dict[ParameterKind, Tensor] | None = None

    def before_step(self, _batch: Batch, _plan: StepPlan) -> None:
        """Keep a sample of the weights when the next step is due."""
        self._before = self._samples() if is_multiple(self._state.step + 1, self._every_steps) else None

    def after_step(self, _pending: PendingStep) -> None:
        """Compare and log `update_ratio/<kind>`, where it is due. Called by every process."""
        if self._before is not None:
            self._log.values(self.ratios())

    @torch.no_grad()
    def ratios(self) -> dict[str, Tensor]:
        """How far the weights have moved since the sample was taken; nothing without one."""
        before, self._before = self._before, None
        if before is None:
            return {}
        now = self._samples()
        kinds = sorted({one.kind for one in layout_table(self._state.model.config)})  # also those of other stages
        sums = torch.zeros(len(kinds), 2, dtype=torch.float64, device=self._world.device)
        for at, kind in enumerate(kinds):
            if kind in now:
                moved = (now[kind] - before[kind]).square().sum()
                sums[at] = torch.stack((moved, before[kind].square().sum()))
        moved, lengths = self._world.mesh.world.sum(sums).unbind(1)
        ratios = (moved / lengths.clamp(min=1e-30)).sqrt()
        return {f"update_ratio/{kind}": ratio for kind, ratio in zip(kinds, ratios, strict=True)}

    @torch.no_grad()
    def _samples(self) -> dict[ParameterKind, Tensor]:
        samples = self._state.weights.master_samples(MOST_SAMPLED_VALUES)
        kinds = {one.name: one.kind for one in layout_table(self._state.model.config)}
        found: dict[ParameterKind, list[Tensor]] = {}
        for name, values in samples.items():
            found.setdefault(kinds[name], []).append(values.double())
        return {kind: torch.cat(parts) for kind, parts in found.items()}
