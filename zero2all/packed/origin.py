"""Where a document came from: packed document -> corpus record -> raw file.

A record's gid is its source's number x 2^40 + the ordinal of the item in that source, counting what was dropped. The
corpus keeps `<source>/origins.jsonl`, one line for each stretch of items from one file: `first`, the ordinal of its
first item, and `file`. So the raw file and the place in it follow.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.files import MANIFEST_NAME, as_written, read_json
from zero2all.common.records import ORIGINS_NAME, READERS

ORDINAL_BITS = 40


@dataclass(frozen=True)
class Origin:
    """What is known of where a document came from."""

    gid: int
    ordinal: int
    """Of the item in its source, from 0."""
    part: Path | None
    """The corpus shard that holds the record."""
    title: str
    file: str | None
    """The raw file."""
    item: int | None
    """Which item of that file, from 0."""
    files: int
    """How many raw files the source has; where `file` is None, it is one of them."""
    path: str
    """What the source was built from."""

    def in_words(self) -> str:
        """In a line."""
        where = f"item {self.ordinal:,} of the {self.files:,} files of {self.path}"
        if self.file is not None and self.item is not None:
            where = f"{self.file}, item {self.item:,}"
        record = f"; {'/'.join(self.part.parts[-3:])}" if self.part is not None else ""
        return f"{where}{record}; gid {self.gid}"


class Origins:
    """Finds origins in one corpus."""

    def __init__(self, corpus: Path) -> None:
        self._corpus = corpus
        self._manifest = cache(self._read_manifest)
        self._listed = cache(self._read_list)

    def find(self, source: str, split: str, gid: int) -> Origin | None:
        """The origin of a document of `source`; None when the corpus is not here or no longer the same."""
        with as_written(self._corpus / source, "Run `z2a corpus build` again."):
            return self._find(source, split, gid)

    def _find(self, source: str, split: str, gid: int) -> Origin | None:
        manifest = self._manifest(source)
        if not manifest or manifest.get("number") != gid >> ORDINAL_BITS:
            return None
        ordinal = gid & ((1 << ORDINAL_BITS) - 1)
        files = int(manifest.get("report", {}).get("input_files", 0))
        path = str(manifest.get("path", "?"))
        file, item = self._raw_file(source, ordinal, files, path)
        part, title = self._record(source, split, gid)
        return Origin(gid, ordinal, part, title, file, item, files, path)

    def _read_manifest(self, source: str) -> dict[str, Any]:
        path = self._corpus / source / MANIFEST_NAME
        return read_json(path) if path.exists() else {}

    def _raw_file(self, source: str, ordinal: int, files: int, path: str) -> tuple[str | None, int | None]:
        firsts, names = self._listed(source)
        stretch = bisect_right(firsts, ordinal) - 1
        if stretch >= 0:
            name = names[stretch]
            earlier = [n for n in range(stretch) if names[n] == name]  # stretches of the same file
            before = sum(firsts[n + 1] - firsts[n] for n in earlier)
            folder, _, last = path.rpartition("/")
            is_one_file = files == 1 and name.split("/")[0] == last  # then the list names it, and not what is below it
            return f"{folder if is_one_file else path}/{name}", before + ordinal - firsts[stretch]
        return (path, ordinal) if files == 1 else (None, None)

    def _read_list(self, source: str) -> tuple[list[int], list[str]]:
        path = self._corpus / source / ORIGINS_NAME
        rows = [jsonio.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        return [row["first"] for row in rows], [row["file"] for row in rows]

    def _record(self, source: str, split: str, gid: int) -> tuple[Path | None, str]:
        """The shard that holds a record, and its title; records stand in the order of their gids."""
        for part in sorted((self._corpus / source / split).glob("part-*"), reverse=True):
            reader = READERS.get(part.name.partition(".")[2])
            if reader is None or part.suffix == ".txt":
                continue
            first = next(iter(reader(part, source)), None)
            if first is not None and first["gid"] <= gid:
                return part, self._title(part, source, gid)
        return None, ""

    def _title(self, part: Path, source: str, gid: int) -> str:
        if part.suffix == ".jsonl":
            start = b'{"gid":%d,' % gid
            with open(part, "rb") as file:
                found = next((line for line in file if line.startswith(start)), None)
            return str(jsonio.loads(found)["title"]) if found else ""
        records = READERS[part.name.partition(".")[2]](part, source)
        return next((str(record["title"]) for record in records if record["gid"] == gid), "")
