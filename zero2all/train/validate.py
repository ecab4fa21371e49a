"""Loss on held-out samples inside the loop: the same samples every time, by channel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero2all.config.training import EvalConfig
from zero2all.model.z2all import PipelineStage, Z2all
from zero2all.packed.config import DataConfig
from zero2all.packed.layout import PackedSplit, open_split
from zero2all.packed.samples import Borders, ConcatSamples
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.context import own_tokens, places_of
from zero2all.parallel.pipeline import Pipeline
from zero2all.parallel.world import World


def open_valid_splits(packed: Path, sources: list[str]) -> list[PackedSplit]:
    """The held-out split of each source."""
    return [open_split(packed, source, "valid") for source in sources]


@dataclass(frozen=True)
class ValidBatch:
    """Some samples of one split, scored in one pass."""

    split: PackedSplit
    windows: ConcatSamples
    first: int
    count: int

    def read(self, data: DataConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Tokens (B, T + 1), the weights of the targets (B, T) and, where documents are masked, which document of its
        row each token belongs to (B, T + 1)."""
        rows = np.empty((self.count, data.seq_len + 1), np.int64)
        weights = np.empty((self.count, data.seq_len), np.float32)
        borders = Borders() if data.document_mask else None
        for row in range(self.count):
            self.windows.read(self.first + row, rows[row], weights[row], borders, row)
        return rows, weights, None if borders is None else borders.documents(self.count, data.seq_len + 1).ids


@torch.no_grad()
def held_out_losses(
    model: Z2all,
    splits: list[PackedSplit],
    data: DataConfig,
    config: EvalConfig,
    world: World | None = None,
    parallel: ParallelConfig | None = None,
    pipeline: Pipeline | None = None,
) -> dict[str, float]:
    """`eval/valid/loss/<channel>` in nats per token and `eval/valid/bpb/<channel>` in bits per byte; without a channel
    those of all tokens and bytes together. This is the held-out loss that every display shows.

    Samples are windows of data.seq_len whatever the packing and the stage, so that values can be compared over a run.
    The work is split over the processes, also within sequences, as `parallel` says; all make the same number of passes,
    because FSDP gathers weights in each.
    """
    world = world or World(device=model.embedding.weight.device)
    batches = valid_batches(splits, data.seq_len, config)
    channels = list(dict.fromkeys(batch.split.channel for batch in batches))
    sums = torch.zeros(3, len(channels), dtype=torch.float64, device=world.device)  # nats, tokens, bytes
    was_training = model.training
    model.eval()
    axis = world.mesh.batch
    places = places_of(model.config, parallel or ParallelConfig(), world.mesh, data.seq_len, world.device)
    for first in range(0, len(batches), axis.size):
        is_mine = first + axis.rank < len(batches)
        batch = batches[first + axis.rank if is_mine else first]
        nats, counted = _score(model, batch, data, world.device, places, pipeline)
        if is_mine:
            at = channels.index(batch.split.channel)
            sums[:, at] += torch.stack((nats, counted, counted * batch.split.bytes_per_token))
    model.train(was_training)
    if not world.mesh.reports:
        sums.zero_()
    nats, tokens, text_bytes = world.mesh.world.sum(sums).tolist()
    known = [at for at in range(len(channels)) if tokens[at]]
    named = {f"/{channels[at]}": (nats[at], tokens[at], text_bytes[at]) for at in known}
    if known:
        named = {"": (sum(nats), sum(tokens), sum(text_bytes))} | named
    values = {f"eval/valid/loss{name}": cost / count for name, (cost, count, _) in named.items()}
    return values | {f"eval/valid/bpb{name}": cost / math.log(2) / size for name, (cost, _, size) in named.items()}


def scored_sizes(splits: list[PackedSplit], data: DataConfig, config: EvalConfig) -> dict[str, tuple[float, float]]:
    """Per channel, how many tokens `held_out_losses` scores, and of how many bytes."""
    found: dict[str, tuple[float, float]] = {}
    for batch in valid_batches(splits, data.seq_len, config):
        counted = float(batch.read(data)[1].sum(dtype=np.float64))
        tokens, size = found.get(batch.split.channel, (0.0, 0.0))
        found[batch.split.channel] = (tokens + counted, size + counted * batch.split.bytes_per_token)
    return {channel: sizes for channel, sizes in found.items() if sizes[0]}


def valid_batches(splits: list[PackedSplit], seq_len: int, config: EvalConfig) -> list[ValidBatch]:
    """The samples that are scored: the first ones of each split."""
    found = []
    for split in splits:
        windows = ConcatSamples(split, seq_len)
        samples = min(windows.count, max(1, config.valid_tokens_per_source // seq_len))
        found += [
            ValidBatch(split, windows, first, min(config.batch_samples, samples - first))
            for first in range(0, samples, config.batch_samples)
        ]
    return found


def _score(
    model: Z2all,
    batch: ValidBatch,
    data: DataConfig,
    device: torch.device,
    places: Tensor | None,
    pipeline: Pipeline | None,
) -> tuple[Tensor, Tensor]:
    """The summed nats and the number of tokens; of those at `places`. The nats are 0 in a process that does not have
    the last stage."""
    rows, weights, documents = batch.read(data)
    tokens = torch.from_numpy(rows).to(device)
    document_ids = None if documents is None else torch.from_numpy(documents).to(device)[:, :-1]
    counts = own_tokens(torch.from_numpy(weights).to(device), places)
    nats = torch.zeros((), dtype=torch.float64, device=device)

    def forward(stage: PipelineStage | None, _number: int, x: Tensor | None) -> Tensor:
        here = own_tokens(tokens[:, :-1], places)
        hidden: Tensor = model(here, document_ids=document_ids, places=places, stage=stage, x=x)
        if stage is None or stage.is_last:
            _, losses = model.head_loss(hidden, own_tokens(tokens[:, 1:], places), counts)
            nats.copy_((losses.double() * counts).sum())
        return hidden

    if pipeline is None:
        forward(None, 0, None)
    else:
        pipeline.evaluate(batch.count, data.seq_len, forward)
    return nats, counts.sum(dtype=torch.float64)
