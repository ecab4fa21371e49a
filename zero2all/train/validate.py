"""Loss on held-out samples inside the loop: the same samples every time, told apart by channel."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from zero2all.model.z2all import Z2all
from zero2all.packed.config import DataConfig
from zero2all.packed.layout import PackedSplit, open_split
from zero2all.packed.samples import Borders, ConcatSamples
from zero2all.train.config import EvalConfig


def open_valid_splits(packed: Path, sources: list[str]) -> list[PackedSplit]:
    """The held-out split of each source."""
    return [open_split(packed, source, "valid") for source in sources]


@torch.no_grad()
def held_out_losses(model: Z2all, splits: list[PackedSplit], data: DataConfig, config: EvalConfig) -> dict[str, float]:
    """`eval/valid/loss/<channel>` in nats per token and `eval/valid/bpb/<channel>` in bits per byte.

    Sources of a channel are summed token by token. A source with less than one held-out sample is left out. Samples are
    windows of data.seq_len whatever the packing and the stage, so that figures can be compared along a run.
    """
    seq_len = data.seq_len
    device = model.embedding.weight.device
    nats: dict[str, float] = {}
    tokens: dict[str, float] = {}
    text_bytes: dict[str, float] = {}
    was_training = model.training
    model.eval()
    for split in splits:
        windows = ConcatSamples(split, seq_len)
        samples = min(windows.count, max(1, config.valid_tokens_per_source // seq_len))
        for first in range(0, samples, config.batch_samples):
            count = min(config.batch_samples, samples - first)
            rows, weights = np.empty((count, seq_len + 1), np.int64), np.empty((count, seq_len), np.float32)
            borders = Borders() if data.document_mask else None
            for row in range(count):
                windows.read(first + row, rows[row], weights[row], borders, row)
            batch = torch.from_numpy(rows).to(device)
            segments = None
            if borders is not None:
                segments = torch.from_numpy(borders.documents(count, seq_len + 1).segments).to(device)[:, :-1]
            _, losses = model.loss(batch[:, :-1], batch[:, 1:], segments=segments)
            counted = float(weights.sum(dtype=np.float64))
            channel_nats = float((losses.double() * torch.from_numpy(weights).to(device)).sum())
            nats[split.channel] = nats.get(split.channel, 0.0) + channel_nats
            tokens[split.channel] = tokens.get(split.channel, 0.0) + counted
            text_bytes[split.channel] = text_bytes.get(split.channel, 0.0) + counted * split.bytes_per_token
    model.train(was_training)
    nats = {channel: total for channel, total in nats.items() if tokens[channel]}
    values = {f"eval/valid/loss/{channel}": nats[channel] / tokens[channel] for channel in nats}
    values |= {f"eval/valid/bpb/{channel}": nats[channel] / math.log(2) / text_bytes[channel] for channel in nats}
    return values
