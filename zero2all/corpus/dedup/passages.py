"""Passages that stand in the text before: every run of at least `min_chars` characters, equal character for character.

    anchors   of each window of `min_chars` characters, the least hash of the runs of half the length in it (winnowing)
              and where it is; equal windows have equal ones, at the same place within them
    windows   the 128-bit hash and the place of every window whose anchor occurs more than once
    cut       the windows that occurred earlier, in the order of the corpus, are cut out; what is left is joined by a
              line break, and a record of which fewer than 50 characters are left is dropped

Both lists are sorted on disk, in parts, as the digests of exact duplicates are (`tasks.py`). Runs are hashed by
differences of sums of powers. A task takes about `MEMORY_BYTES`, or 100 bytes a character of its longest text. On
disk, while it runs: 24 bytes an anchor (about one in min_chars / 4 characters) and 24 a repeated character.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import TaskEngine
from zero2all.common.files import staged_folder
from zero2all.corpus.dedup.index import (
    INDEX_NAME,
    read_index,
    read_slice,
    read_sorted_slice,
    write_npy,
)
from zero2all.corpus.dedup.tasks import PartTask, part_tasks, read_parts, write_parts
from zero2all.corpus.record import encode_record
from zero2all.corpus.segments import LAYOUT_NAME, RECORDS_NAME

ENTRY = np.dtype([(name, "<u8") for name in ("high", "low", "place")])
"""place: document << 32 | character."""
BASES = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
LOW, HIGH = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFF << 32)
MEMORY_BYTES = 128 << 20
LEAST_LEFT = 50
DROP_NAME, VERDICT_NAME = "drop.npy", "verdict.npy"


class PassageTask(NamedTuple):
    """The records of one unit."""

    stage: str
    number: int
    folder: Path
    first_id: int
    steps: Path
    length: int
    memory_bytes: int
    places: tuple[Path, ...]
    """What the stage before found, sorted."""
    target: Path


def cut_folder(work: Path, unit: int) -> Path:
    """Where the records of a unit stand without repeated passages: records, layout, index."""
    return work / f"cut-{unit:05d}"


def cut_passages(
    units: Sequence[Path], first_ids: Sequence[int], drop: np.ndarray, length: int, work: Path, engine: TaskEngine
) -> np.ndarray:
    """Write the `cut_folder` of every unit; (documents,) bool: of which too little is left. Those that `drop` names are
    not looked at."""
    steps = work / "passages"
    shutil.rmtree(steps, ignore_errors=True)  # of a killed build
    steps.mkdir()
    write_npy(steps / DROP_NAME, drop)
    places: tuple[Path, ...] = ()
    for stage in ("anchors", "windows", "cut"):
        tasks = [
            PassageTask(stage, number, folder, first, steps, length, MEMORY_BYTES, places, cut_folder(work, number))
            for number, (folder, first) in enumerate(zip(units, first_ids, strict=False))
        ]
        if stage != "cut":
            files = [steps / name for _, names in sorted(engine.run(split_passages, tasks)) for name in names]
            parts = part_tasks(files, 4 * ENTRY.itemsize, steps, MEMORY_BYTES)
            places = tuple(path for _, path in sorted(engine.run(group_places, parts)))
    lost = [np.load(folder / VERDICT_NAME) for _, folder in sorted(engine.run(cut_unit, tasks))]
    shutil.rmtree(steps)
    return np.concatenate([np.zeros(0, np.bool_), *lost])


def split_passages(task: PassageTask) -> list[str]:
    """The anchors or windows of a unit, in files cut into parts; returns their names."""
    names: list[str] = []
    for documents, points, offsets in _batches(task):
        names.append(f"{task.stage}-{task.number:05d}-{len(names):04d}.npy")
        write_parts(task.steps / names[-1], _find(task, documents, points, offsets))
    return names


def _find(task: PassageTask, documents: np.ndarray, points: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The anchors of all windows; or, in the second stage, the windows whose anchor is known to be repeated."""
    size = np.diff(offsets)
    starts = np.arange(max(len(points) - task.length + 1, 0))
    owner = np.repeat(np.arange(len(size)), size)
    starts = starts[owner[starts] == owner[starts + task.length - 1]]
    if not len(starts):
        return np.empty(0, ENTRY)
    place = (documents << np.uint64(32))[owner] + (np.arange(len(points)) - offsets[owner]).astype(np.uint64)
    short = task.length // 2
    grams = _hashes(points, short, BASES[0])
    anchors = (_least(grams & HIGH | np.arange(len(grams), dtype=np.uint64), task.length - short + 1) & LOW)[starts]
    if task.stage == "anchors":
        kept = np.unique(anchors)
        columns = grams[kept], np.zeros(len(kept), np.uint64), place[kept]
    else:
        kept = starts[np.isin(place[anchors], _places(task, int(documents[0]), int(documents[-1]) + 1))]
        columns = *(_hashes(points, task.length, base)[kept] for base in BASES), place[kept]
    entries = np.empty(len(kept), ENTRY)
    entries["high"], entries["low"], entries["place"] = columns
    return entries


def _hashes(points: np.ndarray, length: int, base: int) -> np.ndarray:
    """The hash of every run of `length` characters."""
    powers = np.cumprod(np.full(len(points), base, np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((points + np.uint64(1)) * powers)])
    found: np.ndarray = sums[length:] - sums[:-length]
    found *= np.cumprod(np.full(len(found), pow(base, -1, 1 << 64), np.uint64))
    for shift, factor in ((32, 0xFF51AFD7ED558CCD), (29, 0xC4CEB9FE1A85EC53), (32, 1)):
        found ^= found >> np.uint64(shift)
        found *= np.uint64(factor)
    return found


def _least(values: np.ndarray, window: int) -> np.ndarray:
    """The least of every `window` consecutive values."""
    size = 1
    while 2 * size <= window:
        values, size = np.minimum(values[:-size], values[size:]), 2 * size
    return np.minimum(values[: len(values) - window + size], values[window - size :])


def group_places(task: PartTask) -> Path:
    """The places of the anchors that occur more than once; of the windows that occurred before. Sorted."""
    stage = task.files[0].name.partition("-")[0]
    target = task.steps / f"places-{stage}-{task.number:05d}.npy"
    entries = read_parts(task)  # in the order of the corpus, which a stable sort keeps among equal ones
    entries = entries[np.argsort(entries["high"], kind="stable")]
    equal = (entries["high"][1:] == entries["high"][:-1]) & (entries["low"][1:] == entries["low"][:-1])
    repeated = np.zeros(len(entries), np.bool_)
    repeated[1:] = equal
    if stage == "anchors":
        repeated[:-1] |= equal
    write_npy(target, np.sort(entries["place"][repeated]))
    return target


def cut_unit(task: PassageTask) -> Path:
    """The unit without the passages that occurred before."""
    target = task.target
    if target.is_dir():
        return target
    index, layout = np.array(read_index(task.folder)), np.load(task.folder / LAYOUT_NAME)
    places = _places(task, task.first_id, task.first_id + len(index))
    owners, starts = (places >> np.uint64(32)).astype(np.int64) - task.first_id, (places & LOW).astype(np.int64)
    borders = np.searchsorted(owners, np.arange(len(index) + 1))
    lost = np.zeros(len(index), np.bool_)
    with staged_folder(target) as partial:
        with open(task.folder / RECORDS_NAME, "rb") as lines, open(partial / RECORDS_NAME, "wb") as out:
            for row, line in enumerate(lines):
                if borders[row] < borders[row + 1]:
                    record = jsonio.loads(line)
                    text = _without(record["content"], starts[borders[row] : borders[row + 1]], task.length)
                    lost[row] = len(text) < LEAST_LEFT
                    if not lost[row]:
                        record["content"] = text
                        line = encode_record(**record)
                        layout["line_bytes"][row] = len(line)
                        index["text_bytes"][row] = len(text.encode("utf-8", "surrogatepass"))
                out.write(line)
        np.save(partial / LAYOUT_NAME, layout)
        np.save(partial / VERDICT_NAME, lost)
        index.tofile(partial / INDEX_NAME)
    return target


def _without(text: str, starts: np.ndarray, length: int) -> str:
    """`text` without the windows that begin at `starts`."""
    breaks = np.flatnonzero(np.diff(starts) > length) + 1
    begins = starts[np.concatenate([[0], breaks])].tolist()
    ends = (starts[np.concatenate([breaks - 1, [len(starts) - 1]])] + length).tolist()
    pieces = [text[end:begin].strip("\n") for end, begin in zip([0, *ends], [*begins, len(text)], strict=True)]
    return "\n".join(piece for piece in pieces if piece)


def _places(task: PassageTask, first: int, end: int) -> np.ndarray:
    """Those of the stage before that are in some documents."""
    found = [read_sorted_slice(path, first << 32, end << 32) for path in task.places]
    return np.sort(np.concatenate([np.zeros(0, np.uint64), *found]))


def _batches(task: PassageTask) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Numbers, code points and borders of the texts that stay, so many at a time that a task's memory holds them."""
    rows = len(read_index(task.folder))
    drop = read_slice(task.steps / DROP_NAME, task.first_id, task.first_id + rows)
    documents: list[int] = []
    texts: list[bytes] = []
    size = 0
    with open(task.folder / RECORDS_NAME, "rb") as lines:
        for row, line in enumerate(lines):
            if drop[row] == 0:
                texts.append(jsonio.loads(line)["content"].encode("utf-32-le", "surrogatepass"))
                documents.append(task.first_id + row)
                size += len(texts[-1])
            if texts and (size >= task.memory_bytes // 16 or row == rows - 1):
                offsets = np.cumsum([0, *(len(text) // 4 for text in texts)])
                yield np.array(documents, np.uint64), np.frombuffer(b"".join(texts), "<u4"), offsets
                documents, texts, size = [], [], 0
