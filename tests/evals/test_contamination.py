"""Contamination: planted items are found in a corpus that was really built and packed, and no others."""

import dataclasses
import json
import random

import numpy as np
import pytest

from tests.corpus.corpus_helpers import HERE
from zero2all.cli.main import main
from zero2all.common.engine import EngineConfig
from zero2all.common.errors import BadInputError
from zero2all.common.records import iter_records
from zero2all.common.workspace import open_workspace
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.evals import contamination
from zero2all.evals.contamination import contaminated_ids, find_contamination, read_contamination, split_accuracy
from zero2all.evals.items import Item, Task
from zero2all.evals.ngrams import STRETCH_CHARACTERS, run_hashes, stretches, units_of
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus

ITEMS, PLANTED, DOCUMENTS = 300, 30, 150
WORDS = str.split(
    "river stone lantern quiet marble copper window basket thunder meadow silver anchor candle garden orchard"
)
HAN = "山水风云花鸟草木江河湖海日月星辰春夏秋冬东西南北天地人和书画琴棋诗酒茶"


def words(rng, count):
    return " ".join(f"{rng.choice(WORDS)}{rng.randrange(1000)}" for _ in range(count))


def han(rng, count):
    return "".join(rng.choice(HAN) for _ in range(count))


def code(rng, count):
    return "\n".join("    total_{} = f{}(x[{}])".format(*(rng.randrange(99) for _ in range(3))) for _ in range(count))


def corpus_of(folder, texts):
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    workspace = open_workspace(folder / "work", create=True)
    options = BuildOptions(valid_share=0, rules="none")
    build_corpus(workspace.corpus, [Source("web", folder / "web.jsonl", "en")], options, HERE)
    return workspace


def make_item(number, rng):
    """Every third English, Chinese, code; every tenth shorter than an n-gram."""
    kind, is_short = ("en", "zh", "code")[number % 3], number % 10 == 0
    questions = {
        "en": f"Which {words(rng, 4 if is_short else 20)}?",
        "zh": f"{han(rng, 12 if is_short else 40)}？",
        "code": f"def f{number}(x):\n{code(rng, 3 if is_short else 10)}",
    }
    return Item(f"item-{number}", questions[kind], answer="x", language=kind)


def as_found(question, number):
    """As the web would print it: other case, other punctuation, other width, other layout."""
    if number % 3 == 0:
        return question.upper().replace(" ", "  ")
    return f"「{question[:7]}，{question[7:]}" if number % 3 == 1 else question.replace("    ", "\t")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    rng = random.Random(7)
    items = [make_item(number, rng) for number in range(ITEMS)]
    chosen = sorted(rng.sample(range(ITEMS), PLANTED))
    texts = [words(rng, 150) + ". " + han(rng, 60) + "。\n" + code(rng, 5) for _ in range(DOCUMENTS)]
    for place, number in zip(rng.sample(range(DOCUMENTS), PLANTED), chosen, strict=True):
        texts[place] += "\n" + as_found(items[number].question, number) + "\n" + words(rng, 20)
    folder = tmp_path_factory.mktemp("planted")
    exam = folder / "benchmarks" / "exam" / "test.jsonl"
    exam.parent.mkdir(parents=True)
    fields = ("id", "question", "answer", "language")
    rows = [{name: getattr(item, name) for name in fields} for item in items]
    exam.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return corpus_of(folder, texts), Task("exam", "en", tuple(items)), {items[number].id for number in chosen}


def test_planted_items_are_found_while_packing_and_none_of_the_others(planted, capsys):
    workspace, task, expected = planted
    train_on_corpus(workspace.corpus, workspace.tokenizer, TokenizerConfig(vocab_size=400))
    data = workspace.root.parent / "benchmarks"
    assert main(["pack", "--work", str(workspace.root), "--against", "exam", "--data", str(data)]) == 0
    assert "exam" in capsys.readouterr().out
    report = read_contamination(workspace)
    dirty, weak = (report["tasks"]["exam"][kind] for kind in ("dirty_items", "weak_items"))
    short = {name for name in expected if int(name.partition("-")[2]) % 10 == 0}
    assert short
    assert (dirty.keys(), weak.keys()) == (expected - short, short)  # a short question alone identifies no item
    assert [report["tasks"]["exam"][key] for key in ("items", "dirty", "weak")] == [ITEMS, len(dirty), len(weak)]
    documents = {record["gid"]: record["content"] for record in iter_records(workspace.corpus, "web", "train")}
    questions = {item.id: item.question for item in task.items}
    for name, entry in (dirty | weak).items():
        number = int(name.partition("-")[2])
        assert as_found(questions[name], number) in documents[entry["gid"]]
        assert (entry["source"], entry["documents"], entry["share"]) == ("web", 1, 1.0)
        assert (entry.get("weak", False), entry["found"]) == (number % 10 == 0, ["question"])


def test_a_corpus_built_against_files_has_no_dirty_item_left_and_says_what_was_dropped(planted, tmp_path, capsys):
    _, task, expected = planted
    rows = [{"question": item.question, "answer": item.answer, "id": item.id} for item in task.items]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::2]))
    (tmp_path / "lines.txt").write_text("\n".join(" ".join(row["question"].split()) for row in rows[1::2]))
    files = ",".join(str(tmp_path / name) for name in ("exam.jsonl", "lines.txt"))
    raw = planted[0].root.parent / "web.jsonl"
    command = ["corpus", "build", f"web={raw}:en", "--options.rules", "none", "--work", str(tmp_path / "work")]
    assert main([*command, "--against", files]) == 0
    report = json.loads((tmp_path / "work/corpus/benchmarks.json").read_text())
    dropped = [gid for found in report["dirty_items"].values() for item in found.values() for gid in item["gids"]]
    long = sum(int(name.partition("-")[2]) % 10 > 0 for name in expected)
    built = json.loads((tmp_path / "work/corpus/report.json").read_text())["totals"]
    assert len(set(dropped)) == report["records"] == built["dropped"]["benchmark"]
    assert 0.8 * long <= report["records"] <= long  # code in one line of text is compared as words
    assert main(["eval", "contamination", files, "--work", str(tmp_path / "work")]) == 0
    found = json.loads((tmp_path / "work/contamination.json").read_text())["tasks"]
    assert [each["dirty"] for each in found.values()] == [0, 0]
    assert "was made for" not in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"title": "x"}\n')
    assert main([*command, "--against", str(tmp_path / "bad.jsonl")]) != 0
    assert "Expected rows with question or prompt" in capsys.readouterr().err


def test_several_processes_and_pieces_find_the_same(planted, monkeypatch):
    workspace, task, _ = planted
    alone = find_contamination(workspace, [task], HERE)["tasks"]
    monkeypatch.setattr(contamination, "PIECE_BYTES", 100_000)
    assert find_contamination(workspace, [task], EngineConfig(workers=2))["tasks"] == alone
    with pytest.raises(BadInputError, match="no items to search for"):
        find_contamination(workspace, [Task("empty", "en", ())])


def test_a_later_pass_adds_to_the_report_until_the_corpus_is_another_one(planted, capsys):
    workspace, task, expected = planted
    find_contamination(workspace, [task], HERE)
    find_contamination(workspace, [Task("other", "en", task.items[:5])], HERE)
    report = read_contamination(workspace)
    assert set(report["tasks"]) == {"exam", "other"}
    found = contaminated_ids(report, task)
    assert found["dirty"] | found["weak"] == expected
    changed = dataclasses.replace(task, items=(dataclasses.replace(task.items[0], question="Why?"), *task.items[1:]))
    assert contaminated_ids(report, changed) is None  # other questions under the same ids
    path = workspace.root / "contamination.json"
    path.write_text(json.dumps(report | {"corpus": "of yesterday"}))
    assert read_contamination(workspace) is None
    assert "was made for another corpus" in capsys.readouterr().err
    path.write_text(json.dumps(report | {"rules": 1}))
    assert read_contamination(workspace) is None
    assert "rules of an earlier version" in capsys.readouterr().err


def test_accuracy_is_split_into_clean_and_dirty_and_weak_hits_stand_apart():
    correct = {"a": True, "b": False, "c": True, "d": True}
    split = split_accuracy(correct, {"dirty": {"a"}, "weak": set()})
    found = {name: (group["items"], group["accuracy"]) for name, group in split.items()}
    assert found == {"all": (4, 0.75), "clean": (3, 2 / 3), "dirty": (1, 1.0)}
    split = split_accuracy(correct, {"dirty": {"a"}, "weak": {"c", "d"}})
    assert (split["clean"], split["weak"]) == ({"items": 1, "accuracy": 0.0}, {"items": 2, "accuracy": 1.0})
    assert "weak 100.0% (2)" in contamination.split_words(split)
    assert split_accuracy({"a": True}, {"dirty": {"a"}, "weak": set()})["clean"] == {"items": 0, "accuracy": None}


STOCK = "Read the following story carefully and then answer the question that is asked about the people in it"


def reading_items(rng):
    """As in C3 (a common question on a dialogue), PIQA (one word, long solutions), a quiz, and questions that begin
    alike."""
    items = []
    for number in range(40):
        choices = tuple(han(rng, 6) for _ in range(4))
        dialogue = "\n".join(f"{who}：{han(rng, 12)}。" for who in ("男", "女", "男", "女"))
        items.append(Item(f"c3-{number}", "女的是什么意思？", choices, 0, choices[0], "zh", context=dialogue))
        choices = (words(rng, 16), words(rng, 16))
        items.append(Item(f"piqa-{number}", "shoes", choices, 0, choices[0]))
        choices = tuple(words(rng, 2) for _ in range(4))
        items.append(Item(f"quiz-{number}", f"Who lit the {rng.choice(WORDS)}?", choices, 1, choices[1]))
        question = f"{STOCK}. Who don't {words(rng, 14)} at the well-known mill?"
        items.append(Item(f"stock-{number}", question, answer="x"))
    return items


def as_printed(item, rng):
    """The item as a page or a data file prints it, with labels or names of fields."""
    labels = rng.choice((("A. ", "B. ", "C. ", "D. "), ("1) ", "2) ", "3) ", "4) "), ('"', '", "', '", "', '", "')))
    options = "\n".join(label + choice for label, choice in zip(labels, item.choices, strict=False))
    return f"{item.context}\nquestion: {item.question}\nchoices: {options}"


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """What is found of 160 items in a corpus with a quarter of them, and with their common phrases everywhere."""
    rng = random.Random(3)
    items = reading_items(rng)
    planted = {item.id: item for item in rng.sample(items, 40)}
    texts = [words(rng, 60) + ". " + han(rng, 40) for _ in range(100)]
    for place in range(0, 100, 2):
        texts[place] += f" {STOCK}. I bought shoes. 「女的是什么意思？」 Who lit the {rng.choice(WORDS)}? Nobody knew."
    for place, item in zip(rng.sample(range(100), 40), planted.values(), strict=True):
        kind = item.id.partition("-")[0]
        text = item.context if kind == "c3" else as_printed(item, rng)
        if kind == "stock":
            text = text.replace("'", "").replace("-", "")  # words that the edit joins
        texts[place] += "\n" + text
    workspace = corpus_of(tmp_path_factory.mktemp("reading"), texts)
    return find_contamination(workspace, [Task("reading", "zh", tuple(items))], HERE)["tasks"]["reading"], planted


def test_an_item_is_dirty_where_what_identifies_it_is_found_and_not_where_a_common_phrase_is(read):
    report, planted = read
    assert set(report["dirty_items"]) == set(planted), "recall and precision are 1"
    where = {name: entry["found"] for name, entry in report["dirty_items"].items()}
    assert all(found == ["passage"] for name, found in where.items() if name.startswith("c3"))
    assert all("options" in found for name, found in where.items() if name.startswith("piqa"))
    assert all(found == ["question"] for name, found in where.items() if name.startswith(("quiz", "stock")))
    weak = report["weak_items"]
    assert {name.partition("-")[0] for name in weak} == {"c3", "piqa", "quiz"}
    assert all(entry["weak"] for entry in weak.values())
    shown = contamination.contamination_lines({"tasks": {"reading": report}})
    assert shown[0].split()[-2:] == ["weak", "hits"]
    assert shown[1].split() == ["reading", "160", "40", "25.0%", f"{len(weak)}"]


def test_what_counts_as_the_same_text():
    for kind, one, other, same in (
        ("words", "The  Cat, sat!", "the cat\nsat", True),
        ("words", "don't well-known", "dont wellknown", True),
        ("characters", "漢字，ＡＢ", "汉字ab", True),
        ("characters", "汉字", "字汉", False),
        ("tokens", "if x_1:\n\treturn y", "if x_1 : return y", True),
        ("tokens", "a_b", "a b", False),
    ):
        first, second = (units_of([text], kind) for text in (one, other))
        hashes = [run_hashes(units, len(units.hashes)).tolist() for units in (first, second)]
        assert (one, hashes[0] == hashes[1]) == (one, same)


def test_a_run_does_not_go_on_from_one_document_into_the_next():
    ((key, hashes),) = contamination.grams_of_items([[Item("1", " ".join(WORDS), answer="x")]]).hashes.items()
    matcher = contamination.Matcher(key, {key: hashes}, hashes)
    whole, first, second = " ".join(WORDS), " ".join(WORDS[:8]), " ".join(WORDS[8:])
    assert not list(matcher.find(units_of([first, second], "words")))
    units = units_of(["nothing", "", whole], "words")
    ((_, found, begins),) = matcher.find(units)
    assert len(found) > 3
    assert set(np.searchsorted(units.bounds, begins, side="right").tolist()) == {3}


def test_a_long_text_is_taken_in_stretches_that_cut_no_run():
    text = "x" * STRETCH_CHARACTERS + " " + " ".join(WORDS) + " " + "y" * STRETCH_CHARACTERS
    for cut in (10, 40, 90):
        pieces = stretches(text[cut:])
        assert len(pieces) > 2
        assert any(" ".join(WORDS) in piece for piece in pieces)
