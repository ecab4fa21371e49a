"""Which lines are boilerplate: menus, footers and share buttons that stand in many records.

    LineCounter      while a segment is read: in how many of its records each line stands -> `lines.npy`
    frequent_lines   all segments -> the hashes of the lines that stand in at least `line_records` records
    strip_lines      texts -> the same texts without those lines

A line is compared without the blanks at its ends and counts once a record. A paragraph without a line break is a line.
Lines are known by 64 bits of hash: that any of a billion lines is taken for one of 10,000 frequent ones has a chance of
5e-7. `lines.npy` has (hash, records), sorted by hash; the files are merged a range of hashes at a time, in about
`memory_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.index import write_npy
from zero2all.corpus.dedup.signatures import encode

LINES_NAME = "lines.npy"
LINE = np.dtype([("hash", "<u8"), ("records", "<u4")])
MERGED_LINES = 1 << 22
"""Lines held in memory before equal ones are merged."""


def uses_lines(channel: str, config: DedupConfig) -> bool:
    """Whether lines of this channel are counted and removed: never in code, where equal lines are no boilerplate."""
    return config.lines and channel != "code"


def count_lines(texts: Sequence[str], config: DedupConfig) -> np.ndarray:
    """(hash, records) of every line of a batch, sorted by hash."""
    from zero2all.corpus.dedup import text_kernels as kernels

    buffer, offsets = encode(texts)
    hashes = np.empty(int(np.count_nonzero(buffer == 0x0A)) + len(texts), np.uint64)
    count = kernels.distinct_lines(buffer, offsets, config.line_min_chars, hashes)
    return _counted(hashes[:count], np.ones(count, np.uint32))


class LineCounter:
    """Counts the lines of one unit."""

    def __init__(self, config: DedupConfig) -> None:
        self.config = config
        self.held: list[np.ndarray] = []
        self.count = 0

    def add(self, texts: Sequence[str]) -> None:
        """Count a batch of kept texts."""
        counted = count_lines(texts, self.config)
        self.held.append(counted)
        self.count += len(counted)
        if self.count > MERGED_LINES:
            self.held = [_merged(self.held)]
            self.count = 0

    def write(self, folder: Path) -> None:
        """Leave `lines.npy` in the unit folder."""
        write_npy(folder / LINES_NAME, _merged(self.held))


def frequent_lines(units: Sequence[Path], config: DedupConfig, memory_bytes: int = 64 << 20) -> np.ndarray:
    """The sorted hashes of the lines that stand in at least `line_records` records of the units with `lines.npy`."""
    files = [np.load(unit / LINES_NAME, mmap_mode="r") for unit in units if (unit / LINES_NAME).exists()]
    total = sum(len(lines) for lines in files)
    pieces = max(1, -(-total * LINE.itemsize * 4 // memory_bytes))
    borders = [np.uint64(piece * ((1 << 64) // pieces)) for piece in range(pieces)]
    found = [np.zeros(0, LINE)]
    for number, first in enumerate(borders):
        parts = []
        for lines in files:
            start = _first_at(lines, first)
            end = _first_at(lines, borders[number + 1]) if number + 1 < pieces else len(lines)
            parts.append(np.array(lines[start:end]))
        merged = _merged(parts)
        found.append(merged[merged["records"] >= config.line_records])
    lines = np.concatenate(found)
    if len(lines) > config.line_max_frequent:
        order = np.lexsort((lines["hash"], -lines["records"].astype(np.int64)))
        lines = lines[order[: config.line_max_frequent]]
    return np.sort(lines["hash"])


def strip_lines(texts: Sequence[str], frequent: np.ndarray, config: DedupConfig) -> list[str]:
    """The texts without their frequent lines; a text that had none is returned as it is."""
    from zero2all.corpus.dedup import text_kernels as kernels

    if not len(frequent):
        return list(texts)
    buffer, offsets = encode(texts)
    out = np.empty(buffer.size, np.uint8)
    ends = np.empty(len(texts), np.int64)
    if kernels.remove_lines(buffer, offsets, config.line_min_chars, np.ascontiguousarray(frequent), out, ends) == 0:
        return list(texts)
    view = out.data
    starts = [0, *ends.tolist()]
    sizes = np.diff(offsets)
    return [
        text if end - start == sizes[number] else str(view[start:end], "utf-8", "surrogatepass")
        for number, (text, start, end) in enumerate(zip(texts, starts, starts[1:], strict=False))
    ]


def _first_at(lines: np.ndarray, value: np.uint64) -> int:
    """Position of the first hash that is not below `value`, reading a few pages only."""
    return bisect_left(range(len(lines)), value, key=lambda at: lines[at]["hash"])


def _merged(parts: list[np.ndarray]) -> np.ndarray:
    lines = np.concatenate(parts) if parts else np.zeros(0, LINE)
    return _counted(lines["hash"], lines["records"])


def _counted(hashes: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Equal hashes as one, their records added up, sorted."""
    order = np.argsort(hashes)
    hashes, records = hashes[order], records[order]
    starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])) if len(hashes) else np.zeros(0, int)
    counted = np.empty(len(starts), LINE)
    counted["hash"] = hashes[starts]
    counted["records"] = np.add.reduceat(records, starts) if len(starts) else 0
    return counted
