"""Boilerplate lines, by option (`dedup.lines`): lines that stand in many records are taken out of all of them.

The search goes over all sources, between ingest and dedup: segments are written again without those lines, so that
duplicates are looked for in the text that will be kept. A record of which nothing is left is dropped as `boilerplate`.
Code is left alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import Engine, advance
from zero2all.common.files import read_json, staged_folder, write_json
from zero2all.common.records import ORIGINS_NAME
from zero2all.corpus.dedup.arrays import write_npy
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.index import IndexWriter, digest_bytes, read_anchors, read_index, read_signatures
from zero2all.corpus.dedup.lines import LINES_NAME, frequent_lines, strip_lines
from zero2all.corpus.dedup.signatures import Described, describe
from zero2all.corpus.record import encode_record
from zero2all.corpus.report import Tally
from zero2all.corpus.segments import (
    DROPPED_NAME,
    LAYOUT,
    LAYOUT_NAME,
    QUARANTINED_NAME,
    RECORDS_NAME,
    SAMPLE_CHARS,
    SAMPLES_PER_RULE,
    STATE_NAME,
    Segment,
    segment_name,
)

FREQUENT_NAME = "frequent.npy"
RULE = "boilerplate"
BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class StripTask:
    """One segment to be written again."""

    segment: Segment
    channel: str
    folder: Path
    frequent: Path
    config: DedupConfig


def strip_boilerplate(
    segments: dict[str, list[Segment]], channels: dict[str, str], work: Path, config: DedupConfig, engine: Engine
) -> dict[str, list[Segment]]:
    """Segments of all sources without boilerplate lines; goes on where an interrupted attempt stopped."""
    work.mkdir(parents=True, exist_ok=True)
    frequent = work / FREQUENT_NAME
    if not frequent.is_file():
        units = [segment.folder for of_source in segments.values() for segment in of_source]
        write_npy(frequent, frequent_lines(units, config))
    stripped = {name: list(of_source) for name, of_source in segments.items()}
    places = [
        (name, number)
        for name, of_source in segments.items()
        for number, segment in enumerate(of_source)
        if (segment.folder / LINES_NAME).is_file()
    ]
    tasks = [
        StripTask(segments[name][number], channels[name], work / name / segment_name(number), frequent, config)
        for name, number in places
    ]
    for position, segment in engine.run(strip_segment, tasks):
        name, number = places[position]
        stripped[name][number] = segment
    return stripped


def strip_segment(task: StripTask) -> Segment:
    """Write one segment again."""
    if task.folder.is_dir():
        return Segment(task.folder, read_json(task.folder / STATE_NAME))
    tally = Tally.of([task.segment])
    with staged_folder(task.folder) as staging, ExitStack() as stack:
        for name in (QUARANTINED_NAME, DROPPED_NAME, ORIGINS_NAME):
            shutil.copyfile(task.segment.folder / name, staging / name)
        records = stack.enter_context(open(staging / RECORDS_NAME, "wb", buffering=1 << 20))
        dropped = stack.enter_context(open(staging / DROPPED_NAME, "ab"))
        index = stack.enter_context(IndexWriter(staging, near=task.config.near != "off"))
        layout: list[np.ndarray] = []
        samples = 0
        for batch in _batches(task):
            for row in batch.strip(task, tally):
                if samples < SAMPLES_PER_RULE:
                    samples += 1
                    dropped.write(batch.sample(row))
            advance(0)
            index.add(*batch.described(task))
            for line in batch.lines:
                records.write(line)
            layout.append(batch.layout)
        np.save(staging / LAYOUT_NAME, np.concatenate(layout) if layout else np.zeros(0, LAYOUT))
        stack.close()
        state = {**task.segment.state, "tally": tally.as_report()}
        write_json(staging / STATE_NAME, state)
    return Segment(task.folder, state)


@lru_cache(maxsize=1)
def _frequent(path: Path) -> np.ndarray:
    loaded: np.ndarray = np.load(path)
    return loaded


class _Batch:
    """Some records of a segment."""

    def __init__(self, lines: list[bytes], first: int, folder: Path, near: bool) -> None:
        self.lines = lines
        self._records = [jsonio.loads(line) for line in lines]
        end = first + len(lines)
        self._index = np.array(read_index(folder)[first:end])
        self._signatures = np.array(read_signatures(folder)[first:end]) if near else None
        self._anchors = np.array(read_anchors(folder)[first:end]) if near else None
        self.layout = np.load(folder / LAYOUT_NAME, mmap_mode="r")[first:end].copy()
        self._changed: list[int] = []
        self._emptied: set[int] = set()

    def strip(self, task: StripTask, tally: Tally) -> list[int]:
        """Take the lines out; returns the rows of which nothing is left, which are no longer in the batch after."""
        texts = [record["content"] for record in self._records]
        emptied = []
        for row, (before, after) in enumerate(
            zip(texts, strip_lines(texts, _frequent(task.frequent), task.config), strict=True)
        ):
            if before == after:
                continue
            text = after.strip("\n") if task.channel == "code" else after.strip()
            removed = len(before.encode()) - len(text.encode())
            if not text:
                emptied.append(row)
                tally.drop_kept(RULE, 1, len(before.encode()))
                continue
            tally.bytes_kept -= removed
            tally.bytes_boilerplate += removed
            record = self._records[row]
            record["content"] = text
            names = ("data_src", "category", "title", "content", "desc", "others")
            self.lines[row] = encode_record(*(record[name] for name in names))
            self.layout["line_bytes"][row] = len(self.lines[row])
            self._changed.append(row)
        self._emptied = set(emptied)
        return emptied

    def sample(self, row: int) -> bytes:
        """A dropped record as a sample."""
        record = self._records[row]
        return jsonio.dumps_line(
            {
                "rule": RULE,
                "item": int(self._index["ordinal"][row]),
                "title": record["title"][:SAMPLE_CHARS],
                "chars": len(record["content"]),
                "excerpt": record["content"][:SAMPLE_CHARS],
            }
        )

    def described(self, task: StripTask) -> tuple[Described, np.ndarray]:
        """What dedup needs of the records that are left; of unchanged ones it is known."""
        digests, text_bytes = digest_bytes(self._index).copy(), self._index["text_bytes"].copy()
        keys = self._index["key"].copy()
        if self._changed:
            texts = [self._records[row]["content"] for row in self._changed]
            again = describe(texts, task.channel, task.config)
            digests[self._changed] = again.digests
            text_bytes[self._changed] = again.text_bytes
            keys[self._changed] = again.keys
            if self._signatures is not None and self._anchors is not None:
                self._signatures[self._changed] = again.signatures
                self._anchors[self._changed] = again.anchors
        left = np.array([row not in self._emptied for row in range(len(self.lines))], bool)
        self.lines = [line for line, stays in zip(self.lines, left.tolist(), strict=True) if stays]
        self.layout = self.layout[left]
        signatures = self._signatures[left] if self._signatures is not None else None
        anchors = self._anchors[left] if self._anchors is not None else None
        described = Described(digests[left], text_bytes[left], signatures, anchors, keys[left])
        return described, self._index["ordinal"][left]


def _batches(task: StripTask) -> Iterator[_Batch]:
    folder, near = task.segment.folder, task.config.near != "off"
    lines: list[bytes] = []
    size = first = 0
    with open(folder / RECORDS_NAME, "rb", buffering=1 << 20) as file:
        for line in file:
            lines.append(line)
            size += len(line)
            if size >= BATCH_BYTES:
                yield _Batch(lines, first, folder, near)
                first += len(lines)
                lines, size = [], 0
    if lines:
        yield _Batch(lines, first, folder, near)
