"""What a build keeps, drops, holds out, reports and refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options
from zero2all.common.errors import BadInputError, DiskError, RunLockedError
from zero2all.common.records import iter_records
from zero2all.corpus import (
    Source,
    read_report,
    summary_notes,
    summary_rows,
)
from zero2all.corpus import build_corpus as build_with
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.report import check_identity


def rows(count: int, word: str = "text") -> list[dict[str, str]]:
    return [{"text": f"{word} number {n}"} for n in range(count)]


def build_corpus(corpus, sources, **options):
    """A build in this process that keeps short texts."""
    return build_with(corpus, sources, plain_options(**options), HERE)


# ---- counts ---------------------------------------------------------------------------------------------------


def test_everything_that_came_in_is_accounted_for(write_lines, build):
    odd = [
        {"text": ""},
        {"text": "\x00 \n"},
        {"text": "ab"},
        {"text": "text  number 3"},
        b"{bad",
        {"text": "\x01control"},
    ]
    report = build(write_lines("a.jsonl", rows(300) + odd), min_chars=3)
    assert report["records_in"] == 306
    assert report["dropped"] == {"duplicate": 1, "empty": 2, "too_short": 1}
    assert report["quarantined"] == 1
    assert report["records_kept"] == 301 == report["train_records"] + report["valid_records"]
    bytes_out = report["bytes_kept"] + sum(report["bytes_dropped"].values())
    assert report["bytes_in"] == bytes_out + report["bytes_quarantined"] + report["bytes_repaired"]
    assert report["bytes_repaired"] == 1


def test_a_count_that_does_not_add_up_is_an_error(write_lines, build):
    report = build(write_lines("a.jsonl", rows(30)))
    with pytest.raises(AssertionError, match="source one: 31 records"):
        check_identity("one", {**report, "records_in": 31})


def test_duplicates_are_dropped_once_also_across_sources(tmp_path, write_lines):
    first = write_lines("a.jsonl", [*rows(3), rows(3)[0]])
    second = write_lines("b.jsonl", [*rows(4), {"text": "text   number 3"}])
    report = build_corpus(tmp_path / "corpus", [Source("a", first), Source("b", second)])
    assert report["sources"]["a"]["dropped"] == {"duplicate": 1}
    assert report["sources"]["b"]["dropped"] == {"duplicate": 4}
    kept = [record["content"] for record in iter_records(tmp_path / "corpus", "b", "train")]
    assert kept == ["text   number 3"], "the longer of two copies that differ in white space"
    assert report["totals"]["dropped"] == {"duplicate": 5}


# ---- numbers, shards, split -----------------------------------------------------------------------------------


def test_gids_are_unique_and_do_not_move(tmp_path, write_lines):
    a, b = Source("a", write_lines("a.jsonl", rows(30))), Source("b", write_lines("b.jsonl", rows(30, "other")))

    def gids(name):
        records = [
            *iter_records(tmp_path / "corpus", name, "train"),
            *iter_records(tmp_path / "corpus", name, "valid"),
        ]
        return {record["content"]: record["gid"] for record in records}

    build_corpus(tmp_path / "corpus", [a, b])
    assert gids("a")["text number 5"] == 5
    assert gids("b")["other number 5"] == 2**40 + 5
    build_corpus(tmp_path / "corpus", [b, a], min_chars=12)
    assert gids("b")["other number 5"] == 2**40 + 5, "neither order nor options renumber a source"
    assert gids("a")["text number 25"] == 25, "dropped records keep their ordinals"
    assert json.loads((tmp_path / "corpus/sources.json").read_text()) == {"a": 0, "b": 1}


def test_shards_roll_at_the_given_size(tmp_path, write_lines, build, kept):
    build(write_lines("a.jsonl", rows(200)), shard_bytes=4000, valid_share=0)
    shards = sorted((tmp_path / "corpus/one/train").iterdir())
    assert [shard.name for shard in shards[:2]] == ["part-00000.jsonl", "part-00001.jsonl"]
    assert all(3800 < shard.stat().st_size <= 4000 for shard in shards[:-1])
    assert [record["id"] for record in iter_records(tmp_path / "corpus", "one", "train")] == list(range(200))


def test_valid_split_depends_on_the_text_only(tmp_path, write_lines):
    def valid(corpus, path):
        build_corpus(corpus, [Source("a", path)], valid_share=0.1)
        train = {record["content"] for record in iter_records(corpus, "a", "train")}
        held_out = {record["content"] for record in iter_records(corpus, "a", "valid")}
        assert not train & held_out
        return held_out

    some = valid(tmp_path / "c1", write_lines("a.jsonl", rows(1000)))
    shuffled = valid(tmp_path / "c2", write_lines("b.jsonl", rows(1500)[::-1]))
    assert 60 < len(some) < 140
    assert some == {text for text in shuffled if int(text.split()[-1]) < 1000}


@pytest.mark.parametrize(("count", "expected"), [(19, 0), (20, 1), (25, 1)])
def test_small_source_holds_out_one_record_or_none(write_lines, build, kept, count, expected):
    report = build(write_lines("a.jsonl", rows(count)), valid_share=1e-9)
    assert (report["train_records"], report["valid_records"]) == (count - expected, expected)
    assert [record["id"] for record in kept()] == list(range(count))


def test_nothing_is_held_out_at_share_zero(write_lines, build):
    assert build(write_lines("a.jsonl", rows(100)), valid_share=0)["valid_records"] == 0


# ---- report ---------------------------------------------------------------------------------------------------


def test_report_lists_the_sources_of_the_last_build_only(tmp_path, write_lines):
    a, b = Source("a", write_lines("a.jsonl", rows(30))), Source("b", write_lines("b.jsonl", rows(30, "other")))
    build_corpus(tmp_path / "corpus", [a, b])
    build_corpus(tmp_path / "corpus", [a])
    assert list(read_report(tmp_path / "corpus")["sources"]) == ["a"]
    assert (tmp_path / "corpus/b").is_dir()


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
    assert "a: channel guessed as en" in notes
    assert "a: fields guessed: content from 'text'" in notes
    assert "a: dropped 1 duplicate" in notes
    assert "a: quarantined 1 invalid_json; see corpus/quarantine/a.jsonl" in notes
    assert "b: too few records" in notes


# ---- errors ---------------------------------------------------------------------------------------------------


def test_folder_with_nothing_readable_is_refused(tmp_path, build):
    (tmp_path / "raw").mkdir()
    with pytest.raises(BadInputError, match="nothing readable was found"):
        build(tmp_path / "raw")
    (tmp_path / "raw/a.bin").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "raw/b.txt").write_bytes(b"")
    with pytest.raises(BadInputError, match=r"left out: 1 binary, 1 empty"):
        build(tmp_path / "raw")


@pytest.mark.parametrize("in_folder", [False, True])
def test_rows_without_a_text_field_are_refused_with_the_fields_seen(tmp_path, write_lines, build, kept, in_folder):
    path = write_lines("raw/a.jsonl", [{"foo": "words", "bar": 1}] * 5)
    if in_folder:
        write_lines("raw/b.jsonl", [{"baz": "words"}])
        path = path.parent
    with pytest.raises(BadInputError, match=r"fields foo, bar.*--map content=foo"):
        build(path)
    assert not (tmp_path / "corpus/report.json").exists()
    build(write_lines("c.jsonl", [{"foo": "words", "bar": 1}]), mapping={"content": "foo"})
    assert kept()[0]["content"] == "words"


def test_mapping_to_a_field_that_is_not_there_is_refused(write_lines, build):
    with pytest.raises(BadInputError, match="have no field 'body', which content is mapped to"):
        build(write_lines("a.jsonl", rows(5)), mapping={"content": "body"})


def test_empty_corpus_is_refused_with_counts_and_no_report(tmp_path, write_lines, build):
    with pytest.raises(BadInputError, match=r"The corpus is empty: 7 records .*5 too_short, 2 empty.*'text'"):
        build(write_lines("a.jsonl", [*rows(5), {"text": " "}, {"text": ""}]), min_chars=100)
    with pytest.raises(BadInputError, match="There is no finished corpus"):
        read_report(tmp_path / "corpus")


def test_too_much_damage_stops_the_build_with_a_summary(tmp_path, write_lines, build, quarantined):
    path = write_lines("a.jsonl", [*rows(96), b"{bad", b"{bad", b'{"text": "\xff"}', b"[]"])
    with pytest.raises(BadInputError) as caught:
        build(path)
    message = str(caught.value)
    assert "4 of 100 records are damaged" in message
    assert "(4.00%; at most 1.00% is allowed)" in message
    assert "2 invalid_json (first in a.jsonl, byte " in message
    assert "--max-damaged-share" in message
    assert len(quarantined()) == 4, "the list is there to look at"
    assert not (tmp_path / "corpus/one").exists()
    assert build(path, max_damaged_share=0.04)["quarantined"] == 4


def test_refused_rebuild_leaves_the_older_corpus_as_it_was(tmp_path, write_lines, build):
    before = build(write_lines("a.jsonl", rows(30)))
    with pytest.raises(BadInputError):
        build(write_lines("a.jsonl", [b"{bad"]))
    assert read_report(tmp_path / "corpus")["sources"]["one"] == before
    assert len(list(iter_records(tmp_path / "corpus", "one", "train"))) == before["train_records"]


def test_full_disk_is_told_before_the_work(tmp_path, build):
    path = tmp_path / "raw"
    path.mkdir()
    (path / "a.txt").write_text("Some words.")
    with open(path / "huge.txt", "wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).free * 2)  # a hole: larger than the disk, taking no room
    with pytest.raises(DiskError, match="Not enough disk space for the corpus"):
        build(path)
    assert not (tmp_path / "corpus/one").exists()


def test_changed_shard_is_noticed_when_read(tmp_path, write_lines, build):
    build(write_lines("a.jsonl", rows(3)))
    (tmp_path / "corpus/one/train/part-00000.jsonl").write_text("{bad\n")
    with pytest.raises(BadInputError, match=r"part-00000.jsonl is damaged: it is not JSON at line 1"):
        list(iter_records(tmp_path / "corpus", "one", "train"))


# ---- doing it again -------------------------------------------------------------------------------------------


def test_second_run_touches_nothing(tmp_path, write_lines):
    sources = [
        Source("a", write_lines("a.jsonl", [*rows(300), b"{bad"])),
        Source("b", write_lines("b.jsonl", rows(3, "b"))),
    ]
    first = build_corpus(tmp_path / "corpus", sources)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*")}
    assert build_corpus(tmp_path / "corpus", sources) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*")} == before


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_shard_is_found_by_the_second_run_and_written_anew(tmp_path, write_lines, damage):
    sources = [Source(name, write_lines(f"{name}.jsonl", rows(30, name))) for name in ("a", "b")]
    build_corpus(tmp_path / "corpus", sources)
    shard = tmp_path / "corpus/b/train/part-00000.jsonl"
    content = shard.read_bytes()
    untouched = (tmp_path / "corpus/a/manifest.json").stat().st_mtime_ns
    if damage == "delete":
        shard.unlink()
    else:
        shard.write_bytes(content[:-1] if damage == "cut" else content[:40] + b"#" + content[41:])
    said: list[str] = []
    build_with(tmp_path / "corpus", sources, plain_options(), HERE, announce=said.append)
    assert shard.read_bytes() == content
    assert (tmp_path / "corpus/a/manifest.json").stat().st_mtime_ns == untouched
    assert re.search(r"b/train/part-00000\.jsonl .*\. The source b is built again", said[0]), said


def test_a_build_without_near_dedup_warns_only_where_something_was_held_out(tmp_path, write_lines):
    few, many = (Source("a", write_lines(f"{count}.jsonl", rows(count, "a"))) for count in (3, 300))
    dedup = DedupConfig(near="off")
    assert build_corpus(tmp_path / "few", [few], dedup=dedup)["notes"] == []
    (note,) = build_corpus(tmp_path / "many", [many], dedup=dedup)["notes"]
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


def test_kept_build_reads_only_what_is_new(tmp_path, write_lines):
    a, b = Source("a", write_lines("a.jsonl", rows(30, "a"))), Source("b", write_lines("b.jsonl", rows(30, "b")))
    options = plain_options()
    build_with(tmp_path / "corpus", [a], options, HERE, keep_build=True)
    units = list((tmp_path / "corpus/.build").glob("*/a/unit-00000"))
    before = [unit.stat().st_ino for unit in units]
    build_with(tmp_path / "corpus", [a, b], options, HERE, keep_build=True)
    assert len(units) == 1
    assert [unit.stat().st_ino for unit in units] == before
    build_with(tmp_path / "corpus", [a, b], options, HERE)
    assert not (tmp_path / "corpus/.build").exists()


def test_second_build_at_the_same_time_is_refused(tmp_path, write_lines):
    import fcntl
    import os

    path = write_lines("a.jsonl", rows(30))
    (tmp_path / "corpus").mkdir()
    handle = os.open(tmp_path / "corpus", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(RunLockedError, match="Another process is building the corpus"):
            build_corpus(tmp_path / "corpus", [Source("a", path)])
    finally:
        os.close(handle)


def test_damage_that_was_repaired_leaves_the_quarantine(tmp_path, write_lines, build):
    build(write_lines("a.jsonl", [*rows(300), b"{bad"]))
    build(write_lines("a.jsonl", rows(301)))
    assert not (tmp_path / "corpus/quarantine/one.jsonl").exists()


# ---- cost -----------------------------------------------------------------------------------------------------

MEASURED_BUILD = """
import re, sys, time
from pathlib import Path
from zero2all.corpus import BuildOptions, EngineConfig, Source, build_corpus
from zero2all.corpus.dedup.config import DedupConfig
started = time.monotonic()
options = BuildOptions(rules="none", dedup=DedupConfig(near="off"))
report = build_corpus(Path(sys.argv[1]), [Source("a", Path(sys.argv[2]))], options, EngineConfig(workers=1))
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(report["totals"]["records_kept"], int(peak[1]) / 1000)
"""


def test_importing_the_stage_loads_nothing_heavy():
    heavy = ("pyarrow", "ijson", "torch", "rich", "numba", "ray", "fsspec", "zstandard", "libarchive")
    code = f"import sys, zero2all.corpus; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
