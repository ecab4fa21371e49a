"""How items read in each form."""

import dataclasses

import pytest

from zero2all.evals import forms
from zero2all.evals.items import BLANK, CODE, CONTINUE, SENTENCE, Item, Task
from zero2all.evals.scorer import Question

SKY = Item("1", "Sky?", ("red", "blue"), 1, "blue")
SEA = Item("2", "Sea?", ("green", "grey"), 0, "green")
CHINESE = Item("3", "首都是？", ("北京", "上海", "广州"), 0, "北京", "zh", context="很久以前。")


def test_cloze_scores_the_text_of_each_choice():
    asked = forms.cloze(SKY, [SEA])
    prompt = "Question: Sea?\nAnswer: green\n\nQuestion: Sky?\nAnswer:"
    assert asked.questions == (Question(prompt, (" red", " blue")),)
    assert asked.unconditional == Question("Answer:", (" red", " blue"))


def test_chinese_items_are_asked_in_chinese():
    question = Question("很久以前。\n问题：首都是？\n答案：", ("北京", "上海", "广州"))
    assert forms.cloze(CHINESE, []).questions[0] == question
    (asked,) = forms.choice(CHINESE, [CHINESE], "甲乙丙丁").questions
    shown = "很久以前。\n问题：首都是？\n甲．北京\n乙．上海\n丙．广州\n答案："
    assert asked == Question(f"{shown}甲\n\n{shown}", ("甲", "乙", "丙"))


def test_choice_scores_labels_after_one_prompt():
    (asked,) = forms.choice(SKY, [SEA]).questions
    prompt = "Question: Sea?\nA. green\nB. grey\nAnswer: A\n\nQuestion: Sky?\nA. red\nB. blue\nAnswer:"
    assert asked == Question(prompt, (" A", " B"))


def test_texts_to_be_continued_blanks_sentences_and_code():
    swag = Item("1", "A man paints. He", ("eats.", "stops."), 1, "stops.", shape=CONTINUE)
    (continued,) = forms.cloze(swag, [swag]).questions
    assert continued == Question("A man paints. He stops.\n\nA man paints. He", (" eats.", " stops."))
    blank = Item("1", "It fell because _ was wet.", ("it", "she"), 0, "it", shape=BLANK)
    it, she = (Question(f"It fell because {word}", (" was wet.",)) for word in ("it", "she"))
    assert (forms.cloze(blank, []).questions, forms.gold(blank, []).questions) == ((it, she), (it,))
    pair = Item("1", "", ("Dogs bark.", "Dogs barks."), 0, "Dogs bark.", shape=SENTENCE)
    assert forms.cloze(pair, []).questions == (Question("", pair.choices),)
    assert forms.gold(pair, []).questions == (Question("", ("Dogs bark.",)),)
    code = Item("1", "def f():\n", answer="    return 1\n", language="code", shape=CODE)
    assert forms.gold(code, []).questions == (Question("def f():\n", ("    return 1\n",)),)
    assert forms.generate(code, []).prompt == "def f():\n"


def asked(**extra):
    return Item("", "q", answer="x", extra=extra)


@pytest.mark.parametrize(
    ("item", "written", "right"),
    [
        (SKY, " B", True),
        (SKY, " An answer: B.", True),
        (SKY, " A or B", False),
        (CHINESE, "A．北京", True),
        (asked(number="1012"), "3*4 is 12. The answer is 1,012. Or 7", True),
        (asked(number="12"), "it costs $3 and then $12.00", True),
        (asked(number="12"), "no idea", False),
        (asked(aliases=["李白", "诗人李白"]), "诗人李白。\n问", True),
        (Item("", "q", answer="The Cat"), " cat!", True),
        (Item("", "q", answer="cat"), " cats", False),
    ],
)
def test_answers_are_found_in_what_was_written(item, written, right):
    assert forms.is_right(item, written) is right


def test_examples_are_of_the_same_subject_the_same_each_time_and_never_the_item_itself():
    shots = tuple(Item(f"s{n}", f"q{n}", ("a", "b"), 0, "a", subject=f"{n % 2}") for n in range(10))
    item = Item("x", "q4", ("a", "b"), 0, "a", subject="0")  # the question of the fifth example
    task = Task("t", "en", (item,), shots)
    picked = forms.Shots(task, 4).of(item)
    assert picked == forms.Shots(task, 4).of(item)
    assert {shot.question for shot in picked} == {"q0", "q2", "q6", "q8"}
    assert forms.Shots(task, 4, seed=1).of(item) != picked or forms.Shots(task, 4, seed=2).of(item) != picked
    assert len(forms.Shots(task, 20).of(dataclasses.replace(item, subject="unknown"))) == 9
    assert forms.Shots(task, 0).of(item) == ()
    turned = dataclasses.replace(item, question=" Q4", choices=("b", "c", "a"), gold=2)
    assert {shot.question for shot in forms.Shots(task, 4).of(turned)} == {"q0", "q2", "q6", "q8"}
