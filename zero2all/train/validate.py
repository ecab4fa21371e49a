"""The held-out loss of a model: one function, so that a checkpoint has one value wherever it is shown.

It is the mean nats per token over contiguous rows. The held-out documents of a source stand one after the other as they
are packed, each with its end token; row i holds tokens i x T to (i + 1) x T, T = data.seq_len, and predicts all but its
first, so that every token is scored once. Scored are the whole rows from the start of each source, at most
validation.tokens_per_source tokens of it; all sources of the run are summed, so that a token counts alike wherever it
is from. Computed in train.precision, summed in float64; with data.document_mask attention stays within documents, as in
training. The loop records the value in the manifest of the checkpoint, and `z2a eval` takes it from there or, where
a checkpoint was saved without a validation, computes the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero2all.config import RunConfig
from zero2all.config.training import ValidationConfig
from zero2all.model.z2all import PipelineStage, Z2all
from zero2all.packed.config import DataConfig
from zero2all.packed.samples import Borders, ConcatSamples
from zero2all.packed.shard_format import PackedSplit, open_split, packed_sources
from zero2all.parallel.context import own_tokens, places_of
from zero2all.parallel.pipeline import Pipeline
from zero2all.parallel.world import World

Scores = dict[str, dict[str, float]]
"""Per channel `loss` (nats per token), `bits_per_byte`, `tokens` and `bytes`."""


def open_valid_splits(packed: Path, sources: Sequence[str]) -> list[PackedSplit]:
    """The held-out split of each source."""
    return [open_split(packed, source, "valid") for source in sources]


def valid_sources(packed: Path, config: RunConfig) -> list[str]:
    """The sources of a run, of any stage: those whose held-out text is scored. Held-out pairs and prompts are no text:
    what is measured on them belongs to the objective."""
    if config.finetune.method in ("dpo", "grpo"):
        return []
    mixtures = [config.data.mixture, *(stage.mixture or config.data.mixture for stage in config.stages)]
    return [
        name for name in packed_sources(packed) if any(mixture is None or mixture.get(name) for mixture in mixtures)
    ]


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


def held_out_metrics(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The scores as metrics: `eval/valid/loss/<channel>` in nats per token and `eval/valid/bpb/<channel>` in bits per
    byte; without a channel those of all tokens and bytes together."""
    together = {"": all_rows(scores)} if scores else {}
    named = {**together, **{f"/{channel}": values for channel, values in scores.items()}}
    values = {f"eval/valid/loss{name}": found["loss"] for name, found in named.items()}
    return values | {f"eval/valid/bpb{name}": found["bits_per_byte"] for name, found in named.items()}


def all_rows(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The scores of all channels together: the mean over tokens, and over bytes; nothing where there is none."""
    tokens, size = (sum(values[name] for values in scores.values()) for name in ("tokens", "bytes"))
    if not tokens:
        return {}
    loss = sum(values["loss"] * values["tokens"] for values in scores.values()) / tokens
    bits = sum(values["bits_per_byte"] * values["bytes"] for values in scores.values()) / size
    return {"loss": loss, "bits_per_byte": bits, "tokens": tokens, "bytes": size}


def held_out_in_words(scores: Mapping[str, Mapping[str, float]], data: DataConfig) -> str:
    """The one number of a checkpoint, and how it was measured."""
    found = all_rows(scores)
    loss, bits, tokens = f"{found['loss']:.4f}", f"{found['bits_per_byte']:.4f}", f"{found['tokens']:,.0f}"
    if data.document_mask:
        return (
            f"held-out loss {loss} nats per token, {bits} bits per byte: {tokens} tokens in contiguous rows of "
            f"{data.seq_len:,}, attention within documents"
        )
    return (
        f"held-out loss {loss} nats per token, {bits} bits per byte: {tokens} tokens in contiguous rows of "
        f"{data.seq_len:,}"
    )


@torch.no_grad()
def held_out_scores(
    model: Z2all,
    splits: list[PackedSplit],
    config: RunConfig,
    world: World | None = None,
    pipeline: Pipeline | None = None,
) -> Scores:
    """The scores of a model by channel, as `config.validation` says.

    Samples are windows of data.seq_len whatever the packing and the stage, so that values can be compared over a run.
    The work is split over the processes, also within sequences; all make the same number of passes,
    because FSDP gathers weights in each.
    """
    world = world or World(device=model.embedding.weight.device)
    data = config.data
    batches = valid_batches(splits, data.seq_len, config.validation)
    channels = list(dict.fromkeys(batch.split.channel for batch in batches))
    sums = torch.zeros(3, len(channels), dtype=torch.float64, device=world.device)  # nats, tokens, bytes
    was_training = model.training
    model.eval()
    axis = world.mesh.batch
    places = places_of(model.config, config.parallel, world.mesh, data.seq_len, world.device)
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
    return {
        channel: {"loss": cost / count, "bits_per_byte": cost / math.log(2) / size, "tokens": count, "bytes": size}
        for channel, cost, count, size in zip(channels, nats, tokens, text_bytes, strict=True)
        if count
    }


def valid_batches(splits: list[PackedSplit], seq_len: int, config: ValidationConfig) -> list[ValidBatch]:
    """The samples that are scored: the first ones of each split."""
    found = []
    for split in splits:
        windows = ConcatSamples(split, seq_len)
        samples = min(windows.count, max(1, config.tokens_per_source // seq_len))
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
        pipeline.forward_only(batch.count, data.seq_len, forward)
    return nats, counts.sum(dtype=torch.float64)
