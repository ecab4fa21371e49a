"""What a file holds, by its beginning; the name settles only what the content leaves open."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import NamedTuple

from zero2all.common import jsonio
from zero2all.corpus.listing import CODE_SUFFIXES
from zero2all.corpus.readers.encodings import BINARY, find_encoding
from zero2all.corpus.readers.items import Format, suffix_of

HEAD_BYTES = 1 << 16
SNIFFED_ROWS = 200
EVEN_SHARE = 0.5
"""A file named as a table may have broken rows near its beginning."""
JSON_LINE_SHARE = 0.2
"""A file named as JSON that does not begin with it is JSON lines when a larger share of its lines is JSON."""

JSON_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson", ".jsonlines"})
CSV_SUFFIXES = frozenset({".csv", ".tsv", ".tab", ".psv"})
PROSE_SUFFIXES = frozenset({".md", ".rst", ".log", ".srt"})
PAGE_SUFFIXES = frozenset({".html", ".htm", ".xhtml", ".xht"})
XML_ROOTS = re.compile(
    r"book|article|chapter|part|section|sect1|refentry|reference|appendix|preface|set|glossary|FictionBook|w:document|"
    r"office:document-content|pmc-articleset"
)
"""DocBook, JATS (articles of journals), FictionBook, Word, OpenDocument."""
_ROOT = re.compile(
    rb"(?>\s+|<\?.*?\?>|<!--.*?-->|<!doctype[^\[>]*(?>\[.*?\]\s*)?>)*+<([\w:.-]+)", re.DOTALL | re.IGNORECASE
)
_HTML = re.compile(rb"\s*<!doctype\s+html", re.IGNORECASE)
TEXT_OF_BOOK = {".epub": r".*\.x?html?", ".docx": r"word/document\.xml", ".odt": r"content\.xml"}
"""Zip files with their text in some members: which they are."""
DOCUMENT_SUFFIXES = frozenset({".xlsx", ".pptx", ".ods", ".odp", ".jar", ".apk", ".npz", ".pt", ".pth"})
"""Zip files inside, but what they hold is no set of texts."""
OFFICE_SUFFIXES = frozenset({".doc", ".rtf", ".wps", ".xls", ".ppt", ".xlsx", ".pptx", ".ods", ".odp"})
STREAMS = {"gzip": ".gz .gzip .tgz", "bzip2": ".bz2 .tbz .tbz2", "xz": ".xz .txz", "zstd": ".zst .zstd .tzst"}
ARCHIVES = frozenset({"tar", "zip", "7z", "rar"})
# fmt: off
TEXT_FIELDS = frozenset({
    "text", "content", "body", "article", "answer", "response", "output", "instruction", "question", "prompt",
    "sentence", "document", "review", "comment", "内容", "正文", "文本", "文章", "评论", "回答",
})
# fmt: on

_TEMPLATES = (b"{{", b"{%", b"{#")
_OBJECT_START = re.compile(rb"\{\s*[\"'}]")
_JSON_ARRAY = re.compile(rb'\[\s*(?:[{\[\]"\d-]|true|false|null|$)')
_ARRAY_START = re.compile(rb'\[\s*(\{\s*["}]|"(?:[^"\\]|\\.)*"\s*[,\]]|\]\s*$)')
_FIRST_KEY = re.compile(rb'\[\s*\{\s*"((?:[^"\\]|\\.)*)"\s*:')
_OTHER_COMPRESSION = (b"\x04\x22\x4d\x18", b"\x1f\x9d", b"LZIP", b"\x89LZO")
_HEADER_FIELD = re.compile(r"[^\W\d][\w \-./()#]{0,39}")
_FIGURES = re.compile(r"[\d\s.,:/%+eETZ$€¥£-]*")
ZIP_STARTS = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
HEADER_CHARS = 60
"""A name in a header is not longer."""
LONG_CELL = 40
"""Characters of most cells of a column that holds texts."""


class SniffedFormat(NamedTuple):
    """What the beginning of a file says about it."""

    format: Format
    encoding: str = "utf-8"
    bom_bytes: int = 0
    delimiter: str = ""
    header: tuple[str, ...] = ()
    has_header: bool = False
    """The header is the first line of the file; otherwise the columns got names from us."""
    first_key: str | None = None


def container_of(head: bytes, name: str) -> str:
    """The compression or archive a file is in: a key of STREAMS, one of ARCHIVES, or nothing."""
    if head.startswith(b"\x1f\x8b\x08"):
        return "gzip"
    if head.startswith(b"BZh") and head[4:10] in (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90"):
        return "bzip2"
    if head.startswith(b"\xfd7zXZ\0"):
        return "xz"
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    if head.startswith(ZIP_STARTS):
        return "" if suffix_of(name) in DOCUMENT_SUFFIXES else "zip"
    if head.startswith(b"7z\xbc\xaf\x27\x1c"):
        return "7z"
    if head.startswith(b"Rar!\x1a\x07"):
        return "rar"
    return "tar" if _is_tar(head) else ""


def _is_tar(head: bytes) -> bool:
    if len(head) < 512 or not head[148:156].strip(b" \0").isdigit():
        return False
    if head[257:262] == b"ustar":
        return True
    stated = head[148:156].strip(b" \0")
    try:
        return int(stated, 8) == sum(head[:148]) + 8 * 32 + sum(head[156:512])
    except ValueError:
        return False


def has_pypdf() -> bool:
    """Whether PDF can be read here."""
    return find_spec("pypdf") is not None


def advice(format_: Format, name: str) -> str:
    """What to do about a file that is not read."""
    if format_ is Format.NEEDS_PYPDF:
        return "reading pdf needs pypdf: pip install 'zero2all[pdf]'"
    if format_ is Format.BINARY and suffix_of(name) in OFFICE_SUFFIXES:
        return "convert it first, for example: libreoffice --headless --convert-to docx FILE (csv for a sheet)"
    return ""


def inner_name(name: str, compression: str) -> str:
    """`a.jsonl` for `a.jsonl.gz`, `a.tar` for `a.tgz`."""
    suffix = suffix_of(name)
    if suffix not in STREAMS[compression].split():
        return name
    return name[: -len(suffix)] + (".tar" if suffix.startswith(".t") else "")


def sniff(
    head: bytes, name: str, whole: bool | None = None, sample: bytes = b"", named: str | None = None
) -> SniffedFormat:
    """What a file that starts with `head` (up to 64 KB) and has this name or ending holds.

    `sample`: text from further inside, for the encoding of a file that begins in ASCII. `whole`: the head is all.
    `named`: the encoding the user gave.
    """
    whole = len(head) < HEAD_BYTES if whole is None else whole
    suffix = suffix_of(name) or (name.lower() if name.startswith(".") else "")
    if not head:
        return SniffedFormat(Format.EMPTY)
    if head.startswith(b"%PDF-"):
        return SniffedFormat(Format.PDF if has_pypdf() else Format.NEEDS_PYPDF)
    if head.startswith(ZIP_STARTS) and suffix in DOCUMENT_SUFFIXES:  # one without compression looks like text
        return SniffedFormat(Format.BINARY)
    if head.startswith(b"PAR1"):
        return SniffedFormat(Format.PARQUET)
    if head.startswith(_OTHER_COMPRESSION):
        return SniffedFormat(Format.COMPRESSED)
    if container_of(head, name):
        return SniffedFormat(Format.ARCHIVE)
    encoding, bom_bytes = find_encoding(head, whole, named)
    if encoding == "utf-8" and sample and head.isascii():
        encoding = find_encoding(sample, whole=False, named=named)[0]
    if encoding == BINARY:
        return SniffedFormat(Format.BINARY)
    text = head[bom_bytes:]
    if encoding != "utf-8":
        text = text.decode(encoding, errors="ignore").encode()
    return _sniff_text(text, suffix, whole)._replace(encoding=encoding, bom_bytes=bom_bytes)


def _sniff_text(text: bytes, suffix: str, whole: bool) -> SniffedFormat:
    if suffix in CODE_SUFFIXES:
        return SniffedFormat(Format.TEXT)
    body = text.lstrip()
    markup = _sniff_markup(body, suffix)
    if markup is not None:
        return SniffedFormat(markup)
    named_json = suffix in JSON_SUFFIXES
    if body.startswith(b"["):
        if _ARRAY_START.match(body) or (named_json and _JSON_ARRAY.match(body)):
            key = _FIRST_KEY.match(body)
            return SniffedFormat(Format.JSON_ARRAY, first_key=key[1].decode("utf-8", "replace") if key else None)
        return SniffedFormat(Format.TEXT)
    if body.startswith(b"{") and not body.startswith(_TEMPLATES):
        return SniffedFormat(_sniff_objects(body, named_json, whole))
    if named_json and _has_json_lines(body, whole):
        return SniffedFormat(Format.JSON_LINES)
    return _sniff_table(text, suffix, whole) or SniffedFormat(Format.TEXT)


def _sniff_markup(body: bytes, suffix: str) -> Format | None:
    """What a text that is marked up holds; None: plain text, or XML of no known kind."""
    if body[:1] == b"<":
        found = _ROOT.match(body)
        root = found[1].decode("ascii", "replace") if found else ""
        if root == "mediawiki":
            return Format.MEDIAWIKI
        if XML_ROOTS.fullmatch(root):
            return Format.XML
        if root.lower() in ("html", "head", "body") or _HTML.match(body):
            return Format.HTML
    if suffix in PAGE_SUFFIXES:
        return Format.HTML
    if body.startswith(b"WARC/"):
        return Format.WARC
    return Format.LATEX if suffix in (".tex", ".latex") else None


def _sniff_objects(body: bytes, named_json: bool, whole: bool) -> Format:
    """One object a line, one object over many lines, or a text that happens to start with a brace."""
    lines = body.split(b"\n")
    if len(lines) == 1 and not whole:  # the first line is longer than the head
        return Format.JSON_LINES if named_json or re.match(rb'\{\s*"', body) else Format.TEXT
    if _is_json(lines[0], dict):
        return Format.JSON_LINES
    if whole and _is_json(body, dict):
        return Format.JSON_OBJECT
    if named_json and lines[0].rstrip().endswith((b"{", b"[", b",")):
        return Format.JSON_OBJECT
    if named_json or any(_is_json(line, dict) for line in lines[1:] if line.startswith(b"{")):
        return Format.JSON_LINES
    return Format.TEXT


def _has_json_lines(body: bytes, whole: bool) -> bool:
    """Whether a file with such a name that begins with something else has enough lines of JSON."""
    lines = [line.strip() for line in body.split(b"\n") if line.strip()]
    if not whole and len(lines) > 1 and not _OBJECT_START.match(lines[-1]):
        lines.pop()  # it may be cut
    return sum(bool(_OBJECT_START.match(line)) or _is_json(line) for line in lines) > JSON_LINE_SHARE * len(lines)


def _is_json(data: bytes, kind: type = object) -> bool:
    try:
        return isinstance(jsonio.loads(data), kind)
    except ValueError:
        return False


def _sniff_table(text: bytes, suffix: str, whole: bool) -> SniffedFormat | None:
    """A table by its name and even columns; without the name only if its header also names a text field."""
    import csv

    named = suffix in CSV_SUFFIXES
    if suffix in PROSE_SUFFIXES or (not named and b"\n" not in text.rstrip()):
        return None
    lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
    if not whole and len(lines) > 1:
        lines.pop()
    candidates = []
    for rank, delimiter in enumerate("\t,;|"):
        try:
            rows = [row for row in csv.reader(lines[:SNIFFED_ROWS], delimiter=delimiter) if row]
        except csv.Error:
            continue
        width = len(rows[0]) if rows else 0
        even = sum(len(row) == width for row in rows) / max(len(rows), 1)
        if width > 1 and even >= EVEN_SHARE:
            candidates.append((even, width, -rank, delimiter, rows))
    if not candidates:
        if not named or not lines:
            return None
        only = lines[0].strip().strip('"')
        has_header = only.lower() in TEXT_FIELDS
        return SniffedFormat(Format.CSV, delimiter=",", header=(only if has_header else "text",), has_header=has_header)
    even, _, _, delimiter, rows = max(candidates)
    names = [name.strip() for name in rows[0]]
    has_header = _is_header(names, [row for row in rows[1:] if len(row) == len(names)])
    names_text = not TEXT_FIELDS.isdisjoint(name.lower() for name in names)
    if not named and not (has_header and names_text and even == 1.0 and len(lines) > 2):
        return None
    header = tuple(names) if has_header else tuple(f"column{n}" for n in range(1, len(names) + 1))
    return SniffedFormat(Format.CSV, delimiter=delimiter, header=header, has_header=has_header)


def _is_header(names: list[str], rows: list[list[str]]) -> bool:
    """Whether the first row of a table names its columns: by plain names, or unlike the rows below it."""
    if len(set(names)) < len(names):
        return False
    if all(_HEADER_FIELD.fullmatch(name) for name in names):
        return True
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    if any(
        len(name) > HEADER_CHARS or "\n" in name or (name and _FIGURES.fullmatch(name)) or name in column
        for name, column in zip(names, columns, strict=True)
    ):
        return False
    return not TEXT_FIELDS.isdisjoint(name.lower() for name in names) or any(
        _is_unlike(name, column) for name, column in zip(names, columns, strict=True) if column
    )


def _is_unlike(name: str, column: tuple[str, ...]) -> bool:
    """Whether a name stands above figures, or above much longer texts."""
    figures = sum(bool(cell.strip()) and _FIGURES.fullmatch(cell) is not None for cell in column)
    usual = sorted(map(len, column))[len(column) // 2]
    return figures > 0.9 * len(column) or usual >= max(LONG_CELL, 4 * len(name))
