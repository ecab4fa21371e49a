"""The packed contract on disk: `packed/<source>/{train,valid}/tokens-00000.bin`, `docs-00000.idx`, `manifest.json`.

Tokens are little-endian uint16 where the vocabulary fits, else uint32; an index holds the uint64 position, within
its shard, at which each document starts. Both are memory-mapped and never read whole. `packed/report.json` names the
sources that belong together: it is removed before anything is packed anew and written last, so while it is absent
there is no packed data, and a source that was left out of the corpus is no longer read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json
from zero2all.common.manifest import read_manifest

PACK_COMMAND = "z2a pack"
REPORT_NAME = "report.json"


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def tokens_name(shard: int) -> str:
    """File name of a token shard."""
    return f"tokens-{shard:05d}.bin"


def docs_name(shard: int) -> str:
    """File name of a document index."""
    return f"docs-{shard:05d}.idx"


@dataclass(frozen=True)
class PackedSplit:
    """One split of one source, memory-mapped."""

    name: str
    folder: Path
    manifest: dict[str, Any]
    shards: list[np.ndarray]
    shard_starts: np.ndarray
    """Position of each shard's first token within the split, and the total at the end."""

    @property
    def channel(self) -> str:
        """The channel this source belongs to."""
        return str(self.manifest["channel"])

    @property
    def tokens(self) -> int:
        """Tokens in this split."""
        return int(self.shard_starts[-1])

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, control tokens counted as tokens: turns nats per token into bits per byte."""
        return float(self.manifest["text_bytes"]) / max(1, self.tokens)

    def samples(self, seq_len: int) -> int:
        """How many samples of seq_len + 1 tokens the split holds; neighbours share one token."""
        return max(0, (self.tokens - 1) // seq_len)

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start` as int64, across shard borders."""
        if start + count > self.tokens:
            raise IndexError(f"token {start + count} lies beyond the {self.tokens} tokens of {self.folder}")
        out = np.empty(count, dtype=np.int64)
        shard = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
        filled = 0
        while filled < count:
            offset = start + filled - int(self.shard_starts[shard])
            piece = self.shards[shard][offset : offset + count - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return out


def open_split(packed: Path, source: str, split: str) -> PackedSplit:
    """Map one split of a packed source; every file must be there and have the size its manifest states."""
    folder = packed / source / split
    manifest = read_manifest(folder, "packed", PACK_COMMAND)
    dtype = np.dtype(manifest["dtype"])
    shards = []
    for number in range(manifest["shards"]):
        path = folder / tokens_name(number)
        expected = manifest["files"][path.name]["bytes"]
        if not path.is_file() or path.stat().st_size != expected:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            raise BadInputError(
                f"The token shard {path} is damaged: {found}, expected {expected} bytes. Run `{PACK_COMMAND}` again."
            )
        shards.append(np.memmap(path, dtype=dtype, mode="r") if expected else np.empty(0, dtype))
    starts = np.concatenate(([0], np.cumsum([len(shard) for shard in shards]))).astype(np.int64)
    return PackedSplit(source, folder, manifest, shards, starts)


def packed_sources(packed: Path) -> list[str]:
    """Names of the packed sources, sorted."""
    try:
        return sorted(read_json(packed / REPORT_NAME)["sources"])
    except FileNotFoundError:
        raise BadInputError(
            f"There is no finished packed data in {packed} (no {REPORT_NAME}). Run `{PACK_COMMAND}` first; if it was "
            f"interrupted, running it again continues."
        ) from None
