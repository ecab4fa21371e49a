"""What stands in a finished corpus beside train records: formats, samples, clusters, reports."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options, tree
from zero2all.common.errors import BadInputError
from zero2all.common.records import iter_records, training_text
from zero2all.corpus import BuildOptions, Source, build_corpus, find_record, iter_dropped, read_report
from zero2all.corpus.channels import SCRIPTS, scripts_of_encoded
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.signatures import encode
from zero2all.corpus.shard_files import SHARD_FORMATS

WORDS = ["river", "stone", "morning", "carpenter", "window", "letter", "garden", "winter", "market", "bridge"]


def prose(seed: int, count: int = 120) -> list[str]:
    return random.Random(seed).choices([f"{word}{n}" for word in WORDS for n in range(40)], k=count)


def both(corpus, name="a"):
    return [record for split in ("train", "valid") for record in iter_records(corpus, name, split)]


# ---- formats --------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(write_lines):
    odd = [{"text": "第二行\n\n第三行", "title": "标题", "n": [1, {"a": None}]}, {"text": "x\fy", "title": "a\fb"}]
    return write_lines("a.jsonl", [*odd, *({"text": f"text {n}", "title": f"t{n}"} for n in range(300))])


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_every_format_is_read_back(tmp_path, rows, shard_format):
    options = {"valid_share": 0.1, "shard_bytes": 8000}
    build_corpus(tmp_path / "plain", [Source("a", rows)], plain_options(**options), HERE)
    report = build_corpus(tmp_path / "other", [Source("a", rows)], plain_options(**options, format=shard_format), HERE)
    expected, found = both(tmp_path / "plain"), both(tmp_path / "other")
    if shard_format == "txt":
        assert [record["content"] for record in found] == [training_text(record) for record in expected]
    else:
        assert found == expected
    assert len(found) == report["totals"]["records_kept"] == 302
    parts = {
        folder: sorted(path.name.partition(".")[0] for path in (tmp_path / folder / "a/train").iterdir())
        for folder in ("plain", "other")
    }
    assert parts["plain"] == parts["other"]
    assert len(parts["plain"]) > 2, "the same records stand in the same shard"


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_damaged_shard_of_any_format_is_noticed(tmp_path, rows, shard_format):
    build_corpus(tmp_path, [Source("a", rows)], plain_options(format=shard_format), HERE)
    part = tmp_path / f"a/train/part-00000.{shard_format}"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(BadInputError, match="changed after it was written"):
        both(tmp_path)


def test_record_above_the_shard_size_has_a_shard_to_itself(tmp_path, write_lines):
    texts = ["a" * 100, "b" * 5000, "c" * 100, "d" * 100]
    path = write_lines("a.jsonl", [{"text": text} for text in texts])
    build_corpus(tmp_path / "corpus", [Source("a", path)], plain_options(shard_bytes=1000), HERE)
    shards = sorted((tmp_path / "corpus/a/train").iterdir())
    assert [len(shard.read_bytes().splitlines()) for shard in shards] == [1, 1, 2]


# ---- what was dropped -----------------------------------------------------------------------------------------


def test_dropped_records_are_shown_with_rule_place_and_measures(tmp_path, write_lines):
    path = write_lines(
        "a.jsonl", [*({"text": f"text {n}"} for n in range(30)), {"text": "77 " * 300 + "x"}, {"text": "78"}]
    )
    options = plain_options(clean={"digits": {"on": True, "max_share": 0.5, "from_chars": 0}})
    report = build_corpus(tmp_path / "corpus", [Source("a", path, "en")], options, HERE)["sources"]["a"]
    assert report["dropped"] == {"digits": 2}
    samples = list(iter_dropped(tmp_path / "corpus", "a", "digits"))
    assert [sample["gid"] for sample in samples] == [30, 31]
    assert samples[0]["file"] == "a.jsonl"
    assert samples[0]["excerpt"].startswith("77 77")
    assert samples[0]["measures"]["chars"] == 601
    assert report["examples"]["dropped"]["digits"][1] == "78"


def test_samples_are_capped(tmp_path, write_lines):
    path = write_lines("a.jsonl", [{"text": "long enough"}, *({"text": f"{n % 9}"} for n in range(900))])
    options = plain_options(min_chars=5, unit_bytes=500)
    report = build_corpus(tmp_path / "corpus", [Source("a", path)], options, HERE)
    assert report["totals"]["dropped"] == {"too_short": 900}
    samples = list(iter_dropped(tmp_path / "corpus", "a", "too_short"))
    assert len(samples) == 200
    assert [sample["gid"] for sample in samples[:3]] == [1, 2, 3]


def test_clusters_say_which_record_was_kept_for_which(tmp_path, write_lines):
    base = prose(1, 200)
    near = [*base[:100], "changed", *base[101:]]
    first = write_lines("a.jsonl", [{"text": " ".join(prose(n))} for n in (2, 3)] + [{"text": " ".join(near)}])
    second = write_lines("b.jsonl", [{"text": " ".join([*base, "longer"])}, {"text": " ".join(prose(2))}])
    sources = [Source("a", first, "en"), Source("b", second, "en")]
    report = build_corpus(tmp_path / "corpus", sources, BuildOptions(rules="none"), HERE)
    lines = [json.loads(line) for line in (tmp_path / "corpus/clusters.jsonl").open()]
    assert lines[0] == {"kept": 0, "dropped": [{"gid": 2**40 + 1, "reason": "duplicate"}]}
    assert lines[1]["kept"] == 2**40, "the longest copy is kept, also in a later source"
    assert lines[1]["dropped"][0]["gid"] == 2
    assert lines[1]["dropped"][0]["similarity"] > 0.8
    assert report["sources"]["a"]["dropped"] == {"near_duplicate": 1}
    (sample,) = iter_dropped(tmp_path / "corpus", "a", "near_duplicate")
    assert sample["kept_gid"] == 2**40


@pytest.mark.parametrize("near", ["all", "held_out"])
def test_no_near_duplicate_of_valid_is_left_in_train(tmp_path, write_lines, near):
    texts = [prose(n) for n in range(300)]
    copies = [[*text[:60], "changed", *text[61:]] for text in texts]
    path = write_lines("a.jsonl", [{"text": " ".join(text)} for text in [*texts, *copies]])
    options = BuildOptions(rules="none", valid_share=0.1, dedup=DedupConfig(near=near))
    report = build_corpus(tmp_path / "corpus", [Source("a", path, "en")], options, HERE)["sources"]["a"]
    train = {record["content"].split()[0:20][0] for record in iter_records(tmp_path / "corpus", "a", "train")}
    starts = {" ".join(record["content"].split()[:20]) for record in iter_records(tmp_path / "corpus", "a", "train")}
    held_out = [record["content"] for record in iter_records(tmp_path / "corpus", "a", "valid")]
    assert train
    assert len(held_out) > 10
    assert not [text for text in held_out if " ".join(text.split()[:20]) in starts]
    assert (report["records_kept"] == 300) == (near == "all")


def test_a_record_is_found_by_its_gid_in_whichever_split_it_stands(tmp_path, rows):
    build_corpus(tmp_path / "corpus", [Source("a", rows)], plain_options(valid_share=0.1), HERE)
    valid = next(iter_records(tmp_path / "corpus", "a", "valid"))
    assert find_record(tmp_path / "corpus", {"a": 0}, valid["gid"]) == ("valid", valid)
    train = next(iter_records(tmp_path / "corpus", "a", "train"))
    assert find_record(tmp_path / "corpus", {"b": 7, "a": 0}, train["gid"]) == ("train", train)
    assert find_record(tmp_path / "corpus", {"a": 0}, 302) is None
    assert find_record(tmp_path / "corpus", {"a": 0}, 1 << 40) is None, "no source has this number"


# ---- the report -----------------------------------------------------------------------------------------------


def test_report_has_lengths_and_scripts_of_what_was_kept(tmp_path, write_lines):
    path = write_lines("a.jsonl", [{"text": "a" * 100}, {"text": "b" * 120}, {"text": "文" * 100}, {"text": "12"}])
    report = build_corpus(tmp_path / "corpus", [Source("a", path, "zh")], plain_options(), HERE)["sources"]["a"]
    assert report["length_histogram"] == {"2": 1, "64": 2, "256": 1}
    assert report["scripts"] == {
        "han": {"records": 1, "bytes": 300},
        "latin": {"records": 2, "bytes": 220},
        "none": {"records": 1, "bytes": 2},
    }
    assert read_report(tmp_path / "corpus")["sources"]["a"] == report


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("The cat sat.", "latin"),
        ("12 + 3 = 15", "none"),
        ("猫坐在垫子上 cat", "han"),
        ("ねこがマットの上に座った", "kana"),
        ("고양이가 앉았다", "hangul"),
        ("Кошка сидела", "cyrillic"),
        ("η γάτα κάθισε", "greek"),
        ("बिल्ली बैठ गई", "devanagari"),
        ("جلست القطة", "arabic"),
    ],
)
def test_script_is_told_from_the_text(text, script):
    assert SCRIPTS[scripts_of_encoded(encode([text]))[0]] == script


# ---- inputs ---------------------------------------------------------------------------------------------------


def test_compressed_stream_goes_on_at_its_cursor(tmp_path, monkeypatch):
    """A stream that cannot be split is one unit of many segments; killed in between, it goes on behind the last."""
    from zero2all.corpus import segment_writer

    lines = [json.dumps({"text": f"{n} " + " ".join(prose(n, 30))}) for n in range(3000)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setattr(segment_writer, "SEGMENT_ITEMS", 400)
    monkeypatch.setattr(segment_writer, "BATCH_RECORDS", 100)
    options = plain_options()
    build_corpus(tmp_path / "whole", [Source("a", path)], options, HERE)

    class KilledError(Exception):
        pass

    def killed_later(self, notes, finish=segment_writer.SegmentWriter.finish):
        state = finish(self, notes)
        if notes["next"]["cursor"] and len(list((tmp_path / "cut").glob(".build/*/a/unit-00000/seg-*[0-9]"))) == 4:
            raise KilledError
        return state

    with monkeypatch.context() as patched:
        patched.setattr(segment_writer.SegmentWriter, "finish", killed_later)
        with pytest.raises(KilledError):
            build_corpus(tmp_path / "cut", [Source("a", path)], options, HERE)
    before = {seg: seg.stat().st_ino for seg in (tmp_path / "cut").glob(".build/*/a/unit-00000/seg-0000[0-2]")}
    assert len(before) == 3
    report = build_corpus(tmp_path / "cut", [Source("a", path)], options, HERE, keep_build=True)
    assert {seg: seg.stat().st_ino for seg in before} == before, "they were not read again"
    assert report["totals"]["records_in"] == 3000
    build_corpus(tmp_path / "cut", [Source("a", path)], options, HERE)
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


def test_archive_members_with_other_fields_have_mappings_of_their_own(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("one.jsonl", "".join(json.dumps({"text": f"one {n}"}) + "\n" for n in range(30)))
        archive.writestr("two.json", json.dumps([{"body": f"two {n}", "name": "t"} for n in range(30)]))
    report = build_corpus(tmp_path / "corpus", [Source("a", tmp_path / "a.zip")], plain_options(), HERE)
    source = report["sources"]["a"]
    assert source["records_kept"] == 60
    assert source["mappings"] == [{"content": "text"}, {"content": "body", "title": "name"}]
    assert source["formats"] == {"json array": 1, "json lines": 1}


def test_rows_json_cannot_hold_are_quarantined(tmp_path, write_lines):
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    path = write_lines("a.jsonl", [*({"text": f"text {n}"} for n in range(300)), {"text": "deep", "n": deep}])
    report = build_corpus(tmp_path / "corpus", [Source("a", path)], plain_options(), HERE)["sources"]["a"]
    assert report["records_kept"] + report["quarantined"] == 301


def test_unit_resumed_behind_any_segment_is_the_same(tmp_path, monkeypatch):
    """Members without text, members with other fields and damage, cut at every place a kill could leave it."""
    import io
    import shutil
    import tarfile

    from zero2all.common.engine import open_engine
    from zero2all.corpus import ingest, segment_writer
    from zero2all.corpus.plan import cut_sources, list_source, plan_source

    monkeypatch.setattr(segment_writer, "SEGMENT_ITEMS", 3)
    monkeypatch.setattr(segment_writer, "BATCH_RECORDS", 2)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for n in range(12):
            rows = [{("text" if n % 3 else "body"): f"{n} {row}", "title": "t"} for row in range(n % 5)]
            data = b"".join(json.dumps(row).encode() + b"\n" for row in rows) + (b"{bad\n" if n % 4 == 1 else b"")
            data = bytes(range(256)) * 4 if n % 6 == 5 else data
            info = tarfile.TarInfo(f"m{n:02d}.jsonl")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    source = Source("a", tmp_path / "a.tar.gz", "en")
    options = plain_options()
    plan = plan_source(source, list_source(source, tmp_path / "corpus"), tmp_path / "corpus", options)
    with open_engine(HERE) as engine:
        (task,) = cut_sources([plan], options, engine)
    segments = ingest.ingest_unit(task)
    whole = tree(task.folder)
    assert len(segments) >= 6
    assert sum(sum(segment.state["skipped"].values()) for segment in segments) > 2
    for done in range(1, len(segments)):
        (task.folder / "done.json").unlink()
        for segment in segments[done:]:
            shutil.rmtree(segment.folder)
        again = ingest.ingest_unit(task)
        assert [segment.state for segment in again] == [segment.state for segment in segments]
        assert tree(task.folder) == whole
