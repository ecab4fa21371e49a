"""Best-fit packing: rows of seq_len + 1 tokens in which no document is cut unless it is longer than a row.

Documents are placed longest first, each into the row with the least room that still takes it (best fit decreasing).
A document longer than a row gives full rows, which share one token as windows do, and a rest that is placed like any
other. What stays free at the end of a row is padding, a few tenths of a percent of real text.

A row with the least sufficient room c takes c // l documents of length l at once, for after each its room is still the
least. So all documents of one length are placed in a few bulk moves: sorting costs O(n), placing O(n) numpy work in at
most L moves per length, and finding the next room O(log L) steps of a bit set. Each shard is packed for itself, which
bounds the memory.

Where the manifest of a split says `together: n`, every n documents in a row are placed as one, and none is cut.

On disk, beside the shards: `best-fit-<seq_len>/` with `starts.u64` and `lengths.u32` (the chunks, row after row),
`rows.u64` (the first chunk of each row, and the total at the end) and a manifest of its own.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.common.files import staged_folder
from zero2all.common.manifest import fingerprint, is_current, read_manifest, write_manifest
from zero2all.packed.shard_format import PackedSplit, map_array

BEST_FIT_COMMAND = "z2a pack --best-fit"
ARRAYS = {"starts.u64": "<u8", "lengths.u32": "<u4", "rows.u64": "<u8"}


@dataclass(frozen=True)
class BestFitIndex:
    """The rows of one split for one seq_len, memory-mapped."""

    folder: Path
    manifest: dict[str, Any]
    starts: np.ndarray
    """Position within the split of each chunk's first token."""
    lengths: np.ndarray
    rows: np.ndarray
    """First chunk of each row, and the number of chunks at the end."""


def best_fit_folder(split: PackedSplit, seq_len: int) -> Path:
    """Where the index of a split lies."""
    return split.folder / f"best-fit-{seq_len}"


def build_best_fit(split: PackedSplit, seq_len: int) -> dict[str, Any]:
    """Write the index of `split` for `seq_len`, unless it is there already; returns its manifest.

    The manifest counts rows, chunks, padding (free token slots), cut (documents longer than a row) and dropped (chunks
    of a single token, from which nothing can be learned).
    """
    folder, inputs = best_fit_folder(split, seq_len), _inputs(split, seq_len)
    if is_current(folder, "best_fit", inputs):
        return read_manifest(folder, "best_fit", BEST_FIT_COMMAND)
    totals = dict.fromkeys(("rows", "pieces", "piece_tokens", "cut", "dropped"), 0)
    with staged_folder(folder) as partial:
        with ExitStack() as stack:
            starts, lengths, rows = (stack.enter_context((partial / name).open("wb")) for name in ARRAYS)
            for shard, tokens in enumerate(split.shards.lengths):
                chunks = cut_documents(np.append(split.docs[shard].astype(np.int64), tokens), seq_len)
                placed = chunks.lengths.reshape(-1, split.together).sum(axis=1)
                assert placed.max(initial=0) <= seq_len + 1, "whoever packed them has left out the long ones"
                row_of = np.repeat(best_fit_rows(placed, seq_len + 1), split.together)
                by_row = np.lexsort((chunks.starts, row_of))
                counts = np.bincount(row_of, minlength=0)
                starts.write((chunks.starts[by_row] + split.shard_starts[shard]).astype("<u8").tobytes())
                lengths.write(chunks.lengths[by_row].astype("<u4").tobytes())
                rows.write((np.cumsum(counts) - counts + totals["pieces"]).astype("<u8").tobytes())
                totals["rows"] += len(counts)
                totals["pieces"] += len(by_row)
                totals["piece_tokens"] += int(chunks.lengths.sum())
                totals["cut"] += chunks.cut
                totals["dropped"] += chunks.dropped
            rows.write(np.array([totals["pieces"]], dtype="<u8").tobytes())
        padding = totals["rows"] * (seq_len + 1) - totals["piece_tokens"]
        content = {"source": split.name, "split": split.split, "seq_len": seq_len, **totals, "padding": padding}
        write_manifest(partial, "best_fit", inputs, content)
    return read_manifest(folder, "best_fit", BEST_FIT_COMMAND)


def open_best_fit(split: PackedSplit, seq_len: int) -> BestFitIndex:
    """Map the index of a split; it must be there and be of these very tokens."""
    folder = best_fit_folder(split, seq_len)
    manifest = read_manifest(folder, "best_fit", f"{BEST_FIT_COMMAND} {seq_len}")
    if split.remote is not None:
        split.remote.bring(folder, manifest["files"])
    if not is_current(folder, "best_fit", _inputs(split, seq_len)):
        raise BadInputError(
            f"{folder} does not belong to the tokens in {split.folder}, or one of its files is damaged. Run "
            f"`{BEST_FIT_COMMAND} {seq_len}` again."
        )
    arrays = [map_array(folder / name, dtype) for name, dtype in ARRAYS.items()]
    return BestFitIndex(folder, manifest, *arrays)


def _inputs(split: PackedSplit, seq_len: int) -> str:
    return fingerprint({"files": split.manifest["files"], "seq_len": seq_len})


class Chunks(NamedTuple):
    """What has to be placed into rows."""

    starts: np.ndarray
    lengths: np.ndarray
    cut: int
    dropped: int


def cut_documents(borders: np.ndarray, seq_len: int) -> Chunks:
    """Documents (borders[i] to borders[i + 1]) as chunks of at most seq_len + 1 tokens.

    Chunks of one document overlap by a token: the first token of a chunk is never predicted in its row, and this way
    every token but a document's first is predicted exactly once.
    """
    starts, lengths = borders[:-1], np.diff(borders)
    chunks_of = np.maximum(1, -(-(lengths - 1) // seq_len))
    number = np.arange(int(chunks_of.sum())) - np.repeat(np.cumsum(chunks_of) - chunks_of, chunks_of)
    offsets = number * seq_len
    chunk_lengths = np.minimum(np.repeat(lengths, chunks_of) - offsets, seq_len + 1)
    chunk_starts = np.repeat(starts, chunks_of) + offsets
    useful = chunk_lengths > 1
    dropped = int(len(useful) - useful.sum())
    return Chunks(chunk_starts[useful], chunk_lengths[useful], int((chunks_of > 1).sum()), dropped)


def best_fit_rows(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each chunk, by best fit decreasing; chunks of one length are placed in their order."""
    row_of = np.empty(len(lengths), dtype=np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    distinct, firsts = np.unique(-lengths[by_length], return_index=True)
    room: dict[int, np.ndarray] = {}
    """Rows with some room left, by how much."""
    rooms = 0
    """The same rooms as a bit set."""
    made = 0
    for length, first, end in zip((-distinct).tolist(), firsts, [*firsts[1:], len(lengths)], strict=True):
        waiting = by_length[first:end]
        while len(waiting):
            fitting = rooms >> length
            least = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            per_row = least // length
            wanted = -(-len(waiting) // per_row)
            if fitting:
                rows = room.pop(least)
                rooms ^= 1 << least
                rows, unused = rows[:wanted], rows[wanted:]
                rooms = _put(room, rooms, least, unused)
            else:
                rows = np.arange(made, made + wanted)
                made += wanted
            placed = min(len(waiting), len(rows) * per_row)
            row_of[waiting[:placed]] = np.repeat(rows, per_row)[:placed]
            in_last = placed - (len(rows) - 1) * per_row
            rooms = _put(room, rooms, least - per_row * length, rows[:-1])
            rooms = _put(room, rooms, least - in_last * length, rows[-1:])
            waiting = waiting[placed:]
    return row_of


def _put(room: dict[int, np.ndarray], rooms: int, left: int, rows: np.ndarray) -> int:
    """Note that `rows` have `left` tokens of room; returns the new bit set."""
    if left < 2 or len(rows) == 0:  # no chunk is shorter than two tokens
        return rooms
    room[left] = np.concatenate((room[left], rows)) if left in room else rows
    return rooms | 1 << left
