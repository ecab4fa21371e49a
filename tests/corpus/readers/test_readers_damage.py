"""Damage costs what is damaged: it is reported with its place, and the rest is kept."""

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.readers import reader_samples as samples
from tests.corpus.readers.reader_samples import ROWS, TEXTS, damaged_of, json_array, json_lines, read_all, rows_of
from zero2all.corpus.listing import InputFile, list_files
from zero2all.corpus.readers import Damaged, Format, RawRow, ReaderLimits, TextBy, plan_units, read_unit, sniff

NOISE = [{"text": random.Random(n).randbytes(300).hex(), "n": n} for n in range(1000)]
"""Does not compress away, so that a stream can be cut in its middle."""


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_broken_line_costs_itself(tmp_path: Path):
    lines = json_lines().splitlines(keepends=True)
    lines[20] = b'{"id": "20", "text": "cut\n'
    lines[39] = lines[39][:-20]
    items = read_all(write(tmp_path / "a.jsonl", b"".join(lines[:39]) + b'{"text": "ab\xffcd"}\n' + lines[39]))
    assert rows_of(items) == ROWS[:20] + ROWS[21:39]
    broken, wrong, cut = damaged_of(items)
    assert (broken.place, broken.reason) == (f"byte {sum(map(len, lines[:20]))}", "invalid_json")
    assert (broken.raw_bytes, broken.excerpt) == (len(lines[20]), lines[20].decode().strip())
    assert items[20] is broken
    assert (wrong.place, wrong.reason) == (f"byte {sum(map(len, lines[:39])) + 12}", "not_utf8")
    assert "\\xff" in wrong.excerpt
    assert cut.reason == "invalid_json"


@pytest.mark.parametrize("text", ["Some plain words, on and on.\n" * 3000, "一些普通的句子，写了很多。\n" * 3000])
@pytest.mark.parametrize("split_above", [1_000_000, 20_000], ids=["whole file", "pieces"])
def test_a_bad_byte_costs_itself_not_a_long_text(tmp_path: Path, text: str, split_above: int):
    data = text.encode()
    middle = data.index(b"\n", len(data) // 2) + 1
    path = write(tmp_path / "a.txt", data[:middle] + b"\xff" + data[middle:])
    items = read_all(path, ReaderLimits(split_text_above_bytes=split_above))
    assert not damaged_of(items)
    read = "".join(row["content"] for row in rows_of(items))
    assert read.count("\ufffd") == sum(item.replaced for item in items if isinstance(item, RawRow)) == 1
    assert read.replace("\ufffd", "") == text


def test_a_text_with_many_bad_bytes_is_left_out_and_not_taken_for_chinese(tmp_path: Path):
    data = bytearray(b"Some plain words, on and on.\n" * 300)
    data[::300] = b"\xff" * len(data[::300])
    [bad] = read_all(write(tmp_path / "a.txt", bytes(data)))
    assert isinstance(bad, Damaged)
    assert bad.reason == "not_utf8"
    assert "29 of 8,700 characters" in bad.detail


GARBAGE = [b"\0" * 300, b"\xff\xfe\0\xff" * 20, b'{"text": "\0"}', b'{"text": "\xff\xff"}', bytes(range(1, 10)) * 9]


@pytest.mark.parametrize("at", [[0] * 5, [0, 400, 800, 1200, 1600], [1500] * 5], ids=["first", "spread", "far in"])
@pytest.mark.parametrize("text", ["plain words and more of them", "一些中文的句子，写得不长。"])
def test_garbage_lines_cost_themselves_not_the_file(tmp_path: Path, at: list[int], text: str):
    good = [{"text": f"{n} {text}"} for n in range(2000)]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in good]
    for number, line in zip(reversed(at), GARBAGE, strict=True):
        lines.insert(number, line)
    items = read_all(write(tmp_path / "a.jsonl", b"\n".join(lines) + b"\n"))
    assert rows_of(items) == good
    assert len(damaged_of(items)) == 5


@pytest.mark.parametrize("head", [b"\x89PNG\r\n\x1a\n", b"", b"\x7fELF\n", b"SQLite format 3\0"])
def test_binary_files_are_still_left_out(head: bytes):
    noise = random.Random(3).randbytes(20_000)
    assert sniff(head + noise, "a.jsonl").format is Format.BINARY
    padded = head + b"some words\n" + bytes(40) + noise + b"more words\n" * 20
    assert sniff(padded, "a.txt").format is Format.BINARY


@pytest.mark.parametrize("wrapping", ["", ".gz", ".zip"])
def test_line_above_the_limit_is_passed_over(tmp_path: Path, wrapping: str):
    rows = [*ROWS, {"text": "x" * 3_000_000}, {"text": "last"}]
    path = write(tmp_path / f"a.jsonl{wrapping}", samples.wrapped(wrapping, "a.jsonl", json_lines(rows)))
    items = read_all(path, ReaderLimits(max_record_bytes=1_000_000))
    assert rows_of(items) == [*ROWS, {"text": "last"}]
    [bad] = damaged_of(items)
    assert (bad.reason, bad.raw_bytes) == ("too_large", 3_000_013)
    assert bad.place.endswith(f"byte {len(json_lines())}")


def elements(*between: bytes) -> bytes:
    rows = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    return b"[" + b",\n".join([*rows[:20], *between, *rows[20:]]) + b"]"


@pytest.mark.parametrize(
    "broken",
    [
        *(b'{"id": "x", "text": "no end}', b'{"id": "x", "text": [1, 2}', b'{"id": "x", "text": tru}', b'{"id" "x"}'),
        *(b'{"id": "x", "sub": {"id": [}}', b"@", b'{"id": "\xff"}', b'{"text": "\0\0"}', b"17", b""),
    ],
)
def test_broken_element_costs_itself(tmp_path: Path, broken: bytes):
    items = read_all(write(tmp_path / "a.json", elements(broken)))
    assert rows_of(items) == ROWS
    assert len(damaged_of(items)) == (broken != b"")
    assert not any(bad.ends_file for bad in damaged_of(items))


THREE_LINES = "第一行文字。\n第二行文字。\n第三行文字。\n"
FIRST_AND_LAST = [{"content": f"第{number}行文字。"} for number in "一三"]
LATE_GB18030 = b'{"text": "plain"}\n' * 8000 + '{"text": "这里是一些中文内容"}\n'.encode("gb18030") * 8000
GB18030_ROWS = [{"text": f"第{n}行，写的是一些普通的句子。"} for n in range(300)]
TABLE = samples.csv_table(ROWS[:3]) + b'a,b\r\n"x","y","z","w"\r\n' + samples.csv_table(ROWS[3:5]).partition(b"\n")[2]
TABLE += b'1,\xff,3\r\n9,"never closed,\r\nto the end\r\n'
SMALL, BY_LINE = ReaderLimits(max_record_bytes=1_000_000), ReaderLimits(text_by=TextBy.LINE)
DAMAGE: dict[str, tuple[str, bytes, list[Any], list[str], ReaderLimits]] = {
    "wrong bytes in GB 18030": ("a.txt", THREE_LINES.encode("gb18030").replace("二".encode("gb18030"), b"\xff\xff"),
        FIRST_AND_LAST, ["not_gb18030"], BY_LINE),
    "wrong bytes in UTF-16": ("a.txt", THREE_LINES.encode("utf-16").replace("二".encode("utf-16-le"), b"\x00\xdc"),
        FIRST_AND_LAST, ["not_utf16le"], BY_LINE),
    "an encoding that shows late": ("a.jsonl", LATE_GB18030, [{"text": "这里是一些中文内容"}], [], ReaderLimits()),
    "garbage in GB 18030": ("a.jsonl", b"\0\0\xff\n" + json_lines(GB18030_ROWS).decode().encode("gb18030"),
        GB18030_ROWS, ["not_gb18030"], ReaderLimits()),
    "no object": ("a.jsonl", b'17\n[1, 2]\n"a text"\nnull\n{"t": "a\tb"}\n', [{"t": "a\tb"}],
        ["not_an_object"] * 4, SMALL),
    "half an emoji, no number and a huge one": (
        "a.jsonl", b'{"text": "half \\ud83d emoji", "score": NaN, "n": 123456789012345678901234567890}\n\n  \n',
        [{"text": "half \ud83d emoji"}], [], SMALL),
    "countless values": ("a.jsonl", b'{"a": [' + b"1," * 3_000_000 + b"1]}\n" + json_lines(ROWS[:2]), ROWS[:2],
        ["too_many_values"], ReaderLimits()),
    "an element above the limit": ("a.json", elements(b'{"id": "big", "text": ["%s"]}' % (b'\\"[{' * 1_000_000)), ROWS,
        ["too_large"], SMALL),
    "strings": ("a.json", json_array(TEXTS), [{"text": text} for text in TEXTS], [], SMALL),
    "an empty array": ("a.json", b" [ ]\n", [], [], SMALL),
    "rows of a table": ("a.csv", TABLE, ROWS[:5], ["wrong_field_count"] * 2 + ["not_utf8", "cut_off"], SMALL),
    "a table without header": ("a.csv", "1,第一\n2,第二，有标点。\n".encode(), [
        {"column1": "1", "column2": "第一"}, {"column1": "2", "column2": "第二，有标点。"}], [], SMALL),
}  # fmt: skip
"""What is wrong -> file, bytes, rows (the last ones), reasons, limits."""


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_costs_what_is_damaged(tmp_path: Path, kind: str):
    name, data, rows, reasons, limits = DAMAGE[kind]
    items = read_all(write(tmp_path / name, data), limits)
    found = [{field: row[field] for field in (rows or [row])[0]} for row in rows_of(items)]
    assert found[-len(rows) :] == rows
    assert len(found) == (16_000 if kind == "an encoding that shows late" else len(rows))
    assert [bad.reason for bad in damaged_of(items)] == reasons


def test_quote_that_is_never_closed_costs_a_record_not_the_file(tmp_path: Path):
    table = samples.csv_table(ROWS[:3]) + b'9,"never closed,\r\n' + b"1,2,3\r\n" * 1000
    items = read_all(write(tmp_path / "a.csv", table), ReaderLimits(max_record_bytes=2000))
    assert len(rows_of(items)) == pytest.approx(3 + 1000 - 284, abs=3)
    assert [bad.reason for bad in damaged_of(items)] == ["too_large"]
    (text,) = rows_of(read_all(write(tmp_path / "a.txt", b"a line of text\n" * 50 + b"\0\0\n")))
    assert text["content"].startswith("a line of text")


def test_array_cut_at_the_end_and_something_behind_the_array(tmp_path: Path):
    data = json_array()[:-10]
    items = read_all(write(tmp_path / "a.json", data))
    assert rows_of(items) == ROWS[:-1]
    [bad] = damaged_of(items)
    assert (bad.place, bad.reason, bad.ends_file) == (f"byte {len(data)}", "cut_off", True)
    assert bad.excerpt.startswith('{"id": "39"')
    items = read_all(write(tmp_path / "a.json", json_array() + b"\n" + json_array(ROWS[:3]) + b"junk"))
    assert rows_of(items) == [*ROWS, *ROWS[:3]]
    ends = [("trailing_data", False), ("trailing_data", True)]
    assert [(bad.reason, bad.ends_file) for bad in damaged_of(items)] == ends


def test_damaged_parquet(tmp_path: Path):
    data = samples.parquet()
    items = read_all(write(tmp_path / "a.parquet", data[:-20]))
    (bad,) = damaged_of(items)
    assert (bad.reason, bad.ends_file, bad.raw_bytes) == ("damaged_parquet", True, len(data) - 20)
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
    pq.write_table(pa.table({"text": pa.array(cells, pa.binary()).view(pa.string())}), tmp_path / "a.parquet")
    items = read_all(tmp_path / "a.parquet", ReaderLimits(max_record_bytes=1_000_000))
    assert [(bad.place, bad.reason) for bad in damaged_of(items)] == [("row 8", "not_utf8"), ("row 10", "too_large")]
    assert [row["text"] for row in rows_of(items)] == [text for n, text in enumerate(TEXTS) if n not in (7, 9)]


MAKERS = {"jsonl": json_lines, "json": json_array, "csv": samples.csv_table, "parquet": samples.parquet}
MAKERS["txt"] = lambda rows: b"".join(row["text"].encode() + b"\n" for row in rows)
CUT = str.split("jsonl.gz json.gz csv.gz txt.gz parquet.gz jsonl.bz2 jsonl.xz jsonl.zst")


@pytest.mark.parametrize("name", CUT)
def test_truncated_stream_gives_what_came_before(tmp_path: Path, name: str):
    kind, wrapping = name.split(".")
    data = samples.STREAMS[f".{wrapping}"](MAKERS[kind](NOISE))
    path = write(tmp_path / f"a.{name}", data[: len(data) * 2 // 3])
    items = read_all(path, ReaderLimits(text_by=TextBy.LINE))
    [bad] = damaged_of(items)
    assert items[-1] is bad
    assert (bad.reason, bad.ends_file) == ("cut_off", True)
    kept = rows_of(items)
    # bzip2 gives blocks of 900 KB or nothing, and the table of a parquet file stands at its end.
    enough = 0 if "parquet" in name or "bz2" in name else 500
    assert enough <= len(kept) < (1 if kind == "parquet" else len(NOISE))
    assert [row.get("text", row.get("content")) for row in kept] == [row["text"] for row in NOISE[: len(kept)]]


@pytest.mark.parametrize("wrapping", [".gz", ".bz2", ".xz", ".zst"])
def test_damaged_stream_says_so_and_streams_on_end_are_read_on(tmp_path: Path, wrapping: str):
    path, pack = tmp_path / f"a.jsonl{wrapping}", samples.STREAMS[wrapping]
    data = bytearray(pack(json_lines(NOISE)))
    at = len(data) * 2 // 3
    data[at : at + 100] = bytes(100)
    items = read_all(write(path, bytes(data)))
    reasons = ("damaged_compression", "cut_off", "invalid_json")  # zst has no check sum here
    assert damaged_of(items)[-1].reason in reasons
    assert len(rows_of(items)) < len(NOISE)
    first, second = json_lines(ROWS[:20]), json_lines(ROWS[20:])
    assert rows_of(read_all(write(path, pack(first) + pack(second)))) == ROWS
    items = read_all(write(path, pack(first) + b"this is no such stream"))
    assert rows_of(items) == ROWS[:20]
    assert damaged_of(items)[0].reason in ("trailing_data", "damaged_compression")
    if wrapping == ".gz":
        assert rows_of(read_all(write(path, pack(first) + bytes(1000)))) == ROWS[:20]


def test_empty_file(tmp_path: Path):
    for name, data in (("a.jsonl", b""), ("a.jsonl.gz", gzip.compress(b""))):
        [unit] = samples.units_of(write(tmp_path / name, data))
        assert unit.format is Format.EMPTY
    skipped: list[tuple[str, str]] = []
    assert read_all(write(tmp_path / "a.zip", samples.zip_of({"a.jsonl": b""})), skipped=skipped) == []
    assert skipped == [("empty", "a.zip/a.jsonl")]


def test_file_that_went_away_between_plan_and_read(tmp_path: Path):
    units = samples.units_of(write(tmp_path / "a.jsonl", json_lines()))
    (tmp_path / "a.jsonl").unlink()
    [item] = read_unit(units[0], ReaderLimits(), lambda _: None)
    assert isinstance(item, Damaged)
    assert (item.reason, item.ends_file, item.cursor) == ("read_error", True, [-1])
    [unit] = plan_units(InputFile(tmp_path / "a.jsonl", "a.jsonl", 10, 0), ReaderLimits())
    assert unit.format is Format.UNREADABLE


def test_files_of_any_file_system():
    store = fsspec.filesystem("memory")
    files = {"a.jsonl": json_lines(), "sub/b.parquet": samples.parquet()}
    files["c.zip"] = samples.zip_of({"c.json": json_array()})
    store.pipe({f"/set/{name}": data for name, data in files.items()})
    listing = list_files("memory://set")
    assert [file.name for file in listing.files] == ["a.jsonl", "c.zip", "sub/b.parquet"]
    for file in listing.files:
        units = plan_units(file, ReaderLimits(unit_bytes=700))
        items = [item for unit in units for item in read_unit(unit, ReaderLimits(), lambda _: None)]
        assert rows_of(items) == ROWS, file.name
    store.rm("/set", recursive=True)


MEMBERS = {f"{n}.jsonl": json_lines(NOISE[n * 100 : n * 100 + 100]) for n in range(10)}


@pytest.mark.parametrize("wrapping", [".zip", ".tar", ".tar.gz", ".7z", ".rar"])
def test_truncated_archive_gives_what_came_before(tmp_path: Path, wrapping: str):
    data = samples.PACKS[wrapping](MEMBERS)
    items = read_all(write(tmp_path / f"a{wrapping}", data[: len(data) * 2 // 3]))
    assert damaged_of(items)[-1].ends_file
    # The same words every time.
    assert not re.search(r"0x[0-9a-f]{6}|archive_p|\d{9}", damaged_of(items)[-1].detail)
    kept = rows_of(items)
    if wrapping == ".7z":  # its directory stands at the end
        assert kept == []
    else:
        assert 550 < len(kept) < 750
        assert kept == NOISE[: len(kept)]


def test_damaged_member_of_a_zip_costs_itself(tmp_path: Path):
    data = bytearray(samples.zip_of(MEMBERS))
    at = data.index(b"5.jsonl") + 20_000
    data[at : at + 50] = bytes(50)
    items = read_all(write(tmp_path / "a.zip", bytes(data)))
    others = [row for n, row in enumerate(NOISE) if not 500 <= n < 600]
    assert [row for row in rows_of(items) if row in others] == others
    assert {item.origin.member for item in damaged_of(items) if item.origin} == {"5.jsonl"}


def test_damaged_header_of_a_tar_costs_its_member(tmp_path: Path):
    data = bytearray(samples.tar_of(MEMBERS))
    at = data.index(b"5.jsonl")
    data[at : at + 5] = b"\xff" * 5
    for name, packed in {"a.tar": bytes(data), "a.tar.gz": gzip.compress(bytes(data))}.items():
        items = read_all(write(tmp_path / name, packed))
        assert rows_of(items) == [row for n, row in enumerate(NOISE) if not 500 <= n < 600]
        assert [bad.reason for bad in damaged_of(items)] == ["damaged_archive"]


def test_rows_know_where_they_come_from(tmp_path: Path):
    items = read_all(write(tmp_path / "a.tar.gz", gzip.compress(samples.tar_of({"in/x.jsonl": json_lines(ROWS[:2])}))))
    row = items[1]
    assert isinstance(row, RawRow)
    assert row.place == f"in/x.jsonl, byte {len(json_lines(ROWS[:1]))}"
    assert (row.origin.file, row.origin.member, row.origin.format) == ("a.tar.gz", "in/x.jsonl", Format.JSON_LINES)
    assert row.raw_bytes == len(json_lines(ROWS[1:2]))
