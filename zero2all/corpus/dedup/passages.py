"""Passages that stand in the text before: every run of at least `min_chars` characters, equal character for character.

    anchors   of each window of `min_chars` characters, the least hash of the shorter runs in it (winnowing) and where
              it is; equal windows have equal ones, at the same place within them
    windows   the 128-bit hash and the place of every window whose anchor occurs more than once
    cut       the windows that occurred earlier, in the order of the corpus, are cut out; what is left is joined by a
              line break, and a record of which fewer than `least_left` characters are left is dropped

Both lists are sorted on disk, in parts, as the digests of exact duplicates are (`tasks.py`). A task takes about
`memory_bytes`, or 90 bytes a character of its longest text. On disk, while it runs: 24 bytes an anchor (about one in
min_chars / 4 characters) and 24 a repeated character.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import TaskEngine
from zero2all.common.files import read_json, staged_folder, write_json
from zero2all.corpus.dedup.config import Passages
from zero2all.corpus.dedup.index import (
    INDEX,
    INDEX_NAME,
    NpyAppender,
    read_index,
    read_slice,
    read_sorted_slice,
    write_npy,
)
from zero2all.corpus.dedup.tasks import PartTask, part_tasks, read_parts, write_parts
from zero2all.corpus.record import encode_record
from zero2all.corpus.segments import LAYOUT_NAME, RECORDS_NAME

COLUMNS = ("high", "low", "place")
ENTRY = np.dtype([(name, "<u8") for name in COLUMNS])
"""place: document << 32 | character."""
MEMORY_BYTES = 128 << 20
DROP_NAME, LIST_NAME, VERDICT_NAME = "drop.npy", "files-{stage}-{number:05d}.json", "verdict.npy"


class PassageTask(NamedTuple):
    """The records of one unit."""

    stage: str
    number: int
    folder: Path
    first_id: int
    steps: Path
    length: int
    least_left: int
    memory_bytes: int
    places: tuple[Path, ...] = ()
    """What the stage before found, sorted."""
    target: Path = Path()


def cut_folder(work: Path, unit: int) -> Path:
    """Where the records of a unit stand without repeated passages: records, layout, index."""
    return work / f"cut-{unit:05d}"


def cut_passages(
    units: Sequence[Path], first_ids: Sequence[int], drop: np.ndarray, config: Passages, work: Path, engine: TaskEngine
) -> np.ndarray:
    """Write the `cut_folder` of every unit; (documents,) bool: of which too little is left. Those that `drop` names are
    not looked at."""
    steps, length = work / "passages", config.min_chars or 0
    steps.mkdir(exist_ok=True)
    write_npy(steps / DROP_NAME, drop)
    places: tuple[Path, ...] = ()
    for stage in ("anchors", "windows"):
        tasks = [
            PassageTask(stage, number, folder, first, steps, length, config.least_left, MEMORY_BYTES, places)
            for number, (folder, first) in enumerate(zip(units, first_ids, strict=False))
        ]
        files = [steps / name for names in _in_order(engine.run(split_passages, tasks)) for name in names]
        parts = part_tasks(files, 4 * ENTRY.itemsize, steps, MEMORY_BYTES)
        places = tuple(_in_order(engine.run(group_places, parts)))
    tasks = [task._replace(places=places, target=cut_folder(work, task.number)) for task in tasks]
    lost = [np.load(folder / VERDICT_NAME) for folder in _in_order(engine.run(cut_unit, tasks))]
    shutil.rmtree(steps)
    return np.concatenate([np.zeros(0, np.bool_), *lost])


def _in_order(done: Iterable[tuple[int, Any]]) -> list[Any]:
    return [result for _, result in sorted(done, key=lambda pair: pair[0])]


def split_passages(task: PassageTask) -> list[str]:
    """The anchors or windows of a unit, in files cut into parts; returns their names."""
    from zero2all.corpus.dedup.text_kernels import find_passages

    done = task.steps / LIST_NAME.format(stage=task.stage, number=task.number)
    if done.exists():
        return list(read_json(done))
    names: list[str] = []
    for documents, points, offsets in _batches(task):
        first, end = int(documents[0]) << 32, (int(documents[-1]) + 1) << 32
        repeated = _places(task, first, end)
        columns = [np.empty(len(points), np.uint64) for _ in COLUMNS]
        count = find_passages(points, offsets, documents, task.length, task.stage == "windows", repeated, *columns)
        entries = np.empty(count, ENTRY)
        for name, column in zip(COLUMNS, columns, strict=True):
            entries[name] = column[:count]
        names.append(f"{task.stage}-{task.number:05d}-{len(names):04d}.npy")
        write_parts(task.steps / names[-1], entries)
    write_json(done, names)
    return names


def group_places(task: PartTask) -> Path:
    """The places of the anchors that occur more than once; of the windows that occurred before. Sorted."""
    stage = task.files[0].name.partition("-")[0]
    target = task.steps / f"places-{stage}-{task.number:05d}.npy"
    if target.exists():
        return target
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
    first = task.first_id
    places = _places(task, first << 32, (first + len(index)) << 32)
    owners = (places >> np.uint64(32)).astype(np.int64) - first
    starts = (places & np.uint64(0xFFFFFFFF)).astype(np.int64)
    borders = np.searchsorted(owners, np.arange(len(index) + 1))
    lost = np.zeros(len(index), np.bool_)
    with staged_folder(target) as partial:
        with open(task.folder / RECORDS_NAME, "rb") as lines, open(partial / RECORDS_NAME, "wb") as out:
            for row, line in enumerate(lines):
                if borders[row] < borders[row + 1]:
                    record = jsonio.loads(line)
                    text = _without(record["content"], starts[borders[row] : borders[row + 1]], task.length)
                    lost[row] = len(text) < task.least_left
                    if not lost[row]:
                        record["content"] = text
                        line = encode_record(**record)
                        layout["line_bytes"][row] = len(line)
                        index["text_bytes"][row] = len(text.encode("utf-8", "surrogatepass"))
                out.write(line)
        np.save(partial / LAYOUT_NAME, layout)
        np.save(partial / VERDICT_NAME, lost)
        writer = NpyAppender(partial / INDEX_NAME, INDEX)
        writer.append(index)
        writer.close()
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
    found = [read_sorted_slice(path, first, end) for path in task.places]
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
