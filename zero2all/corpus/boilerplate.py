"""Boilerplate lines, by option (`dedup.lines`): lines that stand in many records are removed from all of them.

Between ingest and dedup, segments are written again without those lines. A record of which nothing is left is dropped
as `boilerplate`. Code is left alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import Engine, advance
from zero2all.common.files import read_json, staged_folder, write_json
from zero2all.common.records import ORIGINS_NAME
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.index import IndexWriter, digest_bytes, read_anchors, read_index, read_signatures, write_npy
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
    near = task.config.near != "off"
    with staged_folder(task.folder) as staging, ExitStack() as stack:
        for name in (QUARANTINED_NAME, DROPPED_NAME, ORIGINS_NAME):
            shutil.copyfile(task.segment.folder / name, staging / name)
        records = stack.enter_context(open(staging / RECORDS_NAME, "wb", buffering=1 << 20))
        dropped = stack.enter_context(open(staging / DROPPED_NAME, "ab"))
        index = stack.enter_context(IndexWriter(staging, near=near))
        layout = [np.zeros(0, LAYOUT)]
        samples = 0
        for batch in _batches(task.segment.folder, near):
            emptied = _strip(batch, task, tally)
            for row in emptied[: max(0, SAMPLES_PER_RULE - samples)]:
                dropped.write(_sample(batch, row))
            samples += len(emptied)
            advance(0)
            left = np.ones(len(batch.lines), bool)
            left[emptied] = False
            described = Described._make(values if values is None else values[left] for values in batch.described)
            index.add(described, batch.ordinals[left])
            records.writelines(line for line, stays in zip(batch.lines, left.tolist(), strict=True) if stays)
            layout.append(batch.layout[left])
        np.save(staging / LAYOUT_NAME, np.concatenate(layout))
        stack.close()
        state = {**task.segment.state, "tally": tally.as_report()}
        write_json(staging / STATE_NAME, state)
    return Segment(task.folder, state)


@lru_cache(maxsize=1)
def _frequent(path: Path) -> np.ndarray:
    loaded: np.ndarray = np.load(path)
    return loaded


class _Batch(NamedTuple):
    """Some records of a segment, as lines and as JSON, with what the segment keeps of them."""

    lines: list[bytes]
    records: list[dict[str, Any]]
    described: Described
    ordinals: np.ndarray
    layout: np.ndarray


def _batches(folder: Path, near: bool) -> Iterator[_Batch]:
    first = 0
    with open(folder / RECORDS_NAME, "rb", buffering=1 << 20) as file:
        while lines := file.readlines(BATCH_BYTES):
            rows = slice(first, first + len(lines))
            first += len(lines)
            index = np.array(read_index(folder)[rows])
            described = Described(
                digest_bytes(index).copy(),
                index["text_bytes"].copy(),
                np.array(read_signatures(folder)[rows]) if near else None,
                np.array(read_anchors(folder)[rows]) if near else None,
                index["key"].copy(),
            )
            layout = np.load(folder / LAYOUT_NAME, mmap_mode="r")[rows].copy()
            yield _Batch(lines, [jsonio.loads(line) for line in lines], described, index["ordinal"], layout)


def _strip(batch: _Batch, task: StripTask, tally: Tally) -> list[int]:
    """Take the frequent lines out of a batch, in place; returns the rows of which nothing is left."""
    texts = [record["content"] for record in batch.records]
    changed: list[int] = []
    emptied: list[int] = []
    stripped = strip_lines(texts, _frequent(task.frequent), task.config)
    for row, (before, after) in enumerate(zip(texts, stripped, strict=True)):
        if before == after:
            continue
        text = after.strip()
        if not text:
            emptied.append(row)
            tally.drop_kept(RULE, 1, len(before.encode()))
            continue
        removed = len(before.encode()) - len(text.encode())
        tally.bytes_kept -= removed
        tally.bytes_boilerplate += removed
        record = batch.records[row]
        record["content"] = text
        names = ("data_src", "category", "title", "content", "desc", "others")
        batch.lines[row] = encode_record(*(record[name] for name in names))
        batch.layout["line_bytes"][row] = len(batch.lines[row])
        changed.append(row)
    if changed:
        again = describe([batch.records[row]["content"] for row in changed], task.channel, task.config)
        for values, new in zip(batch.described, again, strict=True):
            if values is not None:
                values[changed] = new
    return emptied


def _sample(batch: _Batch, row: int) -> bytes:
    """A dropped record as a sample."""
    record = batch.records[row]
    return jsonio.dumps_line(
        {
            "rule": RULE,
            "item": int(batch.ordinals[row]),
            "title": record["title"][:SAMPLE_CHARS],
            "chars": len(record["content"]),
            "excerpt": record["content"][:SAMPLE_CHARS],
        }
    )
