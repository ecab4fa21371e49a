"""What stands in a finished corpus: formats, samples, clusters, reports, the raw file of every item, chats."""

import json
import random
import shutil

import pytest

from tests.corpus.corpus_helpers import HERE, both, plain_options, tree
from tests.corpus.readers.reader_samples import PACKS, json_lines
from zero2all.common.engine import open_engine
from zero2all.common.errors import BadInputError
from zero2all.common.records import ORIGINS_NAME, iter_records, training_text
from zero2all.corpus import BuildOptions, Source, build_corpus, find_record, ingest, iter_dropped, read_report
from zero2all.corpus.channels import SCRIPTS, scripts_of_encoded
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.signatures import encode
from zero2all.corpus.plan import cut_sources, list_source, plan_source
from zero2all.corpus.shard_files import SHARD_FORMATS

WORDS = ["river", "stone", "morning", "carpenter", "window", "letter", "garden", "winter", "market", "bridge"]


def prose(seed: int, count: int = 120) -> list[str]:
    return random.Random(seed).choices([f"{word}{n}" for word in WORDS for n in range(40)], k=count)


@pytest.fixture
def rows(write_lines):
    odd = [{"text": "第二行\n\n第三行", "title": "标题", "n": [1, {"a": None}]}, {"text": "x\fy", "title": "a\fb"}]
    return write_lines("a.jsonl", [*odd, *({"text": f"text {n}", "title": f"t{n}"} for n in range(300))])


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_every_format_is_read_back_and_damage_of_it_noticed(tmp_path, rows, shard_format):
    options = {"valid_share": 0.1, "shard_bytes": 8000}
    build_corpus(tmp_path / "plain", [Source("a", rows)], plain_options(**options), HERE)
    report = build_corpus(tmp_path / "other", [Source("a", rows)], plain_options(**options, format=shard_format), HERE)
    expected, found = both(tmp_path / "plain"), both(tmp_path / "other")
    if shard_format == "txt":
        assert [record["content"] for record in found] == [training_text(record) for record in expected]
    else:
        assert found == expected
    assert len(found) == report["totals"]["records_kept"] == 302
    plain = {path.name.partition(".")[0] for path in (tmp_path / "plain/a/train").iterdir()}
    assert plain == {path.name.partition(".")[0] for path in (tmp_path / "other/a/train").iterdir()}
    assert len(plain) > 2, "the same records stand in the same shard"
    part = tmp_path / f"other/a/train/part-00000.{shard_format}"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(BadInputError, match="changed after it was written"):
        both(tmp_path / "other")


def test_dropped_records_are_sampled_with_rule_place_and_measures(tmp_path, write_lines):
    texts = [*(f"text {n}" for n in range(30)), "77 " * 300 + "x", "78", *(f"{n % 9} " * 2 for n in range(900))]
    path = write_lines("a.jsonl", [{"text": text} for text in texts])
    options = plain_options(clean={"digits": {"on": True, "max_share": 0.5, "from_chars": 0}}, unit_bytes=2000)
    report = build_corpus(tmp_path / "corpus", [Source("a", path, "en")], options, HERE)["sources"]["a"]
    assert report["dropped"] == {"digits": 902}
    samples = list(iter_dropped(tmp_path / "corpus", "a", "digits"))
    assert len(samples) == 200
    assert [sample["gid"] for sample in samples[:3]] == [30, 31, 32]
    assert samples[0]["file"] == "a.jsonl"
    assert samples[0]["excerpt"].startswith("77 77")
    assert samples[0]["measures"]["chars"] == 601
    assert report["examples"]["dropped"]["digits"][1] == "78"


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


def test_what_is_held_out_shares_no_text_with_train_and_no_near_duplicate_is_dropped_for_it(tmp_path, write_lines):
    texts = [prose(n) for n in range(200)]
    copies = [[*text[:60], "changed", *text[61:]] for text in texts[:100]]
    path = write_lines("a.jsonl", [{"text": " ".join(text)} for text in [*texts, *copies]])
    options = BuildOptions(rules="none", valid_share=0.1, dedup=DedupConfig(near="held_out"))
    report = build_corpus(tmp_path / "corpus", [Source("a", path, "en")], options, HERE)["sources"]["a"]
    assert report["records_kept"] == 300
    assert report["valid_shared_with_train"] == 0
    starts = {" ".join(record["content"].split()[:20]) for record in iter_records(tmp_path / "corpus", "a", "train")}
    held_out = [record["content"] for record in iter_records(tmp_path / "corpus", "a", "valid")]
    assert len(starts) > len(held_out) >= 15
    assert not [text for text in held_out if " ".join(text.split()[:20]) in starts]


def test_a_record_is_found_by_its_gid_in_whichever_split_it_stands(tmp_path, rows):
    build_corpus(tmp_path / "corpus", [Source("a", rows)], plain_options(valid_share=0.1), HERE)
    valid = next(iter_records(tmp_path / "corpus", "a", "valid"))
    assert find_record(tmp_path / "corpus", {"a": 0}, valid["gid"]) == ("valid", valid)
    train = next(iter_records(tmp_path / "corpus", "a", "train"))
    assert find_record(tmp_path / "corpus", {"b": 7, "a": 0}, train["gid"]) == ("train", train)
    assert find_record(tmp_path / "corpus", {"a": 0}, 302) is None
    assert find_record(tmp_path / "corpus", {"a": 0}, 1 << 40) is None, "no source has this number"


def test_report_has_lengths_and_scripts_of_what_was_kept(tmp_path, write_lines):
    path = write_lines("a.jsonl", [{"text": "a" * 100}, {"text": "b" * 120}, {"text": "文" * 100}, {"text": "12"}])
    report = build_corpus(tmp_path / "corpus", [Source("a", path, "zh")], plain_options(), HERE)["sources"]["a"]
    assert report["length_histogram"] == {"2": 1, "64": 2, "256": 1}
    scripts = {"han": (1, 300), "latin": (2, 220), "none": (1, 2)}
    assert {name: (facts["records"], facts["bytes"]) for name, facts in report["scripts"].items()} == scripts
    assert read_report(tmp_path / "corpus")["sources"]["a"] == report


SCRIPT_OF = {"The cat sat.": "latin", "12 + 3 = 15": "none", "猫坐在垫子上 cat": "han", "Кошка сидела": "cyrillic"}
SCRIPT_OF |= {"ねこがマットの上に座った": "kana", "고양이가 앉았다": "hangul", "η γάτα κάθισε": "greek"}
SCRIPT_OF |= {"बिल्ली बैठ गई": "devanagari", "جلست القطة": "arabic"}


def test_script_is_told_from_the_text():
    assert [SCRIPTS[number] for number in scripts_of_encoded(encode(list(SCRIPT_OF)))] == list(SCRIPT_OF.values())


def test_archive_members_with_other_fields_have_mappings_of_their_own_and_no_row_is_lost(tmp_path):
    deep: object = 1
    for _ in range(900):
        deep = [deep]  # more than JSON can hold
    rows = [*({"text": f"one {n}"} for n in range(300)), {"text": "deep", "n": deep}]
    others = json.dumps([{"body": f"two {n}", "name": "t"} for n in range(30)]).encode()
    (tmp_path / "a.zip").write_bytes(PACKS[".zip"]({"one.jsonl": json_lines(rows), "two.json": others}))
    report = build_corpus(tmp_path / "corpus", [Source("a", tmp_path / "a.zip")], plain_options(), HERE)
    source = report["sources"]["a"]
    assert source["records_kept"] + source["quarantined"] == 331
    assert source["mappings"] == [{"content": "text"}, {"content": "body", "title": "name"}]
    assert source["formats"] == {"json array": 1, "json lines": 1}


def test_unit_resumed_behind_any_segment_is_the_same(tmp_path, monkeypatch):
    """Members without text, members with other fields and damage, cut at every place a kill could leave it."""
    monkeypatch.setattr("zero2all.corpus.segment_writer.SEGMENT_ITEMS", 3)
    monkeypatch.setattr("zero2all.corpus.segment_writer.BATCH_RECORDS", 2)
    members = {}
    for n in range(12):
        rows = [{("text" if n % 3 else "body"): f"{n} {row}", "title": "t"} for row in range(n % 5)]
        data = json_lines(rows) + (b"{bad\n" if n % 4 == 1 else b"")
        members[f"m{n:02d}.jsonl"] = bytes(range(256)) * 4 if n % 6 == 5 else data
    (tmp_path / "a.tar.gz").write_bytes(PACKS[".tar.gz"](members))
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
        before = {segment.folder: segment.folder.stat().st_ino for segment in segments[:done]}
        (task.folder / "done.json").unlink()
        for segment in segments[done:]:
            shutil.rmtree(segment.folder)
        again = ingest.ingest_unit(task)
        assert [segment.state for segment in again] == [segment.state for segment in segments]
        assert tree(task.folder) == whole
        assert {folder: folder.stat().st_ino for folder in before} == before, "they were not read again"


def test_each_stretch_of_items_names_its_file_or_archive_member(tmp_path, monkeypatch):
    monkeypatch.setattr("zero2all.corpus.segment_writer.SEGMENT_ITEMS", 3)
    monkeypatch.setattr("zero2all.corpus.segment_writer.BATCH_RECORDS", 2)
    raw = tmp_path / "raw"
    raw.mkdir()
    rows = [json.dumps({"text": f"This is document number {n}, which is like no other."}) for n in range(12)]
    (raw / "a.jsonl").write_text("\n".join(rows[:4]) + '\n{"text": \n')
    (raw / "b.jsonl").write_text("\n".join(rows[4:9]))
    members = {"inner/d.jsonl": "\n".join(rows[9:11]).encode(), "inner/e.jsonl": rows[11].encode()}
    (raw / "c.zip").write_bytes(PACKS[".zip"](members))
    build_corpus(tmp_path / "corpus", [Source("s", raw)], plain_options(max_damaged_share=1.0), HERE)
    found = [json.loads(line) for line in (tmp_path / "corpus/s" / ORIGINS_NAME).read_bytes().splitlines()]
    assert [line["first"] for line in found] == [0, 5, 10, 12]  # the damaged line counts
    assert [line["file"] for line in found] == ["a.jsonl", "b.jsonl", "c.zip/inner/d.jsonl", "c.zip/inner/e.jsonl"]


@pytest.mark.parametrize(
    ("field", "role", "text"), [("messages", "role", "content"), ("conversations", "from", "value")]
)
def test_chats_keep_their_messages_and_are_cleaned_by_their_texts(write_lines, build, kept, field, role, text):
    said = [(f"What is {n} plus {n}?", f"It is {2 * n}.") for n in range(19)]
    talks = [[{role: "user", text: question}, {role: "assistant", text: answer}] for question, answer in said]
    chats = [{field: talk, "id": n} for n, talk in enumerate(talks)]
    assert build(write_lines("chats.jsonl", chats))["mappings"] == [{"content": field}]
    assert kept()[3]["content"] == "What is 3 plus 3?\nIt is 6."
    assert kept()[3]["others"] == {field: chats[3][field], "id": 3}
