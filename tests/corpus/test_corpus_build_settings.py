"""Kinds, YAML, overrides and the command line of `z2a corpus`; docs/corpus.md says what they are."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.corpus.corpus_helpers import HERE, plain_options
from zero2all.cli.main import build_parser
from zero2all.common.errors import UsageError
from zero2all.common.records import iter_records
from zero2all.corpus import BuildOptions, Source, build_corpus, load_settings, parse_source, summary_notes
from zero2all.corpus.clean.config import EDITS, RULES
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.sources import FIELD_NAMES, KINDS

SEED_SETS = {
    "baike2018qa": {"qid": "q1", "category": "健康", "title": "问", "desc": "述", "answer": "答案正文"},
    "news2016zh": {"news_id": "1", "keywords": "k", "title": "题", "desc": "述", "source": "s", "content": "正文"},
    "webtext2019zh": {"qid": 1, "title": "题", "desc": "述", "topic": "类", "star": 3, "content": "正文"},
    "wikipedia_cn": {"id": "1", "url": "u", "title": "题", "text": "正文"},
    "wikipedia_en": {"id": "1", "url": "u", "title": "title", "text": "body"},
    "Zhihu-KOL": {"INSTRUCTION": "问", "RESPONSE": "答", "SOURCE": "Zhihu", "METADATA": "{}"},
    "WuDaoCorpus2.0": {"id": 1, "uniqueKey": "u", "titleUkey": "t", "dataType": "类", "title": "题", "content": "正文"},
    "github-python": {"repo_name": "r", "ref": "x", "path": "a.py", "copies": "1", "content": "x = 1"},
}


@pytest.mark.parametrize("kind", SEED_SETS)
def test_kind_brings_fields_and_channel(tmp_path, write_lines, kind):
    row, known = SEED_SETS[kind], KINDS[kind]
    source = parse_source(f"a={write_lines('a.json', [row])}::{kind.lower()}")
    assert source.kind == kind
    report = build_corpus(tmp_path / "corpus", [source], plain_options(), HERE)["sources"]["a"]
    (record,) = iter_records(tmp_path / "corpus", "a", "train")
    assert {target: record[target] for target in known.mapping} == {to: row[raw] for to, raw in known.mapping.items()}
    assert set(record["others"]) == set(row) - set(known.mapping.values())
    given = (report["channel"], report["channel_guessed"], report["mapping_guessed"])
    assert given == (known.channel, False, False)


def test_channel_and_kind_are_read_in_their_places(tmp_path):
    path, colons = tmp_path / "a:b.json", tmp_path / "a:zh"
    for each in (path, colons):
        each.write_text("{}")
    assert parse_source(f"a={path}") == Source("a", path)
    assert parse_source(f"a={path}:zh") == parse_source(f"a={path}:ZH") == Source("a", path, "zh")
    assert parse_source(f"a={path}:zh:new2016zh") == Source("a", path, "zh", None, "news2016zh")
    assert parse_source(f"a={path}::WuDaoCorpus2.0") == Source("a", path, None, None, "WuDaoCorpus2.0")
    far = "s3://bucket/x.jsonl"
    assert parse_source(f"a={far}:en:wikipedia_en") == Source("a", far, "en", None, "wikipedia_en")
    assert parse_source(f"news={colons}") == Source("news", colons), "a path that exists is taken whole"
    assert parse_source(f"news={colons}:en") == Source("news", colons, "en")
    assert parse_source("news=absent:dir/file.txt").channel is None
    assert Source("a", path, "Poetry").channel == "Poetry", "a name of the user's own stays as it is"
    with pytest.raises(UsageError, match="'nosuch' is not a kind of source; known are baike2018qa"):
        build_corpus(tmp_path / "corpus", [parse_source(f"a={path}:zh:nosuch")])


YAML = """
sources:
  qa: {path: raw/qa.json, kind: baike2018qa}
  own: {path: raw/own.jsonl, channel: en, map: {content: body}}
  plain: raw/plain.jsonl:zh
options: {format: jsonl.zst, valid_share: 0, rules: none}
clean: {too_short: {on: true, min_chars: 3}, zh: {too_short: {min_chars: 4}}}
dedup: {near: off}
engine: {workers: 1}
"""


@pytest.fixture
def yaml_build(tmp_path, write_lines):
    write_lines("raw/qa.json", [SEED_SETS["baike2018qa"]])
    write_lines("raw/own.jsonl", [{"body": "abc", "text": "not this"}, {"body": "ab"}])
    write_lines("raw/plain.jsonl", [{"text": "四个汉字"}, {"text": "三个字"}])
    (tmp_path / "corpus.yaml").write_text(YAML, encoding="utf-8")
    return tmp_path / "corpus.yaml"


def test_whole_build_stands_in_one_file(tmp_path, yaml_build):
    settings = load_settings([str(yaml_build)])
    assert [source.name for source in settings.sources] == ["qa", "own", "plain"]
    assert settings.engine.workers == 1
    report = build_corpus(tmp_path / "corpus", settings.sources, settings.options, settings.engine)["sources"]
    expected = {"qa": ("zh", {}), "own": ("en", {"too_short": 1}), "plain": ("zh", {"too_short": 1})}
    assert {name: (source["channel"], source["dropped"]) for name, source in report.items()} == expected
    assert (tmp_path / "corpus/own/train/part-00000.jsonl.zst").is_file()


def test_flags_and_overrides_come_on_top_of_the_file(yaml_build):
    words = ["--dedup.jaccard", "0.7", "--clean.zh.too_short.min_chars=2", "--dedup.near", "held_out"]
    settings = load_settings([str(yaml_build)], words, {"content": "text"}, {"options": {"format": "txt"}})
    assert (settings.options.format, settings.options.dedup.jaccard) == ("txt", 0.7)
    assert settings.options.dedup.near == "held_out"
    assert settings.options.clean_config("zh").too_short.min_chars == 2
    assert settings.options.clean_config("en").too_short.min_chars == 3
    assert not settings.options.clean_config("en").digits.on
    assert settings.sources[1].given_mapping == {"content": "text"}


def test_all_mistakes_in_the_file_and_the_flags_are_told_at_once(tmp_path):
    path = tmp_path / "corpus.yaml"
    path.write_text("sources: {a: {path: x, kind: baike, chanel: zh}}\ndedup: {jacard: 1}\noptoins: {}\n")
    with pytest.raises(UsageError) as caught:
        load_settings([str(path)])
    message = str(caught.value)
    assert all(part in message for part in ("1.", "4.", "Did you mean `baike2018qa`", "`channel`", "`jaccard`"))
    with pytest.raises(UsageError, match=r"clean\.too_shrt|too_shrt.*channel"):
        build_corpus(tmp_path / "corpus", [Source("a", tmp_path)], plain_options(clean={"too_shrt": 3}))
    words = "--clean.en.digitz.on false --dedup.near of --options.shard_size 3 --dedup.lines true"
    with pytest.raises(UsageError) as caught:
        load_settings([f"a={tmp_path}"], words.split())
    message = str(caught.value)
    assert "`clean` has no field `digitz`. Did you mean `digits`?" in message
    assert " dedup.near: got 'of'" in message
    assert "`options` has no field `shard_size`" in message
    assert "`dedup` has no field `lines`" in message


def test_a_rule_that_drops_much_is_pointed_at(tmp_path, write_lines):
    path = write_lines("a.jsonl", [*({"text": f"text number {n}"} for n in range(45)), *[{"text": "x"}] * 30])
    report = build_corpus(tmp_path / "corpus", [Source("a", path)], plain_options(min_chars=3), HERE)
    notes = summary_notes(report)
    drops = "a: too_short dropped 40.0% of the records as channel en. Check whether it should: z2a corpus show"
    assert f"{drops} a --dropped too_short" in notes
    assert "a: too_short dropped, for example: x | x" in notes
    assert f"{drops} --work 'my work' a --dropped too_short" in summary_notes(report, Path("my work"))


def test_command_line_builds_shows_and_reports(tmp_path, write_lines, z2a):
    rows = [{"text": f"text number {n}", "title": f"t{n}"} for n in range(30)]
    rows[1]["text"] = "a text that steers a terminal: \x1b[31m"
    path, work = write_lines("a.jsonl", [*rows, {"text": "x"}, rows[0]]), tmp_path / "work"
    said = z2a.refused(2, "corpus", "build", f"a={path}", "--work", work, "--format", "csv")
    assert "options.format: got 'csv', expected one of 'jsonl'" in said
    assert not work.exists()
    options = ["--options.rules", "none", "--dedup.near", "off", "--clean.too_short.on", "true", "--workers", "1"]
    options += ["--clean.too_short.min_chars", "3", "--format", "parquet", "--work", work]
    assert "dropped 1 duplicate, 1 too_short" in z2a.done("corpus", "build", f"a={path}", *options)
    assert "dropped 1 duplicate, 1 too_short" in z2a.done("corpus", "report", "--work", work)
    shown = z2a.done("corpus", "show", "a", "--count", "2", "--work", work)
    assert "steers a terminal: " in shown
    assert "\x1b" not in shown
    assert "Did you mean `duplicate`" in z2a.refused(2, "corpus", "show", "--dropped", "dupicate", "--work", work)
    assert json.loads((work / "corpus/report.json").read_text())["options"]["format"] == "parquet"


GUIDE = (Path(__file__).parents[2] / "docs" / "corpus.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> list[str]:
    """The names in the first column of the table with this heading, in order."""
    table = GUIDE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_edits_and_rules_are_listed_in_the_order_in_which_they_are_judged():
    assert set(first_cells("edit")) == (set(EDITS) - {"kinds"}) | {"block_art"}
    rules = [name for name in RULES if name not in EDITS and name != "block_art"]
    assert [name for name in first_cells("rules, in this order") if name != "block_art"] == rules


def test_every_kind_is_named_and_tried_here():
    assert {*SEED_SETS, "conversation", "sharegpt"} == set(KINDS)  # of chats, test_corpus_build_output.py has more
    assert [kind for kind in KINDS if f"`{kind}`" not in GUIDE] == []


def test_names_under_which_fields_are_recognised():
    for field, names in FIELD_NAMES.items():
        assert f"| `{field}` | {names.replace(' ', ', ')} |" in GUIDE


def test_every_option_is_a_flag_with_help_or_explained():
    flags = build_parser().verb("corpus").verb("build").flags
    names = [each.name for each in dataclasses.fields(BuildOptions) if each.name not in ("clean", "dedup", "quality")]
    without_flag = [name for name in names if f"--{name.replace('_', '-')}" not in flags]
    assert [name for name in without_flag if f"`options.{name}" not in GUIDE] == []
    settings = {each.name for each in dataclasses.fields(DedupConfig)}
    assert [name for name in settings if name not in GUIDE] == []


def test_figures_of_the_search_for_near_duplicates():
    config = DedupConfig()
    assert f"b = {config.bands} bands of r = {config.rows}" in GUIDE
    assert f"agree in {config.needed('en')[0]} of 256 bytes" in GUIDE
    similarities, compared = (
        [cell.strip() for cell in re.search(rf"^\| {name} \|(.*)\|$", GUIDE, re.MULTILINE)[1].split("|")]
        for name in ("J", "compared")
    )
    for similarity, share in zip(map(float, similarities), compared, strict=True):
        chance = similarity + (1 - similarity) / 256
        expected = 1 - (1 - chance**config.rows) ** config.bands
        assert abs(float(share.removesuffix(" %")) / 100 - expected) < 0.001
