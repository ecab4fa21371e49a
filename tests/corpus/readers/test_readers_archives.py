"""What an archive may not do, and what is not read in one."""

import gzip
import io
import sys
import tarfile
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.corpus.readers import reader_samples as samples
from tests.corpus.readers.reader_samples import PACKS, ROWS, damaged_of, json_lines, read_all, rows_of, units_of, zip_of
from zero2all.corpus.readers import Format, ReaderLimits
from zero2all.corpus.readers.archives import is_safe_name


@pytest.mark.parametrize("kind", [".zip", ".tar", ".7z", ".rar"])
def test_names_that_point_outside_are_refused(tmp_path: Path, kind: str):
    names = ["../up.txt", "/etc/passwd", "a/../../b.txt", "..\\up.txt", "C:\\x.txt"]
    if kind == ".rar":  # libarchive turns the backslashes of a rar into slashes
        names = names[:3]
    members = dict.fromkeys(names, b"harm") | {"good.jsonl": json_lines(ROWS[:2])}
    (tmp_path / f"a{kind}").write_bytes(PACKS[kind](members))
    items = read_all(tmp_path / f"a{kind}")
    assert rows_of(items) == ROWS[:2]
    assert [bad.reason for bad in damaged_of(items)] == ["unsafe_name"] * len(names)
    safe = {"a/b": True, "a..b/c": True, "": False, "a/..": False, "x\0y": False}
    assert {name: is_safe_name(name) for name in safe} == safe


BOMB = (b'{"text": "' + b"x" * 1000 + b'"}\n') * 20_000


@pytest.mark.parametrize("kind", [".gz", ".zip", ".tar.gz", ".7z", ".zip.gz"])
def test_bomb_is_refused_by_its_ratio(tmp_path: Path, kind: str):
    nested = gzip.compress(zip_of({"b.jsonl.gz": gzip.compress(BOMB)})) if kind == ".zip.gz" else None
    (tmp_path / f"a.jsonl{kind}").write_bytes(nested or samples.wrapped(kind, "a.jsonl", BOMB))
    items = read_all(tmp_path / f"a.jsonl{kind}", ReaderLimits(ratio_from_bytes=1_000_000))
    assert "bomb" in {bad.reason for bad in damaged_of(items)}
    assert len(rows_of(items)) < 10_000
    if kind in (".gz", ".zip"):
        assert len(read_all(tmp_path / f"a.jsonl{kind}")) == 20_000, "below ratio_from_bytes nothing is refused"


def test_many_members_that_are_a_bomb_together(tmp_path: Path):
    members = {f"{n}.jsonl": b'{"text": "%s"}\n' % (b"%d" % n * 100_000) for n in range(30)}
    (tmp_path / "a.zip").write_bytes(zip_of(members))
    items = read_all(tmp_path / "a.zip", ReaderLimits(ratio_from_bytes=1_000_000, max_ratio=100))
    assert damaged_of(items)[0].reason == "bomb"
    assert len(rows_of(items)) < 15


def test_nested_archives_are_read_to_a_depth(tmp_path: Path):
    texts = zip_of({"c.7z": samples.seven_zip_of({"d.jsonl.gz": gzip.compress(json_lines(ROWS[:3]))})})
    members = {"b.zip": texts, "p.zip": zip_of({"e.parquet": samples.parquet()})}
    (tmp_path / "a.tar").write_bytes(samples.tar_of(members))
    items = read_all(tmp_path / "a.tar")
    assert rows_of(items) == ROWS[:3] + ROWS
    assert items[0].origin is not None
    assert items[0].origin.member == "b.zip/c.7z/d.jsonl.gz"
    items = read_all(tmp_path / "a.tar", ReaderLimits(max_nesting=3))
    assert [bad.reason for bad in damaged_of(items)] == ["nested_too_deep"]
    assert rows_of(items) == ROWS
    deep = b"text"
    for _ in range(12):
        deep = zip_of({"x.zip": deep})
    (tmp_path / "b.zip").write_bytes(deep)
    assert [bad.reason for bad in damaged_of(read_all(tmp_path / "b.zip"))] == ["nested_too_deep"]


def test_links_hidden_and_empty_members_are_counted(tmp_path: Path):
    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "pipe": tarfile.FIFOTYPE, "dir": tarfile.DIRTYPE}
    long = "a" * 300 + ".txt"
    members = {".DS_Store": b"x", "empty.txt": b"", "pic.png": b"\x89PNG\0\0\0", long: b"text"}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in (*kinds, *members):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kinds.get(name, b"0"), len(members.get(name, b"")), "/etc/passwd"
            tar.addfile(info, io.BytesIO(members.get(name, b"")))
    for name, data in {"a.tar": out.getvalue(), "b.tar.gz": gzip.compress(out.getvalue())}.items():
        (tmp_path / name).write_bytes(data)
        skipped: list[tuple[str, str]] = []
        items = read_all(tmp_path / name, skipped=skipped)
        assert [row["others"]["file"] for row in rows_of(items)] == [f"{name}/{long}"]
        expected = {"link": "link", "hard": "link", "pipe": "not a file", ".DS_Store": "hidden", "empty.txt": "empty"}
        expected["pic.png"] = "binary"
        assert skipped == [(reason, f"{name}/{member}") for member, reason in expected.items()]


def test_an_encrypted_entry_is_reported_and_the_name_of_another_may_be_chinese(tmp_path: Path):
    data = bytearray(zip_of({"a.txt": b"secret", "dir/XXXX.txt": b"open"}).replace(b"XXXX", "文件".encode("gbk")))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(bytes(data))
    items = read_all(tmp_path / "a.zip")
    assert [bad.reason for bad in damaged_of(items)] == ["encrypted"]
    assert [(row["content"], row["others"]["file"]) for row in rows_of(items)] == [("open", "a.zip/dir/文件.txt")]


def test_office_documents_are_not_archives_of_texts(tmp_path: Path):
    (tmp_path / "a.pptx").write_bytes(zip_of({"ppt/slides/slide1.xml": b"<p>text</p>"}))
    assert units_of(tmp_path / "a.pptx")[0].format is Format.BINARY


@pytest.mark.parametrize("kind", [".7z", ".rar"])
def test_without_libarchive_the_file_is_skipped_and_the_user_told_what_to_install(tmp_path: Path, kind: str):
    packed = PACKS[kind]({"a.txt": b"text"})
    (tmp_path / f"a{kind}").write_bytes(packed)
    (tmp_path / f"b{kind}.zip").write_bytes(zip_of({f"a{kind}": packed}))
    with patch.dict(sys.modules, {"libarchive": None}):
        [unit] = units_of(tmp_path / f"a{kind}")
        assert unit.format is Format.NEEDS_LIBARCHIVE
        assert "apt install libarchive13" in unit.note
        skipped: list[tuple[str, str]] = []
        assert read_all(tmp_path / f"b{kind}.zip", skipped=skipped) == []
        assert skipped == [("needs libarchive", f"b{kind}.zip/a{kind}")]
