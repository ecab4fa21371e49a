"""From the weights a person writes to the sources of a run.

A name in the mixture is a source or a channel; a channel's weight is shared among its sources by their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.manifest import fingerprint
from zero2all.common.schema import nearest_hint
from zero2all.packed.config import DataConfig
from zero2all.packed.layout import PACK_COMMAND, PackedSplit, open_split, packed_sources
from zero2all.packed.order import WEIGHT_UNITS, Order, Source, rounded_weights


@dataclass(frozen=True)
class Stage:
    """A mixture that holds from a position on."""

    name: str
    from_position: int
    mixture: dict[str, float] | None


@dataclass(frozen=True)
class TrainingData:
    """The opened sources of a run and the order in which they are read."""

    splits: list[PackedSplit]
    channels: list[str]
    order: Order
    shares: dict[str, list[float]]
    """Per stage name, the share of each source after rounding."""
    fingerprint: str
    """Changes when any token, weight, or the seed changes."""


def open_training_data(packed: Path, config: DataConfig, stages: list[Stage]) -> TrainingData:
    """Map the sources that any stage uses, check them, and lay out their order."""
    every = [open_split(packed, name, "train") for name in packed_sources(packed)]
    _check_one_tokenizer(every)
    weights = [source_weights(every, stage.mixture) for stage in stages]
    used = [index for index in range(len(every)) if any(stage[index] for stage in weights)]
    if not used:
        raise BadInputError(f"The packed data in {packed} has no text for training. Build a corpus with more text.")
    splits = [every[index] for index in used]
    sources = []
    for split in splits:
        samples = split.samples(config.seq_len)
        if samples == 0:
            raise BadInputError(
                f"The source `{split.name}` has {split.tokens} tokens, fewer than one sample of {config.seq_len} + 1. "
                f"Give it weight 0 in data.mixture, add text to it, or lower data.seq_len."
            )
        sources.append(Source(split.name, samples))
    units = [rounded_weights([stage[index] for index in used]) for stage in weights]
    laid_out = [(stage.from_position, stage_units) for stage, stage_units in zip(stages, units, strict=True)]
    return TrainingData(
        splits=splits,
        channels=sorted({split.channel for split in splits}),
        order=Order(sources, laid_out, config.seed),
        shares={
            stage.name: [unit / WEIGHT_UNITS for unit in stage_units]
            for stage, stage_units in zip(stages, units, strict=True)
        },
        fingerprint=fingerprint(
            {
                "sources": {split.name: split.manifest["files"] for split in splits},
                "stages": laid_out,
                "seed": config.seed,
                "seq_len": config.seq_len,
            }
        ),
    )


def source_weights(splits: list[PackedSplit], mixture: dict[str, float] | None) -> list[float]:
    """One weight per source."""
    if mixture is None:
        return [float(split.tokens) for split in splits]
    by_name = {split.name: index for index, split in enumerate(splits)}
    weights = [0.0] * len(splits)
    for name, weight in mixture.items():
        members = [by_name[name]] if name in by_name else _channel_members(splits, name)
        if not members:
            known = [*by_name, *sorted({split.channel for split in splits})]
            raise UsageError(
                f"data.mixture names `{name}`, which is neither a packed source nor a channel. "
                f"{nearest_hint(name, known)}"
            )
        tokens = sum(splits[index].tokens for index in members)
        for index in members:
            # An empty source keeps its weight, so that it is named when the samples are counted.
            weights[index] += weight * (splits[index].tokens / tokens if tokens else 1 / len(members))
    if not any(weights):
        raise UsageError("data.mixture gives no source a weight above 0, so there is nothing to read.")
    return weights


def _channel_members(splits: list[PackedSplit], channel: str) -> list[int]:
    return [index for index, split in enumerate(splits) if split.channel == channel]


def _check_one_tokenizer(splits: list[PackedSplit]) -> None:
    fingerprints = {split.manifest["tokenizer"] for split in splits}
    if len(fingerprints) > 1:
        names = ", ".join(f"{split.name} ({split.manifest['tokenizer'][:8]})" for split in splits)
        raise BadInputError(
            f"The packed sources were made with different tokenizers: {names}. Run `{PACK_COMMAND}` again, so that "
            f"all of them use the tokenizer of this workspace."
        )
