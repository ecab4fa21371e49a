"""Every benchmark in each form its files have: small ones of our own invention."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.readers.reader_samples import parquet as parquet_of
from tests.corpus.readers.reader_samples import tar_of, zip_of
from zero2all.common.errors import BadInputError
from zero2all.evals.items import FORMS
from zero2all.evals.tasks.list import READERS, read_task, read_tasks


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(*rows: dict[str, Any]) -> bytes:
    return parquet_of(rows)


def tarred(files: dict[str, bytes]) -> bytes:
    return gzip.compress(tar_of(files))


def put(data: Path, name: str, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (data / name / path).parent.mkdir(parents=True, exist_ok=True)
        (data / name / path).write_bytes(content)
    return data


CMMLU = b",Question,A,B,C,D,Answer\n0,\xe5\xa4\xa9\xef\xbc\x9f,\xe8\x93\x9d,\xe7\xbb\xbf,\xe7\xba\xa2,\xe9\xbb\x84,A\n"
CEVAL = "id,question,A,B,C,D,answer,explanation\n0,天？,红,蓝,绿,黄,B,因为\n".encode()
CEVAL_VAL = "id,question,A,B,C,D,answer\n0,海？,红,绿,蓝,黄,C\n".encode()
CEVAL_TEST = "id,question,A,B,C,D\n0,地？,红,绿,蓝,黄\n".encode()
MMLU = b'"Sky, by day?",red,blue,green,brown,B\n'
ARC = {"stem": "Sky?", "choices": [{"text": "red", "label": "1"}, {"text": "blue", "label": "2"}]}
ARC_HUB = {"id": "q1", "question": "Sky?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "B"}
SWAG = {"ind": 3, "activity_label": "Painting", "ctx": "A man paints. he", "ctx_a": "A man paints.", "ctx_b": "he"}
SWAG |= {"endings": ["eats [step] it.", "stops."]}
PIQA = {"goal": "Cool tea", "sol1": "wait", "sol2": "heat it"}
WINO = {"qID": "x-1", "sentence": "The cup fell off the table because _ was wet.", "option1": "cup", "option2": "table"}
PAIR = {"sentence_good": "Dogs bark.", "sentence_bad": "Dogs barks.", "UID": "agreement", "pairID": "0"}
C3 = [["男：你好", "女：再见"], [{"question": "谁走？", "choice": ["男", "女"], "answer": "女"}], "7-1"]
C3_ASKED = {"question": ["谁走？"], "answer": ["女"], "choice": [["男", "女"]]}
C3_HUB = {"documents": ["男：你好", "女：再见"], "document_id": "7-1", "questions": C3_ASKED}
ANSWERS = [{"text": text, "answer_start": 0} for text in ("李", "李某")]
ASKED = {"id": "D_1", "question": "谁？", "answers": ANSWERS}
CMRC = {"version": "v1.0", "data": [{"title": "", "paragraphs": [{"id": "D", "context": "李某来了", "qas": [ASKED]}]}]}
CMRC_HUB = {**ASKED, "context": "李某来了", "answers": {"text": ["李", "李某"], "answer_start": [0, 0]}}
CMRC_PLAIN = {"context_id": "D", "context_text": "李某来了"}
CMRC_PLAIN |= {"qas": [{"query_id": "D_1", "query_text": "谁？", "answers": ["李", "李某"]}]}
GSM_READ = ("3 bags of 4?", "It is 3*4=12. The answer is 1012.")
GSM = {"question": "3 bags of 4?", "answer": "It is 3*4=<<3*4=12>>12.\n#### 1,012"}
HUMAN = {"task_id": "HumanEval/0", "prompt": 'def one():\n    """One."""\n', "entry_point": "one"}
HUMAN |= {"canonical_solution": "    return 1\n", "test": "def check(candidate):\n    assert candidate() == 1\n"}

CASES = [
    ("cmmlu", {"test/agronomy.csv": CMMLU, "dev/agronomy.csv": CMMLU}, ("天？", "蓝", "agronomy", 1)),
    ("cmmlu", {"cmmlu_v1_0_1.zip": zip_of({"test/agronomy.csv": CMMLU})}, ("天？", "蓝", "agronomy", 0)),
    ("ceval", {"val/law_val.csv": CEVAL_VAL, "dev/law_dev.csv": CEVAL, "test/law_test.csv": CEVAL_TEST},
     ("海？", "蓝", "law", 1)),
    ("ceval", {"law/val-00000-of-00001.parquet": parquet(
        {"id": 0, "question": "海？", "A": "红", "B": "绿", "C": "蓝", "D": "黄", "answer": "C"})},
     ("海？", "蓝", "law", 0)),
    ("mmlu", {"data/test/sky_test.csv": MMLU, "data/dev/sky_dev.csv": MMLU}, ("Sky, by day?", "blue", "sky", 1)),
    ("mmlu", {f"{folder}/test-00000-of-00001.parquet": parquet(
        {"question": "Sky?", "subject": "sky", "choices": ["red", "blue"], "answer": 1}) for folder in ("all", "sky")},
     ("Sky?", "blue", "sky", 0)),
    ("arc_easy", {"ARC-Easy/ARC-Easy-Test.csv": b"questionID,question\n1,x\n",
                  "ARC-Easy/ARC-Easy-Test.jsonl": lines({"id": "q1", "question": ARC, "answerKey": "2"})},
     ("Sky?", "blue", "", 0)),
    ("arc_challenge", {"ARC-Challenge/test-00000-of-00001.parquet": parquet(ARC_HUB),
                       "ARC-Challenge/train-00000-of-00001.parquet": parquet(ARC_HUB),
                       "ARC-Easy/test-00000-of-00001.parquet": parquet({**ARC_HUB, "question": "easy"})},
     ("Sky?", "blue", "", 1)),
    ("hellaswag", {"hellaswag_val.jsonl": lines({**SWAG, "label": 1})},
     ("Painting: A man paints. He", "stops.", "Painting", 0)),
    ("hellaswag", {"data/validation-00000-of-00001.parquet": parquet({**SWAG, "label": "0"})},
     ("Painting: A man paints. He", "eats it.", "Painting", 0)),
    ("piqa", {"valid.jsonl": lines(PIQA, PIQA), "valid-labels.lst": b"0\n1\n"}, ("Cool tea", "wait", "", 0)),
    ("piqa", {"data/validation-0.parquet": parquet({**PIQA, "label": 1})}, ("Cool tea", "heat it", "", 0)),
    ("winogrande", {"train_xl.jsonl": lines({**WINO, "answer": "2"}, {**WINO, "answer": "1"}),
                    "train_s.jsonl": lines({**WINO, "answer": "2"}), "dev.jsonl": lines({**WINO, "answer": "2"})},
     ("The cup fell off the table because _ was wet.", "table", "", 2)),
    ("blimp", {"data/agreement.jsonl": lines(PAIR)}, ("", "Dogs bark.", "agreement", 0)),
    ("blimp", {"agreement/train-00000-of-00001.parquet": parquet(PAIR)}, ("", "Dogs bark.", "agreement", 0)),
    ("blimp", {"data/agreement.jsonl": lines(PAIR), "BLiMP.zip": zip_of({"a.jsonl": lines(PAIR)})},
     ("", "Dogs bark.", "agreement", 0)),
    ("zhoblimp", {"ba_passive.json": lines({"sentence_good": "他把书看了。", "sentence_bad": "他书把看了。"})},
     ("", "他把书看了。", "ba_passive", 0)),
    ("zhoblimp", {"data/ZhoBLiMP.tar.gz": tarred({"ZhoBLiMP/ba.jsonl": lines({**PAIR, "UID": "ba"})}),
                  "data/ZhoBLiMP-excluded.tar.gz": tarred({"ZhoBLiMP-excluded/no.jsonl": lines(PAIR)}),
                  "data/human_validation_result.csv": b"a,b\n1,2\n"}, ("", "Dogs bark.", "ba", 0)),
    ("c3", {f"c3-d-{split}.json": json.dumps([C3]).encode() for split in ("test", "train")}, ("谁走？", "女", "", 1)),
    ("c3", {"dialog/validation-00000-of-00001.parquet": parquet(C3_HUB)}, ("谁走？", "女", "", 0)),
    ("cmrc", {"cmrc2018_dev.json": json.dumps(CMRC).encode()}, ("谁？", "李", "", 0)),
    ("cmrc", {"data/cmrc2018_dev.json": json.dumps([CMRC_PLAIN]).encode()}, ("谁？", "李", "", 0)),
    ("cmrc", {"data/cmrc2018_dev.json": json.dumps([CMRC_PLAIN]).encode(),
              "squad-style-data/cmrc2018_dev.json": json.dumps(CMRC).encode()}, ("谁？", "李", "", 0)),
    ("cmrc", {"data/validation-00000-of-00001.parquet": parquet(CMRC_HUB)}, ("谁？", "李", "", 0)),
    ("lambada", {"data/lambada_test.jsonl": lines({"text": "I saw Tom"}),
                 "data/lambada_test_de.jsonl": lines({"text": "Ich sah Tom"})}, ("I saw", "Tom", "", 0)),
    ("gsm8k", {f"{name}.jsonl": lines(GSM) for name in ("train", "test", "test_socratic")}, (*GSM_READ, "", 1)),
    ("gsm8k", {"main/test-00000-of-00001.parquet": parquet(GSM)}, (*GSM_READ, "", 0)),
    ("humaneval", {"HumanEval.jsonl.gz": gzip.compress(lines(HUMAN)), "example_problem.jsonl": lines(HUMAN)},
     (HUMAN["prompt"], "    return 1\n", "", 0)),
    ("humaneval", {"openai_humaneval/test-00000-of-00001.parquet": parquet(HUMAN)},
     (HUMAN["prompt"], "    return 1\n", "", 0)),
]  # fmt: skip


OF_ONE_KIND = {
    "gsm8k": {"number": "1012"},
    "cmrc": {"id": "D_1", "context": "李某来了", "aliases": ["李", "李某"]},
    "humaneval": {"id": "HumanEval/0", "entry_point": "one"},
    "c3": {"context": "男：你好\n女：再见"},
}


@pytest.mark.parametrize(("name", "files", "expected"), CASES)
def test_each_benchmark_is_read_in_each_form_its_files_have(tmp_path, name, files, expected):
    task = read_task(put(tmp_path, "arc" if name.startswith("arc") else name, files), name)
    question, answer, subject, shots = expected
    item = task.items[0]
    assert (item.question, item.answer, item.subject, len(task.shots)) == (question, answer, subject, shots)
    assert len(task.items) == (2 if "valid-labels.lst" in files else 1), "nothing is read twice"
    assert (task.skipped, task.name, item.language) == ({}, name, READERS[name].language)
    if item.choices:
        assert item.choices[item.gold] == answer
    found = {**item.extra, "id": item.id, "context": item.context}
    assert {field: found[field] for field in OF_ONE_KIND.get(name, ())} == OF_ONE_KIND.get(name, {})
    assert not {shot.id for shot in task.shots} & {each.id for each in task.items}


def test_every_benchmark_that_is_named_has_a_file_of_its_own_above():
    assert {name for name, _, _ in CASES} == set(READERS)


def test_items_that_cannot_be_used_are_named_and_the_rest_is_read(tmp_path):
    rows = "id,question,A,B,C,D,answer | 0,天？,红,蓝,绿,黄,B | 1,天？,红,蓝,绿,黄,E | 2,天？,红,,绿,黄,A | 3,天？,红"
    rows += " | 4,,红,蓝,绿,黄,B | 5,天？,红,蓝,绿,黄,B,太,多"
    put(tmp_path, "ceval", {"val/law_val.csv": rows.replace(" | ", "\n").encode()})
    task = read_task(tmp_path, "ceval")
    assert len(task.items) == 1
    assert task.skipped == {"gold outside the options": 1, "empty text": 2, "missing column": 1, "not readable": 1}
    assert task.problems[0] == "val/law_val.csv row 2: the right answer is E; the options are A, B, C, D"
    assert "it has no answer; its fields are id, question, A" in task.problems[2]


@pytest.mark.parametrize(
    ("name", "row", "reason", "said"),
    [
        ("blimp", {"sentence_good": "Same. ", "sentence_bad": "Same."}, "the right option stands twice", "same text"),
        ("mine", {"choices": ["a", "b", "a"], "answer": "a"}, "the right option stands twice", "same text"),
        ("mine", {"choices": ["a"], "answer": "a"}, "only one option", "only one option"),
        ("mine", {"choices": ["Lima", "Rome"], "answer": "Quito"}, "gold outside the options", "are Lima, Rome"),
        ("mine", {"choices": ["Lima", "Rome"], "answer": ""}, "no right answer given", "no right answer"),
        ("winogrande", WINO | {"sentence": "_ and _", "answer": "1"}, "not exactly one blank", "2"),
        ("hellaswag", {"label": "", "ctx_a": "a", "ctx_b": "", "activity_label": "x"}, "no right answer given", "test"),
        ("lambada", {"text": "word"}, "only one word", "only one word"),
    ],
)
def test_the_reason_that_is_counted_is_that_of_the_item(tmp_path, name, row, reason, said):
    good = {"question": "?", "choices": ["a", "b", "b"], "answer": "a"}  # two equal wrong options harm nothing
    good |= {"sentence_good": "a", "sentence_bad": "b", "sentence": "_ b", "option1": "a", "option2": "b"}
    good |= {"label": 0, "ctx_a": "a", "ctx_b": "b", "activity_label": "x", "endings": ["a", "b"], "text": "a b"}
    good["answer"] = "1" if name == "winogrande" else "a"
    file = "test.jsonl" if name == "blimp" else "val.jsonl"
    put(tmp_path, name, {file: lines(good, {"question": "?", **row})})
    task = read_task(tmp_path, name)
    assert (len(task.items), task.skipped) == (1, {reason: 1})
    assert said in task.problems[0]


def test_one_bad_question_of_a_passage_leaves_the_others(tmp_path):
    bad = {"question": "谁？", "choice": ["男", "女"], "answer": "狗"}
    put(tmp_path, "c3", {"c3-d-test.json": json.dumps([[C3[0], [bad, *C3[1]], "7"], ["x"], 3]).encode()})
    task = read_task(tmp_path, "c3")
    assert [item.answer for item in task.items] == ["女"]
    assert task.skipped == {"gold outside the options": 1, "not readable": 2}


def test_a_set_of_your_own(tmp_path):
    capital, sum_of = {"question": "首都是？", "choices": ["北京", "上海"]}, {"question": "一加一"}
    rows = [{**capital, "answer": "上海"}, {**capital, "answer": "B", "id": "mine"}, {**capital, "answer": 1}]
    rows += [{**sum_of, "answer": "二", "id": "mine"}, {**sum_of, "answer": "二"}, sum_of]
    rows += [{**capital, "question": "首都是", "answer": 0, "shape": shape} for shape in ("continue", "round")]
    put(tmp_path, "mine", {"all.jsonl": lines(*rows) + b"{broken\n"})
    table = b"question,A,B,C,answer\nSky?,red,blue,,blue\n"
    put(tmp_path, "table", {"q.csv": table, "dev.csv": b"question,answer\na,b\n"})
    mine, table = read_tasks(tmp_path, ["all"])
    assert [item.answer for item in mine.items] == ["上海", "上海", "上海", "二", "北京"]
    assert [item.shape for item in mine.items[-2:]] == ["question", "continue"]
    assert (mine.language, mine.items[1].id, mine.forms) == ("zh", "mine", FORMS)
    assert mine.skipped == {"duplicate id": 1, "missing column": 1, "not readable": 2}
    assert (table.items[0].choices, table.items[0].gold, table.language) == (("red", "blue"), 1, "en")
    assert len(table.shots) == 1


def test_an_own_question_may_have_several_answers(tmp_path):
    rows = [{"question": "2 + 2 =", "answer": ["4", "four"]}, {"question": "None?", "answer": []}]
    put(tmp_path, "open", {"all.jsonl": lines(*rows)})
    (mine,) = read_tasks(tmp_path, ["open"])
    assert [(item.answer, item.extra["aliases"]) for item in mine.items] == [("4", ["four"])]
    given = ("ABD", "A, D", ["a", "c"], [1, 2], "B", "BAD", [], 0.5, ["e"])
    choose = [{"question": str(each), "choices": ["a", "b", "c", "d"], "answer": each} for each in given]
    put(tmp_path, "exam", {"all.jsonl": lines(*choose)})
    (exam,) = read_tasks(tmp_path, ["exam"])
    assert [item.golds for item in exam.items] == [(0, 1, 3), (0, 3), (0, 2), (1, 2), (1,), (0, 1, 3)]
    said = ("it has no right answer", "the right answer is 0.5; the", "the right answer is e")
    assert all(part in problem for part, problem in zip(said, exam.problems, strict=True))
    put(tmp_path, "table", {"q.csv": b"question,A,B,C,answer\nEven?,2,3,4,AC\nOdd?,2,3,4,B\n"})
    assert [item.golds for item in read_tasks(tmp_path, ["table"])[0].items] == [(0, 2), (1,)]
    put(tmp_path, "excel", {"q.csv": "\ufeffquestion,A,B,C,D,answer\r\nFew?,2,3,,,b\r\nGap?,2,,4,5,C\r\n".encode()})
    (excel,) = read_tasks(tmp_path, ["excel"])
    assert [(item.choices, item.gold) for item in excel.items] == [(("2", "3"), 1)]
    assert excel.problems == ("q.csv row 2: option 2 is empty",), "without B, C would be the third option"
    spelt = ("ＡＣ", "a,c", "A和C", "A and C", "(A)(C)", "['A', 'C']", "bad", [True, False])
    rows = [{"question": str(each), "options": ["2", "3", "4", "7"], "answer": each} for each in spelt]
    rows += [{"question": "?", "choices": each, "answer": "A"} for each in ({"A": "2", "B": "3"}, [None, "3"])]
    put(tmp_path, "spelt", {"q.jsonl": lines(*rows)})
    (exam,) = read_tasks(tmp_path, ["spelt"])
    assert [item.golds for item in exam.items] == [(0, 2)] * 6
    said = ("the right answer is bad;", "the right answer is True;", *["its choices are not a list of texts"] * 2)
    assert all(part in problem for part, problem in zip(said, exam.problems, strict=True))
    put(tmp_path, "word", {"q.csv": b"question,A,B,answer\nWord?,AB,BA,AB\n"})  # the text of an option
    assert [(item.gold, item.golds) for item in read_tasks(tmp_path, ["word"])[0].items] == [(0, ())]


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("cmmlu", {}, "no folder .*cmmlu.*z2a eval download cmmlu"),
        ("cmmlu", {"readme.md": b"x"}, "expected files .* of the split test, found none"),
        ("cmmlu", {"test/a.csv": b",Question,A\n0,x,y\n"}, "no item of cmmlu that can be asked: .*it has no answer"),
        ("cmmlu", {"cmmlu.zip": b"PK broken"}, "not a complete archive"),
        ("cmmlu", {"test/a.csv": "题".encode("gb18030")}, "is not UTF-8"),
        ("mmlu", {"all/test-0.parquet": b"PAR1 broken"}, "not a complete parquet file"),
        ("humaneval", {"h.jsonl.gz": gzip.compress(b"x" * 99)[:20]}, "cannot be read"),
        ("cmlu", {}, r"Did you mean `cmmlu`\? A set of your own"),
    ],
)
def test_folders_that_cannot_be_read_say_what_was_expected(tmp_path, name, files, said):
    put(tmp_path, name, files)
    with pytest.raises(BadInputError, match=f"(?s){said}"):
        read_task(tmp_path, name)


def test_no_folder_at_all(tmp_path):
    for folder, names, said in (
        ("nowhere", ["hellaswg"], r"There is no folder .*hellaswg.* Did you mean `hellaswag`\?"),
        ("none", ["all"], "no folder with a benchmark"),
        (".", ["all"], "no folder with a benchmark"),
    ):
        with pytest.raises(BadInputError, match=said):
            read_tasks(tmp_path / folder, names)
