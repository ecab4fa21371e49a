"""How items read in each form."""

import dataclasses

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


def test_generated_answers_come_after_examples_that_answer_alike():
    written = forms.generate(SKY, [SEA])
    assert written.prompt == "Question: Sea?\nA. green\nB. grey\nAnswer: A\n\nQuestion: Sky?\nA. red\nB. blue\nAnswer:"
    listed = dataclasses.replace(SEA, question="Sea?\n① green\n② grey", extra={"labels": "①②"})
    assert (
        forms.generate(listed, [listed]).prompt
        == f"Question: {listed.question}\nAnswer: ①\n\nQuestion: {listed.question}\nAnswer:"
    )
    both = dataclasses.replace(SEA, extra={"golds": (0, 1)})
    assert forms.generate(both, [both]).asked[0][1] == " AB"


def test_thinking_is_shown_by_examples_that_end_with_the_marker():
    known = dataclasses.replace(SEA, extra={"reasoning": "Algae are green."})
    written = forms.think(SKY, forms.thought_examples(SKY, [SEA, known], 2), most=99)
    assert written.prompt == (
        "Question: Sea?\nA. green\nB. grey\nAnswer: Let us think step by step. Algae are green. So the answer is A.\n\n"
        "Question: Sky?\nA. red\nB. blue\nAnswer: Let us think step by step."
    )
    assert written.max_new_tokens == 99
    ours = forms.think(CHINESE, forms.thought_examples(CHINESE, [], 2)).prompt
    assert ours.count("所以答案是") == 2
    assert ours.endswith("答案：先想一想。")
    several = dataclasses.replace(SKY, extra={"golds": (0, 1)})
    assert forms.thought_examples(several, [], 1)[0].golds, "an example with several answers comes first"
    assert not any(each.choices for each in forms.thought_examples(Item("", "2 + 2", answer="4"), [], 2))
    assert forms.thought_examples(SKY, [known], 0) == []


def test_a_conversation_has_the_examples_as_turns():
    known = dataclasses.replace(SEA, extra={"reasoning": "Algae are green."})
    turns = forms.conversation(forms.think(SKY, [known]))
    assert [each.role for each in turns] == ["user", "assistant", "user"]
    assert turns[2].text == "Question: Sky?\nA. red\nB. blue\nThink first, then end with: So the answer is ..."
    assert forms.conversation(forms.generate(CHINESE, []))[0].text.endswith("广州\n只写答案。")


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
