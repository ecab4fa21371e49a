"""Training text in parts that can be read again, each on its own: shards of a corpus, and plain text files.

A part is small enough (`PART_BYTES`) that threads have work and an interrupted training loses little, and plain data
(paths and numbers), so that it can be handed to another process. Its fingerprint says what it reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from zero2all.common.errors import BadInputError
from zero2all.common.files import crc32c_of
from zero2all.common.manifest import fingerprint
from zero2all.common.records import READERS, corpus_sources, record_of_line, training_text
from zero2all.tokenizer.take import belongs, shares

PART_BYTES = 64 << 20
"""Large JSON-lines shards and text files are read in parts of about this size."""
READ_BYTES = 1 << 20


class TextPart(Protocol):
    """A piece of training text that can be read any number of times."""

    @property
    def name(self) -> str:
        """Stable over runs: the resume state knows the part by it."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the text does."""

    @property
    def size_bytes(self) -> int:
        """About how much text it is."""

    def texts(self) -> Iterator[str]:
        """The documents, from the first."""


@dataclass(frozen=True)
class ShardPart:
    """Records of one shard of the corpus, or of a stretch of its lines where it is plain JSON lines."""

    name: str
    fingerprint: str
    size_bytes: int
    path: Path
    source: str
    share: Fraction
    stretch: tuple[int, int] | None
    """First byte and the byte after the last one, both at line borders; None reads the whole shard."""

    def texts(self) -> Iterator[str]:
        """The text of every record that the share takes."""
        for record in self._records():
            text = training_text(record)
            if belongs(text, self.share):
                yield text

    def _records(self) -> Iterator[dict[str, Any]]:
        if self.stretch is None:
            yield from READERS[self.path.name.partition(".")[2]](self.path, self.source)
            return
        place, end = self.stretch
        with open(self.path, "rb") as file:
            file.seek(place)
            while place < end and (line := file.readline()):
                yield record_of_line(line, self.path, f"the line at byte {place}")
                place += len(line)


@dataclass(frozen=True)
class FilePart:
    """A stretch of a plain text file, in UTF-8. A byte that is no UTF-8 is handed on as a lone surrogate, which every
    trainer turns into U+FFFD and counts."""

    name: str
    fingerprint: str
    size_bytes: int
    path: Path
    stretch: tuple[int, int]

    def texts(self) -> Iterator[str]:
        """The text in blocks of whole lines that teach what the whole file would (see `_safe_end`)."""
        place, end = self.stretch
        block = bytearray()
        with open(self.path, "rb") as file:
            file.seek(place)
            while piece := file.read(min(READ_BYTES, end - file.tell())):
                block += piece
                if file.tell() < end and (cut := _safe_end(block, len(block) - len(piece))):
                    yield block[:cut].decode("utf-8", "surrogateescape")
                    del block[:cut]
        if block:
            yield block.decode("utf-8", "surrogateescape")


class ListPart:
    """Texts that stand in memory already."""

    name = "texts"

    def __init__(self, texts: Sequence[str]) -> None:
        self.kept = texts
        self.size_bytes = 0
        digest = hashlib.blake2b(digest_size=8)
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            self.size_bytes += len(data)
            digest.update(len(data).to_bytes(8, "little") + data)
        self.fingerprint = digest.hexdigest()

    def texts(self) -> Iterator[str]:
        """All of them."""
        return iter(self.kept)


def corpus_parts(
    corpus: Path, take: Mapping[str, str] | str | None, part_bytes: int = PART_BYTES
) -> tuple[list[ShardPart], dict[str, dict[str, Any]]]:
    """The training split of every source that is taken, in parts; and, by source, what is taken of it."""
    sources = corpus_sources(corpus)
    sizes = {name: _train_bytes(manifest["report"]) for name, manifest in sources.items()}
    chosen = shares(take, sizes)
    parts: list[ShardPart] = []
    for source, manifest in sources.items():
        share = chosen[source]
        files = {name: facts for name, facts in manifest["files"].items() if name.startswith("train/part-")}
        disk_bytes = sum(facts["bytes"] for facts in files.values())
        for name, facts in sorted(files.items()):
            path = corpus / source / name
            for stretch in _shard_stretches(path, facts["bytes"], part_bytes) if share else []:
                whole = f"{source}/{name}"
                read = facts["bytes"] if stretch is None else stretch[1] - stretch[0]
                parts.append(
                    ShardPart(
                        name=whole if stretch is None else f"{whole}@{stretch[0]}",
                        fingerprint=fingerprint([facts, str(share), stretch]),
                        size_bytes=int(sizes[source] * read / max(1, disk_bytes) * share),
                        path=path,
                        source=source,
                        share=share,
                        stretch=stretch,
                    )
                )
    asked = dict.fromkeys(sources, take) if isinstance(take, str) else (take or {})
    taken = {
        name: {
            "asked": asked.get(name, "all"),
            "share": str(chosen[name]),
            "about_bytes": int(sizes[name] * chosen[name]),
        }
        for name in sources
    }
    return parts, taken


def file_parts(paths: Sequence[Path], part_bytes: int = PART_BYTES) -> list[FilePart]:
    """Plain text files, in parts."""
    parts = []
    for path in paths:
        if not path.is_file():
            raise BadInputError(f"The text file {path} does not exist. Give files of plain text with --text.")
        size = path.stat().st_size
        crc = crc32c_of(path)
        for stretch in _file_stretches(path, size, part_bytes):
            name = f"{path}@{stretch[0]}"
            print_of_it = fingerprint([crc, size, stretch])
            parts.append(FilePart(name, print_of_it, stretch[1] - stretch[0], path, stretch))
    return parts


def _train_bytes(report: dict[str, Any]) -> int:
    """About how much text of a source is in its training split."""
    return int(report["bytes_kept"] * report["train_records"] / max(1, report["records_kept"]))


def _shard_stretches(path: Path, size: int, part_bytes: int) -> list[tuple[int, int] | None]:
    """Where the parts of a shard begin and end; formats other than JSON lines are read whole."""
    if path.name.partition(".")[2] != "jsonl" or size <= part_bytes:
        return [None]
    borders = [0]
    with open(path, "rb") as file:
        while borders[-1] + part_bytes < size:
            file.seek(borders[-1] + part_bytes - 1)
            file.readline()
            borders.append(file.tell())
    return [stretch for stretch in pairwise([*borders, size]) if stretch[0] < stretch[1]]


def _file_stretches(path: Path, size: int, part_bytes: int) -> list[tuple[int, int]]:
    """The same for a text file: parts end where a line ends and the next begins without white space."""
    borders = [0]
    with open(path, "rb") as file:
        while borders[-1] + part_bytes < size:
            start = borders[-1] + part_bytes
            file.seek(start)
            block, cut = bytearray(), 0
            while not cut and (piece := file.read(READ_BYTES)):
                block += piece
                cut = _safe_end(block, 0, first=True)
            if not cut:
                break
            borders.append(start + cut)
    return list(pairwise([*borders, size])) if size else []


def _safe_end(block: bytearray, look_from: int, first: bool = False) -> int:
    """The last place (or the first) where a line ends and no white space follows, so that no pre-token crosses it; 0
    where there is none. `look_from`: earlier bytes are known to have none."""
    place = block.find(b"\n") if first else block.rfind(b"\n", max(0, look_from - 5))
    while place != -1:
        following = block[place + 1 : place + 5].decode("utf-8", "ignore")[:1]
        if following and not following.isspace():
            return place + 1
        place = block.find(b"\n", place + 1) if first else block.rfind(b"\n", max(0, look_from - 5), place)
    return 0
