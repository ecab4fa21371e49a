"""Loss on held-out samples inside the loop: the same samples every time, told apart by channel."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from zero2all.model.z2all import Z2all
from zero2all.packed.layout import PackedSplit, open_split
from zero2all.train.config import EvalConfig


def open_valid_splits(packed: Path, sources: list[str]) -> list[PackedSplit]:
    """The held-out split of each source."""
    return [open_split(packed, source, "valid") for source in sources]


@torch.no_grad()
def held_out_losses(model: Z2all, splits: list[PackedSplit], seq_len: int, config: EvalConfig) -> dict[str, float]:
    """`eval/valid/loss/<channel>` in nats per token and `eval/valid/bpb/<channel>` in bits per byte.

    Sources of a channel are summed token by token. A source with less than one held-out sample is left out.
    """
    device = model.embedding.weight.device
    nats: dict[str, float] = {}
    tokens: dict[str, int] = {}
    text_bytes: dict[str, float] = {}
    was_training = model.training
    model.eval()
    for split in splits:
        samples = min(split.samples(seq_len), max(1, config.valid_tokens_per_source // seq_len))
        for first in range(0, samples, config.batch_samples):
            count = min(config.batch_samples, samples - first)
            rows = np.stack([split.read((first + row) * seq_len, seq_len + 1) for row in range(count)])
            batch = torch.from_numpy(rows).to(device)
            losses = model.token_losses(batch[:, :-1], batch[:, 1:])
            nats[split.channel] = nats.get(split.channel, 0.0) + float(losses.double().sum())
            tokens[split.channel] = tokens.get(split.channel, 0) + losses.numel()
            text_bytes[split.channel] = text_bytes.get(split.channel, 0.0) + losses.numel() * split.bytes_per_token
    model.train(was_training)
    values = {f"eval/valid/loss/{channel}": nats[channel] / tokens[channel] for channel in nats}
    values |= {f"eval/valid/bpb/{channel}": nats[channel] / math.log(2) / text_bytes[channel] for channel in nats}
    return values
