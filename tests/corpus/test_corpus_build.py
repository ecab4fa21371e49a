"""What a build keeps, drops, holds out, reports and refuses."""

import json
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.corpus.corpus_helpers import HERE, both, plain_options
from zero2all.common.errors import BadInputError, DiskError, RunLockedError
from zero2all.common.lock import folder_lock
from zero2all.common.records import iter_records
from zero2all.corpus import Source, read_report, summary_notes, summary_rows
from zero2all.corpus import build_corpus as build_with
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.report import check_identity


def rows(count: int, word: str = "text") -> list[dict[str, str]]:
    return [{"text": f"{word} number {n}"} for n in range(count)]


def build_corpus(corpus, sources, **options):
    return build_with(corpus, sources, plain_options(**options), HERE)


def test_everything_that_came_in_is_accounted_for(write_lines, build):
    odd = [{"text": text} for text in ("", "\x00 \n", "ab", "text  number 3", "\x01control")] + [b"{bad"]
    report = build(write_lines("a.jsonl", rows(300) + odd), min_chars=3)
    assert report["records_in"] == 306
    assert report["dropped"] == {"duplicate": 1, "empty": 2, "too_short": 1}
    assert report["quarantined"] == 1
    assert report["records_kept"] == 301 == report["train_records"] + report["valid_records"]
    bytes_out = report["bytes_kept"] + sum(report["bytes_dropped"].values())
    assert report["bytes_in"] == bytes_out + report["bytes_quarantined"] + report["bytes_repaired"]
    assert report["bytes_repaired"] == 1
    with pytest.raises(AssertionError, match="source one: 307 records"):
        check_identity("one", {**report, "records_in": 307})


def test_gids_are_unique_and_do_not_move_and_the_report_is_of_the_last_build(tmp_path, write_lines):
    a, b = Source("a", write_lines("a.jsonl", rows(30))), Source("b", write_lines("b.jsonl", rows(30, "other")))

    def gids(name):
        return {record["content"]: record["gid"] for record in both(tmp_path / "corpus", name)}

    build_corpus(tmp_path / "corpus", [a, b])
    assert gids("a")["text number 5"] == 5
    assert gids("b")["other number 5"] == 2**40 + 5
    build_corpus(tmp_path / "corpus", [b, a], min_chars=12)
    assert gids("b")["other number 5"] == 2**40 + 5, "neither order nor options renumber a source"
    assert gids("a")["text number 25"] == 25, "dropped records keep their ordinals"
    assert json.loads((tmp_path / "corpus/sources.json").read_text()) == {"a": 0, "b": 1}
    build_corpus(tmp_path / "corpus", [a])
    assert list(read_report(tmp_path / "corpus")["sources"]) == ["a"]
    assert (tmp_path / "corpus/b").is_dir()


def test_shards_roll_at_the_given_size_and_nothing_is_held_out_at_share_zero(tmp_path, write_lines, build):
    large = [{"text": text} for text in ("a" * 100, "b" * 5000, "c" * 100, "d" * 100)]
    report = build(write_lines("a.jsonl", [*rows(200), *large]), shard_bytes=4000, valid_share=0)
    assert report["valid_records"] == 0
    shards = sorted((tmp_path / "corpus/one/train").iterdir())
    assert [shard.name for shard in shards[:2]] == ["part-00000.jsonl", "part-00001.jsonl"]
    assert all(3800 < shard.stat().st_size <= 4000 for shard in shards[:-3])
    records = [len(shard.read_bytes().splitlines()) for shard in shards]
    assert records[-2:] == [1, 2], "a record above the size has a shard to itself"
    assert [record["id"] for record in iter_records(tmp_path / "corpus", "one", "train")] == list(range(204))


def test_valid_split_depends_on_the_text_only(tmp_path, write_lines):
    def valid(corpus, path):
        build_corpus(corpus, [Source("a", path)], valid_share=0.1)
        train = {record["content"] for record in iter_records(corpus, "a", "train")}
        held_out = {record["content"] for record in iter_records(corpus, "a", "valid")}
        assert not train & held_out
        return held_out

    some = valid(tmp_path / "c1", write_lines("a.jsonl", rows(400)))
    shuffled = valid(tmp_path / "c2", write_lines("b.jsonl", rows(600)[::-1]))
    assert 20 < len(some) < 60
    assert some == {text for text in shuffled if int(text.split()[-1]) < 400}


def test_small_source_holds_out_one_record_or_none(write_lines, build, kept):
    for count, expected in ((19, 0), (20, 1), (25, 1)):
        report = build(write_lines("a.jsonl", rows(count)), valid_share=1e-9)
        assert (report["train_records"], report["valid_records"]) == (count - expected, expected)
        assert [record["id"] for record in kept()] == list(range(count))


def test_summary_shows_each_source_the_total_and_what_was_guessed(tmp_path, write_lines):
    a = Source("a", write_lines("a.jsonl", [*rows(300), rows(1)[0], b"{bad"]))
    b = Source("b", write_lines("b.jsonl", [{"text": "你好，世界"}]), "zh")
    report = build_corpus(tmp_path / "corpus", [a, b])
    table = summary_rows(report)
    assert [row[0] for row in table] == ["source", "a", "b", "total"]
    assert table[1][1:6] == ["en", "302", "300", "1", "1"]
    shards = [len(list((tmp_path / "corpus" / name).glob("*/part-*"))) for name in ("a", "b")]
    assert [row[8] for row in table] == ["shards", *map(str, shards), str(sum(shards))]
    notes = "\n".join(summary_notes(report))
    said = ["a: channel guessed as en", "a: fields guessed: content from 'text'", "a: dropped 1 duplicate"]
    for words in (*said, "a: quarantined 1 invalid_json; see corpus/quarantine/a.jsonl", "b: too few records"):
        assert words in notes


@pytest.mark.parametrize("channel", [None, "auto"])
def test_folder_with_nothing_readable_is_refused_and_nothing_is_read(tmp_path, channel):
    said, raw = [], tmp_path / "raw"
    raw.mkdir()
    with pytest.raises(BadInputError, match=r"nothing readable was found in .*raw"):
        build_with(tmp_path / "corpus", [Source("b", raw, channel)], announce=said.append)
    for name, data in {"a.bin": bytes(range(256)) * 8, "b.txt": b"", "c.jpg": b"\xff\xd8\xff" + bytes(5000)}.items():
        (raw / name).write_bytes(data)
    with pytest.raises(BadInputError, match=r"nothing readable was found in .*raw\. Files left out: 2 binary, 1 empty"):
        build_with(tmp_path / "corpus", [Source("b", raw, channel)], announce=said.append)
    assert said == []


def test_rows_without_a_text_field_are_refused_with_the_fields_seen(tmp_path, write_lines, build, kept):
    path = write_lines("raw/a.jsonl", [{"foo": "words", "bar": 1}] * 5)
    write_lines("raw/b.jsonl", [{"baz": "words"}])
    for given in (path, path.parent):
        with pytest.raises(BadInputError, match=r"fields foo, bar.*--map content=foo"):
            build(given)
    assert not (tmp_path / "corpus/report.json").exists()
    build(write_lines("c.jsonl", [{"foo": "words", "bar": 1}]), mapping={"content": "foo"})
    assert kept()[0]["content"] == "words"
    named = {"id": "7", "review": "A long review of a small thing."}
    with pytest.raises(BadInputError, match="for example --map content=review"):  # the field with most text
        build(write_lines("d.jsonl", [named] * 3))


def test_empty_corpus_is_refused_with_counts_and_no_report(tmp_path, write_lines, build):
    with pytest.raises(BadInputError, match=r"The corpus is empty: 7 records .*5 too_short, 2 empty.*'text'"):
        build(write_lines("a.jsonl", [*rows(5), {"text": " "}, {"text": ""}]), min_chars=100)
    with pytest.raises(BadInputError, match="There is no finished corpus"):
        read_report(tmp_path / "corpus")


def test_too_much_damage_stops_the_build_and_leaves_the_older_corpus(tmp_path, write_lines, build, quarantined):
    before = build(write_lines("a.jsonl", rows(30)))
    path = write_lines("a.jsonl", [*rows(96), b"{bad", b"{bad", b'{"text": "\xff"}', b"[]"])
    with pytest.raises(BadInputError, match=r"4 of 100 records are damaged \(4\.00%; at most 1\.00% is") as caught:
        build(path)
    for said in ("2 invalid_json (first in a.jsonl, byte ", "--max-damaged-share"):
        assert said in str(caught.value)
    assert len(quarantined()) == 4, "the list is there to look at"
    assert read_report(tmp_path / "corpus")["sources"]["one"] == before
    assert len(list(iter_records(tmp_path / "corpus", "one", "train"))) == before["train_records"]
    assert build(path, max_damaged_share=0.04)["quarantined"] == 4
    build(write_lines("a.jsonl", rows(301)))
    assert not (tmp_path / "corpus/quarantine/one.jsonl").exists(), "damage that was repaired leaves it"


def test_full_disk_is_told_before_the_work(tmp_path, build):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("Some words.")
    with open(tmp_path / "raw/huge.txt", "wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).free * 2)  # a hole: larger than the disk, taking no room
    with pytest.raises(DiskError, match="Not enough disk space for the corpus"):
        build(tmp_path / "raw")
    assert not (tmp_path / "corpus/one").exists()


def test_second_run_touches_nothing_but_a_damaged_shard_which_is_written_anew(tmp_path, write_lines):
    corpus = tmp_path / "corpus"
    contents = {"a": [*rows(300), b"{bad"], "b": rows(30, "b")}
    sources = [Source(name, write_lines(f"{name}.jsonl", lines)) for name, lines in contents.items()]
    first = build_corpus(corpus, sources)
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    assert not (corpus / ".build").exists()
    assert build_corpus(corpus, sources) == first
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before
    shard = corpus / "b/train/part-00000.jsonl"
    content, untouched = shard.read_bytes(), (corpus / "a/manifest.json").stat().st_mtime_ns
    for damaged in (None, content[:-1], content[:40] + b"#" + content[41:]):
        shard.unlink()
        if damaged:
            shard.write_bytes(damaged)
        said: list[str] = []
        build_with(corpus, sources, plain_options(), HERE, announce=said.append)
        assert shard.read_bytes() == content
        assert (corpus / "a/manifest.json").stat().st_mtime_ns == untouched
        assert re.search(r"b/train/part-00000\.jsonl .*\. The source b is built again", said[0]), said
    shard.write_text("{bad\n")
    with pytest.raises(BadInputError, match=r"part-00000.jsonl is damaged: it is not JSON at line 1"):
        both(corpus, "b")


def test_a_build_without_near_dedup_warns_only_where_something_was_held_out(tmp_path, write_lines):
    few, many = (Source("a", write_lines(f"{count}.jsonl", rows(count, "a"))) for count in (3, 300))
    assert build_corpus(tmp_path / "few", [few])["notes"] == []
    (note,) = build_corpus(tmp_path / "many", [many])["notes"]
    assert note.startswith("near duplicates were not looked for")


def test_without_dedup_only_the_changed_source_is_rebuilt(tmp_path, write_lines):
    names = ("a", "b", "c")
    sources = [Source(name, write_lines(f"{name}.jsonl", rows(30, name))) for name in names]
    off = DedupConfig(exact=False, near="off")
    build_corpus(tmp_path / "corpus", sources, dedup=off)
    before = {name: (tmp_path / "corpus" / name).stat().st_ino for name in names}
    time.sleep(0.01)
    write_lines("b.jsonl", rows(29, "b") + rows(1, "a"))
    build_corpus(tmp_path / "corpus", sources, dedup=off)
    after = {name: (tmp_path / "corpus" / name).stat().st_ino for name in names}
    assert [before[name] == after[name] for name in names] == [True, False, True]


def test_second_build_at_the_same_time_is_refused(tmp_path, write_lines):
    (tmp_path / "corpus").mkdir()
    refused = pytest.raises(RunLockedError, match="Another process is building the corpus")
    with folder_lock(tmp_path / "corpus", "busy"), refused:
        build_corpus(tmp_path / "corpus", [Source("a", write_lines("a.jsonl", rows(30)))])


def test_importing_the_stage_loads_nothing_heavy():
    heavy = ("pyarrow", "ijson", "torch", "rich", "numba", "ray", "fsspec", "zstandard", "libarchive")
    code = f"import sys, zero2all.corpus; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
