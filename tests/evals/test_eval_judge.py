"""Accuracy, chance, intervals and what is left out, on models whose every probability we chose."""

import dataclasses
import math
import random
import statistics

import pytest

from zero2all.common.errors import UsageError
from zero2all.evals.items import CODE, CONTINUE, SENTENCE, Item, Task
from zero2all.evals.judge import FormResult, ItemResult, JudgeOptions, _chosen, summary, wilson
from zero2all.evals.judge import judge as judged
from zero2all.evals.scorer import Question, score_questions
from zero2all.infer.engine import Engine


def judge(engine, tasks, forms=None, **more):
    return judged(engine, tasks, JudgeOptions(forms, **more))


@pytest.fixture
def asked_model(bigram, border_tokenizer, logits):
    """After `：` it says 北京 or A: never anything else, if it can help it."""
    colon = border_tokenizer.encode_text("：")[-1]
    for text, logit in (("北京", 9.0), ("A", 8.0)):
        logits[colon, border_tokenizer.encode_text(text)[0]] = logit
    logits[border_tokenizer.encode_text("A")[0], border_tokenizer.end_id] = 9.0
    return Engine(bigram(logits, max_seq_len=256))


CHOICES = [("北京", "上海"), ("上海", "北京"), ("广州", "上海", "北京", "东")]
CAPITALS = tuple(Item(str(n), "首都？", each, each.index("北京"), "北京", "zh") for n, each in enumerate(CHOICES))
ZH = Task("cmmlu", "zh", CAPITALS)


def test_each_form_says_how_many_were_right_beyond_chance(asked_model):
    by_form = {result.form: result for result in judge(asked_model, [ZH], labels="AXYZ")}
    assert list(by_form) == ["cloze", "cloze_pmi", "choice", "bits", "generate"]
    cloze, choice, bits = by_form["cloze"], by_form["choice"], by_form["bits"]
    assert (cloze.accuracy, cloze.items, cloze.skipped, cloze.shots) == (1.0, 3, {}, 0)
    assert (cloze.chance, cloze.centred) == (pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3), 1.0)
    assert cloze.interval == wilson(3, 3)
    # It always says A: the right label of the first item only.
    assert [each.chosen for each in choice.per_item] == [0, 0, 0]
    assert choice.accuracy == pytest.approx(1 / 3)
    assert choice.centred == pytest.approx((1 / 3 - choice.chance) / (1 - choice.chance))
    assert choice.centred_interval[0] < choice.centred < choice.centred_interval[1]
    assert by_form["generate"].per_item[0].written[:1] in ("北", "A")
    # Bits per byte of the right answer are those of the scorer.
    ((scored,),) = score_questions(asked_model, [Question("问题：首都？\n答案：", ("北京",))])
    assert bits.bits_per_byte == pytest.approx(-scored.logprob / math.log(2) / 6)
    assert (bits.accuracy, bits.centred, bits.interval) == (None, None, None)
    assert cloze.bits_per_byte == bits.bits_per_byte


def test_pmi_takes_away_what_is_likely_anyway_and_bits_alone_are_those_of_cloze(bigram, border_tokenizer, logits):
    # 北京 is the likeliest after `：` whatever was asked, so PMI sees no reason for it.
    logits[border_tokenizer.encode_text("：")[-1], border_tokenizer.encode_text("北京")[0]] = 9.0
    engine = Engine(bigram(logits, max_seq_len=256))
    beside = {each.form: each for each in judge(engine, [ZH], ["cloze", "bits"])}
    scores = [score for each in beside["cloze_pmi"].per_item for score in each.scores]
    assert scores == pytest.approx([0.0] * len(scores), abs=1e-4)
    (alone,) = judge(engine, [ZH], ["bits"])
    assert alone.bits_per_byte == pytest.approx(beside["bits"].bits_per_byte)


def test_items_that_cannot_be_asked_are_counted_and_named_and_the_rest_is_judged(asked_model):
    long = dataclasses.replace(CAPITALS[0], id="long", question="首" * 400)
    wide = dataclasses.replace(CAPITALS[0], id="wide", choices=("北京",) * 27)
    opened = Item("open", "首都？", answer="北京", language="zh")
    begun = dataclasses.replace(CAPITALS[0], id="begun", question="首都是", shape=CONTINUE)
    task = Task("mine", "zh", (*CAPITALS, long, wide, opened, begun), skipped={"missing column": 2})
    by_form = {result.form: result for result in judge(asked_model, [task])}
    left_out = {"missing column": 2, "longer than the context": 1}
    assert by_form["cloze"].skipped == {**left_out, "a question without choices": 1}
    assert by_form["bits"].skipped == left_out
    assert by_form["bits"].items == by_form["cloze"].items + 1, "bits needs no choices"
    assert any(line.startswith("mine cloze long: prompt and continuation have") for line in by_form["cloze"].problems)
    assert by_form["choice"].skipped["more choices than labels"] == 1
    assert by_form["generate"].skipped["longer than the context"] == 1
    assert (by_form["cloze"].items, by_form["choice"].items, by_form["generate"].items) == (5, 4, 5)
    assert (by_form["cloze_pmi"].items, by_form["cloze_pmi"].skipped["no unconditional prompt"]) == (4, 1)


def test_a_limit_takes_the_same_items_each_time(asked_model):
    task = Task("t", "zh", tuple(dataclasses.replace(CAPITALS[0], id=str(number)) for number in range(20)))
    results = [judge(asked_model, [task], ["choice"], limit=5, seed=seed)[0] for seed in (0, 0, 1)]
    first, again, other = ([each.id for each in result.per_item] for result in results)
    assert len(first) == 5
    assert first == again != other


def test_last_words_are_right_where_greedy_decoding_writes_them_and_pairs_where_the_good_one_is_likelier(speller):
    engine = Engine(speller("首都", " Rome"))
    items = tuple(Item(word, "首都", answer=word, shape=CONTINUE) for word in ("Rome", "Oslo"))
    (result,) = judge(engine, [Task("lambada", "en", items, forms=("bits",))])
    assert [each.correct for each in result.per_item] == [True, False]
    assert (result.accuracy, result.chance) == (0.5, 0.0)
    pairs = (Item("1", "", ("首都 Rome", "Rome 首都"), 0, "首都 Rome", shape=SENTENCE),)
    (cloze, _) = judge(engine, [Task("blimp", "en", pairs, forms=("cloze", "bits"))])
    assert cloze.accuracy == 1.0


TIES = [((-2.0, -1.0, -1.0), 1, 2), ((-1.0, -2.0, -2.0), 0, 0), ((math.nan, math.nan), 0, 1)]
TIES += [((math.nan, -1.0), 1, 1), ((-math.inf, -math.inf), 1, 0)]


@pytest.mark.parametrize(("scores", "gold", "chosen"), TIES)
def test_a_tie_with_a_wrong_option_gives_no_credit(scores, gold, chosen):
    found = _chosen(Item("1", "?", tuple("abc"[: len(scores)]), gold, "abc"[gold]), scores, None, 1, False)
    assert (found.chosen, found.correct) == (chosen, chosen == gold)


def test_programs_are_run_only_when_asked_for(bigram, border_tokenizer, logits):
    one = border_tokenizer.encode_text("1")[0]
    logits[:, one] = 9.0  # it writes `1` and ends, whatever comes before
    logits[one] = 0.0
    logits[one, border_tokenizer.end_id] = 9.0
    coder = Engine(bigram(logits))
    items = tuple(
        Item(name, "def f(): return ", answer=answer, language="code", shape=CODE, extra={
            "test": f"def check(f):\n    assert f() == {answer}\n", "entry_point": "f"})
        for name, answer in (("right", "1"), ("wrong", "2"))
    )  # fmt: skip
    task = Task("humaneval", "code", items, forms=("bits", "generate"))
    (safe,) = judge(coder, [task], ["generate"])
    assert (safe.items, safe.accuracy, safe.skipped) == (0, None, {"code is run only with --run-code": 2})
    (run,) = judge(coder, [task], ["generate"], run_code=True)
    found = [(each.id, each.correct, each.note) for each in run.per_item]
    assert found == [("right", True, "passed"), ("wrong", False, "failed: AssertionError")]
    with pytest.raises(UsageError, match="The forms are cloze, choice, bits, generate, think"):
        judge(coder, [ZH], ["clozee"])


def test_wilson_interval_against_known_values():
    for right, expected in ((0, (0.0, 0.2775)), (5, (0.2366, 0.7634)), (10, (0.7225, 1.0))):
        assert wilson(right, 10) == pytest.approx(expected, abs=1e-4)


def result(task: str, form: str, accuracy: float | None, chance: float = 0.25, rights=()) -> FormResult:
    rights = rights or [number < 100 * (accuracy or 0) for number in range(100)]
    items = [ItemResult(str(number), right, chance=chance) for number, right in enumerate(rights)]
    return FormResult(task, "en", form, 0, 10, {}, (), chance, accuracy, None, None, 0, items)


def test_the_summary_takes_the_best_form_of_each_task_that_belongs_to_it():
    forms = [("cmmlu", "cloze", 0.40), ("cmmlu", "choice", 0.25), ("cmmlu", "bits", None), ("ceval", "cloze", 0.10)]
    forms += [("piqa", "cloze", 0.75, 0.5), ("my-own", "cloze", 1.0)]
    found = summary([result(*each) for each in forms])
    assert (found["zh"]["score"], found["zh"]["forms"]) == (pytest.approx(0.0), {"cmmlu": "cloze", "ceval": "cloze"})
    assert (found["en"]["score"], found["en"]["forms"]) == (pytest.approx(0.5), {"piqa": "cloze"})


def test_a_guesser_gains_nothing_by_the_choice_of_the_form_and_a_better_one_is_taken():
    rng, options = random.Random(0), 4
    scores = []
    for _ in range(40):
        rights = [[rng.randrange(options) == 0 for _ in range(100)] for _ in range(3)]
        forms = zip(("cloze", "cloze_pmi", "choice"), rights, strict=True)
        results = [result("piqa", form, sum(each) / 100, 1 / options, each) for form, each in forms]
        scores.append(summary(results)["en"]["score"])
    assert abs(statistics.fmean(scores)) < 3 * statistics.stdev(scores) / 40**0.5 < 0.06
    found = summary([result("piqa", "cloze", 0.5, 0.5), result("piqa", "choice", 0.9, 0.5)])["en"]
    assert (found["score"], found["forms"]) == (pytest.approx(0.8), {"piqa": "choice"})
    one = [result("piqa", form, 1.0, 0.5, [True]) for form in ("cloze", "choice")]  # few items are enough
    assert summary(one)["en"]["forms"] == {"piqa": "cloze"}
    wide = [dataclasses.replace(result(name, "cloze", 0.7), interval=(0.6, 0.8)) for name in ("piqa", "hellaswag")]
    assert summary(wide)["en"]["interval"] == pytest.approx((0.6 - 0.1 / 0.75 / 2**0.5, 0.6 + 0.1 / 0.75 / 2**0.5))


def test_who_writes_no_answer_is_not_measured_against_guessing_one(asked_model):
    cities = [dataclasses.replace(item, choices=("天津", "重庆"), gold=0) for item in CAPITALS]
    (written,) = judge(asked_model, [Task("cmmlu", "zh", tuple(cities))], ["generate"], labels="WXYZ")
    assert (written.accuracy, written.chance, written.centred, written.no_answer) == (0.0, 0.0, 0.0, 3)
    (named,) = judge(asked_model, [ZH], ["generate"], labels="WXYZ")  # by the text of an option
    assert (named.accuracy, named.chance, named.no_answer) == (1.0, pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3), 0)


def test_of_several_samples_the_answer_given_most_often_counts(bigram, border_tokenizer, logits):
    colon = border_tokenizer.encode_text("：")[-1]
    logits[colon] = -20.0
    for text, share in (("北京", 0.7), ("A", 0.3)):  # the second option, and the label of the first
        (token,) = border_tokenizer.encode_text(text)
        logits[colon, token], logits[token, border_tokenizer.end_id] = math.log(share), 20.0
    engine = Engine(bigram(logits, max_seq_len=256))
    items = tuple(dataclasses.replace(CAPITALS[1], id=str(number)) for number in range(40))
    task = Task("cmmlu", "zh", items)
    (one,) = judge(engine, [task], ["generate"], samples=2, temperature=1.0)
    (many,) = judge(engine, [task], ["generate"], samples=15, temperature=1.0)
    assert (one.form, many.form) == ("generate@2", "generate@15")
    assert 0.9 < many.accuracy > one.accuracy, "0.95 by the binomial; 0.7 where the first of two that differ counts"
    assert [each.answers for each in many.per_item] != [many.per_item[0].answers] * 40, "each item has its own draws"
    assert many == judge(engine, [task], ["generate"], samples=15, temperature=1.0)[0]


def test_several_right_options_are_asked_one_by_one_or_named_together(asked_model):
    item = dataclasses.replace(CAPITALS[2], extra={"golds": (0, 2)})
    by_form = {each.form: each for each in judge(asked_model, [Task("mine", "zh", (item,))])}
    assert by_form["cloze"].skipped == by_form["bits"].skipped == {"several options may be right": 1}
    choice, generate = by_form["choice"], by_form["generate"]
    assert choice.chance == 1 / 16
    assert len(choice.per_item[0].scores) == 4
    assert (generate.per_item[0].answers, generate.accuracy, generate.credit) == (("2",), 0.0, 0.75)
    assert generate.chance == 1 / 15


def test_thinking_is_asked_for_by_name_and_has_its_own_room(asked_model):
    assert "think" not in {each.form for each in judge(asked_model, [ZH])}
    (short,) = judge(asked_model, [ZH], ["think"], shots=0, think_tokens=3)
    assert (short.form, short.no_answer, short.accuracy) == ("think", 3, 0.0)
    assert all(len(each.written) <= 6 for each in short.per_item)


def test_the_best_form_is_chosen_on_the_split_of_the_examples(asked_model):
    task = dataclasses.replace(ZH, shots=CAPITALS[:2])
    (best,) = judge(asked_model, [task], ["best"], shots=0, labels="AXYZ")
    assert (best.form, best.items, best.chosen_on) == ("cloze", 3, 2)
    assert judge(asked_model, [ZH], ["best"]) == [], "no other split"
    with pytest.raises(UsageError, match="best alone"):
        judge(asked_model, [ZH], ["best", "cloze"])
