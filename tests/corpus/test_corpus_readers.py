"""Every raw format is found by its content, read whole, and damage stays where it is."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zero2all.common.errors import BadInputError
from zero2all.corpus.listing import list_files
from zero2all.corpus.readers import Format, sniff

TEXTS = [f"Document number {n}, 第{n}篇。" for n in range(300)]
ROWS = [{"id": n, "title": f"t{n}", "text": text} for n, text in enumerate(TEXTS)]


def contents(records):
    return [record["content"] for record in records]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.parquet", "a"])
def test_json_lines_are_found_under_any_name(write_lines, build, kept, name):
    report = build(write_lines(name, ROWS))
    assert report["formats"] == {"json lines": 1}
    assert contents(kept()) == TEXTS


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "a.parquet"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_array_is_found_under_any_name(tmp_path, build, kept, name, indent):
    (tmp_path / name).write_text(json.dumps(ROWS, indent=indent), encoding="utf-8")
    assert build(tmp_path / name)["formats"] == {"json array": 1}
    assert contents(kept()) == TEXTS


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.txt"])
def test_parquet_is_found_under_any_name(tmp_path, build, kept, name):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name, row_group_size=70)
    assert build(tmp_path / name)["formats"] == {"parquet": 1}
    assert contents(kept()) == TEXTS
    assert kept()[7]["title"] == "t7"
    assert kept()[7]["others"] == {"id": 7}


def test_array_of_plain_strings(tmp_path, build, kept):
    (tmp_path / "a.json").write_text(json.dumps(TEXTS))
    build(tmp_path / "a.json")
    assert contents(kept()) == TEXTS


def test_one_object_over_many_lines_is_one_record(tmp_path, build, kept):
    (tmp_path / "a.json").write_text(json.dumps({"title": "A", "body": "the text"}, indent=4))
    assert build(tmp_path / "a.json")["formats"] == {"json object": 1}
    assert contents(kept()) == ["the text"]


def test_text_file_is_one_document_and_only_a_program_is_titled_by_its_path(tmp_path, build, kept):
    (tmp_path / "raw/sub").mkdir(parents=True)
    (tmp_path / "raw/sub/b.md").write_text("# B\n\ntext")
    (tmp_path / "raw/a.txt").write_text("only a")
    (tmp_path / "raw/c.py").write_text("c = 1")
    build(tmp_path / "raw")
    assert [(record["title"], record["others"]["file"], record["content"]) for record in kept()] == [
        ("", "a.txt", "only a"),
        ("c.py", "c.py", "c = 1"),
        ("", "sub/b.md", "# B\n\ntext"),
    ]


@pytest.mark.parametrize(
    ("head", "suffix", "expected"),
    [
        (b'["a", "b"]\nprint(1)', ".py", Format.TEXT),
        (b"[link](http://a.b) starts this page", ".md", Format.TEXT),
        (b"[1]: a footnote", ".txt", Format.TEXT),
        (b"{\\rtf1 not JSON}", ".txt", Format.TEXT),
        (b'{"a": \n{"text": "ok"}\n', ".txt", Format.JSON_LINES),
        (b'{"text": "' + b"x" * 65526, ".txt", Format.JSON_LINES),
        (b"\xef\xbb\xbf  [ {}, {} ]", "", Format.JSON_ARRAY),
        (b"\x89PNG\r\n\0\0", ".txt", Format.BINARY),
        (b"\xff\xfea\0b\0", ".txt", Format.UTF16),
        (gzip.compress(b"x", mtime=0), ".jsonl", Format.COMPRESSED),
        (b"", ".jsonl", Format.EMPTY),
    ],
)
def test_content_decides_the_format(head, suffix, expected):
    assert sniff(head, suffix) is expected


def test_long_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path, build, kept):
    paragraphs = [f"Paragraph {n}: " + "words and more words " * 40 for n in range(2000)]
    text = "\n\n".join(paragraph.strip() for paragraph in paragraphs)
    (tmp_path / "book.txt").write_text(text)
    report = build(tmp_path / "book.txt")
    records = kept()
    assert report["records_in"] == len(records) > 100
    assert all(4_000 < len(content) < 33_000 for content in contents(records)[:-1])
    assert "\n\n".join(contents(records)) == text
    assert [record["others"]["part"] for record in records] == list(range(1, len(records) + 1))


def test_long_text_without_any_line_end_is_cut_between_characters(tmp_path, build, kept):
    text = "".join(chr(0x4E00 + n % 9000) for n in range(400_000))
    (tmp_path / "a.txt").write_text("a" + text, encoding="utf-8")
    report = build(tmp_path / "a.txt")
    assert report["quarantined"] == 0
    assert "".join(contents(kept())) == "a" + text


def test_long_program_stays_one_document(tmp_path, build, kept):
    (tmp_path / "a.py").write_text("x = 1\n\n" * 200_000)
    build(tmp_path / "a.py")
    assert len(kept()) == 1


def test_folder_of_any_mix_is_read_in_name_order(tmp_path, write_lines, build, kept):
    write_lines("raw/b.jsonl", ROWS[:2])
    write_lines("raw/c/c.txt", [{"content": "other field name", "title": "c"}])
    (tmp_path / "raw/a.json").write_text(json.dumps(ROWS[2:4]))
    pq.write_table(pa.Table.from_pylist(ROWS[4:6]), tmp_path / "raw/d.parquet")
    (tmp_path / "raw/e.py").write_text("print('e')")
    (tmp_path / "raw/f.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "raw/g.txt").write_bytes(b"")
    (tmp_path / "raw/h.jsonl.gz").write_bytes(gzip.compress(b"{}", mtime=0))
    (tmp_path / "raw/.hidden.txt").write_text("not read")
    (tmp_path / "raw/.git").mkdir()
    (tmp_path / "raw/.git/config").write_text("not read")
    (tmp_path / "raw/nowhere.txt").symlink_to(tmp_path / "absent")
    report = build(tmp_path / "raw")
    assert contents(kept()) == [*TEXTS[2:4], *TEXTS[0:2], "other field name", *TEXTS[4:6], "print('e')"]
    assert report["skipped_files"] == {"binary": 1, "compressed": 1, "empty": 1, "hidden": 2, "unreadable": 1}


def test_what_our_own_stages_wrote_is_not_read(tmp_path):
    (tmp_path / "workspace.json").write_text("{}")
    for name in ("mine.txt", "corpus/report.json", "runs/r/log.txt", "inner/workspace.json", "inner/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    listing = list_files(tmp_path, leave_out=tmp_path / "corpus")
    assert [file.name for file in listing.files] == ["mine.txt"]
    assert listing.skipped == {"workspace": ["corpus/", "inner/", "runs/"]}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read_is_counted(tmp_path, build):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("fine")
    (tmp_path / "raw/b.txt").write_text("secret")
    (tmp_path / "raw/b.txt").chmod(0)
    assert build(tmp_path / "raw")["skipped_files"] == {"unreadable": 1}


def test_byte_order_mark_is_not_text(tmp_path, build, kept):
    bom = b"\xef\xbb\xbf"
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_bytes(bom + json.dumps(ROWS[0]).encode())
    (tmp_path / "raw/b.json").write_bytes(bom + json.dumps(ROWS[1:3]).encode())
    (tmp_path / "raw/c.txt").write_bytes(bom + b"plain")
    (tmp_path / "raw/d.txt").write_bytes(bom + b"long text\n\n" * 100_000)
    build(tmp_path / "raw")
    assert contents(kept())[:4] == [*TEXTS[:3], "plain"]
    assert kept()[4]["content"].startswith("long")


def test_damaged_line_is_quarantined_with_its_place_and_the_rest_is_kept(write_lines, build, kept, quarantined):
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    lines[150] = b'{"id": 150, "text": "cut'
    report = build(write_lines("a.jsonl", lines))
    assert contents(kept()) == TEXTS[:150] + TEXTS[151:]
    assert (report["records_in"], report["quarantined"]) == (300, 1)
    [bad] = quarantined()
    assert bad["file"] == "a.jsonl"
    assert bad["place"] == f"line 151, byte {sum(len(line) + 1 for line in lines[:150])}"
    assert bad["reason"] == "invalid_json"
    assert bad["excerpt"].strip() == lines[150].decode()
    assert kept()[150]["id"] == 151, "a damaged line keeps its ordinal"


def test_damaged_beginning_does_not_hide_the_fields(write_lines, build):
    report = build(write_lines("a.jsonl", [b"{broken"] * 25 + ROWS), max_damaged_share=0.1)
    assert (report["records_kept"], report["quarantined"]) == (300, 25)


def test_invalid_utf8_is_quarantined_with_its_place(tmp_path, write_lines, build, kept, quarantined):
    write_lines("raw/a.jsonl", [*ROWS, b'{"text": "ab\xffcd"}'])
    (tmp_path / "raw/b.txt").write_bytes(b"good\xe4\xb8bad")
    report = build(tmp_path / "raw")
    assert contents(kept()) == TEXTS
    assert report["quarantined_by_reason"] == {"not_utf8": 2}
    line, text = quarantined()
    assert line["place"].startswith("line 301, ")
    assert "\\xff" in line["excerpt"]
    assert (text["file"], text["place"]) == ("b.txt", "byte 4")


def test_invalid_utf8_in_a_long_text_costs_one_document(tmp_path, build, quarantined):
    data = b"\n\n".join(b"paragraph %d " % n * 60 for n in range(5000))
    at = len(data) // 2
    (tmp_path / "a.txt").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    report = build(tmp_path / "a.txt")
    assert report["quarantined"] == 1
    assert quarantined()[0]["place"] == f"byte {at}"


def test_array_cut_at_the_end_keeps_what_stands_before(tmp_path, build, kept, quarantined):
    data = json.dumps(ROWS, ensure_ascii=False).encode()[:-10]
    (tmp_path / "a.json").write_bytes(data)
    report = build(tmp_path / "a.json")
    assert contents(kept()) == TEXTS[:-1]
    assert report["quarantined_by_reason"] == {"cut_off": 1}
    assert quarantined()[0]["place"] == f"item 300, byte {len(data)}"
    assert quarantined()[0]["excerpt"].startswith('{"id": 299')


def test_array_broken_in_the_middle_counts_the_unread_rest_as_damage(tmp_path, build, kept, quarantined):
    data = json.dumps(ROWS * 20).encode()
    at = data.index(b'{"id": 150', len(data) // 2)
    (tmp_path / "a.json").write_bytes(data[:at] + b"@" + data[at:])
    with pytest.raises(BadInputError, match=r"1 of .* records are damaged, and [0-9,]+ bytes behind damaged places"):
        build(tmp_path / "a.json")
    report = build(tmp_path / "a.json", max_damaged_share=0.6)
    [bad] = quarantined()
    assert bad["ends_file"]
    assert bad["place"] == f"item {report['records_in']}, byte {at}"
    assert report["bytes_quarantined"] == pytest.approx(len(data) - at, abs=5)
    assert contents(kept()) == TEXTS


def test_damaged_parquet_is_named(tmp_path, build, quarantined):
    (tmp_path / "raw").mkdir()
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "raw" / name)
    cut = (tmp_path / "raw/b.parquet").read_bytes()[:-20]
    (tmp_path / "raw/b.parquet").write_bytes(cut)
    report = build(tmp_path / "raw", max_damaged_share=0.9)
    assert (report["records_kept"], report["quarantined"]) == (300, 1)
    assert (quarantined()[0]["file"], quarantined()[0]["place"]) == ("b.parquet", "whole file")


def test_invalid_utf8_in_parquet_costs_one_row(tmp_path, build, quarantined):
    cells = [text.encode() for text in TEXTS]
    cells[42] = b"ab\xff"
    column = pa.array(cells, pa.binary())
    pq.write_table(pa.table({"text": column.view(pa.string())}), tmp_path / "a.parquet")
    assert build(tmp_path / "a.parquet")["quarantined_by_reason"] == {"not_utf8": 1}
    assert quarantined()[0]["place"] == "row 43"


def test_record_above_the_limit_is_passed_over(write_lines, build, kept, quarantined):
    report = build(write_lines("a.jsonl", [*ROWS, {"text": "x" * 500_000}, {"text": "last"}]), max_record_bytes=100_000)
    assert report["quarantined_by_reason"] == {"too_large": 1}
    assert contents(kept()) == [*TEXTS, "last"]
    assert quarantined()[0]["place"].startswith("line 301, ")
    assert len(quarantined()[0]["excerpt"]) == 200


def test_odd_but_legal_json_is_kept(write_lines, build, kept):
    rows = [b'{"text": "half \\ud83d emoji", "score": NaN, "n": 123456789012345678901234567890}', b"", b"   "]
    report = build(write_lines("a.jsonl", rows))
    assert report["records_in"] == 1, "blank lines are no records"
    assert kept()[0]["content"] == "half  emoji"
    assert kept()[0]["others"] == {"score": None, "n": "123456789012345678901234567890"}


def test_line_that_is_no_object_is_quarantined(write_lines, build):
    assert build(write_lines("a.jsonl", [*ROWS, 17]))["quarantined_by_reason"] == {"not_an_object": 1}


def test_utf16_text_is_quarantined_with_advice(tmp_path, build, quarantined):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("hello", encoding="utf-16")
    (tmp_path / "raw/b.txt").write_text("good")
    build(tmp_path / "raw", max_damaged_share=1.0)
    assert "iconv" in quarantined()[0]["detail"]


def test_single_file_is_listed_by_its_name(tmp_path: Path):
    (tmp_path / "x.txt").write_text("x")
    assert [file.name for file in list_files(tmp_path / "x.txt").files] == ["x.txt"]
