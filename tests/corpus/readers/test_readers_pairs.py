"""Every format in every wrapping gives the same rows, found by content."""

import json
from pathlib import Path

import pytest

from tests.corpus.readers import reader_samples as samples
from tests.corpus.readers.reader_samples import FORMATS, PACKS, ROWS, STREAMS, damaged_of, read_all, rows_of, wrapped
from zero2all.corpus.readers import RawRow, ReaderLimits, TextBy


def check_rows(kind: str, items: list[samples.Item]) -> None:
    assert not damaged_of(items)
    if kind == "text":
        assert [row["content"] for row in rows_of(items)] == [text.replace("\n", " ") for text in samples.TEXTS]
    else:
        assert rows_of(items) == ROWS


PAIRS = [(kind, wrapping) for kind in FORMATS for wrapping in (*STREAMS, *PACKS)]
FEW = [(kind, each) for kind, each in PAIRS if kind in ("json lines", "parquet") or each in ("", ".gz", ".zip")]


@pytest.mark.parametrize(("kind", "wrapping"), FEW)
def test_format_in_wrapping(tmp_path: Path, kind: str, wrapping: str):
    name, make = FORMATS[kind]
    (tmp_path / (name + wrapping)).write_bytes(wrapped(wrapping, name, make()))
    check_rows(kind, read_all(tmp_path / (name + wrapping), ReaderLimits(text_by=TextBy.LINE)))
    if kind not in ("csv", "tsv", "text"):  # the content decides, not the name
        (tmp_path / "a.unknown").write_bytes(wrapped(wrapping, "unknown", make()))
        check_rows(kind, read_all(tmp_path / "a.unknown"))
    if (kind, wrapping) == ("csv", ""):  # found by a column that is named text
        (tmp_path / "a.txt").write_bytes(make())
        check_rows(kind, read_all(tmp_path / "a.txt"))


@pytest.mark.parametrize("wrapping", [".zip", ".tar", ".tar.gz", ".7z", ".rar"])
def test_one_object_a_file_in_an_archive(tmp_path: Path, wrapping: str):
    members = {f"part/{n:03d}.json": json.dumps(row, indent=1).encode() for n, row in enumerate(ROWS)}
    (tmp_path / f"a{wrapping}").write_bytes(PACKS[wrapping](members))
    items = read_all(tmp_path / f"a{wrapping}")
    assert rows_of(items) == ROWS
    assert items[7].origin is not None
    assert items[7].origin.name == f"a{wrapping}/part/007.json"


@pytest.mark.parametrize("wrapping", ["", ".tar.xz"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "gb18030", "utf-32"])
def test_encoding_is_found_and_converted(tmp_path: Path, encoding: str, wrapping: str):
    for kind in ("json lines", "json array", "csv", "text"):
        name, make = FORMATS[kind]
        (tmp_path / (name + wrapping)).write_bytes(wrapped(wrapping, name, make().decode().encode(encoding)))
        items = read_all(tmp_path / (name + wrapping), ReaderLimits(text_by=TextBy.LINE))
        check_rows(kind, items)
        expected = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}.get(encoding, encoding)
        assert {item.origin.encoding for item in items if isinstance(item, RawRow)} == {expected}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gb18030"])
@pytest.mark.parametrize("wrapping", ["", ".gz"])
def test_text_by_file_line_blank_line_and_long(tmp_path: Path, encoding: str, wrapping: str):
    name = "a.txt" + wrapping
    paragraphs = [f"第{n}段。\n" + "一些文字和 words。" * 50 for n in range(400)]
    text = "\n \n\n".join(paragraphs) + "\n"
    (tmp_path / name).write_bytes(wrapped(wrapping, "a.txt", text.encode(encoding)))

    def contents(**limits: object) -> list[str]:
        items = read_all(tmp_path / name, ReaderLimits(**limits))  # type: ignore[arg-type]
        assert not damaged_of(items)
        return [row["content"] for row in rows_of(items)]

    assert contents(text_by=TextBy.FILE) == [text]
    assert contents(text_by=TextBy.LINE) == [line for line in text.split("\n") if line.strip()]
    assert contents(text_by=TextBy.BLANK_LINE) == paragraphs
    assert contents() == [text]
    documents = contents(split_text_above_bytes=100_000)
    assert "".join(documents) == text
    assert len(documents) > 20
    assert all(2_000 < len(document.encode()) < 33_000 for document in documents[:-1])
    pieces = contents(split_text_above_bytes=100_000, text_piece_bytes=2_000)
    assert "".join(pieces) == text
    assert len(pieces) > 2 * len(documents)
    assert all(len(piece.encode()) <= 8_000 for piece in pieces)


def test_text_and_code_in_archives_are_named_by_their_member(tmp_path: Path):
    (tmp_path / "a.zip").write_bytes(PACKS[".zip"]({"src/b.py": b"x = 1\n", "c.md": b"# C\n"}))
    code, text = rows_of(read_all(tmp_path / "a.zip"))
    assert code == {"content": "x = 1\n", "title": "src/b.py", "others": {"file": "a.zip/src/b.py"}}
    assert text == {"content": "# C\n", "title": "", "others": {"file": "a.zip/c.md"}}
