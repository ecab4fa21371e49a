"""Rewrites: what each makes of an item, what it refuses, and how original and rewritten items are compared."""

import json
import random
import shutil
from dataclasses import replace

import pytest

from zero2all.cli import main
from zero2all.cli.evaluate import named_tasks
from zero2all.common.errors import UsageError
from zero2all.evals.items import BLANK, CONTINUE, FORMS, QUESTION, SENTENCE, Item, Task, check_item
from zero2all.evals.judge import JudgeOptions
from zero2all.evals.rewrites import measure
from zero2all.evals.rewrites.base import lineage_of, order_of, rewritten
from zero2all.evals.rewrites.list import REWRITES, ShotRewrite, chosen_rewrites
from zero2all.evals.rewrites.measure import ModelAnswer, Said, gap_of, measure_rewrites, rewrite_lines
from zero2all.evals.rewrites.options import HARDEST
from zero2all.evals.rewrites.wording import chinese_numeral, english_numeral
from zero2all.infer.engine import Engine
from zero2all.quickstart.pipeline import WORLD_SEED
from zero2all.quickstart.world.generator import documents

WATER = Item("water", "水的化学式是什么？", ("CO2", "H2O", "O2", "H2O2"), 1, "H2O", "zh", "chemistry")
CAPITAL = Item("capital", "What is the capital of France?", ("Rome", "Oslo", "Paris", "Lima"), 2, "Paris")
PASSAGE = replace(CAPITAL, id="passage", context="France is a country.")
GOES_ON = replace(CAPITAL, id="goes on", question="The capital of France is", shape=CONTINUE)
PENS = Item("pens", "3 pens cost 4 yuan each. How many yuan do they cost?", answer="12")


def made(name, item, seed=0):
    return rewritten(item, chosen_rewrites([name])[name], seed)


def only(name, item, seed=0):
    (found,) = made(name, item, seed)
    return found


def test_labels_are_others_and_the_right_one_stays_right():
    labels_of = {"han": "一二三四", "stems": "甲乙丙丁", "circled": "①②③④", "digits": "1234", "letters": "JKLM"}
    for name, labels in labels_of.items():
        item = only(f"R1.{name}", WATER)
        assert (item.choices, item.answer) == (tuple(labels), labels[1])
        assert f"{labels[1]}．H2O" in item.question
        assert order_of(item) == (0, 1, 2, 3)
    item = only("R1.bullets", CAPITAL)
    assert item.question == "What is the capital of France?\n- Rome\n- Oslo\n- Paris\n- Lima"
    assert item.choices == CAPITAL.choices, "with a dash for a label the text is the answer"


def test_rotations_hold_every_option_in_every_place_once():
    items = made("R2", CAPITAL)
    assert [item.gold for item in items] == [2, 1, 0, 3]
    assert all(item.choices[item.gold] == item.answer == "Paris" for item in items)
    assert all(CAPITAL.choices[order_of(item)[place]] == item.choices[place] for item in items for place in range(4))


def test_none_of_the_others_replaces_the_right_option_or_a_wrong_one_where_that_fits():
    gold, other = only("R3", WATER), only("R4", WATER)
    assert gold.choices == ("CO2", gold.answer, "O2", "H2O2")
    assert (gold.answer, order_of(gold)) == ("其他选项均不正确", (0, -1, 2, 3))
    assert (other.answer, other.choices.count("其他选项均不正确")) == ("H2O", 1)
    for question in ("下列最大的是？", "Which is NOT a city?", "Which is the best answer?"):
        assert [made(name, replace(CAPITAL, question=question)) for name in ("R3", "R4")] == [[], []]
    item = replace(CAPITAL, choices=("Rome", "Oslo", "Paris", "None of the above"))
    assert [made(name, item) for name in ("R2", "R3", "R4")] == [[], [], []]


def test_of_several_right_options_one_is_left_and_of_one_right_option_the_question_is_turned():
    item = only("R5", replace(CAPITAL, extra={"golds": (0, 2)}))
    assert sorted(item.choices) in (["Lima", "Oslo", "Paris"], ["Lima", "Oslo", "Rome"])
    assert item.answer in ("Paris", "Rome")
    sets = only("R5.sets", replace(CAPITAL, extra={"golds": (0, 2)}))
    assert (sets.answer, sets.golds, len(set(sets.choices))) == ("Rome; Paris", (), 4)
    assert made("R5.sets", CAPITAL) == []
    moved = made("R2", replace(CAPITAL, extra={"golds": (0, 2)}))
    assert all({item.choices[place] for place in item.golds} == {"Rome", "Paris"} for item in moved)
    turned = only("R5", CAPITAL)
    assert turned.question.startswith("Which of these is not a right answer?")
    assert {*turned.choices} == {turned.answer, "Paris"} != {"Paris"}
    hardest = only("R6", replace(CAPITAL, extra={HARDEST: 0}))
    assert (sorted(hardest.choices), hardest.answer) == (["Paris", "Rome"], "Paris")


def test_wording_becomes_a_short_answer_a_proposal_or_a_statement():
    item = only("R8", WATER)
    assert (item.choices, item.gold, item.answer) == ((), None, "H2O")
    item = only("R9", CAPITAL)
    assert item.question == "What is the capital of France? The answer is _. True or false? True"
    assert (item.shape, item.choices) == (BLANK, CAPITAL.choices)
    assert made("R9", replace(CAPITAL, question="Fill in: ___")) == []
    item = only("R10", PASSAGE)
    assert item.choices[2] == "France is a country.\nWhat is the capital of France? The answer is Paris."
    assert item.shape == SENTENCE
    assert only("R10", GOES_ON).choices[0] == "The capital of France is Rome"


def written(name, item):
    return rewritten(item, chosen_rewrites([name])[name], 0, "generate")


def test_for_written_answers_labels_stand_in_the_question_and_each_option_is_proposed():
    (item,) = written("R1.stems", WATER)
    assert item.question.endswith("丙．O2\n丁．H2O2")
    assert (item.choices, item.extra["labels"]) == (WATER.choices, "甲乙丙丁")
    assert written("R1.bullets", WATER)[0].extra["labels"] == ""
    asked = written("R9", CAPITAL)
    assert [(each.answer, each.gold) for each in asked] == [("False", 1), ("False", 1), ("True", 0), ("False", 1)]
    assert asked[2].question == "What is the capital of France?\nProposed answer: Paris. True or false?"
    both = written("R9", replace(CAPITAL, extra={"golds": (0, 2)}))
    assert [each.answer for each in both] == ["True", "False", "True", "False"]


def test_an_irrelevant_sentence_comes_first_and_another_language_needs_a_translation():
    assert only("R13", WATER).question.endswith("。水的化学式是什么？")
    assert only("R13", CAPITAL).question.endswith(". What is the capital of France?")
    assert made("R15", WATER) == []
    item = only("R15", replace(WATER, extra={"translation": "What is the formula of water?"}))
    assert (item.question, item.language, item.choices) == ("What is the formula of water?", "en", WATER.choices)


def test_every_option_stands_in_the_context_as_the_answer():
    first, *told = only("R16", PASSAGE).context.split("\n")
    assert first == PASSAGE.context
    assert sorted(told) == sorted(f"{CAPITAL.question} The answer is {choice}." for choice in CAPITAL.choices)
    assert only("R16", GOES_ON).question.count("The capital of France is") == 5


def test_surface_changes_keep_the_words():
    assert only("R11.width", WATER).choices[1] == "Ｈ２Ｏ"
    assert only("R11.traditional", WATER).question == "水的化學式是什麼？".replace("麼", "么")
    assert only("R11.options_first", CAPITAL).question.startswith("A. Rome\n")
    assert made("R11.wording", CAPITAL)[0].question == "Q: What is the capital of France?\nA:"
    assert only("R11.numerals", PENS).question.startswith("three pens cost four yuan")
    assert [made(name, CAPITAL) for name in ("R11.width", "R11.traditional", "R11.numerals")] == [[], [], []]
    assert [chinese_numeral(number) for number in (0, 10, 12, 99)] == ["零", "十", "十二", "九十九"]
    assert [english_numeral(number) for number in (13, 20, 42)] == ["thirteen", "twenty", "forty-two"]
    assert made("R11.numerals", replace(PENS, question="In 1999 it was 3.5 m, 100 %, 7th.")) == []


def test_other_numbers_give_another_answer():
    item = only("R12", PENS)
    pens, yuan = (int(word) for word in item.question.split() if word.isdigit())
    assert (pens, yuan) != (3, 4)
    assert int(item.answer) == pens * yuan
    solution = "She sold 48/2 = 24 clips in May. Together 48+24 = 72 clips. The answer is 72."
    clips = Item("clips", "She sold 48 clips, then half as many.", answer=solution, extra={"number": "72"})
    item = only("R12", clips)
    given = int(item.question.split()[2])
    assert given != 48
    assert item.extra["number"] == str(given + given // 2), "by the equations of the written solution"
    unknown = {"2 and 2?": "4", "3 pens, 4 yuan, 5 days": "12", "Who?": "Paris", "3 of 4": "99", "7 or 0": "7"}
    for question, answer in unknown.items():
        assert made("R12", replace(PENS, question=question, answer=answer)) == []


EVERY_CHAIN = [name for name, rewrite in REWRITES.items() if not isinstance(rewrite, ShotRewrite)]


@pytest.mark.parametrize("name", EVERY_CHAIN)
def test_every_rewrite_makes_items_that_can_be_asked_with_their_lineage_and_the_same_for_the_same_seed(name):
    full = {"translation": "?", "paraphrases": ("a?", "b?")}
    items = [replace(item, extra=full) for item in (WATER, CAPITAL, PASSAGE, GOES_ON, PENS)]
    items.append(replace(CAPITAL, id="several", extra={**full, "golds": (0, 2)}))
    found, again = ([each for item in items for each in made(name, item, seed=3)] for _ in range(2))
    assert found == again != []
    for item in found:
        check_item(item)
        lineage = lineage_of(item)
        assert (lineage["rewrites"], lineage["seed"]) == ([name], 3)
        assert lineage["origin"] in {each.id for each in items}
    assert len({item.id for item in found}) == len(found)


def test_rewrites_follow_one_another_and_other_shapes_do_not_fit():
    items = made("R13+R2", CAPITAL)
    assert (len(items), lineage_of(items[3])["rewrites"]) == (4, ["R13", "R2"])
    assert all(item.question != CAPITAL.question and item.choices[item.gold] == "Paris" for item in items)
    assert made("R3+R2", CAPITAL) != []
    assert made("R10+R2", CAPITAL) == []  # whole sentences have no options to turn
    sentence = Item("s", "", ("He goes.", "He go."), 0, "He goes.", shape=SENTENCE)
    assert all(made(name, sentence) == [] for name in EVERY_CHAIN if name not in ("R12", "R11.numerals"))


def test_names():
    assert list(chosen_rewrites(["R18", "R2"])) == ["R18.one", "R18.all", "R2"]
    assert "R10" not in chosen_rewrites(["R1"])
    assert len(chosen_rewrites(["all"])) == len(REWRITES)
    assert {name.partition(".")[0] for name in REWRITES} == {f"R{n}" for n in (*range(1, 17), 18)}
    with pytest.raises(UsageError, match="no rewrite 'R99'"):
        chosen_rewrites(["R99"])
    with pytest.raises(UsageError, match="cannot be joined"):
        chosen_rewrites(["R2+R14.0"])


def test_examples_can_be_wrong_or_balanced():
    task = Task("t", "en", (WATER,), tuple(replace(CAPITAL, id=str(number)) for number in range(8)))
    wrong = REWRITES["R14.wrong"].task(task, 0).shots
    assert all(shot.gold != 2 and shot.answer == shot.choices[shot.gold] for shot in wrong)
    balanced = REWRITES["R14.balanced"].task(task, 0).shots
    assert [shot.gold for shot in balanced] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert all(shot.answer == "Paris" for shot in balanced)


def answer(right):
    return ModelAnswer((Said(0, 0, None, right),), None, None)


def test_the_gap_is_paired():
    pairs = [(True, False)] * 30 + [(True, True)] * 50 + [(False, False)] * 20
    found = gap_of([answer(one) for one, _ in pairs], [answer(other) for _, other in pairs], True)
    assert (found["original"], found["rewritten"], found["expected"]) == (0.8, 0.5, pytest.approx(0.8))
    assert found["gap"] == pytest.approx(0.3)
    low, high = found["gap_interval"]
    assert 0.19 < low < 0.3 < high < 0.4
    assert found["p"] < 1e-6
    assert found["all_right"] is None
    even = gap_of([answer(True), answer(False)] * 10, [answer(False), answer(True)] * 10, True)
    assert even["p"] == 1.0
    assert even["gap_interval"][0] < 0 < even["gap_interval"][1]
    assert gap_of([], [], True)["gap"] is None


def rotated(rng, items, options, known, liking, golds, remembered=0.0):
    """Answers to items and to the other rotations of their options. The model knows some, remembers of some only the
    label, and guesses the others by its own liking."""
    before, after = [], []
    for _ in range(items):
        gold = rng.choices(range(options), golds)[0]
        is_known, is_remembered = rng.random() < known, rng.random() < remembered
        said = []
        for place in ((gold + turn) % options for turn in range(options)):
            chosen = place if is_known else gold if is_remembered else rng.choices(range(options), liking)[0]
            said.append(Said(options, place, chosen, chosen == place))
        before.append(ModelAnswer((said[0],), None, None))
        after.append(ModelAnswer(tuple(said[1:]), all(each.correct for each in said), None))
    return before, after


def share_with_a_gap(draws, **model):
    rng = random.Random(0)
    return sum(gap_of(*rotated(rng, **model), True)["gap_interval"][0] > 0 for _ in range(draws)) / draws


GUESSERS = [(0.0, (1, 0, 0, 0), (7, 1, 1, 1)), (0.4, (6, 1, 2, 1), (5, 2, 2, 1)), (0.0, (1, 0), (1, 1))]


@pytest.mark.parametrize(("known", "liking", "golds"), GUESSERS, ids=str)
def test_a_guesser_shows_no_memorisation_whatever_labels_it_likes(known, liking, golds):
    model = {"items": 100, "options": len(liking), "known": known, "liking": liking, "golds": golds}
    assert share_with_a_gap(40, **model) <= 0.05


def test_a_model_that_remembers_labels_shows_it():
    model = {"items": 100, "options": 4, "known": 0.2, "liking": (3, 1, 1, 1), "golds": (1, 1, 1, 1)}
    assert share_with_a_gap(20, remembered=0.4, **model) >= 0.95
    found = gap_of(*rotated(random.Random(1), remembered=1.0, **(model | {"known": 0.0})), True)
    assert (found["original"], found["rewritten"], found["gap"], found["all_right"]) == (1.0, 0.0, 1.0, 0.0)


def test_rewrites_are_asked_of_a_model_and_compared(trained):
    cities = ("北京", "巴黎", "东京")
    asked = [(f"{country}的首都是", gold) for gold, country in enumerate(("中国", "法国", "日本"))]
    items = tuple(Item(text, text, cities, gold, cities[gold], "zh", shape=CONTINUE) for text, gold in asked)
    plain = tuple(replace(item, shape=QUESTION) for item in items)
    task = Task("capitals", "zh", items, forms=("cloze", "choice"))
    chains = chosen_rewrites(["R2", "R6", "R10", "R13", "R18", "R14.5", "R8"])
    found = measure_rewrites(Engine(trained), [task], chains)["capitals"]
    rows = {(row["rewrite"], row["form"]): row for row in found["rows"]}
    assert rows["R2", "choice"]["items"] == 3
    assert rows["R2", "choice"]["all_right"] <= rows["R2", "choice"]["original"] + 1e-9
    assert rows["R6", "cloze"]["rewritten"] >= rows["R6", "cloze"]["original"]  # the model's own best wrong option
    low, high = rows["R10", "cloze"]["gap_interval"]
    assert low <= rows["R10", "cloze"]["gap"] <= high
    assert rows["R18.one", "cloze"]["skipped"] == {"the rewrite does not fit": 3}
    assert rows["R14.5", "cloze"]["skipped"] == {"too few examples": 3}
    assert rows["R8", "generate"]["items"] == 0
    only_cloze = measure_rewrites(Engine(trained), [task], chosen_rewrites(["R1.digits"]), JudgeOptions(["cloze"], 0))
    assert "    none of these rewrites is compared in the forms of --forms" in rewrite_lines({"tasks": only_cloze})
    chains = chosen_rewrites(["R1.digits", "R2", "R7", "R8", "R9"])
    said = measure_rewrites(
        Engine(trained), [replace(task, items=plain, forms=FORMS)], chains, JudgeOptions(["generate"], 0)
    )
    forms = {row["rewrite"]: (row["baseline"], row["form"], row["items"]) for row in said["capitals"]["rows"]}
    assert forms == dict.fromkeys(("R1.digits", "R2", "R8", "R9"), ("generate", "generate", 3)), "R7 is not written"
    assert found["spread"]["cloze"][0] <= rows["R10", "cloze"]["gap"] <= found["spread"]["cloze"][1]
    assert set(found["consistency"]) == {"cloze", "choice"}
    section = {"tasks": {"capitals": found}}
    assert measure.rewrite_figures(section)["eval/rewrites/gap/capitals/R2/choice"] == rows["R2", "choice"]["gap"]
    lines = rewrite_lines(section)
    assert any("R13" in line and "%" in line for line in lines)
    assert any("all items left out (too few examples): R14.5" in line for line in lines)
    gaps = [("cloze", -0.7), ("choice", 0.1), ("choice", 0.3), ("generate", None)]
    spread = measure.gap_spread([{"baseline": "choice", "form": form, "gap": gap} for form, gap in gaps])
    assert spread == {"choice": (0.1, 0.3)}, "only within the same forms"


@pytest.fixture
def capitals(trained_workspace, tmp_path):
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    path = tmp_path / "data/capitals/test.jsonl"
    path.parent.mkdir(parents=True)
    asked = {"中国的首都是": 0, "法国的首都是": 1, "月球上的首都叫什么名字呢": 1}
    common = {"choices": ["北京", "巴黎"]}
    rows = [{"id": text, "question": text, "answer": answer, **common} for text, answer in asked.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "work", tmp_path / "data"


def test_a_run_is_asked_rewritten_benchmarks_and_told_what_was_in_its_training_text(capitals, capsys):
    work, data = capitals
    common = ["--work", str(work), "--data", str(data)]
    for words, problem in (
        (["--rewrites", "R2"], "--rewrites needs benchmarks. Name them with --tasks."),
        (["--tasks", "capitals", "--rewrites", "R77"], "no rewrite 'R77'"),
        (["--tasks", "capitals", "--rewrites", "R17"], "z2a eval once"),
    ):
        assert main(["eval", "tiny", *common, *words]) == 2
        assert problem in capsys.readouterr().err
    assert main(["eval", "contamination", "capitals", *common]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["capitals", "3", "0", "0.0%", "2"]
    words = ["--tasks", "capitals", "--rewrites", "R2,R13+R2", "--forms", "choice", "--held-out", "none"]
    assert main(["eval", "tiny", *common, *words, "--probes", "none", "--pairs", "none"]) == 0
    shown = capsys.readouterr().out
    assert "in the training text: all " in shown
    assert "R13+R2" in shown
    report = json.loads((work / "runs/tiny/eval/step-00000030.json").read_bytes())
    assert [row["rewrite"] for row in report["rewrites"]["tasks"]["capitals"]["rows"]] == ["R2", "R13+R2"]
    split = report["tasks"]["results"][0]["contamination"]
    assert {name: group["items"] for name, group in split.items()} == {"all": 3, "clean": 1, "dirty": 0, "weak": 2}


def test_the_quiz_of_the_small_world_needs_no_files(tmp_path):
    tasks = {task.name: task for task in named_tasks(["quickstart-facts"], tmp_path / "nowhere")}
    assert set(tasks) == {f"quickstart-{kind}-{each}" for kind in ("facts", "unread-facts") for each in ("en", "zh")}
    for language in ("en", "zh"):
        text = "\n".join(document.text for document in documents(language, 3_300_000, WORLD_SEED))  # as trained on
        for item in tasks[f"quickstart-facts-{language}"].items:
            check_item(item)
            assert any(item.question + joiner + item.answer in text for joiner in ("", " ", "\n"))
            for other in item.extra["paraphrases"]:
                assert not any(other + joiner + item.answer in text for joiner in ("", " ", "\n"))
        for item in tasks[f"quickstart-unread-facts-{language}"].items:
            check_item(item)
            assert item.id.partition("/")[2] not in text
