"""What a step says about itself: numbers that all processes sum in one all-reduce, and their reading on the host.

On a GPU nothing waits for them: `PendingStep` begins to copy them to the host, and its `result` is read while the
device computes the next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zero2all.train.step_timer import Mark, StepTimer

SCALARS = ("loss", "grad_norm", "refused", "stop_requested", "folder_changed", "core_loss")


class StepStats:
    """One float64 tensor with a named view of each part, so that one all-reduce sums all of them.

    `loss`: mean nats per token of the global batch; `core_loss`: the same without the highest quarter of the rows;
    `grad_norm`: before clipping (until the sum this process's share of its square); `refused`, `stop_requested`,
    `folder_changed`: 1 if so in any process. `channel_nats`, `channel_counts` (channels,), `row_nats`, `row_counts`
    (rows of the global batch,): summed loss and summed token weights. `paces` (ranks, 2): seconds of each rank, of
    several (`hooks.stragglers`). `expert_loads` (blocks with experts, experts): tokens that each expert got. `numbers`:
    what the objective counts (`train.objective`).
    """

    loss: Tensor
    grad_norm: Tensor
    refused: Tensor
    stop_requested: Tensor
    folder_changed: Tensor
    core_loss: Tensor

    def __init__(
        self,
        channels: int,
        rows: int,
        ranks: int = 1,
        experts: tuple[int, int] = (0, 0),
        device: torch.device | str = "cpu",
        numbers: int = 0,
    ) -> None:
        """`experts`: blocks with experts, and experts of each."""
        self._shape = (channels, rows, ranks, experts)
        paces = (ranks if ranks > 1 else 0, 2)
        self._sizes = [len(SCALARS), channels, channels, rows, rows, paces[0] * 2, experts[0] * experts[1], numbers]
        self._name_views(torch.zeros(sum(self._sizes), dtype=torch.float64, device=device))

    def _name_views(self, values: Tensor) -> None:
        self.values = values
        scalars, *others = values.split(self._sizes)
        for name, scalar in zip(SCALARS, scalars.unbind(), strict=True):
            setattr(self, name, scalar)
        self.channel_nats, self.channel_counts, self.row_nats, self.row_counts, paces, loads, self.numbers = others
        self.paces, self.expert_loads = paces.view(-1, 2), loads.view(self._shape[3])

    def to_host(self) -> tuple[StepStats, torch.cuda.Event | None]:
        """A copy on the host, and the event after which it is there; on a CPU itself."""
        if not self.values.is_cuda:
            return self, None
        host = StepStats(*self._shape, numbers=len(self.numbers))
        host._name_views(torch.empty(self.values.shape, dtype=torch.float64, pin_memory=True))
        host.values.copy_(self.values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return host, arrived


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same in every process."""

    step: int  # steps made, this one included
    tokens: tuple[int, int]  # tokens of the run before and after this step
    loss: float  # mean nats per token over the global batch
    channel_losses: list[float | None]
    """The same per channel; None for a channel that had no sample in this step."""
    core_loss: float  # mean nats per token of the rows without the highest quarter
    grad_norm: float  # L2 norm of the gradient before clipping
    lr: float
    updated: bool  # False when the update was refused: not finite, or beyond the limits
    stop_requested: bool  # whether any process was asked to stop
    folder_changed: bool  # whether rank 0 found something in the run's folder
    row_nats: np.ndarray  # summed loss of each row of the global batch
    row_counts: np.ndarray  # summed token weights of each row
    seconds: dict[str, float]  # time of each part
    ended: Mark  # when it ended
    ended_between: tuple[float, float]
    """Earliest and latest time at which it ended, by the host's clock, in seconds since the epoch."""
    expert_loads: np.ndarray | None = None  # (blocks with experts, experts) tokens that each expert got
    paces: np.ndarray | None = None  # (ranks, 2) the `pace` of each; None: one process
    numbers: Sequence[float] = ()  # of the objective, summed over all rows


class PendingStep:
    """A step whose stats may still be on their way from the device."""

    def __init__(self, step: int, tokens: tuple[int, int], lr: float, stats: StepStats, timer: StepTimer) -> None:
        """Called once the host has queued all of the step; on a CPU it has ended then."""
        self.step, self.tokens, self.lr, self._timer = step, tokens, lr, timer
        self._stats, self._arrived = stats.to_host()
        self._queued_at = time.time()

    def result(self) -> StepResult:
        """Wait for the stats, where they have not arrived yet."""
        between = (self._queued_at, self._queued_at)
        if self._arrived is not None:
            was_over = self._arrived.query()
            self._arrived.synchronize()
            now = time.time()
            between = (self._queued_at if was_over else now, now)
        stats = self._stats
        pairs = zip(stats.channel_nats.tolist(), stats.channel_counts.tolist(), strict=True)
        return StepResult(
            step=self.step,
            tokens=self.tokens,
            loss=stats.loss.item(),
            channel_losses=[nats / count if count else None for nats, count in pairs],
            core_loss=stats.core_loss.item(),
            grad_norm=stats.grad_norm.item(),
            lr=self.lr,
            updated=not stats.refused.item(),
            stop_requested=bool(stats.stop_requested.item()),
            folder_changed=bool(stats.folder_changed.item()),
            row_nats=stats.row_nats.numpy(),
            row_counts=stats.row_counts.numpy(),
            seconds=self._timer.seconds(),
            ended=self._timer.end,
            ended_between=between,
            expert_loads=stats.expert_loads.numpy() if stats.expert_loads.numel() else None,
            paces=stats.paces.numpy() if stats.paces.numel() else None,
            numbers=stats.numbers.tolist(),
        )
