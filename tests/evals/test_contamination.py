"""Contamination: planted items are found in a corpus that was really built and packed, and no others."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from zero2all.cli.main import main
from zero2all.common.engine import EngineConfig
from zero2all.common.errors import BadInputError
from zero2all.common.records import iter_records
from zero2all.common.workspace import open_workspace
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.evals import contamination
from zero2all.evals.contamination import (
    Matcher,
    dirty_ids,
    find_contamination,
    grams_of_items,
    read_contamination,
    split_accuracy,
)
from zero2all.evals.items import Item, Task
from zero2all.evals.ngrams import STRETCH_CHARACTERS, run_hashes, stretches, units_of
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus

ITEMS, PLANTED = 1000, 50
WORDS = (
    *("river", "stone", "lantern", "quiet", "marble", "copper", "window", "basket"),
    *("thunder", "meadow", "silver", "anchor", "candle", "garden", "orchard"),
)
HAN = "山水风云花鸟草木江河湖海日月星辰春夏秋冬东西南北天地人和书画琴棋诗酒茶"


def words(rng, count):
    return " ".join(f"{rng.choice(WORDS)}{rng.randrange(1000)}" for _ in range(count))


def han(rng, count):
    return "".join(rng.choice(HAN) for _ in range(count))


def code(rng, count):
    return "\n".join(
        f"    total_{rng.randrange(99)} = f{rng.randrange(99)}(x[{rng.randrange(99)}])" for _ in range(count)
    )


def make_item(number, rng):
    """Every third English, Chinese, code; every tenth shorter than an n-gram."""
    kind, is_short = ("en", "zh", "code")[number % 3], number % 10 == 0
    if kind == "en":
        return Item(f"item-{number}", f"Which {words(rng, 7 if is_short else 20)}?", answer="x")
    if kind == "zh":
        return Item(f"item-{number}", f"{han(rng, 12 if is_short else 40)}？", answer="x", language="zh")
    return Item(f"item-{number}", f"def f{number}(x):\n{code(rng, 3 if is_short else 10)}", answer="x", language="code")


def as_found(question, number):
    """As the web would print it: other case, other punctuation, other width, other layout."""
    if number % 3 == 0:
        return question.upper().replace(" ", "  ")
    return f"「{question[:7]}，{question[7:]}" if number % 3 == 1 else question.replace("    ", "\t")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A workspace whose corpus holds 50 of 1,000 items, and the task."""
    rng = random.Random(7)
    items = [make_item(number, rng) for number in range(ITEMS)]
    chosen = sorted(rng.sample(range(ITEMS), PLANTED))
    texts = [words(rng, 150) + ". " + han(rng, 60) + "。\n" + code(rng, 5) for _ in range(400)]
    for place, number in zip(rng.sample(range(400), PLANTED), chosen, strict=True):
        texts[place] += "\n" + as_found(items[number].question, number) + "\n" + words(rng, 20)
    folder = tmp_path_factory.mktemp("planted")
    raw = folder / "web.jsonl"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    workspace = open_workspace(folder / "work", create=True)
    build_corpus(workspace.corpus, [Source("web", raw, "en")], BuildOptions(valid_share=0, rules="none"))
    exam = folder / "benchmarks" / "exam" / "test.jsonl"
    exam.parent.mkdir(parents=True)
    fields = ("id", "question", "answer", "language")
    rows = [{name: getattr(item, name) for name in fields} for item in items]
    exam.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workspace, Task("exam", "en", tuple(items)), {items[number].id for number in chosen}


def test_planted_items_are_found_while_packing_and_none_of_the_others(planted, capsys):
    workspace, task, expected = planted
    train_on_corpus(workspace.corpus, workspace.tokenizer, TokenizerConfig(vocab_size=400))
    data = workspace.root.parent / "benchmarks"
    assert main(["pack", "--work", str(workspace.root), "--against", "exam", "--data", str(data)]) == 0
    assert "exam" in capsys.readouterr().out
    report = read_contamination(workspace)
    found = report["tasks"]["exam"]["dirty_items"]
    assert found.keys() == expected
    assert {key: report["tasks"]["exam"][key] for key in ("items", "dirty", "weak")} == {
        "items": ITEMS,
        "dirty": PLANTED,
        "weak": ITEMS // 10,
    }
    documents = {record["gid"]: record["content"] for record in iter_records(workspace.corpus, "web", "train")}
    questions = {item.id: item.question for item in task.items}
    for name, entry in found.items():
        number = int(name.partition("-")[2])
        assert as_found(questions[name], number) in documents[entry["gid"]]
        assert (entry["source"], entry["documents"], entry["share"]) == ("web", 1, 1.0)
        assert entry["weak"] == (number % 10 == 0)


def test_several_processes_and_pieces_find_the_same(planted, monkeypatch):
    workspace, task, _ = planted
    alone = find_contamination(workspace, [task])["tasks"]
    monkeypatch.setattr(contamination, "PIECE_BYTES", 100_000)
    assert find_contamination(workspace, [task], EngineConfig(workers=2))["tasks"] == alone


def test_a_later_pass_adds_to_the_report_until_the_corpus_is_another_one(planted, capsys):
    workspace, task, expected = planted
    find_contamination(workspace, [task])
    find_contamination(workspace, [Task("other", "en", task.items[:5])])
    report = read_contamination(workspace)
    assert set(report["tasks"]) == {"exam", "other"}
    assert dirty_ids(report, task) == expected
    changed = dataclasses.replace(task, items=(dataclasses.replace(task.items[0], question="Why?"), *task.items[1:]))
    assert dirty_ids(report, changed) is None  # other questions under the same ids
    path = workspace.root / "contamination.json"
    path.write_text(json.dumps(report | {"corpus": "of yesterday"}))
    assert read_contamination(workspace) is None
    assert "was made for another corpus" in capsys.readouterr().err


def test_no_items_are_refused(planted):
    with pytest.raises(BadInputError, match="no items to search for"):
        find_contamination(planted[0], [Task("empty", "en", ())])


def test_accuracy_is_split_into_clean_and_dirty():
    split = split_accuracy({"a": True, "b": False, "c": True}, {"a"})
    assert split["all"] == {"items": 3, "accuracy": 2 / 3}
    assert split["clean"] == {"items": 2, "accuracy": 0.5}
    assert split["dirty"] == {"items": 1, "accuracy": 1.0}
    assert split_accuracy({"a": True}, {"a"})["clean"] == {"items": 0, "accuracy": None}


@pytest.mark.parametrize(
    ("kind", "one", "other", "same"),
    [
        ("words", "The  Cat, sat!", "the cat\nsat", True),
        ("words", "the cats at", "the cat sat", False),
        ("characters", "漢字，ＡＢ", "汉字ab", True),
        ("characters", "汉字", "字汉", False),
        ("tokens", "if x_1:\n\treturn y", "if x_1 : return y", True),
        ("tokens", "f(X)", "f(x)", False),
        ("tokens", "a_b", "a b", False),
    ],
)
def test_what_counts_as_the_same_text(kind, one, other, same):
    first, second = (units_of([text], kind) for text in (one, other))
    hashes = [run_hashes(units, len(units.hashes)).tolist() for units in (first, second)]
    assert (hashes[0] == hashes[1]) is same


def test_a_run_does_not_go_on_from_one_document_into_the_next():
    item = Item("1", " ".join(WORDS), answer="x")
    grams = grams_of_items([item])
    ((key, hashes),) = grams.hashes.items()
    matcher = Matcher(key, {key: hashes}, hashes)
    whole, first, second = " ".join(WORDS), " ".join(WORDS[:8]), " ".join(WORDS[8:])
    assert not list(matcher.find(units_of([first, second], "words")))
    ((_, found, texts),) = matcher.find(units_of(["nothing", "", whole], "words"))
    assert len(found) == len(WORDS) - 12
    assert set(texts.tolist()) == {2}


def test_a_long_text_is_taken_in_stretches_that_cut_no_run():
    text = "x" * STRETCH_CHARACTERS + " " + " ".join(WORDS) + " " + "y" * STRETCH_CHARACTERS
    for cut in (10, 40, 90):
        pieces = stretches(text[cut:])
        assert len(pieces) > 2
        assert any(" ".join(WORDS) in piece for piece in pieces)
