"""One optimizer step: forward and backward over the micro-batches, check, update.

The gradient is that of the mean loss over all tokens of the global batch that count (all of them, unless rows are
padded or prompts masked), whatever the micro-batch; the loss of each channel comes from the same forward pass.

On a GPU the host only queues work. Whether the update may be made is decided on the device, and what the step did
comes back as `PendingStep`, whose figures are copied in the background: reading them a step later waits for nothing.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.config import RunConfig
from zero2all.packed.loader import Batch
from zero2all.train.schedule import learning_rate
from zero2all.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What a step did."""

    step: int
    """Steps made, this one included."""
    tokens: int
    """Tokens seen, those of this step included."""
    loss: float
    """Mean nats per token over the global batch."""
    channel_losses: list[float | None]
    """The same per channel; None for a channel that had no sample in this step."""
    grad_norm: float
    """L2 norm of the gradient before clipping."""
    lr: float
    updated: bool
    """False when the update was skipped because loss or gradient was not finite."""


@dataclass(frozen=True)
class PendingStep:
    """A step whose figures may still be on their way from the device."""

    step: int
    tokens: int
    lr: float
    figures: Tensor
    """(2 x channels + 1) on the host: nats and counts per channel, gradient norm."""
    arrived: torch.cuda.Event | None

    def result(self) -> StepResult:
        """Wait for the figures, where they have not arrived yet."""
        if self.arrived is not None:
            self.arrived.synchronize()
        *sums, norm = self.figures.tolist()
        nats, counts = sums[: len(sums) // 2], sums[len(sums) // 2 :]
        loss = sum(nats) / (sum(counts) or 1.0)
        channel_losses = [total / count if count else None for total, count in zip(nats, counts, strict=True)]
        updated = math.isfinite(loss) and math.isfinite(norm)
        return StepResult(self.step, self.tokens, loss, channel_losses, norm, self.lr, updated)


def train_step(state: TrainState, batch: Batch, channels: int, config: RunConfig, device: torch.device) -> PendingStep:
    """Advance `state` by one step on `batch`."""
    lr = learning_rate(state.step, config.train.steps, config.optim.lr_max, config.schedule)
    # Dropout depends on (seed, step) alone, so a resumed run needs no stored random state.
    torch.manual_seed(_step_key(config.train.seed, state.step))

    sums = _forward_backward(state, batch, channels, config, device)
    norm = state.optimizer.gradient_norm()
    # A loss that is not finite makes the norm so, and the optimizer then leaves everything as it was.
    state.optimizer.step(lr, torch.where(torch.isfinite(sums[0].sum()), norm, math.nan))

    state.step += 1
    state.tokens += batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)
    figures = torch.cat((sums.flatten(), norm.double().reshape(1)))
    if device.type != "cuda":
        return PendingStep(state.step, state.tokens, lr, figures, None)
    host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
    host.copy_(figures, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return PendingStep(state.step, state.tokens, lr, host, arrived)


def _step_key(seed: int, step: int) -> int:
    """64 bits that depend on both in every part: torch's CPU generator looks at the lower 32 only."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest(), "little")


def _forward_backward(
    state: TrainState, batch: Batch, channels: int, config: RunConfig, device: torch.device
) -> Tensor:
    """Accumulate the gradient; returns (2, channels): summed nats and token counts, float64."""
    tokens = torch.as_tensor(batch.tokens)
    weights = None if batch.weights is None else torch.as_tensor(batch.weights)
    segments = None if batch.segments is None or not config.data.document_mask else torch.as_tensor(batch.segments)
    channel_of = torch.as_tensor(batch.channels).to(device, non_blocking=True)
    seq_len = tokens.shape[1] - 1
    # A stage of longer sequences keeps the tokens of a pass, so that it needs no more memory.
    micro = max(1, config.train.micro_batch_samples * config.data.seq_len // seq_len)
    counted = tokens.shape[0] * seq_len if batch.counted is None else max(1.0, batch.counted)
    sums = torch.zeros(2, channels, dtype=torch.float64, device=device)
    wide = state.weights.masters.dtype
    for first in range(0, tokens.shape[0], micro):
        rows = tokens[first : first + micro].to(device, non_blocking=True)  # (B, T + 1)
        documents = None if segments is None else segments[first : first + micro, :-1].to(device, non_blocking=True)
        if weights is None:
            counts = torch.ones(rows.shape[0], seq_len, dtype=wide, device=device)
        else:
            counts = weights[first : first + micro].to(device, dtype=wide, non_blocking=True)
        total, losses = state.model.loss(rows[:, :-1], rows[:, 1:], counts / counted, documents, config.train.z_loss)
        total.backward()
        channels_here = channel_of[first : first + micro]
        sums[0].index_add_(0, channels_here, (losses * counts).sum(dim=1, dtype=torch.float64))
        sums[1].index_add_(0, channels_here, counts.sum(dim=1, dtype=torch.float64))
    return sums
