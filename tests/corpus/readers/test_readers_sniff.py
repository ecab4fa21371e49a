"""Content decides what a file is, and which files a source has."""

import gzip
import os
from pathlib import Path

import pytest

from tests.corpus.readers.reader_samples import csv_table, parquet, tar_of, zip_of
from zero2all.common.errors import BadInputError
from zero2all.corpus.listing import list_files
from zero2all.corpus.readers import Format, sniff
from zero2all.corpus.readers.encodings import encoding_problem, find_encoding

HEADS = {
    Format.TEXT: [
        (b'["a", "b"]\nprint(1)', ".py"), (b"[link](http://a.b) starts this page", ".md"),
        (b"[1]: a footnote", ".txt"), (b"{\\rtf1 not JSON}", ".txt"), ("hello there".encode("utf-16"), ".txt"),
        (b"BZh1 is how this sentence starts", ".txt"), (b"PK is how this one starts", ".txt"),
        (b"One, two, three.\nFour, five, six.\n" * 5, ".txt"), (b"a,b\n1,2\n3,4\n", ".md"),
        (b'"Well," he said,\n\nand went on with [1] his {story}.\n' * 50, ".json"),
        ("这是一段普通的文字，不是 JSON。\n".encode() * 20, ".jsonl"),
        (b"[Chapter 1] It was a dark night.\n", ".json"), (b"words of a long line " * 4000, ".json"),
        (b'{{< note >}}\nA page.\n{{< /note >}}\n\n{"a": 1}\n' + b"More words.\n" * 20, ".json"),
        (b'A page.\n{{< note >}}\n{"a": 1}\n' + b"More words.\n" * 20, ".json"),
    ],
    Format.JSON_LINES: [
        (b'{"a": \n{"text": "ok"}\n', ".txt"), (b'{"text": "' + b"x" * 65526, ".txt"), (b"{not json at all", ".json"),
        (b'garbage first\n{"text": "ok"}\n', ".json"), (b'"a text"\n"another"\n17\n', ".json"),
        (b"{'text': 'of Python'}\n", ".json"),
    ],
    Format.JSON_OBJECT: [(b'{\n "text": "one object"\n}\n', "")],
    Format.JSON_ARRAY: [(b"\xef\xbb\xbf  [ {}, {} ]", ""), ('[{"文": 1}]'.encode("utf-16"), ""), (b"[1, 2]", ".json")],
    Format.BINARY: [(b"\x89PNG\r\n\0\0", ".txt")],
    Format.ARCHIVE: [
        (gzip.compress(b"x", mtime=0), ".jsonl"), (zip_of({"a": b"x"}), ".jsonl"), (tar_of({"a": b"x"}), ".jsonl"),
    ],
    Format.COMPRESSED: [(b"\x04\x22\x4d\x18 lz4", ".jsonl")],
    Format.PARQUET: [(parquet(), ".json")],
    Format.CSV: [(csv_table(), ".csv"), (csv_table(), ".txt")],
    Format.EMPTY: [(b"", ".jsonl")],
}  # fmt: skip
"""What is found in it -> beginning and name of a file."""


@pytest.mark.parametrize("expected", HEADS)
def test_content_decides_the_format(expected: Format):
    for head, name in HEADS[expected]:
        assert (head[:40], sniff(head, name).format) == (head[:40], expected)


def test_delimiter_and_header_of_a_table():
    for delimiter in ",\t;|":
        found = sniff(csv_table(delimiter=delimiter), "a.csv")
        assert (found.format, found.delimiter, found.header) == (Format.CSV, delimiter, ("id", "title", "text"))


@pytest.mark.parametrize(
    "names",
    [
        ["id", "name, first and last", "text"],
        ["Is it good? (1-5)", "50% of what", "my review & yours"],
        ["编号（整数）", "用户名,昵称", "正文：全部"],
        ["_id", "text", "2nd text"],
        ["", "instruction", "output"],  # the index of a pandas frame has no name
    ],
)
def test_quoted_names_and_names_with_signs_are_a_header(names: list[str]):
    rows = [[f"{n}", f"No. {n}, of many", "Some words, and a few more."] for n in range(9)]
    found = sniff(csv_table([dict(zip(names, row, strict=True)) for row in rows]), "a.csv")
    assert (found.has_header, found.header) == (True, tuple(names))
    quoted = "\n".join(",".join(f'"{value}"' for value in row) for row in [names, *rows])
    assert sniff(quoted.encode(), "a.csv").header == tuple(names)


@pytest.mark.parametrize(
    "row",
    [
        ["1", "A first record. It has two sentences.", "en"],
        ["u17", "The words of one person, said to another", "2024-01-01"],
        ["张三", "今天天气很好，我们去公园玩。", "好评"],
    ],
)
def test_a_first_row_that_is_like_the_others_is_no_header(row: list[str]):
    others = [[cell.replace("1", f"{n}").replace("three", "x") for cell in row] for n in range(2, 12)]
    table = csv_table([dict(enumerate(each)) for each in [row, *others]]).split(b"\r\n", 1)[1]  # type: ignore[misc]
    assert not sniff(table, "a.csv").has_header


def test_folder_is_listed_in_name_order_without_what_is_no_data(tmp_path: Path):
    for name in ("b.txt", "a/z.txt", ".hidden.txt", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    listing = list_files(tmp_path)
    assert [file.name for file in listing.files] == ["a/z.txt", "b.txt"]
    assert listing.skipped == {"hidden": [".git", ".hidden.txt"], "unreadable": ["nowhere"], "not a file": ["pipe"]}


SENTENCES = {
    "gb18030": "今天我们去了河边的学校，老师给我们讲了一个很长的故事。",
    "big5hkscs": "今天我們去了河邊的學校，老師給我們講了一個很長的故事。",
    "cp932": "今日は川のそばの学校に行って、先生から長い話を聞きました。",
    "euc_jp": "今日は川のそばの学校に行って、先生から長い話を聞きました。",
    "cp949": "오늘 우리는 강가에 있는 학교에 가서 선생님에게 긴 이야기를 들었습니다.",
    "cp1251": "Сегодня мы пошли в школу у реки, и учитель рассказал нам длинную историю.",
    "koi8_r": "Сегодня мы пошли в школу у реки, и учитель рассказал нам длинную историю.",
    "cp1252": "Après l’école, l’élève a raconté une très longue histoire à son père.",
    "cp1250": "Žluťoučký kůň šel kolem řeky až ke škole, kde učitel vyprávěl příběh.",
}


@pytest.mark.parametrize("encoding", SENTENCES)
def test_an_encoding_without_a_mark_is_found_by_what_the_text_says(encoding: str):
    for text in (SENTENCES[encoding], "plain = words\n" * 40 + SENTENCES[encoding]):
        assert find_encoding(text.encode(encoding), whole=True) == (encoding, 0)
        assert find_encoding(text.encode(), whole=True) == ("utf-8", 0)
        assert find_encoding(text.encode(encoding), whole=True, named="cp866") == ("cp866", 0)
        assert find_encoding(text.encode(), whole=True, named="cp866") == ("utf-8", 0)


def test_text_in_no_known_encoding_is_not_taken_for_chinese_and_names_are_checked():
    for data in ("Καλημέρα σε όλους".encode("cp1253"), "สวัสดีครับ ทุกคน".encode("cp874"), bytes(range(128, 256))):
        assert find_encoding(data, whole=True) == ("utf-8", 0)
    assert [bool(encoding_problem(name)) for name in ("big5", "utf-16-le", "rot13", "utf-16", "none")] == [
        False
    ] * 2 + [True] * 3


def test_what_our_own_stages_wrote_is_not_read(tmp_path: Path):
    (tmp_path / "workspace.json").write_text("{}")
    for name in ("mine.txt", "corpus/report.json", "runs/r/log.txt", "inner/workspace.json", "inner/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    listing = list_files(tmp_path, leave_out=tmp_path / "corpus")
    assert [file.name for file in listing.files] == ["mine.txt"]
    assert listing.skipped == {"workspace": ["corpus/", "inner/", "runs/"]}


def test_single_file_is_listed_by_its_name_and_an_address_with_nothing_behind_it_is_refused(tmp_path: Path):
    (tmp_path / "x.txt").write_text("x")
    for path in (tmp_path / "x.txt", str(tmp_path / "x.txt")):
        assert [file.name for file in list_files(path).files] == ["x.txt"]
    with pytest.raises(BadInputError, match="Nothing was found at memory://nowhere"):
        list_files("memory://nowhere")
