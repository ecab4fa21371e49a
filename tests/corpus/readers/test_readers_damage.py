"""Damage costs what is damaged: it is reported with its place, and the rest is kept."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.readers.reader_samples import (
    ROWS,
    TEXTS,
    WRAPPINGS,
    csv_table,
    damaged_of,
    json_array,
    json_lines,
    parquet,
    rar5_of,
    read_all,
    rows_of,
    seven_zip_of,
    tar_of,
    units_of,
    zip_of,
    zstd_of,
)
from zero2all.corpus.listing import InputFile
from zero2all.corpus.readers import Damaged, Format, RawRow, ReaderLimits, TextBy, plan_units, read_unit, sniff

NOISE = [{"text": random.Random(n).randbytes(300).hex(), "n": n} for n in range(1000)]
"""Does not compress away, so that a stream can be cut in its middle."""


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# ---- lines ----------------------------------------------------------------------------------------------------


def test_broken_line_in_the_middle(tmp_path: Path):
    lines = json_lines().splitlines(keepends=True)
    lines[20] = b'{"id": "20", "text": "cut\n'
    items = read_all(write(tmp_path / "a.jsonl", b"".join(lines)))
    assert rows_of(items) == ROWS[:20] + ROWS[21:]
    [bad] = damaged_of(items)
    assert (bad.place, bad.reason) == (f"byte {sum(map(len, lines[:20]))}", "invalid_json")
    assert (bad.raw_bytes, bad.excerpt) == (len(lines[20]), lines[20].decode().strip())
    assert items[20] is bad


def test_object_cut_at_the_end_of_the_file(tmp_path: Path):
    items = read_all(write(tmp_path / "a.jsonl", json_lines()[:-20]))
    assert rows_of(items) == ROWS[:-1]
    assert [bad.reason for bad in damaged_of(items)] == ["invalid_json"]


def test_wrong_bytes_cost_one_line(tmp_path: Path):
    data = json_lines() + b'{"text": "ab\xffcd"}\n' + json_lines(ROWS[:1])
    items = read_all(write(tmp_path / "a.jsonl", data))
    assert rows_of(items) == [*ROWS, ROWS[0]]
    [bad] = damaged_of(items)
    assert bad.reason == "not_utf8"
    assert bad.place == f"byte {len(json_lines()) + 12}"
    assert "\\xff" in bad.excerpt


def test_wrong_bytes_in_gb18030_and_utf16_cost_one_line(tmp_path: Path):
    text = "第一行文字。\n第二行文字。\n第三行文字。\n"
    data = text.encode("gb18030").split(b"\n")
    data[1] = data[1][:4] + b"\xff\xff" + data[1][4:]
    items = read_all(write(tmp_path / "a.txt", b"\n".join(data)), ReaderLimits(text_by=TextBy.LINE))
    assert [row["content"] for row in rows_of(items)] == ["第一行文字。", "第三行文字。"]
    assert [bad.reason for bad in damaged_of(items)] == ["not_gb18030"]
    wide = text.encode("utf-16").replace("二".encode("utf-16-le"), b"\x00\xdc")
    items = read_all(write(tmp_path / "b.txt", wide), ReaderLimits(text_by=TextBy.LINE))
    assert [row["content"] for row in rows_of(items)] == ["第一行文字。", "第三行文字。"]
    assert [bad.reason for bad in damaged_of(items)] == ["not_utf16le"]


def test_encoding_is_also_looked_for_inside_a_file_that_begins_in_ascii(tmp_path: Path):
    data = b'{"text": "plain"}\n' * 8000 + '{"text": "这里是一些中文内容"}\n'.encode("gb18030") * 8000
    items = read_all(write(tmp_path / "a.jsonl", data))
    assert not damaged_of(items)
    assert rows_of(items)[-1] == {"text": "这里是一些中文内容"}


@pytest.mark.parametrize("text", ["Some plain words, on and on.\n" * 3000, "一些普通的句子，写了很多。\n" * 3000])
@pytest.mark.parametrize("split_above", [1_000_000, 20_000], ids=["whole file", "pieces"])
def test_a_bad_byte_costs_itself_not_a_long_text(tmp_path: Path, text: str, split_above: int):
    data = text.encode()
    middle = data.index(b"\n", len(data) // 2) + 1
    items = read_all(
        write(tmp_path / "a.txt", data[:middle] + b"\xff" + data[middle:]),
        ReaderLimits(split_text_above_bytes=split_above),
    )
    assert not damaged_of(items)
    read = "".join(row["content"] for row in rows_of(items))
    assert read.count("\ufffd") == sum(item.replaced for item in items if isinstance(item, RawRow)) == 1
    assert read.replace("\ufffd", "") == text


def test_a_text_with_many_bad_bytes_is_left_out(tmp_path: Path):
    data = bytearray(b"Some plain words, on and on.\n" * 300)
    data[::300] = b"\xff" * len(data[::300])
    [bad] = read_all(write(tmp_path / "a.txt", bytes(data)))
    assert isinstance(bad, Damaged)
    assert bad.reason == "not_utf8"
    assert "29 of 8,700 characters" in bad.detail


@pytest.mark.parametrize("text", ["naïve façade déjà vu " * 20, "Größe und Höhe über Straßen " * 20])
def test_other_encodings_are_not_taken_for_chinese(tmp_path: Path, text: str):
    items = read_all(write(tmp_path / "a.txt", text.encode("latin-1")))
    assert [bad.reason for bad in damaged_of(items)] == ["not_utf8"]


def test_odd_but_legal_json_is_kept(tmp_path: Path):
    data = b'{"text": "half \\ud83d emoji", "score": NaN, "n": 123456789012345678901234567890}\n\n  \n{"t": "a\tb"}\n'
    items = read_all(write(tmp_path / "a.jsonl", data))
    assert len(items) == 2
    assert rows_of(items)[0]["text"] == "half \ud83d emoji"
    assert rows_of(items)[1] == {"t": "a\tb"}


def test_what_is_no_object_is_damaged(tmp_path: Path):
    items = read_all(write(tmp_path / "a.jsonl", b'{"a": 1}\n17\n[1, 2]\n"a text"\nnull\n'))
    assert rows_of(items) == [{"a": 1}]
    assert [bad.reason for bad in damaged_of(items)] == ["not_an_object"] * 4


GARBAGE = [b"\0" * 300, b"\xff\xfe\0\xff" * 20, b'{"text": "\0"}', b'{"text": "\xff\xff"}', bytes(range(1, 10)) * 9]


@pytest.mark.parametrize("place", ["first", "spread", "far in"])
@pytest.mark.parametrize("text", ["plain words and more of them", "一些中文的句子，写得不长。"])
def test_garbage_lines_cost_themselves_not_the_file(tmp_path: Path, place: str, text: str):
    good = [{"text": f"{n} {text}"} for n in range(2000)]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in good]
    at = {"first": [0] * 5, "spread": [0, 400, 800, 1200, 1600], "far in": [1500] * 5}[place]
    for number, line in zip(reversed(at), GARBAGE, strict=True):
        lines.insert(number, line)
    items = read_all(write(tmp_path / "a.jsonl", b"\n".join(lines) + b"\n"))
    assert rows_of(items) == good
    assert len(damaged_of(items)) == 5


def test_garbage_in_gb18030_lines_arrays_and_texts(tmp_path: Path):
    lines = [f'{{"text": "第{n}行，写的是一些普通的句子。"}}'.encode("gb18030") for n in range(300)]
    items = read_all(write(tmp_path / "a.jsonl", b"\n".join([b"\0\0\xff", *lines])))
    assert (len(rows_of(items)), len(damaged_of(items))) == (300, 1)
    elements = [b'{"text": "words of element %d"}' % n for n in range(300)]
    items = read_all(write(tmp_path / "a.json", b"[" + b",\n".join([*elements, b'{"text": "\0\0"}', *elements]) + b"]"))
    assert (len(rows_of(items)), len(damaged_of(items))) == (600, 1)
    (text,) = rows_of(read_all(write(tmp_path / "a.txt", b"a line of text\n" * 50 + b"\0\0\n")))
    assert text["content"].startswith("a line of text")


@pytest.mark.parametrize("head", [b"\x89PNG\r\n\x1a\n", b"", b"%PDF-1.4\n", b"SQLite format 3\0"])
def test_binary_files_are_still_left_out(head: bytes):
    noise = random.Random(3).randbytes(20_000)
    assert sniff(head + noise, "a.jsonl").format is Format.BINARY
    padded = head + b"some words\n" + bytes(40) + noise + b"more words\n" * 20
    assert sniff(padded, "a.txt").format is Format.BINARY


def test_what_is_said_of_a_broken_archive_is_the_same_every_time(tmp_path: Path):
    data = seven_zip_of(MEMBERS)
    path = write(tmp_path / "a.7z", data[: len(data) * 2 // 3])
    (bad,) = damaged_of(read_all(path))
    assert not re.search(r"0x[0-9a-f]{6}|archive_p|\d{9}", bad.detail), bad.detail


@pytest.mark.parametrize("wrapping", ["", ".gz", ".zst", ".zip"])
def test_line_above_the_limit_is_passed_over(tmp_path: Path, wrapping: str):
    rows = [*ROWS, {"text": "x" * 3_000_000}, {"text": "last"}]
    path = write(tmp_path / f"a.jsonl{wrapping}", WRAPPINGS[wrapping]("a.jsonl", json_lines(rows)))
    items = read_all(path, ReaderLimits(max_record_bytes=1_000_000))
    assert rows_of(items) == [*ROWS, {"text": "last"}]
    [bad] = damaged_of(items)
    assert (bad.reason, bad.raw_bytes) == ("too_large", 3_000_013)
    assert bad.place.endswith(f"byte {len(json_lines())}")


def test_record_of_countless_values_is_not_parsed(tmp_path: Path):
    data = b'{"a": [' + b"1," * 3_000_000 + b"1]}\n" + json_lines(ROWS[:2])
    items = read_all(write(tmp_path / "a.jsonl", data))
    assert rows_of(items) == ROWS[:2]
    assert [bad.reason for bad in damaged_of(items)] == ["too_many_values"]


# ---- arrays ---------------------------------------------------------------------------------------------------


def test_array_cut_at_the_end(tmp_path: Path):
    data = json_array()[:-10]
    items = read_all(write(tmp_path / "a.json", data))
    assert rows_of(items) == ROWS[:-1]
    [bad] = damaged_of(items)
    assert (bad.place, bad.reason, bad.ends_file) == (f"byte {len(data)}", "cut_off", True)
    assert bad.excerpt.startswith('{"id": "39"')


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        (b'{"id": "x", "text": "no end}', 1),
        (b'{"id": "x", "text": [1, 2}', 1),
        (b'{"id": "x", "text": tru}', 1),
        (b'{"id": "x", "sub": {"id": [}}', 1),
        (b'{"id" "x"}', 1),
        (b"@", 1),
        (b'{"id": "\xff"}', 1),
        (b"17", 1),
        (b"", 0),
    ],
)
def test_broken_element_costs_itself(tmp_path: Path, broken: bytes, lost: int):
    elements = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    data = b"[" + b",\n".join([*elements[:20], broken, *elements[20:]]) + b"]"
    items = read_all(write(tmp_path / "a.json", data))
    assert rows_of(items) == ROWS
    assert len(damaged_of(items)) == lost
    assert not any(bad.ends_file for bad in damaged_of(items))


def test_something_behind_the_array(tmp_path: Path):
    items = read_all(write(tmp_path / "a.json", json_array() + b"\n" + json_array(ROWS[:3]) + b"junk"))
    assert rows_of(items) == [*ROWS, *ROWS[:3]]
    assert [(bad.reason, bad.ends_file) for bad in damaged_of(items)] == [
        ("trailing_data", False),
        ("trailing_data", True),
    ]


def test_element_above_the_limit_is_passed_over(tmp_path: Path):
    rows = [*ROWS, {"id": "big", "text": ['"[{' * 1_000_000]}, {"id": "last"}]
    items = read_all(write(tmp_path / "a.json", json_array(rows)), ReaderLimits(max_record_bytes=1_000_000))
    assert rows_of(items) == [*ROWS, {"id": "last"}]
    assert [(bad.reason, bad.excerpt[:12]) for bad in damaged_of(items)] == [("too_large", '{"id": "big"')]


def test_array_of_strings_and_empty_array(tmp_path: Path):
    assert rows_of(read_all(write(tmp_path / "a.json", json_array(TEXTS)))) == [{"text": text} for text in TEXTS]
    assert read_all(write(tmp_path / "b.json", b" [ ]\n")) == []


# ---- tables ---------------------------------------------------------------------------------------------------


def test_damaged_rows_of_a_table(tmp_path: Path):
    table = csv_table(ROWS[:3]) + b'a,b\r\n"x","y","z","w"\r\n' + csv_table(ROWS[3:5]).partition(b"\n")[2]
    table += b'1,\xff,3\r\n9,"never closed,\r\nto the end\r\n'
    items = read_all(write(tmp_path / "a.csv", table))
    assert rows_of(items) == ROWS[:5]
    assert [bad.reason for bad in damaged_of(items)] == [
        "wrong_field_count",
        "wrong_field_count",
        "not_utf8",
        "cut_off",
    ]


def test_quote_that_is_never_closed_costs_a_record_not_the_file(tmp_path: Path):
    table = csv_table(ROWS[:3]) + b'9,"never closed,\r\n' + b"1,2,3\r\n" * 1000
    items = read_all(write(tmp_path / "a.csv", table), ReaderLimits(max_record_bytes=2000))
    assert len(rows_of(items)) == pytest.approx(3 + 1000 - 284, abs=3)
    assert [bad.reason for bad in damaged_of(items)] == ["too_large"]


def test_table_without_header(tmp_path: Path):
    items = read_all(write(tmp_path / "a.csv", "1,第一\n2,第二，有标点。\n".encode()))
    assert rows_of(items) == [{"column1": "1", "column2": "第一"}, {"column1": "2", "column2": "第二，有标点。"}]


def test_damaged_parquet(tmp_path: Path):
    data = parquet()
    items = read_all(write(tmp_path / "a.parquet", data[:-20]))
    assert [(bad.reason, bad.ends_file, bad.raw_bytes) for bad in damaged_of(items)] == [
        ("damaged_parquet", True, len(data) - 20)
    ]
    path = write(tmp_path / "b.parquet", data)
    at = pq.ParquetFile(path).metadata.row_group(1).column(2).data_page_offset
    write(path, data[:at] + b"\xff" * 30 + data[at + 30 :])
    items = read_all(path)
    assert rows_of(items) == ROWS[:16] + ROWS[32:]
    assert [bad.reason for bad in damaged_of(items)] == ["damaged_parquet"]


def test_wrong_bytes_and_huge_cells_in_parquet_cost_one_row(tmp_path: Path):
    cells = [text.encode() for text in TEXTS]
    cells[7] = b"ab\xff"
    cells[9] = b"x" * 2_000_000
    table = pa.table({"text": pa.array(cells, pa.binary()).view(pa.string())})
    pq.write_table(table, tmp_path / "a.parquet")
    items = read_all(tmp_path / "a.parquet", ReaderLimits(max_record_bytes=1_000_000))
    assert [(bad.place, bad.reason) for bad in damaged_of(items)] == [("row 8", "not_utf8"), ("row 10", "too_large")]
    assert [row["text"] for row in rows_of(items)] == [text for n, text in enumerate(TEXTS) if n not in (7, 9)]


# ---- compressed streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet"])
@pytest.mark.parametrize("wrapping", [".gz", ".bz2", ".xz", ".zst"])
def test_truncated_stream_gives_what_came_before(tmp_path: Path, wrapping: str, kind: str):
    make = {
        "jsonl": json_lines,
        "json": json_array,
        "csv": csv_table,
        "parquet": parquet,
        "txt": lambda rows: b"".join(row["text"].encode() + b"\n" for row in rows),
    }[kind]
    data = WRAPPINGS[wrapping]("a", make(NOISE))
    items = read_all(
        write(tmp_path / f"a.{kind}{wrapping}", data[: len(data) * 2 // 3]), ReaderLimits(text_by=TextBy.LINE)
    )
    assert isinstance(items[-1], Damaged)
    assert (items[-1].reason, items[-1].ends_file) == ("cut_off", True)
    assert len(damaged_of(items)) == 1
    kept = rows_of(items)
    if kind == "parquet":
        assert kept == []
        return
    enough = 0 if wrapping == ".bz2" else 500  # bzip2 gives blocks of 900 KB or nothing
    assert enough <= len(kept) < len(NOISE)
    assert [row.get("text", row.get("content")) for row in kept] == [row["text"] for row in NOISE[: len(kept)]]


@pytest.mark.parametrize("wrapping", [".gz", ".bz2", ".xz", ".zst"])
def test_damaged_stream_says_so(tmp_path: Path, wrapping: str):
    data = bytearray(WRAPPINGS[wrapping]("a", json_lines(NOISE)))
    at = len(data) * 2 // 3
    data[at : at + 100] = bytes(100)
    items = read_all(write(tmp_path / f"a.jsonl{wrapping}", bytes(data)))
    assert damaged_of(items)[-1].reason in (
        "damaged_compression",
        "cut_off",
        "invalid_json",
    )  # zst has no check sum here
    assert len(rows_of(items)) < len(NOISE)


def test_streams_on_end_and_what_follows_them(tmp_path: Path):
    first, second = json_lines(ROWS[:20]), json_lines(ROWS[20:])
    for name, pack in {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd_of}.items():
        path = tmp_path / f"a.jsonl.{name}"
        assert rows_of(read_all(write(path, pack(first) + pack(second)))) == ROWS
        items = read_all(write(path, pack(first) + b"this is no such stream"))
        assert rows_of(items) == ROWS[:20]
        assert damaged_of(items)[0].reason in ("trailing_data", "damaged_compression")
    padded = gzip.compress(first) + bytes(1000)
    assert rows_of(read_all(write(tmp_path / "a.gz", padded))) == ROWS[:20]


# ---- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv", "a.parquet"])
def test_empty_file(tmp_path: Path, name: str):
    [unit] = units_of(write(tmp_path / name, b""))
    assert unit.format is Format.EMPTY
    skipped: list[tuple[str, str]] = []
    [unit] = units_of(write(tmp_path / f"{name}.gz", gzip.compress(b"")))
    assert unit.format is Format.EMPTY
    assert read_all(write(tmp_path / f"{name}.zip", zip_of({name: b""})), skipped=skipped) == []
    assert skipped == [("empty", f"{name}.zip/{name}")]


def test_file_that_went_away_between_plan_and_read(tmp_path: Path):
    units = units_of(write(tmp_path / "a.jsonl", json_lines()))
    (tmp_path / "a.jsonl").unlink()
    [item] = read_unit(units[0], ReaderLimits(), lambda _: None)
    assert isinstance(item, Damaged)
    assert (item.reason, item.ends_file, item.cursor) == ("read_error", True, [-1])
    file = InputFile(tmp_path / "a.jsonl", "a.jsonl", 10, 0)
    [unit] = plan_units(file, ReaderLimits())
    assert unit.format is Format.UNREADABLE


def test_files_of_any_file_system(tmp_path: Path):
    import fsspec

    from zero2all.corpus.listing import list_files

    store = fsspec.filesystem("memory")
    store.pipe(
        {"/set/a.jsonl": json_lines(), "/set/sub/b.parquet": parquet(), "/set/c.zip": zip_of({"c.json": json_array()})}
    )
    listing = list_files("memory://set")
    assert [file.name for file in listing.files] == ["a.jsonl", "c.zip", "sub/b.parquet"]
    for file in listing.files:
        units = plan_units(file, ReaderLimits(unit_bytes=700))
        items = [item for unit in units for item in read_unit(unit, ReaderLimits(), lambda _: None)]
        assert rows_of(items) == ROWS, file.name
    store.rm("/set", recursive=True)


# ---- archives -------------------------------------------------------------------------------------------------

MEMBERS = {f"{n}.jsonl": json_lines(NOISE[n * 100 : n * 100 + 100]) for n in range(10)}


@pytest.mark.parametrize("wrapping", [".zip", ".tar", ".tar.gz", ".7z", ".rar"])
def test_truncated_archive_gives_what_came_before(tmp_path: Path, wrapping: str):
    pack = {
        ".zip": zip_of,
        ".tar": tar_of,
        ".tar.gz": lambda members: gzip.compress(tar_of(members)),
        ".7z": seven_zip_of,
        ".rar": rar5_of,
    }[wrapping]
    data = pack(MEMBERS)
    items = read_all(write(tmp_path / f"a{wrapping}", data[: len(data) * 2 // 3]))
    assert damaged_of(items)
    assert damaged_of(items)[-1].ends_file
    kept = rows_of(items)
    if wrapping == ".7z":  # its directory stands at the end
        assert kept == []
    else:
        assert 550 < len(kept) < 750
        assert kept == NOISE[: len(kept)]


def test_damaged_member_of_a_zip_costs_itself(tmp_path: Path):
    data = bytearray(zip_of(MEMBERS))
    at = data.index(b"5.jsonl") + 20_000
    data[at : at + 50] = bytes(50)
    items = read_all(write(tmp_path / "a.zip", bytes(data)))
    others = [row for n, row in enumerate(NOISE) if not 500 <= n < 600]
    assert [row for row in rows_of(items) if row in others] == others
    assert {item.origin.member for item in damaged_of(items) if item.origin} == {"5.jsonl"}


def test_damaged_header_of_a_tar_costs_its_member(tmp_path: Path):
    data = bytearray(tar_of(MEMBERS))
    at = data.index(b"5.jsonl")
    data[at : at + 5] = b"\xff" * 5
    for name, packed in {"a.tar": bytes(data), "a.tar.gz": gzip.compress(bytes(data))}.items():
        items = read_all(write(tmp_path / name, packed))
        assert rows_of(items) == [row for n, row in enumerate(NOISE) if not 500 <= n < 600]
        assert [bad.reason for bad in damaged_of(items)] == ["damaged_archive"]


def test_rows_know_where_they_come_from(tmp_path: Path):
    items = read_all(write(tmp_path / "a.tar.gz", gzip.compress(tar_of({"in/x.jsonl": json_lines(ROWS[:2])}))))
    row = items[1]
    assert isinstance(row, RawRow)
    assert row.place == f"in/x.jsonl, byte {len(json_lines(ROWS[:1]))}"
    assert (row.origin.file, row.origin.member, row.origin.format) == ("a.tar.gz", "in/x.jsonl", Format.JSON_LINES)
    assert row.raw_bytes == len(json_lines(ROWS[1:2]))
