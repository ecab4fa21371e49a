"""One optimizer step: forward and backward over the micro-batches, check, update.

The gradient is that of the mean loss over all tokens of the global batch that count (all of them, unless rows are
padded or prompts masked), whatever the micro-batch; the loss of each channel comes from the same forward pass.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.config import RunConfig
from zero2all.packed.loader import Batch
from zero2all.train.guards import update_is_safe
from zero2all.train.optim import clip_gradient
from zero2all.train.schedule import learning_rate
from zero2all.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What a step did."""

    loss: float
    """Mean nats per token over the global batch."""
    channel_losses: list[float | None]
    """The same per channel; None for a channel that had no sample in this step."""
    grad_norm: float
    """L2 norm of the gradient before clipping."""
    lr: float
    updated: bool
    """False when the update was skipped because loss or gradient was not finite."""


def train_step(state: TrainState, batch: Batch, channels: int, config: RunConfig, device: torch.device) -> StepResult:
    """Advance `state` by one step on `batch`."""
    lr = learning_rate(state.step, config.train.steps, config.optim.lr_max, config.schedule)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    # Dropout depends on (seed, step) alone, so a resumed run needs no stored random state.
    torch.manual_seed(_step_key(config.train.seed, state.step))

    sums = _forward_backward(state, batch, channels, config, device)
    grad_norm = clip_gradient(state.model, config.optim.clip_grad_norm)

    nats, counts = sums.tolist()
    loss, norm = sum(nats) / (sum(counts) or 1.0), float(grad_norm)
    safe = update_is_safe(loss, norm)
    if safe:
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)

    state.step += 1
    state.tokens += batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)
    state.skips_in_a_row = 0 if safe else state.skips_in_a_row + 1
    channel_losses = [total / count if count else None for total, count in zip(nats, counts, strict=True)]
    return StepResult(loss, channel_losses, norm, lr, safe)


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
    channel_of = torch.as_tensor(batch.channels).to(device)
    seq_len = tokens.shape[1] - 1
    # A stage of longer sequences keeps the tokens of a pass, so that it needs no more memory.
    micro = max(1, config.train.micro_batch_samples * config.data.seq_len // seq_len)
    counted = tokens.shape[0] * seq_len if batch.counted is None else max(1.0, batch.counted)
    sums = torch.zeros(2, channels, dtype=torch.float64, device=device)
    for first in range(0, tokens.shape[0], micro):
        rows = tokens[first : first + micro].to(device, non_blocking=True)  # (B, T + 1)
        documents = None if segments is None else segments[first : first + micro, :-1].to(device, non_blocking=True)
        with _precision(config.train.precision, device):
            losses = state.model.token_losses(rows[:, :-1], rows[:, 1:], documents)  # (B, T)
        row_counts = torch.full((len(rows),), float(seq_len), dtype=torch.float64, device=device)
        if weights is not None:
            here = weights[first : first + micro].to(device, non_blocking=True)
            losses = losses * here
            row_counts = here.sum(dim=1, dtype=torch.float64)
        (losses.sum() / counted).backward()
        row_nats = losses.detach().sum(dim=1, dtype=torch.float64)  # (B,)
        channels_here = channel_of[first : first + micro]
        sums[0].index_add_(0, channels_here, row_nats)
        sums[1].index_add_(0, channels_here, row_counts)
    return sums


def _precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if name == "bfloat16" else nullcontext()
