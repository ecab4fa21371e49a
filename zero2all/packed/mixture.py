"""From the weights a person writes to the sources of a run.

A name in the mixture is a source or a channel; a channel's weight is shared among its sources by their tokens. Weights
are relative: they need not sum to one, but one of them must be above 0 and none below.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import columns, flush_right, padded
from zero2all.common.language import translate as t
from zero2all.common.manifest import fingerprint
from zero2all.common.schema import nearest_hint
from zero2all.packed.bestfit import open_best_fit
from zero2all.packed.config import DataConfig
from zero2all.packed.order import WEIGHT_UNITS, rounded_weights
from zero2all.packed.samples import Samples, open_samples
from zero2all.packed.shard_format import (
    PACK_COMMAND,
    REPORT_NAME,
    PackedSplit,
    open_split,
    packed_report,
    packed_sources,
)
from zero2all.packed.stages import (
    OrderSegment,
    PlannedStage,
    Planner,
    Stage,
    epochs_read,
    segments_of,
    stage_notes,
    stages_from_records,
)


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come, and the stages by which it came there."""

    token: int = 0
    stages: Sequence[Mapping[str, Any]] = ()
    """What `TrainingData.record` gave as `stages`."""


@dataclass(frozen=True)
class TrainingData:
    """The opened sources of a run and the order in which they are read."""

    splits: list[PackedSplit]
    channels: list[str]
    plan: list[PlannedStage]
    segments: list[OrderSegment]
    samples: list[list[Samples] | None]
    """Per segment, the samples of each source; None for segments that lie in the past."""
    seed: int
    packing: str

    @cached_property
    def channel_of(self) -> np.ndarray:
        """Index into `channels` of each source."""
        return np.array([self.channels.index(split.channel) for split in self.splits], dtype=np.int64)

    @property
    def shares(self) -> dict[str, list[float]]:
        """Per stage name, the share of each source after rounding."""
        return {
            stage.name: [stage.units.get(split.name, 0) / WEIGHT_UNITS for split in self.splits] for stage in self.plan
        }

    @property
    def record(self) -> dict[str, Any]:
        """Everything that decides which sample stands where, as plain values."""
        return {
            "seed": self.seed,
            "packing": self.packing,
            "sources": {split.name: split.fingerprint for split in self.splits},
            "stages": [asdict(stage) for stage in self.plan],
        }

    @property
    def fingerprint(self) -> str:
        """Changes when any token, weight, sequence length, or the seed changes."""
        return fingerprint(self.record)

    def segment_at(self, token: int) -> OrderSegment:
        """The segment that the sample beginning at `token` belongs to."""
        return [segment for segment in self.segments if segment.from_token <= token][-1]

    def notes(self, end: int) -> list[str]:
        """What a person should know of the data before training to token `end`."""
        names = [split.name for split in self.splits]
        return [*stage_notes(self.plan, self.segments, names, end), "\n".join(self.epochs_table(end))]

    def reading(self, end: int) -> list[tuple[float, float]]:
        """Per source: the tokens that a run up to `end` reads of it, and how often that is all of it."""
        rows = list(zip(epochs_read(self.segments, end), self.segments, strict=False))
        return [
            (
                sum(float(row[number]) * part.order.sources[number].samples * part.seq_len for row, part in rows),
                sum(float(row[number]) for row, _ in rows),
            )
            for number in range(len(self.splits))
        ]

    def epochs_table(self, end: int) -> list[str]:
        """Per source: tokens it has, tokens and share of the run up to `end`, and how often it is read."""
        reading = self.reading(end)
        total = sum(tokens for tokens, _ in reading) or 1.0
        table = [tuple(map(t, ("source", "channel", "tokens", "read", "share", "epochs")))]
        for split, (tokens, epochs) in zip(self.splits, reading, strict=True):
            figures = (f"{split.tokens:,}", f"{tokens:,.0f}", f"{tokens / total:.2%}", f"{epochs:.2f}")
            table.append((split.name, split.channel, *figures))
        widths = [max(map(columns, column)) for column in zip(*table, strict=True)]
        lines = [t(f"epochs over the whole run ({end:,} tokens)")]
        for row in table:
            cells = [flush_right(cell, width) for cell, width in zip(row, widths, strict=True)]
            cells[:2] = [padded(cell, width) for cell, width in zip(row[:2], widths, strict=False)]
            lines.append("  " + "  ".join(cells).rstrip())
        return lines


def open_training_data(
    packed: Path,
    config: DataConfig,
    stages: Sequence[Stage],
    progress: RunProgress | None = None,
    end: int | None = None,
) -> TrainingData:
    """Open the sources that any stage uses, check them, and lay out their order.

    `progress` is where a resumed run stands; what it recorded is kept, `stages` hold from there on. `end` is the token
    at which the run is over: without it limits on epochs are not looked at.
    """
    progress = progress or RunProgress()
    every = [open_split(packed, name, "train") for name in packed_sources(packed)]
    _check_one_tokenizer(packed, every)
    history = stages_from_records(progress.stages)
    asked = [_planned(stage, every) for stage in stages]
    used = {name for stage in [*history, *asked] for name in stage.units}
    if not used:
        raise BadInputError(f"The packed data in {packed} has no text for training. Build a corpus with more text.")
    gone = used - {split.name for split in every}
    if gone:
        raise BadInputError(
            f"The run has read the source `{min(gone)}`, but {packed} no longer has it. Pack it again, or "
            "start over with --fresh."
        )
    splits = [split for split in every if split.name in used]
    by_name = {split.name: split for split in splits}

    def samples_of(name: str, seq_len: int) -> int:
        if config.packing == "best_fit":
            return int(open_best_fit(by_name[name], seq_len).manifest["rows"])
        return by_name[name].samples(seq_len)

    limits = _epoch_limits(config.max_epochs, every)
    names = list(by_name)
    planner = Planner(names, samples_of, config.seed, limits, config.when_used_up == "share")
    for stage in asked:
        _check_samples(stage, by_name, samples_of)
    plan = planner.plan(asked, history, progress.token, end)
    segments = segments_of(plan, names, samples_of, config.seed)
    is_past = [after.from_token <= progress.token for after in segments[1:]] + [False]
    return TrainingData(
        splits=splits,
        channels=sorted({split.channel for split in splits}),
        plan=plan,
        segments=segments,
        samples=[
            None if past else [open_samples(split, segment.seq_len, config.packing) for split in splits]
            for segment, past in zip(segments, is_past, strict=True)
        ],
        seed=config.seed,
        packing=config.packing,
    )


def source_weights(splits: Sequence[PackedSplit], mixture: Mapping[str, float] | None) -> list[float]:
    """One weight per source."""
    if mixture is None:
        return [float(split.tokens) for split in splits]
    weights = [0.0] * len(splits)
    for name, weight in mixture.items():
        if not 0 <= weight < math.inf:
            raise UsageError(f"data.mixture gives `{name}` the weight {weight}; expected 0 or more.")
        members = _members(splits, name, "data.mixture")
        tokens = sum(splits[index].tokens for index in members)
        for index in members:
            # An empty source keeps its weight, so that it is named when the samples are counted.
            weights[index] += weight * (splits[index].tokens / tokens if tokens else 1 / len(members))
    if not any(weights):
        raise UsageError(
            f"data.mixture gives no source a weight above 0, so there is nothing to read. Set one, for example "
            f"--data.mixture.{splits[0].name} 1."
        )
    return weights


def _planned(stage: Stage, splits: Sequence[PackedSplit]) -> PlannedStage:
    weights = source_weights(splits, stage.mixture)
    units = rounded_weights(weights) if any(weights) else [0] * len(weights)
    named = {split.name: unit for split, unit in zip(splits, units, strict=True) if unit}
    return PlannedStage(stage.name, stage.from_token, stage.seq_len, named)


def _epoch_limits(max_epochs: Mapping[str, float] | None, splits: Sequence[PackedSplit]) -> dict[str, float]:
    """The limit of each source; one on a source stands before one on its channel."""
    limits: dict[str, float] = {}
    names = {split.name for split in splits}
    for name, limit in sorted((max_epochs or {}).items(), key=lambda item: item[0] in names):
        for index in _members(splits, name, "data.max_epochs"):
            limits[splits[index].name] = limit
    return limits


def _members(splits: Sequence[PackedSplit], name: str, field: str) -> list[int]:
    """The source of this name, or else the sources of the channel of this name."""
    members = [index for index, split in enumerate(splits) if split.name == name] or [
        index for index, split in enumerate(splits) if split.channel == name
    ]
    if not members:
        known = dict.fromkeys([*(split.name for split in splits), *sorted({split.channel for split in splits})])
        raise UsageError(
            f"{field} names `{name}`, which is neither a packed source nor a channel. {nearest_hint(name, known)}"
        )
    return members


def _check_samples(stage: PlannedStage, splits: Mapping[str, PackedSplit], samples_of: Any) -> None:
    short = [name for name in stage.units if samples_of(name, stage.seq_len) == 0]
    if short:
        name = short[0]
        others = [f"--data.mixture.{other} {units}" for other, units in stage.units.items() if other not in short]
        leave = f"Add text to it, lower data.seq_len (--data.seq_len N), or leave it out: {' '.join(others)}"
        raise BadInputError(
            f"The source `{name}` has {splits[name].tokens} tokens, fewer than one sample of {stage.seq_len} + 1 "
            f"({splits[name].folder}). "
            + (leave if others else "Add text to it, or lower data.seq_len (--data.seq_len N).")
        )


def _check_one_tokenizer(packed: Path, splits: Sequence[PackedSplit]) -> None:
    fingerprints = {split.manifest["tokenizer"] for split in splits}
    if len(fingerprints) > 1:
        names = ", ".join(f"{split.name} ({split.manifest['tokenizer'][:8]})" for split in splits)
        raise BadInputError(
            f"The packed sources were made with different tokenizers: {names}. Run `{PACK_COMMAND}` again, so that "
            f"all of them use the tokenizer of this workspace."
        )
    stated = packed_report(packed).get("tokenizer")
    if fingerprints and stated is not None and {stated} != fingerprints:
        split = splits[0]
        raise BadInputError(
            f"{split.folder / 'manifest.json'}: `tokenizer` is {split.manifest['tokenizer'][:8]}, but "
            f"{packed / REPORT_NAME} says {stated[:8]}. Run `{PACK_COMMAND}` again."
        )
