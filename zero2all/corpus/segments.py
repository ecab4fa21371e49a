"""What ingest leaves for the later steps: segments, each whole or absent.

    .build/<inputs>/<source>/unit-00000/        the outcome of one ingest task
        seg-00000/                              at most about SEGMENT_BYTES of text
            records.jsonl                       kept records, not yet numbered, one JSON object a line
            index.bin, signatures.bin           what dedup needs of them (see zero2all.corpus.dedup)
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.files import atomic_file, read_json
from zero2all.common.language import translate as t
from zero2all.corpus.readers import Damaged
from zero2all.corpus.record import make_gid

BUILD_NAME = ".build"
RECORDS_NAME = "records.jsonl"
LAYOUT_NAME = "layout.npy"
QUARANTINED_NAME = "quarantine.jsonl"
DROPPED_NAME = "dropped.jsonl"
STATE_NAME = "segment.json"
DONE_NAME = "done.json"
CHANNELS_KEY = "channels"
"""Where the counts of an `auto` segment stand, by channel."""

SAMPLES_PER_RULE = 200
"""Samples a segment, and then the corpus, keeps of what a rule dropped from a source."""
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


# `corpus/quarantine/<source>.jsonl`: every damaged item with file, place, reason and the beginning of what is there.
#
# Ingest lists the damaged items of each segment. A source without damage has no such file.


QUARANTINE_NAME = "quarantine"
EXCERPT_CHARS = 200


def quarantine_line(item: int, file_name: str, damaged: Damaged) -> bytes:
    """One damaged item as ingest lists it; `item` is its position in the segment."""
    line = {
        "gid": item,
        "file": file_name,
        "place": damaged.place,
        "reason": damaged.reason,
        "detail": damaged.detail,
        "ends_file": damaged.ends_file,
        "excerpt": damaged.excerpt[:EXCERPT_CHARS],
    }
    return jsonio.dumps_line(encodable(line))


def encodable(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without lone surrogates, which JSON cannot hold."""
    return {
        key: value.encode("utf-8", errors="replace").decode() if isinstance(value, str) else value
        for key, value in values.items()
    }


def write_quarantine(path: Path, segments: Sequence[Segment], source_number: int) -> str:
    """Put the list of a source together, or remove the old one when there is nothing to list.

    Returns the counts by reason in words, each with its first place.
    """
    counts: Counter[str] = Counter()
    firsts: dict[str, str] = {}
    if not any(segment.state["tally"]["quarantined"] for segment in segments):
        path.unlink(missing_ok=True)
        return ""
    with atomic_file(path) as out:
        for segment, first_ordinal in zip(segments, first_ordinals(segments), strict=True):
            with open(segment.folder / QUARANTINED_NAME, "rb") as file:
                for line in map(jsonio.loads, file):
                    counts[line["reason"]] += 1
                    firsts.setdefault(line["reason"], f"{line['file']}, {line['place']}: {line['detail']}")
                    line["gid"] = make_gid(source_number, first_ordinal + line["gid"])
                    out.write(jsonio.dumps_line(line))
    return "; ".join(t(f"{counts[reason]:,} {reason} (first in {first})") for reason, first in firsts.items())
