"""Rows of a benchmark's files: CSV, JSON, JSON lines and parquet, plain, gzipped or inside a zip or tar.

The split of a file is the last of the words train, dev, val, test in its path: `dev/anatomy.csv`, `c3-d-test.json`,
`ARC-Easy/train-00000-of-00001.parquet`.
"""

import csv
import functools
import gzip
import io
import itertools
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.evals.items import (
    DUPLICATE,
    FORMS,
    GOLD_OUTSIDE,
    MISSING_COLUMN,
    NO_ANSWER,
    NOT_READABLE,
    Item,
    ItemError,
    Task,
    check_item,
)

SPLIT_WORDS = {"train": "train", "dev": "dev", "test": "test", "val": "val", "valid": "val", "validation": "val"}
SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
ARCHIVE_ERRORS = (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError)
NOT_DATA = ("benchmark.json", "dataset_infos.json")
"""What `z2a eval download` and hubs write about a data set, beside it."""
LARGEST_BYTES = 2_000_000_000
"""No file of a benchmark is larger: a larger one, or a zip bomb, is refused rather than read into memory."""


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, perhaps inside an archive."""

    folder: Path
    name: str
    """Its path below the folder, or inside the archive."""
    archive: str = ""
    """The path of the zip or tar below the folder."""

    @property
    def stem(self) -> str:
        """The name without folders and suffixes."""
        return self.name.rpartition("/")[2].partition(".")[0]

    @property
    def suffix(self) -> str:
        """Its kind: `.jsonl` also for `x.jsonl.gz`."""
        return Path(self.name.removesuffix(".gz")).suffix.lower()

    @property
    def split(self) -> str:
        """train, dev, val or test; empty where the name does not say."""
        words = [word for word in re.split(r"[^a-z]+", self.name.lower()) if word in SPLIT_WORDS]
        return SPLIT_WORDS[words[-1]] if words else ""

    def __str__(self) -> str:
        return f"{self.archive}/{self.name}" if self.archive else self.name

    def read(self) -> bytes:
        """The content."""
        try:
            data = self._raw()
            if self.name.endswith(".gz"):
                with gzip.open(io.BytesIO(data)) as packed:
                    data = packed.read(LARGEST_BYTES + 1)
        except (*ARCHIVE_ERRORS, RuntimeError) as error:
            raise BadInputError(
                f"{self.folder / str(self)} cannot be read: {error}. Copy or fetch the data set again."
            ) from error
        if len(data) > LARGEST_BYTES:
            raise BadInputError(f"{self.folder / str(self)} is larger than {LARGEST_BYTES:,} bytes: no benchmark is.")
        return data

    def _raw(self) -> bytes:
        if not self.archive:
            with open(self.folder / self.name, "rb") as file:
                return file.read(LARGEST_BYTES + 1)
        if self.archive.lower().endswith(".zip"):
            with zipfile.ZipFile(self.folder / self.archive) as archive, archive.open(self.name) as member:
                return member.read(LARGEST_BYTES + 1)
        return _tar_contents(self.folder / self.archive)[self.name]


def data_files(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[DataFile]:
    """The files of these kinds below the folder, in the order of their names; not hidden ones and NOT_DATA. Archives
    are looked into where there is none: many people unpack one and keep it."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    found = [DataFile(folder, name) for name in names if not _is_hidden(name)]
    archives = [file.name for file in found if file.name.lower().endswith(ARCHIVES)]
    found = [file for file in found if file.suffix in suffixes]
    for archive in archives if not found else ():
        members = [DataFile(folder, name, archive) for name in _members(folder / archive) if not _is_hidden(name)]
        found += [file for file in members if file.suffix in suffixes]
    return found


def _members(path: Path) -> list[str]:
    """The files in an archive."""
    try:
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as archive:
                return sorted(name for name in archive.namelist() if not name.endswith("/"))
        return sorted(_tar_contents(path))
    except ARCHIVE_ERRORS as error:
        raise BadInputError(f"{path} is not a complete archive ({error}). Copy or fetch it again.") from error


@functools.lru_cache(maxsize=1)
def _tar_contents(path: Path) -> dict[str, bytes]:
    """All files of a tar at once: to reach one, everything before it must be unpacked."""
    contents: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)) is not None:
                contents[member.name] = file.read(LARGEST_BYTES + 1)
            if sum(map(len, contents.values())) > LARGEST_BYTES:
                raise OSError(f"more than {LARGEST_BYTES:,} bytes are in it: no benchmark is so large")
    return contents


def _is_hidden(name: str) -> bool:
    parts = name.split("/")
    return any(part.startswith(".") or part == "__MACOSX" for part in parts) or parts[-1] in NOT_DATA


Rows = Iterator[tuple[int, Any | ItemError]]
"""(number from 1, the row: a mapping, or whatever a JSON list has) or why it cannot be read."""


def rows_of(file: DataFile, header: Sequence[str] | None = None) -> Rows:
    """The rows of a file. `header`: names of the columns of a CSV without a first line of names."""
    data = file.read()
    if file.suffix == ".parquet":
        yield from _parquet_rows(data, file)
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{file.folder / str(file)} is not UTF-8 ({error}). Convert it: iconv -f GB18030 -t UTF-8."
        ) from error
    if file.suffix == ".csv":
        yield from _csv_rows(text, header)
    elif file.suffix == ".txt":
        yield from ((number, {"question": line}) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    else:
        yield from (_json_rows if file.suffix == ".json" else _line_rows)(text)


def _csv_rows(text: str, header: Sequence[str] | None) -> Rows:
    reader = csv.reader(io.StringIO(text, newline=""))
    names = list(header) if header else [name.strip() for name in next(reader, [])]
    for number in itertools.count(1):
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, ItemError(NOT_READABLE, f"this is not CSV: {error}")
            continue
        if not cells:
            continue
        if len(cells) > len(names):
            yield number, ItemError(NOT_READABLE, f"it has {len(cells)} cells for {len(names)} columns")
            continue
        yield number, dict(zip(names, cells, strict=False))


def _json_rows(text: str) -> Rows:
    try:
        whole = jsonio.loads(text)
    except ValueError:
        yield from _line_rows(text)  # some hubs name JSON lines `.json`
        return
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        whole = whole["data"]
    yield from enumerate(whole if isinstance(whole, list) else [whole], 1)


def _line_rows(text: str) -> Rows:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, jsonio.loads(line)
        except ValueError as error:
            yield number, ItemError(NOT_READABLE, f"this is not JSON: {error}")


def _parquet_rows(data: bytes, file: DataFile) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(pyarrow.BufferReader(data), use_threads=False).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadInputError(
            f"{file.folder / str(file)} is not a complete parquet file ({error}). Copy or fetch it again."
        ) from error
    yield from enumerate(rows, 1)


def cell(row: Any, *names: str) -> Any:
    """The first of these columns that the row has; an ItemError where it has none."""
    if not isinstance(row, Mapping):
        raise ItemError(NOT_READABLE, f"the row is a {type(row).__name__}, not an object with {names[0]}")
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ItemError(MISSING_COLUMN, f"it has no {names[0]}; its fields are {', '.join(map(str, row)) or 'not given'}")


def text(row: Any, *names: str) -> str:
    """The same, as text without spaces around it."""
    return str(cell(row, *names)).strip()


# What the readers of all benchmarks have in common: which split is asked, which gives examples, what is left out.


ReadRow = Callable[[Any, DataFile], Iterable[Item | ItemError]]
"""The items of a row (their ids may be empty), or why one of them, or the row, cannot be used."""


@dataclass(frozen=True)
class Reader:
    """How one benchmark is read from a folder."""

    name: str
    language: str
    read_row: ReadRow
    items: tuple[str, ...]
    """Splits to ask, of which the first that is there is taken; an empty name: files that name no split."""
    shots: tuple[str, ...] = ()
    """Splits with examples, likewise."""
    forms: tuple[str, ...] = FORMS
    default_shots: int = 5
    header: tuple[str, ...] | None = None
    """Columns of CSV files without a first line of names."""
    rows: Callable[[DataFile, Sequence[str] | None], Iterable[tuple[int, Any]]] = rows_of
    suffixes: tuple[str, ...] = SUFFIXES
    choose: Callable[[list[DataFile]], list[DataFile]] = list
    """Of the files that are there, those of this benchmark."""
    is_own: bool = False
    """A person's own set, which no hub has."""

    def read(self, folder: Path) -> Task:
        """The task; items that cannot be used are named and counted, a folder without any is an error."""
        files = self.choose(data_files(folder, self.suffixes))
        splits = {file.split for file in files}
        asked = next((split for split in self.items if split in splits), None)
        if asked is None:
            wanted = " or ".join(split or "a name without a split" for split in self.items)
            hint = "Check the folder." if self.is_own else f"See `z2a eval download {self.name}`."
            raise BadInputError(
                f"{folder} has no items of {self.name}: expected files ({', '.join(self.suffixes)}) of the split "
                f"{wanted}, found {', '.join(map(str, files[:8])) or 'none'}. {hint}"
            )
        items, problems, counts = self._read([file for file in files if file.split == asked])
        if not items:
            reasons = "; ".join(problems[:3]) or "the files are empty"
            raise BadInputError(f"{folder} has no item of {self.name} that can be asked: {reasons}.")
        examples = next((split for split in self.shots if split in splits - {asked}), None)
        shots, _, _ = self._read([file for file in files if file.split == examples and examples is not None])
        shot_ids = tuple(replace(shot, id=f"{examples}/{shot.id}") for shot in shots)
        return Task(
            self.name, self.language, tuple(items), shot_ids, self.forms, counts, tuple(problems), self.default_shots
        )

    def _read(self, files: Iterable[DataFile]) -> tuple[list[Item], list[str], Mapping[str, int]]:
        items: dict[str, Item] = {}
        problems: list[str] = []
        counts: Counter[str] = Counter()
        for file in files:
            for number, row in self.rows(file, self.header):
                for place, found in enumerate(self._row(row, file)):
                    # A row may hold several questions; one without an id of its own is named after its place.
                    place_name = f"{file.stem}:{number}{f'.{place + 1}' if place else ''}"
                    try:
                        if isinstance(found, ItemError):
                            raise found
                        item = check_item(found if found.id else replace(found, id=place_name))
                        if item.id in items:
                            raise ItemError(DUPLICATE, f"there is another item {item.id}")
                        items[item.id] = item
                    except ItemError as error:
                        counts[error.reason] += 1
                        problems.append(f"{file} row {number}: {error}")
        return list(items.values()), problems, dict(counts)

    def _row(self, row: Any, file: DataFile) -> Iterable[Item | ItemError]:
        if isinstance(row, ItemError):
            return [row]
        try:
            return list(self.read_row(row, file))
        except ItemError as error:
            return [error]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return [ItemError(NOT_READABLE, f"its format is not that of {self.name} ({error!r})")]


def with_choices(question: str, choices: Iterable[str], gold: int, **more: Any) -> Item:
    """An item with options, its answer filled in; an ItemError where the right one is not among them."""
    texts = tuple(choice.strip() for choice in choices)
    if not 0 <= gold < len(texts):
        raise ItemError(GOLD_OUTSIDE, f"the right answer is number {gold} (from 0) of {len(texts)} options")
    return Item("", question, texts, gold, texts[gold], **more)


def gold_of(label: str, labels: Sequence[str]) -> int:
    """The place of a label such as B among those of the options."""
    if not label:
        raise ItemError(NO_ANSWER, "it has no right answer")
    if label not in labels:
        raise ItemError(GOLD_OUTSIDE, f"the right answer is {label}; the options are {', '.join(labels)}")
    return list(labels).index(label)
