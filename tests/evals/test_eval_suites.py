"""Suites: the same items every time, a score recomputed by hand, and a score with a task missing, which has another
name."""

import json
import math
import random
import shutil

import pytest

from zero2all.cli import main
from zero2all.evals import suites
from zero2all.evals.chat_tasks import CHAT_FORM
from zero2all.evals.download import SOURCES
from zero2all.evals.items import Item, Task
from zero2all.evals.judge import FormResult, wilson
from zero2all.evals.report import figures, step_lines
from zero2all.evals.suites import SUITES, ask_task, fixed_items, mean_score
from zero2all.evals.tasks.list import READERS
from zero2all.infer.engine import Engine
from zero2all.track.reader import RunReader

ITEMS = 8


@pytest.fixture(autouse=True)
def few_items(monkeypatch):
    monkeypatch.setattr(suites, "ITEMS", ITEMS)


@pytest.fixture
def knows_beijing(bigram, border_tokenizer, logits):
    """After `：` it says 北京."""
    logits[border_tokenizer.encode_text("：")[-1], border_tokenizer.encode_text("北京")[0]] = 9.0
    return Engine(bigram(logits, max_seq_len=256))


def wilson_ends(right, total):
    """Where (share - p)² = 1.959964² p (1 - p) / total: the ends of the 95 % interval."""
    a, b, c = 1 + 3.841459 / total, -(2 * right / total + 3.841459 / total), (right / total) ** 2
    root = math.sqrt(b * b - 4 * a * c)
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def test_the_score_is_the_mean_of_centred_accuracies_and_an_item_without_room_is_a_guess(knows_beijing):
    def task(name, right, wrong, too_long=0):
        texts = ["北京"] * right + ["上海"] * wrong
        items = [
            Item(f"{n}", f"首都{n}？", ("北京", "上海"), int(gold == "上海"), gold) for n, gold in enumerate(texts)
        ]
        long = [Item(f"long {n}", "长" * 300 + str(n), ("北京", "上海"), 0, "北京") for n in range(too_long)]
        return Task(name, "zh", tuple(Item(**{**vars(each), "language": "zh"}) for each in (*items, *long)))

    cmmlu = ask_task(knows_beijing, task("cmmlu", right=6, wrong=2), "cloze")
    c3 = ask_task(knows_beijing, task("c3", right=3, wrong=1, too_long=4), "cloze")
    assert (cmmlu.items, cmmlu.accuracy, cmmlu.chance, cmmlu.centred) == (ITEMS, 6 / 8, 0.5, 0.5)
    # Three right of four, and four guesses of two options: 3 + 4 / 2 of 8.
    assert (c3.items, c3.accuracy, c3.centred) == (ITEMS, 5 / 8, 0.25)
    assert c3.skipped == {"longer than the context": 4}
    assert c3.interval == pytest.approx(wilson_ends(5, 8), abs=1e-6)

    found = mean_score([cmmlu, c3])
    assert found["score"] == (0.5 + 0.25) / 2
    (low_a, high_a), (low_b, high_b) = ([2 * end - 1 for end in wilson_ends(right, 8)] for right in (6, 5))
    below, above = (
        math.sqrt((0.5 - low_a) ** 2 + (0.25 - low_b) ** 2),
        math.sqrt((high_a - 0.5) ** 2 + (high_b - 0.25) ** 2),
    )
    assert found["interval"] == pytest.approx((0.375 - below / 2, 0.375 + above / 2), abs=1e-6)
    assert mean_score([c3])["interval"] == pytest.approx(c3.centred_interval)


def test_the_interval_holds_the_true_score_of_19_in_20_models():
    rng = random.Random(0)

    def drawn(chance, truth, count=200):
        right = sum(rng.random() < truth for _ in range(count))
        return FormResult(
            "t", "en", "cloze", 0, count, {}, (), chance, right / count, wilson(right, count), None, 0, []
        )

    truths = [(0.5, 0.6), (0.0, 0.02), (0.25, 0.3), (0.25, 0.9)]
    score = sum((truth - chance) / (1 - chance) for chance, truth in truths) / 4
    held = 0
    for _ in range(1000):
        low, high = mean_score([drawn(*each) for each in truths])["interval"]
        held += low <= score <= high
    assert 930 <= held <= 970


def test_the_items_are_the_same_whatever_their_order_and_their_files_and_each_stands_once():
    items = [Item(f"hub:{n}", f"question {n}", ("a", "b"), n % 2, "ab"[n % 2]) for n in range(50)]
    others = [Item(f"own:{n}", f"question {n}", ("a", "b"), n % 2, "ab"[n % 2]) for n in range(50)]
    random.Random(1).shuffle(others)
    asked = [item.question for item in fixed_items(items)]
    assert len(set(asked)) == ITEMS
    assert asked == [item.question for item in fixed_items([*others, *items])]
    assert asked != [item.question for item in items[:ITEMS]]


def test_every_task_has_a_reader_its_form_and_a_place_to_get_it_from():
    for name, form in ((name, form) for tasks in SUITES.values() for name, form in tasks.items()):
        if form == CHAT_FORM:  # made, not read
            continue
        assert form in READERS[name].forms
        assert name in SOURCES


@pytest.fixture
def data(tmp_path):
    """The files of core-zh, as their authors give them."""
    folder = tmp_path / "data"
    for name in SUITES["core-zh"]:
        (folder / name).mkdir(parents=True)
    pairs = [{"sentence_good": f"这是{n}条鱼。", "sentence_bad": f"这是{n}张鱼。"} for n in range(12)]
    (folder / "zhoblimp/classifier.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    asked = [
        [["他在北京。"], [{"question": f"{n}他在哪？", "choice": ["北京", "东京"], "answer": "北京"}], n]
        for n in range(9)
    ]
    (folder / "c3/c3-d-test.json").write_text(json.dumps(asked))
    rows = [f"{n},首都{n}？,北京,巴黎,东京,伦敦,{'ABCD'[n % 4]}" for n in range(10)]
    (folder / "cmmlu/test").mkdir()
    (folder / "cmmlu/test/law.csv").write_text("\n".join([",Question,A,B,C,D,Answer", *rows]), encoding="utf-8")
    return folder


@pytest.fixture
def ask(trained_workspace, tmp_path, data, capsys):
    work = tmp_path / "work"
    shutil.copytree(trained_workspace.root, work)
    quick = ["--probes", "none", "--pairs", "none", "--held-out", "none"]

    def run(*words):
        code = main(["eval", "tiny", "--work", str(work), "--data", str(data), *quick, "--suite", *words])
        return code, capsys.readouterr(), work / "runs/tiny"

    return run


def suites_of(run):
    return json.loads((run / "eval/step-00000030.json").read_bytes())["suites"]


def test_a_run_gets_its_score_which_is_that_of_the_same_items_when_asked_again(ask, data):
    code, said, run = ask("core-zh")
    assert code == 0, said.err
    (found,) = suites_of(run).values()
    assert [each["task"] for each in found["tasks"]] == list(SUITES["core-zh"])
    for each in found["tasks"]:
        assert (each["form"], each["shots"], each["items"]) == ("cloze", 0, ITEMS)
        assert each["centred"] == pytest.approx((each["accuracy"] - each["chance"]) / (1 - each["chance"]))
    low, high = found["interval"]
    assert found["score"] == pytest.approx(sum(each["centred"] for each in found["tasks"]) / 3)
    assert low < found["score"] < high
    assert (found["version"], found["missing"], "PARTIAL" in said.out) == (suites.VERSION, {}, False)
    assert f"score: {found['score']:.1%} above chance, 95 % {low:.1%} … {high:.1%}" in said.out

    lines = (data / "zhoblimp/classifier.jsonl").read_text().splitlines()
    (data / "zhoblimp/classifier.jsonl").rename(data / "zhoblimp/of-the-hub.jsonl").write_text("\n".join(lines[::-1]))
    assert ask("core-zh")[0] == 0
    assert suites_of(run)["core-zh-v1"]["score"] == found["score"]
    logged = RunReader(run).series("eval/suites/core-zh-v1/score")
    assert (logged.step.tolist(), logged.value.tolist()) == ([30], [found["score"]])


def test_a_suite_without_a_task_is_named_after_it_and_says_how_to_get_it(ask, data):
    shutil.rmtree(data / "c3")
    (data / "cmmlu/test/law.csv").write_text(",Question,A,B,C,D,Answer\n0,首都？,北京,巴黎,东京,伦敦,A\n")
    code, said, run = ask("core-zh")
    assert code == 3
    assert "PARTIAL: 1 of 3 tasks" in said.out
    assert "Not asked, because their files cannot be used: c3, cmmlu." in said.err
    assert "z2a eval download c3" in said.err
    assert "Of its items 1 can be asked, not 8" in said.err
    report = {"suites": suites_of(run)}
    assert set(report["suites"]["core-zh-v1-without-c3-cmmlu"]["missing"]) == {"c3", "cmmlu"}
    assert {name.split("/")[2] for name in figures(report)} == {"core-zh-v1-without-c3-cmmlu"}


def test_the_table_of_checkpoints_has_a_column_for_every_score():
    scores = [{"core-zh-v1": {"score": 0.25}}, {"core-zh-v1-without-c3": {"score": 0.5}}]
    reports = [{"step": step, "held_out": {}, "suites": score} for step, score in enumerate(scores)]
    title, first, second = step_lines(reports)
    end = title.index("core-zh-v1 ") + len("core-zh-v1")
    assert (first[end - 5 : end], first.split()) == ("25.0%", ["0", "25.0%"])
    assert len(second) == len(title)
    assert second.split() == ["1", "50.0%"]


def test_what_cannot_be_asked_at_all_is_refused_before_the_model_is_loaded(ask, data, monkeypatch):
    monkeypatch.setattr("zero2all.infer.load.load_run", None)  # would be called too early
    for words, code, expected in (
        ("core-xx", 2, "Did you mean"),
        ("core-zh,core-en", 3, "z2a eval download blimp lambada hellaswag piqa arc_easy --data"),
    ):
        found, said, _ = ask(words)
        assert (found, expected in said.err) == (code, True)
