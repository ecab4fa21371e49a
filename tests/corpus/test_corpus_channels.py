"""Which channel a source or a document gets, and what happens when the rules of a guessed one drop much of it."""

import gzip
import json
import os
import random
import re
from pathlib import Path

import pytest

from tests.corpus.corpus_helpers import HERE, both, plain_options, tree
from tests.corpus.readers.reader_samples import PACKS
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.records import corpus_sources, iter_records
from zero2all.corpus import BuildOptions, Source, build_corpus, summary_notes
from zero2all.corpus import finish as finish_module
from zero2all.corpus.channels import channels_of
from zero2all.corpus.listing import list_files
from zero2all.corpus.source_sampling import SourceSample

HAN = "春江潮水连海平，海上明月共潮生。滟滟随波千万里，何处春江无月明。江流宛转绕芳甸，月照花林皆似霰。"
ENGLISH = "the old man and the boy went down to the river in the morning because it was the only place with any shade"


def han(number: int) -> str:
    rng = random.Random(number)
    return "".join(rng.choice(HAN + "我们在的是了不有这一个人和他说到") for _ in range(120)) + "。"


def english(number: int) -> str:
    rng = random.Random(number)
    return " ".join(rng.choice(ENGLISH.split()) for _ in range(60)).capitalize() + "."


def one_rule(**options) -> BuildOptions:
    return plain_options(**{"clean": {"wrong_script": {"on": True}}, "accept_drops": False, **options})


def guess(path: Path, **options) -> tuple[str, str]:
    return SourceSample(Source("one", path), list_files(path), BuildOptions(**options).limits).guess_channel()


CODE = ("let value = other(value);\n" * 8 + "// 值\n") * 12
"""In the middle of a page, far more than the words around it."""


@pytest.mark.parametrize(
    ("title", "text", "channel"),
    [
        ("", ENGLISH, "en"),
        ("", HAN, "zh"),
        ("", "Beijing 北京是中国的首都，也是一座很古老的城市。", "zh"),
        ("src/a.py", "# 注释\nprint()", "code"),
        ("", "Der Hund liegt vor dem Haus und die Katze ist auf dem Dach, aber nicht im Garten.", "other"),
        ("", "Le chat est dans la maison et les chiens sont sur le toit avec une souris.", "other"),
        ("", "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。", "other"),
        ("", "Москва является столицей России.", "other"),
        ("", "cheap shoes casino bonus handbags poker", "en"),
        ("", "3.14 + 2.71 = 5.85", None),
        ("", CODE + "这个方法返回一个新的值。\n", "en"),
        ("", "这个方法返回一个新的值，可以省略参数。\n" * 5 + CODE + "可以省略参数。\n" * 5, "zh"),
        ("", "このメソッドは新しい値を返します。\n" * 5 + CODE + "省略できます。\n" * 5, "other"),
    ],
)
def test_a_document_has_the_channel_of_its_own_text(title, text, channel):
    assert channels_of([title], [text]) == [channel]


@pytest.mark.timeout(60)  # the pattern that this asks for took minutes
@pytest.mark.parametrize("opening", ["{{ ", "]( ", "``` ", "< "])
def test_what_opens_and_never_closes_takes_no_longer_than_other_text(opening):
    assert channels_of(["t"], [opening * 300_000]) == [None]


def test_members_behind_the_first_one_of_an_archive_count_and_lists_of_lines_do(tmp_path, write_lines):
    members = {"README.md": english(0).encode() * 9, **{f"t/{n:03d}.txt": han(n).encode() for n in range(300)}}
    for name in (".zip", ".tar.gz"):
        (tmp_path / f"a{name}").write_bytes(PACKS[name](members))
        assert guess(tmp_path / f"a{name}")[0] == "zh", name
    rows = [{"title": f"poem {n}", "author": "Li Bai", "content": han(n).split("，")} for n in range(50)]
    assert guess(write_lines("a.jsonl", rows))[0] == "zh"


def test_hundreds_of_small_files_are_looked_into(tmp_path):
    for number in range(200):
        text = "هذا نص قصير عن المدينة والنهر والجبل." if number % 10 else "A short text about the town and the river."
        (tmp_path / f"{number:03}.txt").write_text(text)
    assert guess(tmp_path) == ("other", "sampled documents: 200; 90% other, 10% en")


def test_samples_come_from_all_over_a_file_and_are_hundreds(write_lines):
    rows = [{"text": english(n)} for n in range(600)] + [{"text": han(n)} for n in range(1400)]
    channel, reason = guess(write_lines("a.jsonl", rows))
    assert channel == "zh"
    assert 25 <= int(reason.partition("% en")[0].rpartition(" ")[2]) <= 35, reason
    many = write_lines("many.jsonl", [{"text": english(number)} for number in range(500)] * 70)
    assert many.stat().st_size > 9_000_000
    assert int(re.search(r"sampled documents: (\d+);", guess(many)[1])[1]) >= 200


@pytest.fixture
def mixed(tmp_path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    rows = [{"text": han(n) if n % 3 else english(n)} for n in range(600)]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    (folder / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "cut', b'{"text": "1 + 1 = 2"}']) + b"\n")
    (folder / "b.py").write_text("import os\n\nprint(os.getcwd())\n" * 3)
    (folder / "c.bin").write_bytes(os.urandom(5000) + bytes(5000))
    return folder


def test_auto_makes_a_source_of_each_channel(tmp_path, mixed):
    corpus = tmp_path / "corpus"
    report = build_corpus(corpus, [Source("mix", mixed, "auto")], plain_options(), HERE)
    counts = {"mix-code": 1, "mix-en": 200, "mix-zh": 402}  # what belongs to no channel, too: digits and damage
    assert {name: source["records_in"] for name, source in report["sources"].items()} == counts
    channels = {name: manifest["channel"] for name, manifest in corpus_sources(corpus).items()}
    assert channels == {"mix-code": "code", "mix-en": "en", "mix-zh": "zh"}
    assert report["sources"]["mix-zh"]["quarantined"] == 1
    assert report["sources"]["mix-zh"]["skipped_files"] == {"binary": 1}
    assert not report["sources"]["mix-en"]["skipped_files"], "counted once"
    for name in report["sources"]:
        records = both(corpus, name)
        assert {record["data_src"] for record in records} == {name}
        assert len({record["gid"] for record in records}) == len(records)
    english_only = "".join(record["content"] for record in iter_records(corpus, "mix-en", "train"))
    assert not re.search(r"[\u4e00-\u9fff]", english_only)
    (note,) = (note for note in summary_notes(report) if "fields guessed" in note)
    assert note.startswith("mix: fields guessed: content from 'text'; all other fields")
    with pytest.raises(UsageError, match=r"mix-zh is also the name of a part"):
        build_corpus(corpus, [Source("mix", mixed, "auto"), Source("mix-zh", mixed)], plain_options())


def test_auto_built_again_does_nothing_and_in_pieces_writes_the_same(tmp_path, mixed, monkeypatch):
    monkeypatch.setattr("zero2all.corpus.segment_writer.SEGMENT_ITEMS", 150)
    monkeypatch.setattr("zero2all.corpus.segment_writer.BATCH_RECORDS", 40)

    def build(folder):
        build_corpus(tmp_path / folder, [Source("mix", mixed, "auto")], plain_options(), HERE)
        return tree(tmp_path / folder)

    before = build("whole")
    with monkeypatch.context() as patch:
        patch.setattr("zero2all.corpus.build.ingest_unit", None)
        assert build("whole") == before
    written, calls = finish_module.write_shard, []

    def fail_at_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return written(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(finish_module, "write_shard", fail_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            build("pieces")
    assert build("pieces") == before


def test_a_rule_that_drops_a_fifth_under_a_guess_stops_the_build(tmp_path, write_lines, monkeypatch):
    path = write_lines("a.jsonl", [{"text": han(n) if n % 10 < 7 else english(n)} for n in range(400)])
    corpus = tmp_path / "corpus"
    with pytest.raises(BadInputError) as caught:
        build_corpus(corpus, [Source("one", path)], one_rule(), HERE)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert all(part in message for part in ("wrong_script dropped 120 of 400", "30%", "--accept-drops", "auto"))
    assert english(7)[:40] in message, "samples are shown"
    assert not (corpus / "one").exists()
    assert not (corpus / "report.json").exists()
    assert not (corpus / "sources.json").exists(), "no number is used"
    with monkeypatch.context() as patch:
        patch.setattr("zero2all.corpus.build.ingest_unit", None)  # what was read is not read again
        report = build_corpus(corpus, [Source("one", path)], one_rule(accept_drops=True), HERE)
    assert report["sources"]["one"]["dropped"]["wrong_script"] == 120
    named = build_corpus(tmp_path / "named", [Source("one", path, "zh")], one_rule(), HERE)
    assert named["sources"]["one"]["dropped"]["wrong_script"] == 120, "under a name that was given, a note is enough"


def test_a_refused_build_leaves_the_corpus_that_is_there(tmp_path, write_lines):
    good = write_lines("good.jsonl", [{"text": han(n)} for n in range(50)])
    bad = write_lines("bad.jsonl", [{"text": han(n) if n % 2 else english(n)} for n in range(100)])
    corpus = tmp_path / "corpus"
    build_corpus(corpus, [Source("good", good)], one_rule(), HERE)
    before = tree(corpus)
    with pytest.raises(BadInputError, match="accept-drops"):
        build_corpus(corpus, [Source("bad", bad), Source("good", good)], one_rule(), HERE)
    assert {name: data for name, data in tree(corpus).items() if not name.startswith(".build")} == before
    build_corpus(corpus, [Source("new", good)], one_rule(), HERE)
    assert json.loads((corpus / "sources.json").read_text()) == {"good": 0, "new": 1}


def test_a_wrong_channel_named_by_hand_is_named_with_samples(tmp_path, write_lines):
    path = write_lines("a.jsonl", [{"text": english(n)} for n in range(30)])
    with pytest.raises(BadInputError, match=r"none was kept \(30 wrong_script\)") as caught:
        build_corpus(tmp_path / "corpus", [Source("one", path, "zh")], one_rule(), HERE)
    message, dropped = str(caught.value), tmp_path / "corpus/one/dropped"
    for part in ("one: wrong_script dropped 30 of 30 records as channel zh.", english(0)[:40], str(dropped)):
        assert part in message
    assert "quarantine" not in message
    assert (dropped / "wrong_script.jsonl").is_file()


def test_damage_of_an_auto_source_is_told_in_words_as_that_of_any_other(tmp_path):
    texts = "\n".join(json.dumps({"text": english(number)}) for number in range(60)) + "\n"
    whole = gzip.compress(texts.encode(), mtime=0)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInputError, match=r"records are damaged.*--max-damaged-share"):
        build_corpus(tmp_path / "corpus", [Source("one", tmp_path / "a.jsonl.gz", "auto")], plain_options(), HERE)


def test_one_item_that_holds_most_of_a_file_counts_with_its_bytes(tmp_path):
    rows = [f"{number},{english(number)}" for number in range(300)]
    text = "id,text\n" + "\n".join([*rows, '300,"an unclosed quote', *rows, *rows]) + "\n"
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(BadInputError, match=r"1 of 301 records are damaged .*places, [\d,]{6,} bytes"):
        build_corpus(tmp_path / "corpus", [Source("one", tmp_path / "table.csv", "en")], plain_options(), HERE)
