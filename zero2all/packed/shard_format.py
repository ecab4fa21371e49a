"""The packed contract on disk: `packed/<source>/{train,valid}/tokens-00000.bin`, `docs-00000.idx`, `manifest.json`.

Tokens are little-endian uint16 where the vocabulary fits, else uint32; an index holds the uint64 position, within
its shard, at which each document starts. With `loss_mask: true` in the manifest, `mask-00000.bin` holds one bit per
token, lowest bit first, 1 where it counts in the loss. With `gids: true`, `gids-00000.bin` holds the uint64 gid of each
document's corpus record. All are memory-mapped when first touched. `packed/report.json` names the sources that belong
together; it is removed before anything is packed anew and written last.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.common.files import MANIFEST_NAME, read_json_object
from zero2all.common.manifest import fingerprint, read_manifest
from zero2all.common.records import report_sources
from zero2all.packed.remote import BlockArray, Remote, remote_of

PACK_COMMAND = "z2a pack"
PACK_AGAIN = "Run `z2a pack` again."
REPORT_NAME = "report.json"
TOKEN_DTYPES = ("<u2", "<u4")
COUNTS = ("vocab_size", "shards", "tokens", "text_bytes")
MANIFEST_FIELDS: dict[str, type] = {
    **dict.fromkeys(("source", "channel", "tokenizer"), str),
    **dict.fromkeys(COUNTS, int),
    "dtype": str,
    "files": dict,
}
"""What the manifest of a split must say, and of which type. Optional: `max_id` (largest id there), `loss_mask`,
`gids`, `together`, `imported`."""
NO_GID = (1 << 64) - 1
"""Stands for the gid of a document that has none."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


tokens_name = "tokens-{:05d}.bin".format
docs_name = "docs-{:05d}.idx".format
mask_name = "mask-{:05d}.bin".format
gids_name = "gids-{:05d}.bin".format
"""File names of a shard: tokens, starts of its documents, loss mask, gids of its documents."""


def map_array(path: Path, dtype: np.dtype | str) -> np.ndarray:
    """A file as an array that is read when it is touched, a few pages at a time and in any order.

    Without the advice the system reads ahead, as much as 8 MB for every sample of 4 KB: cold samples then took 4.4 ms
    instead of 0.18 ms (measured 2026-11-15 on a network disk with read_ahead_kb 8192).
    """
    if not path.stat().st_size:
        return np.empty(0, dtype)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)


class DamagedShardError(BadInputError):
    """A packed file is not as it was written."""


class ShardFiles:
    """One kind of file of a split, each mapped when it is first asked for."""

    def __init__(
        self,
        folder: Path,
        names: list[str],
        dtype: str,
        files: dict[str, Any],
        remote: Remote | None = None,
        in_blocks: bool = False,
    ) -> None:
        """`remote`: the files lie at an address, which has checked that they are there; `in_blocks`: of them only what
        is touched is fetched."""
        self._folder, self._names, self._dtype = folder, names, np.dtype(dtype)
        self._files, self._remote, self._in_blocks = files, remote, in_blocks
        self.lengths = [self._checked_bytes(name) // self._dtype.itemsize for name in names]
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: int) -> np.ndarray:
        number = range(len(self._names))[number]
        found = self._maps.get(number)  # two threads may both map a file for the first time; either map will do
        if found is None:
            found = self._maps[number] = self._open(number)
        return found

    def _checked_bytes(self, name: str) -> int:
        if name not in self._files:
            raise BadInputError(f"{self._folder / MANIFEST_NAME}: `files` does not list {name}. {PACK_AGAIN}")
        expected = int(self._files[name]["bytes"])
        if self._remote is not None:
            return expected
        try:
            # There may be thousands of files, and Path would take longer than the disk.
            size: int | None = os.stat(f"{self._folder}/{name}").st_size  # noqa: PTH116
        except FileNotFoundError:
            size = None
        if size != expected:
            if size is None:
                raise DamagedShardError(f"The packed file {self._folder / name} is missing. {PACK_AGAIN}")
            raise DamagedShardError(
                f"The packed file {self._folder / name} has {size} bytes, expected {expected}. {PACK_AGAIN}"
            )
        return expected

    def _open(self, number: int) -> np.ndarray:
        path = self._folder / self._names[number]
        if self._remote is not None:
            facts = self._files[path.name]
            if self._in_blocks:
                blocks = BlockArray(self._remote, path, facts, self._dtype)
                return cast(np.ndarray, blocks)  # it is only ever sliced
            return map_array(self._remote.whole(path, facts), self._dtype)
        self._checked_bytes(path.name)  # again: hours may have passed since the split was opened
        return map_array(path, self._dtype)


class PackedSplit:
    """One split of one source: tokens, document borders and loss mask by position within the split."""

    def __init__(self, packed: Path, name: str, split: str, manifest: dict[str, Any]) -> None:
        self.name, self.split, self.folder, self.manifest = name, split, packed / name / split, manifest
        self._packed, self.remote = packed, remote_of(packed)
        self.shards = self._files(tokens_name, manifest["dtype"], in_blocks=True)
        self.docs = self._files(docs_name, "<u8")
        self.masks = self._files(mask_name, "u1", in_blocks=True) if manifest.get("loss_mask") else None
        self._starts = [0, *accumulate(self.shards.lengths)]
        self._first_documents = [0, *accumulate(self.docs.lengths)]
        self.shard_starts = np.array(self._starts, dtype=np.int64)
        """Position of each shard's first token within the split, and the total at the end."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open_split, (self._packed, self.name, self.split)  # another process maps the files itself

    @property
    def channel(self) -> str:
        """The channel this source belongs to."""
        return str(self.manifest["channel"])

    @property
    def tokens(self) -> int:
        """How many tokens the split has."""
        return self._starts[-1]

    @property
    def together(self) -> int:
        """How many neighbouring documents stand in one row."""
        return int(self.manifest.get("together", 1))

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, control tokens counted as tokens: turns nats per token into bits per byte."""
        return float(self.manifest["text_bytes"]) / max(1, self.tokens)

    @property
    def fingerprint(self) -> str:
        """Changes with any byte of the tokens, the borders or the mask."""
        files = self.manifest["files"].items()
        return fingerprint({name: facts for name, facts in files if not name.startswith("gids-")})

    @cached_property
    def gids(self) -> ShardFiles | None:
        """The gids of the documents of each shard, where they are known. Training never asks for them."""
        return self._files(gids_name, "<u8") if self.manifest.get("gids") else None

    def gid_of(self, document: int) -> int | None:
        """The gid of the record behind a document of this split, where it is known."""
        if self.gids is None:
            return None
        shard = bisect_right(self._first_documents, document) - 1
        gid = int(self.gids[shard][document - self._first_documents[shard]])
        return None if gid == NO_GID else gid

    def samples(self, seq_len: int) -> int:
        """How many samples of seq_len + 1 tokens the split holds; neighbours share one token."""
        return max(0, (self.tokens - 1) // seq_len)

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start` as int64, across shard borders."""
        out = np.empty(count, dtype=np.int64)
        self.read_into(out, start)
        return out

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out` with the tokens from position `start` on, converted to its type on the way."""
        count = len(out)
        if start + count > self._starts[-1]:
            raise IndexError(f"token {start + count} lies beyond the {self.tokens} tokens of {self.folder}")
        shard = bisect_right(self._starts, start) - 1
        filled = 0
        while filled < count:
            offset = start + filled - self._starts[shard]
            found = self.shards[shard][offset : offset + count - filled]
            out[filled : filled + len(found)] = found
            filled += len(found)
            shard += 1

    def read_mask(self, start: int, count: int) -> np.ndarray:
        """1 for each token that counts in the loss, else 0, as uint8."""
        if self.masks is None:
            return np.ones(count, dtype=np.uint8)
        out = np.empty(count, dtype=np.uint8)
        shard = bisect_right(self._starts, start) - 1
        filled = 0
        while filled < count:
            offset = start + filled - self._starts[shard]
            length = min(count - filled, self._starts[shard + 1] - self._starts[shard] - offset)
            first_byte = offset // 8
            bits = np.unpackbits(self.masks[shard][first_byte : (offset + length + 7) // 8], bitorder="little")
            out[filled : filled + length] = bits[offset - 8 * first_byte :][:length]
            filled += length
            shard += 1
        return out

    def documents_in(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents that the `count` tokens from `start` on belong to.

        Returns where each begins, counted from `start` (0 for one that began before), and its number in the split.
        """
        shard = bisect_right(self._starts, start) - 1
        if start + count <= self._starts[shard + 1]:
            return self._documents_of_shard(shard, start, start + count)
        parts = []
        while shard < len(self.shards) and self._starts[shard] < start + count:
            if self.shards.lengths[shard]:
                parts.append(self._documents_of_shard(shard, start, start + count))
            shard += 1
        columns, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
        return columns, numbers

    def document_at(self, token: int) -> int:
        """Number in the split of the document that a token belongs to."""
        shard = bisect_right(self._starts, token) - 1
        within = self.docs[shard].searchsorted(np.uint64(token - self._starts[shard]), side="right")
        return int(within) - 1 + self._first_documents[shard]

    def _documents_of_shard(self, shard: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        base, starts = self._starts[shard], self.docs[shard]
        # uint64 on both sides: numpy would otherwise turn the whole index into float64
        low = int(starts.searchsorted(np.uint64(max(start - base, 0)), side="right")) - 1
        high = int(starts.searchsorted(np.uint64(end - base), side="left"))
        columns = starts[low:high].astype(np.int64)
        columns += base - start
        columns[0] = max(0, columns[0])
        first = self._first_documents[shard]
        return columns, np.arange(low + first, high + first)

    def _files(self, name_of: Callable[[int], str], dtype: str, in_blocks: bool = False) -> ShardFiles:
        names = [name_of(number) for number in range(self.manifest["shards"])]
        files = self.manifest["files"]
        return ShardFiles(self.folder, names, dtype, files, self.remote, in_blocks)


def open_split(packed: Path, source: str, split: str) -> PackedSplit:
    """One split of a packed source; its manifest must be sound, every file must be there and have its size."""
    folder = packed / source / split
    manifest = read_manifest(folder, "packed", PACK_COMMAND)
    check_split_manifest(folder, manifest)
    opened = PackedSplit(packed, source, split, manifest)
    if opened.tokens != manifest["tokens"]:
        raise _bad_field(folder, "tokens", manifest["tokens"], f"{opened.tokens}, the number of tokens in the shards")
    for shard, size in enumerate(opened.masks.lengths if opened.masks is not None else ()):
        tokens = opened.shards.lengths[shard]
        if size != -(-tokens // 8):
            raise BadInputError(
                f"{folder / mask_name(shard)} has {size} bytes, expected one bit for each of {tokens} tokens. Run "
                f"`{PACK_COMMAND}` again."
            )
    return opened


def check_split_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse a manifest whose fields cannot be true, naming file and field."""
    for field, kind in MANIFEST_FIELDS.items():
        value = manifest.get(field)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _bad_field(folder, field, value, f"a value of type {kind.__name__}")
    for field in COUNTS:
        if manifest[field] < 0:
            raise _bad_field(folder, field, manifest[field], "0 or more")
    shards, files, dtype, vocab_size = (manifest[name] for name in ("shards", "files", "dtype", "vocab_size"))
    if shards > len(files):
        raise _bad_field(folder, "shards", shards, f"at most the number of files ({len(files)})")
    if dtype not in TOKEN_DTYPES:
        raise _bad_field(folder, "dtype", dtype, f"one of {', '.join(TOKEN_DTYPES)}")
    if vocab_size > 1 << 8 * np.dtype(dtype).itemsize:
        raise _bad_field(folder, "dtype", dtype, f"a type that holds {vocab_size} ids")
    largest = manifest.get("max_id", 0)
    if not isinstance(largest, int) or largest >= max(1, vocab_size):
        raise _bad_field(folder, "max_id", largest, f"an id below vocab_size ({vocab_size})")


def _bad_field(folder: Path, field: str, value: Any, expected: str) -> BadInputError:
    return BadInputError(f"{folder / MANIFEST_NAME}: `{field}` is {value!r}, expected {expected}. {PACK_AGAIN}")


def packed_report(packed: Path) -> dict[str, Any]:
    """What was packed together: `tokenizer`, and `sources` by name; FileNotFoundError when nothing was."""
    path = packed / REPORT_NAME
    report = read_json_object(path, PACK_AGAIN)
    report_sources(report, path, PACK_AGAIN)
    if not isinstance(report.get("tokenizer"), str | None):
        raise BadInputError(f"{path}: `tokenizer` is not a fingerprint. {PACK_AGAIN}")
    return report


def packed_sources(packed: Path) -> list[str]:
    """Names of the packed sources, sorted."""
    try:
        return sorted(packed_report(packed)["sources"])
    except FileNotFoundError:
        raise BadInputError(
            f"There is no finished packed data in {packed} (no {REPORT_NAME}). Run `{PACK_COMMAND}` first. If "
            "it was interrupted, run it again to continue."
        ) from None
