"""Training text in parts that can be read several times: shards of a corpus, plain text files, texts from memory.

A part is small (`PART_BYTES`), so that threads have work and an interrupted training loses little. Its fingerprint says
what it reads.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from zero2all.common import records
from zero2all.common.errors import BadInputError
from zero2all.common.files import crc32c_of
from zero2all.common.manifest import fingerprint
from zero2all.tokenizer.sampling import belongs, shares

PART_BYTES = 64 << 20
"""Large JSON-lines shards and text files are read in parts of about this size."""
READ_BYTES = 1 << 20
LENGTH_BYTES = 8


@dataclass(frozen=True)
class TextPart:
    """Some of the training text, readable any number of times."""

    name: str
    """Stable over runs: the resume state knows the part by it."""
    fingerprint: str
    """Changes whenever the text does."""
    size_bytes: int
    """About how much text it is."""
    path: Path

    def texts(self) -> Iterator[str]:
        """The documents, from the first."""
        raise NotImplementedError


@dataclass(frozen=True)
class ShardPart(TextPart):
    """The records of one shard of the corpus, or of a range of its lines where it is plain JSON lines."""

    source: str
    share: Fraction
    byte_range: tuple[int, int] | None
    """First byte, and the byte after the last; both at line borders. None reads the whole shard."""
    template: str = records.TITLE_AND_TEXT
    """How its records become training text."""

    def texts(self) -> Iterator[str]:
        """The text of every record that the share takes."""
        for record in self._records():
            text = records.training_text(record, self.template)
            if belongs(text, self.share):
                yield text

    def _records(self) -> Iterator[dict[str, Any]]:
        if self.byte_range is None:
            yield from records.READERS[self.path.name.partition(".")[2]](self.path, self.source)
            return
        place, end = self.byte_range
        with open(self.path, "rb") as file:
            file.seek(place)
            while place < end and (line := file.readline()):
                yield records.record_of_line(line, self.path, f"the line at byte {place}")
                place += len(line)


@dataclass(frozen=True)
class FilePart(TextPart):
    """A byte range of a plain text file. A byte that is not UTF-8 becomes a lone surrogate, which every trainer turns
    into U+FFFD and counts."""

    byte_range: tuple[int, int]

    def texts(self) -> Iterator[str]:
        """The text in blocks of whole lines that teach what the whole file would (see `_safe_end`)."""
        place, end = self.byte_range
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


@dataclass(frozen=True)
class SpooledPart(TextPart):
    """Texts in a file of ours, each after its length in bytes. Lone surrogates survive, to be counted later."""

    def texts(self) -> Iterator[str]:
        """The texts, from the first."""
        with open(self.path, "rb") as file:
            while head := file.read(LENGTH_BYTES):
                size = int.from_bytes(head, "little")
                data = file.read(size)
                if len(data) < size:
                    raise BadInputError(f"{self.path} ends too early. Delete its folder and start the training again.")
                yield data.decode("utf-8", "surrogatepass")


def corpus_parts(
    corpus: Path, take: Mapping[str, str] | str | None, part_bytes: int = PART_BYTES
) -> tuple[list[ShardPart], dict[str, dict[str, Any]]]:
    """The training split of every source that is taken, in parts; and, by source, what is taken of it."""
    sources = records.corpus_sources(corpus)
    sizes = {name: _train_bytes(manifest["report"]) for name, manifest in sources.items()}
    chosen = shares(take, sizes)
    parts: list[ShardPart] = []
    for source, manifest in sources.items():
        share, template = chosen[source], records.text_template(manifest)
        unusual = [] if template == records.TITLE_AND_TEXT else [template]
        files = {name: facts for name, facts in manifest["files"].items() if name.startswith("train/part-")}
        disk_bytes = sum(facts["bytes"] for facts in files.values())
        for name, facts in sorted(files.items()):
            path = corpus / source / name
            for byte_range in _shard_ranges(path, facts["bytes"], part_bytes) if share else []:
                start, end = byte_range or (0, facts["bytes"])
                part_name = f"{source}/{name}" if byte_range is None else f"{source}/{name}@{start}"
                print_of_it = fingerprint([facts, str(share), byte_range, *unusual])
                size = int(sizes[source] * (end - start) / max(1, disk_bytes) * share)
                parts.append(ShardPart(part_name, print_of_it, size, path, source, share, byte_range, template))
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


def require_text_files(paths: Sequence[Path]) -> None:
    """An error for the first path that is no file."""
    for path in paths:
        if path.is_dir():
            raise BadInputError(
                f"{path} is a folder. --text takes files of plain text, such as --text {path}/*.txt. For a folder of "
                f"raw files use `z2a corpus build NAME={path}`, then `z2a tokenizer train`."
            )
        if not path.is_file():
            raise BadInputError(f"The text file {path} does not exist. Give files of plain text with --text.")


def file_parts(paths: Sequence[Path], part_bytes: int = PART_BYTES) -> list[FilePart]:
    """Plain text files, in parts."""
    require_text_files(paths)
    parts = []
    for path in paths:
        size = path.stat().st_size
        crc = crc32c_of(path)
        for byte_range in _file_ranges(path, size, part_bytes):
            name = f"{path}@{byte_range[0]}"
            print_of_it = fingerprint([crc, size, byte_range])
            parts.append(FilePart(name, print_of_it, byte_range[1] - byte_range[0], path, byte_range))
    return parts


def parts_from_texts(texts: Iterable[str], scratch: Path, part_bytes: int = PART_BYTES) -> list[SpooledPart]:
    """Write `texts` to files under `scratch`, in parts of about `part_bytes`: training reads its text several times."""
    scratch.mkdir(parents=True, exist_ok=True)
    parts: list[SpooledPart] = []
    left = iter(texts)
    text = next(left, None)
    while text is not None:
        path = scratch / f"texts-{len(parts):05d}.spool"
        digest = hashlib.sha256()
        size = 0
        with open(path, "wb") as file:
            while text is not None and size < part_bytes:
                data = text.encode("utf-8", "surrogatepass")
                record = len(data).to_bytes(LENGTH_BYTES, "little") + data
                file.write(record)
                digest.update(record)
                size += len(data)
                text = next(left, None)
            file.flush()
            os.fsync(file.fileno())
        parts.append(SpooledPart(path.name, digest.hexdigest()[:16], size, path))
    return parts


def _train_bytes(report: dict[str, Any]) -> int:
    """About how much text of a source is in its training split."""
    return int(report["bytes_kept"] * report["train_records"] / max(1, report["records_kept"]))


def _shard_ranges(path: Path, size: int, part_bytes: int) -> list[tuple[int, int] | None]:
    """Where the parts of a shard begin and end; formats other than JSON lines are read whole."""
    if path.name.partition(".")[2] != "jsonl" or size <= part_bytes:
        return [None]
    borders = [0]
    with open(path, "rb") as file:
        while borders[-1] + part_bytes < size:
            file.seek(borders[-1] + part_bytes - 1)
            file.readline()
            borders.append(file.tell())
    return [byte_range for byte_range in pairwise([*borders, size]) if byte_range[0] < byte_range[1]]


def _file_ranges(path: Path, size: int, part_bytes: int) -> list[tuple[int, int]]:
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
    """The last place (or the first) where a line ends and no white space follows, so that no pretoken crosses it; 0
    where there is none. `look_from`: earlier bytes are known to have none."""
    place = block.find(b"\n") if first else block.rfind(b"\n", max(0, look_from - 5))
    while place != -1:
        following = block[place + 1 : place + 5].decode("utf-8", "ignore")[:1]
        if following and not following.isspace():
            return place + 1
        place = block.find(b"\n", place + 1) if first else block.rfind(b"\n", max(0, look_from - 5), place)
    return 0
