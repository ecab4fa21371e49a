"""How a source is named, mapped and given a channel."""

import datetime
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.corpus_helpers import HERE, plain_options
from tests.corpus.readers.reader_samples import PACKS, json_lines
from zero2all.cli import main
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.records import corpus_sources, iter_records, text_template, training_text
from zero2all.common.workspace import open_workspace
from zero2all.corpus import BuildOptions, Source, build_corpus, parse_mapping, parse_source, summary_notes
from zero2all.corpus.sources import guess_mapping, source_from_path
from zero2all.tokenizer.parts import corpus_parts


def test_source_is_named_after_its_path_and_text_without_a_name_refused_with_an_example(tmp_path):
    for name, expected in (("My news.jsonl", "My_news"), ("百科.json", "百科"), ("quarantine", "quarantine_data")):
        assert source_from_path(tmp_path / name).name == expected
    for text in ("data.jsonl", "news=", ""):
        with pytest.raises(UsageError, match=r"NAME=PATH.*for example"):
            parse_source(text)


def test_all_problems_are_told_together(tmp_path):
    sources = [Source("a", tmp_path), Source("a", tmp_path), Source("../x", tmp_path), Source("b", tmp_path, "z/h")]
    with pytest.raises(UsageError) as caught:
        build_corpus(tmp_path / "corpus", sources, BuildOptions(valid_share=2, shard_bytes=0))
    message = str(caught.value)
    assert all(part in message for part in ("1.", "5.", "used twice", "'../x'", "'z/h'", "valid_share", "shard_bytes"))
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    ("row", "given", "expected"),
    [
        ({"id": 1, "url": "u", "title": "t", "text": "x"}, None, {"content": "text", "title": "title"}),
        ({"INSTRUCTION": "q", "RESPONSE": "a"}, None, {"content": "RESPONSE", "title": "INSTRUCTION"}),
        ({"repo": "r", "path": "a.py", "content": "x = 1"}, None, {"content": "content", "title": "path"}),
        ({"text": ["a", "b"], "n": 1}, None, {"content": "text"}),
        ({"text": 5, "n": 1}, None, None),
        # Given fields win, and the rest is guessed.
        ({"text": "a", "note": "b", "title": "t"}, {"content": "note"}, {"content": "note", "title": "title"}),
        ({"text": "a", "note": "b", "title": "t"}, {"content": "absent"}, {"content": "text", "title": "title"}),
        ({"note": "this"}, {"content": "absent"}, None),
    ],
)
def test_fields_are_recognised_by_name(row, given, expected):
    assert guess_mapping([row], given) == expected


def test_a_given_field_is_used_where_it_is_and_must_be_somewhere(tmp_path, write_lines, build, kept):
    write_lines("raw/a.jsonl", [{"text": f"some words, number {n}"} for n in range(5)])
    write_lines("raw/b.jsonl", [{"my, long review": f"a review, number {n}", "text": "good"} for n in range(5)])
    report = build(tmp_path / "raw", mapping={"content": "my, long review"})
    assert [record["content"] for record in kept()[::5]] == ["some words, number 0", "a review, number 0"]
    assert report["mapping_guessed"]
    with pytest.raises(BadInputError, match="have no field 'absent', which content is mapped to"):
        build(tmp_path / "raw", mapping={"content": "absent"})


def test_a_table_without_text_among_texts_is_told_how_to_name_its_field(tmp_path, write_lines, build):
    write_lines("raw/a.jsonl", [{"text": f"some words, number {n}"} for n in range(5)])
    write_lines("raw/b.jsonl", [{"stars": 5, "my long review": f"a review, number {n}"} for n in range(5)])
    with pytest.raises(BadInputError, match="5 of 10 records are damaged") as refused:
        build(tmp_path / "raw")
    flags = shlex.split(re.search(r"--map '.*?'", str(refused.value))[0])
    assert flags == ["--map", "content=my long review"]
    assert build(tmp_path / "raw", mapping=parse_mapping(flags[1]))["records_kept"] == 10
    report = build(tmp_path / "raw", max_damaged_share=1)
    notes = summary_notes({"sources": {"one": report}, "options": {"valid_share": 0}, "notes": []}, Path("my work"))
    note, advice = (note for note in notes if "no_text_field" in note or "no text field" in note)
    assert note == "one: quarantined 5 no_text_field; see my work/corpus/quarantine/one.jsonl"
    assert advice.endswith("if one of their fields is the text, name it with --map content=FIELD")


def test_mapping_is_read_from_text():
    odd = {"content": "name, first and last", "title": "a b"}
    assert parse_mapping("content=name, first and last, title=a b") == odd
    assert parse_mapping("content=body, title=headline") == {"content": "body", "title": "headline"}
    with pytest.raises(UsageError, match=r"'contents=x'.*content, title, category, desc"):
        parse_mapping("contents=x")


def test_record_has_all_fields_and_keeps_the_rest_under_others(write_lines, build, kept):
    path = write_lines("a.jsonl", [{"id": "x7", "title": "T", "topic": "C", "summary": "D", "text": "正文", "n": [1]}])
    report = build(path)
    record = {"gid": 0, "id": 0, "data_src": "one", "category": "C", "title": "T", "content": "正文", "desc": "D"}
    assert kept() == [{**record, "others": {"id": "x7", "n": [1]}}]
    assert report["mappings"] == [{"content": "text", "title": "title", "category": "topic", "desc": "summary"}]
    assert "正文".encode() in (path.parent / "corpus/one/train/part-00000.jsonl").read_bytes(), "not escaped to ASCII"


def test_values_json_does_not_know_are_written_as_text(tmp_path, build, kept):
    row = {"text": "x", "day": datetime.date(2024, 5, 1), "raw": b"\xffa", "nested": {"at": datetime.time(1, 2)}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    build(tmp_path / "a.parquet")
    assert kept()[0]["others"] == {"day": "2024-05-01", "raw": "\\xffa", "nested": {"at": "01:02:00"}}


def test_missing_and_empty_texts_are_told_apart(write_lines, build, quarantined):
    rows = [{"text": f"text {n}"} for n in range(300)]
    report = build(write_lines("a.jsonl", [*rows, {"text": None}, {"text": ""}, {"other": 1}, {"text": {"a": 1}}]))
    assert report["dropped"] == {"empty": 2}
    assert report["quarantined_by_reason"] == {"no_text_field": 1, "not_text": 1}
    assert quarantined()[0]["detail"] == "fields: other"


def test_a_field_inside_another_can_be_mapped(write_lines, build, kept):
    rows = [{"doc": {"text": f"text number {n}", "lang": "en"}, "meta": {"head": "T"}, "n": n} for n in range(3)]
    path = write_lines("a.jsonl", [*rows, {"doc.text": "a name with a dot", "n": 3}])
    report = build(path, mapping={"content": "doc.text", "title": "meta.head"})
    first, _, _, last = kept()
    assert report["records_kept"] == 4
    assert (first["content"], first["title"]) == ("text number 0", "T")
    assert first["others"] == {"doc": {"lang": "en"}, "meta": {}, "n": 0}
    assert last["content"] == "a name with a dot"


def test_no_text_field_in_a_compressed_archive_is_told_before_it_is_read(tmp_path, build, monkeypatch):
    rows = [{"id": n, "note": f"words {n}"} for n in range(500)]
    (tmp_path / "a.tar.gz").write_bytes(PACKS[".tar.gz"]({"a.jsonl": json_lines(rows)}))
    monkeypatch.setattr("zero2all.corpus.build.ingest_unit", None)
    with pytest.raises(BadInputError, match=r"no text field was found in a.tar.gz/a.jsonl.*note"):
        build(tmp_path / "a.tar.gz")


def test_an_archive_that_begins_without_texts_is_read(tmp_path, build, monkeypatch):
    monkeypatch.setattr("zero2all.corpus.source_sampling.ITEMS", 40)  # as many are looked into
    members = {f"{n:05d}.json": b'{"id": 1}' if n < 50 else b'{"text": "words %d"}' % n for n in range(60)}
    (tmp_path / "a.tar.gz").write_bytes(PACKS[".tar.gz"](members))
    assert build(tmp_path / "a.tar.gz", max_damaged_share=1)["records_kept"] == 10


QUESTIONS = [
    {"title": f"怎样养花{n}？", "desc": f"我家的花总是第{n}天枯萎，不知道为什么。", "answer": "多晒太阳，" * 9 + f"{n}"}
    for n in range(30)
]


def build_questions(tmp_path, **options):
    path = tmp_path / "qa.jsonl"
    path.write_bytes(json_lines(QUESTIONS))
    settings = plain_options(**options.pop("build", {}))
    build_corpus(tmp_path / "corpus", [Source("qa", path, "zh", **options)], settings, HERE)
    template = text_template(corpus_sources(tmp_path / "corpus")["qa"])
    return template, training_text(next(iter_records(tmp_path / "corpus", "qa", "train")), template)


def test_the_question_of_a_question_site_is_part_of_its_training_text(tmp_path):
    template, text = build_questions(tmp_path)
    assert template == "{title}\n{desc}\n{content}"
    assert text.startswith("怎样养花0？\n我家的花总是第0天枯萎，不知道为什么。\n多晒太阳")
    assert next(corpus_parts(tmp_path / "corpus", None)[0][0].texts()) == text
    # A template of one's own is kept by every format, and changing it builds again.
    _, text = build_questions(tmp_path, training_text=QA)
    assert text.startswith("问：怎样养花0？\n我家的花总是第0天枯萎，不知道为什么。\n答：多晒太阳")
    template, in_txt = build_questions(tmp_path, training_text=QA, build={"format": "txt"})
    assert (template, in_txt) == ("{content}", text)
    assert build_questions(tmp_path, training_text="{content}")[1].startswith("多晒太阳")


QA = "问：{title}\n{desc}\n答：{content}"


@pytest.mark.parametrize(
    ("record", "template", "text"),
    [
        ({"title": "A", "desc": "", "content": "C"}, QA, "问：A\n答：C"),
        ({"title": "", "desc": None, "content": "C"}, QA, "答：C"),
        ({"title": "A", "desc": "A b", "content": "C"}, QA, "A b\n答：C"),
        ({"title": "A", "desc": "B", "content": "B c"}, "{title}\n{desc}\n{content}", "A\nB c"),
        ({"content": "C"}, "{content}\n完", "C\n完"),
        ({"title": "A", "content": "C"}, "{{title}} {content}", "{title} C"),
        ({"title": "A", "content": "C"}, '{{"q": "{title}", "a": "{content}"}}', '{"q": "A", "a": "C"}'),
    ],
)
def test_empty_fields_and_repetitions_leave_no_trace_and_double_braces_are_text(record, template, text):
    assert training_text(record, template) == text


def test_a_description_may_be_a_list_or_a_number_and_the_plan_names_the_training_text(tmp_path, write_lines, capsys):
    descs = (["a", "b"], 12, {"deep": 1}, "plain")
    rows = [{"title": f"Number {n}", "desc": desc, "content": f"The text number {n}."} for n, desc in enumerate(descs)]
    path, work = write_lines("own.jsonl", rows), tmp_path / "work"
    open_workspace(work, create=True)
    said = []
    build_corpus(work / "corpus", [Source("own", path, "en")], plain_options(valid_share=0), HERE, announce=said.append)
    assert "training text {title}\\n{content}" in said[0]
    records = list(iter_records(work / "corpus", "own", "train"))
    assert [record["desc"] for record in records] == ["a\nb", "12", "", "plain"]
    assert records[2]["others"] == {"desc": {"deep": 1}}
    own = Source("own", path, "en", training_text="{title}|{desc}|{content}")
    build_corpus(work / "corpus", [own], plain_options(valid_share=0), HERE)
    assert main(["corpus", "show", "--gid", "1", "--work", str(work)]) == 0
    assert "training text {title}|{desc}|{content}\nNumber 1|12|The text number 1." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{title}\n{body}{content}", "there is no field 'body'; fields are title, desc, content"),
        ("{title}", "the text itself, is not in it"),
        ("{content}{content}", "{content} stands in it twice"),
        ("{content", "the braces do not fit together"),
        ("{content!r}", "content has a conversion (!r) or a format (:>5), which are not known; write {content}"),
        ("{title}{content:>5}", "content has a conversion"),
        ("{desc}\n{content}", "names {desc}, but no file of the source has that field (it has content, title)"),
    ],
)
def test_templates_that_name_what_is_not_there_are_refused_before_any_work(tmp_path, template, message):
    path = tmp_path / "news.jsonl"
    path.write_text('{"title": "Rain", "text": "It fell all day long in the valley."}\n' * 3)
    with pytest.raises(UsageError) as refused:
        build_corpus(tmp_path / "corpus", [Source("news", path, "en", training_text=template)])
    assert message in str(refused.value)
    assert not (tmp_path / "corpus" / "news").exists()
    assert not (tmp_path / "corpus" / ".build").exists()
