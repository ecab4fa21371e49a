"""What ingest leaves for the later steps: segments, each whole or absent.

    .build/<inputs>/<source>/unit-00000/        the outcome of one ingest task
        seg-00000/                              at most about SEGMENT_BYTES of text
            records.jsonl                       kept records, not yet numbered, one JSON object a line
            index.npy, signatures.npy           what dedup needs of them (see zero2all.corpus.dedup)
            layout.npy                          length of each line and script of its text
            quarantine.jsonl, dropped.jsonl     damaged items, samples of what the rules dropped
            origins.jsonl                       the raw file of each run of items
            segment.json                        counts, and the cursor behind its last item
        done.json                               the unit is whole: its segments' counts

A segment of an `auto` source has a folder of these files, and counts, for each channel met in it. A stream that cannot
be split among workers is one unit of many segments; an interrupted unit continues behind the last of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.files import read_json

BUILD_NAME = ".build"
RECORDS_NAME = "records.jsonl"
LAYOUT_NAME = "layout.npy"
QUARANTINED_NAME = "quarantine.jsonl"
DROPPED_NAME = "dropped.jsonl"
STATE_NAME = "segment.json"
DONE_NAME = "done.json"
CHANNELS_KEY = "channels"
"""Where the counts of an `auto` segment stand, by channel."""

SAMPLES_PER_RULE = 40
"""Samples a segment keeps of what a rule dropped."""
SAMPLE_CHARS = 400

LAYOUT = np.dtype([("line_bytes", "<u4"), ("script", "u1")])


@dataclass(frozen=True)
class Segment:
    """One finished segment and its counts."""

    folder: Path
    state: dict[str, Any] = field(repr=False)

    @property
    def items(self) -> int:
        """Everything read for it: kept, dropped and damaged."""
        return int(self.state["items"])

    @property
    def kept(self) -> int:
        """Records that passed cleaning."""
        return int(self.state["tally"]["records_kept"])


def finished_segments(unit_folder: Path) -> list[Segment]:
    """The segments of a unit that are there, in order."""
    found: list[Segment] = []
    while (folder := unit_folder / segment_name(len(found))).is_dir():
        found.append(Segment(folder, read_json(folder / STATE_NAME)))
    return found


def segments_of_unit(unit_folder: Path) -> list[Segment] | None:
    """All segments of a finished unit; None when it is not finished."""
    try:
        states = read_json(unit_folder / DONE_NAME)["segments"]
    except FileNotFoundError:
        return None
    return [Segment(unit_folder / segment_name(number), state) for number, state in enumerate(states)]


def channels_in(segments: Sequence[Segment]) -> list[str]:
    """The channels that were met in the segments of an `auto` source."""
    return sorted({channel for segment in segments for channel in segment.state[CHANNELS_KEY]})


def dropped_excerpts(segments: Sequence[Segment], rule: str, most: int = 3) -> list[str]:
    """The beginnings of the first texts that a rule dropped."""
    found: list[str] = []
    for segment in segments:
        if len(found) < most and segment.state["tally"]["dropped"].get(rule):
            with open(segment.folder / DROPPED_NAME, "rb") as file:
                found += [sample["excerpt"] for sample in map(jsonio.loads, file) if sample["rule"] == rule]
    return found[:most]


def first_ordinals(segments: Sequence[Segment]) -> list[int]:
    """The ordinal of each segment's first item in its source."""
    return [0, *itertools.accumulate(segment.items for segment in segments)][: len(segments)]


def segment_name(number: int) -> str:
    """`seg-00000`."""
    return f"seg-{number:05d}"
