"""However a file is split, and wherever reading was interrupted, the items are the same."""

import gzip
import json
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpus.readers import reader_samples as samples
from tests.corpus.readers.reader_samples import ROWS, csv_table, essence, json_lines, rows_of, tar_of, units_of, zip_of
from zero2all.corpus.readers import Format, ReaderLimits, TextBy, read_unit

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
TEXT = st.text(alphabet='ab"\\\n\r,;{}[]: é中🙂', max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.lists(st.fixed_dictionaries({"id": st.integers(0, 9), "text": TEXT, "more": VALUES}), max_size=25)
BAD = [b'{"id": 1, "text": "cut', b"{broken}", b"17", b'{"id": "\xff"}', b'{"id": [1, {"id": 2}', b"@"]
BROKEN = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(BAD)), max_size=2)
SIZES = st.integers(1, 400)


def limits_with(**more: Any) -> ReaderLimits:
    return ReaderLimits(max_record_bytes=more.pop("max_record_bytes", 300), split_text_above_bytes=20, **more)


def same_however_split(path: Path, unit_bytes: int, **more: Any) -> list[samples.Item]:
    """Also however the bytes arrive: some bytes at a time, or all at once."""
    whole = samples.read_all(path, limits_with(unit_bytes=1 << 30, **more))
    for chunk in (64, 1 << 20):
        with ExitStack() as stack:
            for name in ("arrays.READ_BYTES", "lines.READ_BYTES", "read.READ_BYTES", "tables.CHUNK_BYTES"):
                stack.enter_context(patch(f"zero2all.corpus.readers.{name}", chunk))
            split = samples.read_all(path, limits_with(unit_bytes=unit_bytes, **more))
        assert [essence(item) for item in split] == [essence(item) for item in whole]
    return whole


def same_after_every_item(path: Path, limits: ReaderLimits) -> None:
    """Reading again from the cursor of each item gives exactly the rest of its unit."""
    for unit in units_of(path, limits):
        items = list(read_unit(unit, limits, lambda _: None))
        for number, item in enumerate(items):
            cursor = json.loads(json.dumps(item.cursor))
            rest = list(read_unit(pickle.loads(pickle.dumps(unit)), limits, lambda _: None, cursor))
            assert [essence(one) for one in rest] == [essence(one) for one in items[number + 1 :]]


def put_in(lines: list[bytes], broken: list[tuple[int, bytes]]) -> list[bytes]:
    lines = list(lines)
    for place, line in broken:
        lines.insert(place % (len(lines) + 1), line)
    return lines


@QUICK
@given(OBJECTS, BROKEN, SIZES)
def test_json_lines(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], broken: Any, unit_bytes: int):
    path = tmp_path_factory.mktemp("u") / "a.jsonl"
    path.write_bytes(b"\n".join(put_in([json.dumps(row, ensure_ascii=False).encode() for row in rows], broken)))
    same_however_split(path, unit_bytes)
    same_after_every_item(path, limits_with(unit_bytes=unit_bytes))


@QUICK
@given(OBJECTS, BROKEN, SIZES, st.sampled_from([None, 2]), st.integers(0, 30))
def test_json_array(tmp_path_factory, rows: list[Any], broken: Any, unit_bytes: int, indent: int | None, cut: int):
    path = tmp_path_factory.mktemp("u") / "a.json"
    elements = put_in([json.dumps(row, ensure_ascii=False, indent=indent).encode() for row in rows], broken)
    data = b"[" + b", \n".join(elements) + b"]\n"
    path.write_bytes(data[: len(data) - cut if cut < 20 else None])
    whole = same_however_split(path, unit_bytes)
    if not broken and cut in (0, 1):
        limit = limits_with().max_record_bytes
        assert rows_of(whole) == [row for row, text in zip(rows, elements, strict=True) if len(text) <= limit]
    same_after_every_item(path, limits_with(unit_bytes=unit_bytes))


def test_elements_found_again_behind_an_open_bracket_are_not_where_units_begin(tmp_path: Path):
    """The bracket swallows what follows until something cannot stand there; then all of that is read again."""
    good = b'{"id": 0, "text": ""}'
    data = b",".join([b'{"id": [1, {"id": 2}', *[good] * 20, b'{"id": 1, "text": "cut', *[good] * 20])
    (tmp_path / "a.json").write_bytes(b"[" + data + b"]")
    for unit_bytes in (1, 50, 100, 300):
        whole = same_however_split(tmp_path / "a.json", unit_bytes, max_record_bytes=10_000)
        assert len([row for row in rows_of(whole) if row["id"] == 0]) == 40
        assert len(units_of(tmp_path / "a.json", limits_with(unit_bytes=unit_bytes, max_record_bytes=10_000))) > 1


@QUICK
@given(OBJECTS, SIZES, st.sampled_from(",\t"), st.sampled_from([b"", b'1,"open\nquote\n']))
def test_csv(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], unit_bytes: int, delimiter: str, tail: bytes):
    path = tmp_path_factory.mktemp("u") / "a.csv"
    table = [{"id": str(row["id"]), "text": row["text"], "more": json.dumps(row["more"])} for row in rows]
    header = {"id": "0", "text": "first", "more": "{}"}
    path.write_bytes(csv_table([header, *table], delimiter) + tail)
    whole = same_however_split(path, unit_bytes, max_record_bytes=100)
    if not samples.damaged_of(whole):
        assert rows_of(whole) == [header, *table]
    same_after_every_item(path, limits_with(unit_bytes=unit_bytes, max_record_bytes=100))


LINES = st.lists(st.text(alphabet=" a中\r", max_size=80), max_size=40)


@QUICK
@given(LINES, SIZES, st.sampled_from(list(TextBy)), st.integers(1, 200))
def test_text(tmp_path_factory: pytest.TempPathFactory, lines: list[str], unit_bytes: int, text_by: TextBy, block: int):
    path = tmp_path_factory.mktemp("u") / "a.txt"
    path.write_bytes("\n".join(lines).encode())
    cut = {"text_by": text_by, "text_block_bytes": block, "text_piece_bytes": 15}
    whole = same_however_split(path, unit_bytes, **cut)
    same_after_every_item(path, limits_with(unit_bytes=unit_bytes, **cut))
    if text_by is TextBy.AUTO and path.stat().st_size > 20 and "\r" not in "".join(lines):
        documents = "".join(row["content"] for row in rows_of(whole))
        assert "".join(documents.split()) == "".join("".join(lines).split())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-16", "gb18030"])
@pytest.mark.parametrize("unit_bytes", [100, 333, 1024])
def test_lines_in_other_encodings_are_split_too_but_for_utf_16(tmp_path: Path, encoding: str, unit_bytes: int):
    tricky = "\u0a05一" if encoding == "utf-16" else ""  # holds the bytes of a line end, at an odd place
    rows = [{"text": f"第一段{tricky}文字，以及更多的内容。" * 5, "n": n} for n in range(60)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows).decode().encode(encoding))
    limits = limits_with(unit_bytes=unit_bytes, max_record_bytes=1000)
    assert (len(units_of(tmp_path / "a.jsonl", limits)) > 5) is ("16" not in encoding)
    assert rows_of(same_however_split(tmp_path / "a.jsonl", unit_bytes, max_record_bytes=1000)) == rows
    same_after_every_item(tmp_path / "a.jsonl", limits)


def test_parquet_is_split_by_row_groups(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(samples.parquet(ROWS, group=7))
    for unit_bytes in (100, 1000, 5000):
        assert rows_of(same_however_split(tmp_path / "a.parquet", unit_bytes, max_record_bytes=10_000)) == ROWS
        same_after_every_item(tmp_path / "a.parquet", limits_with(unit_bytes=unit_bytes, max_record_bytes=10_000))


def test_zip_is_split_by_entries_and_everything_resumes_inside_archives(tmp_path: Path):
    inner = zip_of({f"{n}.jsonl": json_lines(ROWS[n : n + 3]) for n in range(0, 9, 3)})
    members = {"a.jsonl": json_lines(ROWS[:3]), "b.json": samples.json_array(ROWS[3:6]), "c.zip": inner}
    members |= {"../evil.txt": b"no", "d.csv": csv_table(ROWS[:4]), "e.parquet": samples.parquet(ROWS[:5])}
    members |= {"f.txt": b"one\n\ntwo\n" * 10, "empty.txt": b"", "g.jsonl": b'{"text": "good"}\n{broken\n'}
    limits = limits_with(unit_bytes=300, max_record_bytes=10_000)
    (tmp_path / "a.zip").write_bytes(zip_of(members))
    assert len(units_of(tmp_path / "a.zip", limits)) > 2
    whole = same_however_split(tmp_path / "a.zip", 300, max_record_bytes=10_000)
    assert [item.reason for item in samples.damaged_of(whole)] == ["unsafe_name", "invalid_json"]
    files = {"a.zip": zip_of(members), "a.tar": tar_of(members), "a.tar.zst": samples.zstd_of(tar_of(members))}
    files |= {"c.jsonl.gz": gzip.compress(json_lines(ROWS)), "b.tar.gz": gzip.compress(tar_of(members))[:-300]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        same_after_every_item(tmp_path / name, limits)


def test_units_say_what_they_are(tmp_path: Path):
    limits = limits_with(unit_bytes=500)
    (tmp_path / "a.jsonl").write_bytes(json_lines())
    units = units_of(tmp_path / "a.jsonl", limits)
    assert [unit.number for unit in units] == list(range(len(units)))
    assert [unit.start for unit in units] == [0, *(unit.end for unit in units[:-1])]
    assert units[-1].end is None
    assert sum(unit.raw_bytes for unit in units) == (tmp_path / "a.jsonl").stat().st_size
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines()))
    [unit] = units_of(tmp_path / "a.jsonl.gz", limits)
    assert (unit.format, unit.compression) == (Format.JSON_LINES, "gzip")
    assert "resuming unpacks it again" in unit.note
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 10)
    [unit] = units_of(tmp_path / "a.bin", limits)
    assert unit.format is Format.BINARY
    assert list(read_unit(unit, limits, lambda _: None)) == []
