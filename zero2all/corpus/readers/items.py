"""What readers give (rows, damaged items), what they are told (limits) and the pieces of work they accept (units)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from zero2all.corpus.listing import UNREADABLE, InputFile

EXCERPT_CHARS = 200
FINISHED = -1
"""As the last number of a cursor: nothing is left of this file or archive member."""

Cursor = list[int]
"""Where reading goes on behind an item: archive entry numbers, outermost first, then a position. Opaque to callers."""

OnBytes = Callable[[int], None]
OnSkip = Callable[[str, str], None]
"""Told (reason, name) of every archive member that holds nothing to read."""


class Format(StrEnum):
    """What a file holds. Those in NOT_READ are not read; their names are the reasons in the report."""

    JSON_LINES = "json lines"
    JSON_ARRAY = "json array"
    JSON_OBJECT = "json object"
    PARQUET = "parquet"
    CSV = "csv"
    TEXT = "text"
    HTML = "html"
    XML = "xml document"
    LATEX = "latex"
    PDF = "pdf"
    WARC = "warc"
    MEDIAWIKI = "mediawiki dump"
    ARCHIVE = "archive"
    EMPTY = "empty"
    BINARY = "binary"
    COMPRESSED = "compressed in an unknown way"
    NEEDS_LIBARCHIVE = "needs libarchive"
    NEEDS_PYPDF = "needs pypdf"
    UNREADABLE = UNREADABLE


NOT_READ = frozenset(
    {Format.EMPTY, Format.BINARY, Format.COMPRESSED, Format.NEEDS_LIBARCHIVE, Format.NEEDS_PYPDF, Format.UNREADABLE}
)
DOCUMENTS = frozenset({Format.HTML, Format.XML, Format.LATEX, Format.PDF})
"""One document a file, made of its markup."""


class TextBy(StrEnum):
    """What one document of a plain text is. Program text is always one document a file."""

    AUTO = "auto"
    """The file; above `split_text_above_bytes`, documents of 1 to 4 `text_piece_bytes`, best cut at blank lines."""
    LINE = "line"
    BLANK_LINE = "blank line"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Sizes the readers must respect, and how plain text is cut."""

    max_record_bytes: int = 32_000_000
    """A larger item goes to quarantine without being held in memory."""
    split_text_above_bytes: int = 1_000_000
    """With `text_by` auto, a plain text above this size is cut into documents …"""
    text_piece_bytes: int = 8_000
    """… at the first blank line behind this many bytes, and of four times as many at most."""
    unit_bytes: int = 64 << 20
    """A file that can be split is split into units of about this many bytes on disk."""
    text_by: TextBy = TextBy.AUTO
    """What one document of a plain text is."""
    text_block_bytes: int = 1 << 20
    """A long text is also cut at the first line end behind every multiple of this, so that units never change it."""
    max_ratio: float = 200.0
    """A compressed stream that grows by more than this is refused as a bomb …"""
    ratio_from_bytes: int = 100_000_000
    """… once it has given this many bytes."""
    max_nesting: int = 5
    """Layers of compression and archives inside one another that are opened (tar.gz: 2)."""
    encoding: str | None = None
    """That of every file which is not UTF-8 and has no byte order mark. None: found file by file."""
    chats: bool = False
    """Rows that are a message each are joined to conversations (see `chats`)."""
    max_spool_bytes: int = 16_000_000_000
    """A parquet, zip, 7z or rar file inside a compressed stream is copied to a nameless temporary file up to this size,
    since it cannot be read from front to back."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of work: a whole file, or a part of one that a worker can read alone."""

    file: InputFile
    number: int
    """Position of this unit within its file, or from the number `plan_units` was told to start with."""
    format: Format
    """`ARCHIVE` where every member has its own; one of NOT_READ where there is nothing to read, and `note` says why."""
    encoding: str = "utf-8"
    bom_bytes: int = 0
    """Length of the byte order mark at the beginning of the file."""
    compression: str = ""
    """`gzip`, `zstd`, `tar`, `zip` …, outermost first: `gzip tar`. Empty: plain."""
    start: int = 0
    """First byte in the file (plain), first row group (parquet) or first entry (zip)."""
    end: int | None = None
    """Where the next unit starts. None: to the end of the file."""
    raw_bytes: int = 0
    """How much of the file it stands for; the units of a file add up to its size."""
    first_row: int = 0
    """Rows of a parquet file that stand before this unit."""
    header: tuple[str, ...] = ()
    """Column names of a CSV file."""
    has_header: bool = False
    """They are the first row of the file."""
    delimiter: str = ""
    """Between the fields of a CSV file."""
    first_key: str | None = None
    """First key of the first object of a JSON array: where reading goes on behind damage."""
    mapping: Mapping[str, str] | None = None
    """Record field -> raw field as found in the first rows of a file of several units; empty when nothing was found
    there. None: the reader of the unit looks."""
    note: str = ""
    """For the user: why the file is not split, or not read."""


@dataclass(eq=False, slots=True)
class ItemOrigin:
    """Where items come from: shared by all items of one file or archive member."""

    file: str
    """Name of the input file within its source."""
    member: str
    """Name within the archive, empty outside archives."""
    format: Format
    encoding: str = "utf-8"
    """As it was found."""
    data: str = "utf-8"
    """Of the bytes readers see and positions count: the same, or UTF-8 where the data is converted on its way."""
    path: tuple[int, ...] = ()
    """Archive entry numbers: the beginning of every cursor."""
    is_code: bool = False
    """Program text by its name."""
    is_misnamed: bool = False
    """Plain text, though its name says JSON."""
    counts: str = "byte"
    """What positions count: `byte` or `row`."""

    @property
    def name(self) -> str:
        """The file, or `archive/member`."""
        return f"{self.file}/{self.member}" if self.member else self.file

    def place(self, at: int) -> str:
        """A position in words. Positions in compressed or converted data count bytes of the plain UTF-8 data."""
        words = f"row {at + 1}" if self.counts == "row" else f"byte {at}"
        return f"{self.member}, {words}" if self.member else words

    def damaged(self, at: int, end: int, reason: str, detail: str, raw_bytes: int, data: bytes = b"") -> Damaged:
        """A damaged item that starts at `at`; reading goes on at `end`."""
        cursor = [*self.path, end]
        return Damaged(self.place(at), reason, detail[:EXCERPT_CHARS], raw_bytes, excerpt_of(data), False, self, cursor)


@dataclass(slots=True)
class RawRow:
    """One item as the file gave it."""

    fields: dict[str, Any]
    origin: ItemOrigin
    at: int
    """Where it starts, counted as `origin.counts` says."""
    end: int
    """Where reading goes on behind it."""
    is_document: bool = False
    """True when the reader made the document itself (plain text): fields are then `content`, `title`, `others`."""
    line_start: int | None = None
    """Of a document that ends inside a line: where that line started."""
    replaced: int = 0
    """Of a document that the reader made: characters that could not be decoded and are U+FFFD now."""

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        return self.origin.place(self.at)

    @property
    def raw_bytes(self) -> int:
        """How many bytes of plain data it took; 0 for a parquet row."""
        return self.end - self.at if self.origin.counts == "byte" and self.end != FINISHED else 0

    @property
    def cursor(self) -> Cursor:
        """From where reading goes on behind this item."""
        cursor = [*self.origin.path, self.end]
        return cursor if self.line_start is None else [*cursor, self.line_start]


@dataclass(frozen=True, slots=True)
class Damaged:
    """One item that could not be read."""

    place: str
    reason: str
    detail: str
    raw_bytes: int
    excerpt: str = ""
    ends_file: bool = False
    """True when nothing behind this place could be read; `raw_bytes` then reaches to the end where that is known."""
    origin: ItemOrigin | None = None
    cursor: Cursor | None = None
    """From where reading goes on behind this item; None when it did not come from a reader."""

    def to_the_end(self) -> Damaged:
        """The same, when nothing behind it in its file can be read."""
        assert self.origin is not None, "a damaged item of a file has an origin"
        return replace(self, ends_file=True, cursor=[*self.origin.path, FINISHED])


Items = Iterator[RawRow | Damaged]


def too_large(origin: ItemOrigin, at: int, size: int, limit: int, data: bytes) -> Damaged:
    """An item above `max_record_bytes`."""
    detail = f"{size:,} bytes; max_record_bytes is {limit:,}"
    return origin.damaged(at, at + size, "too_large", detail, size, data[:limit])


def wrong_encoding(
    origin: ItemOrigin, at: int, end: int, data: bytes, error: UnicodeDecodeError, more: str = ""
) -> Damaged:
    """An item with bytes that its encoding does not have."""
    detail = f"byte 0x{data[error.start]:02x} at {error.start} of {len(data)} is not {origin.encoding}"
    if origin.data != origin.encoding:
        detail = f"something at {error.start} of {len(data)} bytes of UTF-8 was not {origin.encoding}"
    detail += more
    near = data[max(0, error.start - EXCERPT_CHARS // 2) :]
    reason = f"not_{origin.encoding.replace('-', '')}"
    return replace(origin.damaged(at, end, reason, detail, end - at, near), place=origin.place(at + error.start))


def excerpt_of(data: bytes) -> str:
    """The first characters of raw data, readable whatever it holds."""
    return data[: EXCERPT_CHARS * 4].decode("utf-8", errors="backslashreplace")[:EXCERPT_CHARS]


def first_line_of(error: BaseException) -> str:
    """An error in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:EXCERPT_CHARS]


def suffix_of(name: str) -> str:
    """`.txt` of `a/b.TXT`; empty when the last part of the name has none."""
    last = name.rsplit("/", 1)[-1]
    dot = last.rfind(".")
    return last[dot:].lower() if dot > 0 else ""
