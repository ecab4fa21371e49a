"""What a written answer says, and whether that is right."""

from dataclasses import replace

import pytest

from zero2all.evals.answers import credit, majority, read_answer, right_answers
from zero2all.evals.items import Item

CITY = Item("1", "The capital of France?", ("Berlin", "Paris", "Rome", "Paris, Texas"), 1, "Paris")
HAN = Item("2", "首都？", ("北京", "上海"), 0, "北京", "zh")
STEMS = replace(HAN, extra={"labels": "甲乙"})
EVEN = Item("3", "Which are even?", ("2", "3", "4", "5"), 0, "2", extra={"golds": (0, 2)})
NUMBER = Item("4", "How many?", answer="12 pens", extra={"number": "1012"})
POET = Item("5", "谁？", answer="李白", language="zh", extra={"aliases": ["诗人李白"]})


@pytest.mark.parametrize(
    ("item", "written", "answer"),
    [
        *((CITY, text, "1") for text in (" B", "(B)", "**B**", " B. Paris", "The answer is B.", "选B", "So what? B")),
        *((CITY, text, "1") for text in ("paris", "Paris is big", "The answer is a city: Paris")),
        *((CITY, text, "1") for text in ("A dog. B", "I think it is B")),
        (replace(CITY, choices=("10", "16"), gold=0), "13. 13 - 3 = 10.", None),
        (Item("", "5 + 5", answer="10"), " 10. 12 minus 1 is 11.", "10"),
        (CITY, "The answer is neither A nor C.", None),
        (HAN, "答案不是A", None),
        (replace(NUMBER, extra={"number": "-5"}), "答案是－5", "-5.0"),
        (CITY, "Paris, Texas", "3"),
        (CITY, "Germany.\nQ: And the capital of Italy? A: Rome.", None),
        (CITY, "I think so.\nThe correct reply is Paris.", "1"),
        (CITY, "The correct option is (C) Rome, not Paris", "2"),
        *((CITY, text, None) for text in ("", "An answer", "It is Paris, not Rome", "Bonn", "E")),
        *((HAN, text, "0") for text in ("A", "答案是A", "答案：A。", "A．北京", "我想是北京", "北京。")),
        *((STEMS, *each) for each in (("乙", "1"), ("甲骨文", None), ("答案是甲", "0"), ("乙．上海", "1"))),
        *((CITY, text, "1") for text in ("b", " (b)", "b. Paris", "Ｂ", "Option C is wrong; the answer is B.")),
        *((CITY, text, "1") for text in ("A is wrong. B is right.", "Berlin? No, the answer is Paris.")),
        *((CITY, text, None) for text in ("A or B", "A and C", "The answer is A or B", "I'd say E")),
        *((HAN, text, "1") for text in ("选项A错误，选项B正确。", "A不对，故选B。", "不是A，而是B。", "答案应为Ｂ")),
        (replace(HAN, extra={"labels": ""}), "A", None),
        *((EVEN, text, "0,2") for text in ("AC", "A, C", "C and A", "A、C。", "The answer is A and C.", "2 and 4")),
        *((EVEN, text, "0,2") for text in ("(A) and (C)", "**A**, **C**", "A. 2\nC. 4", "ac", "\\boxed{AC}")),
        *((EVEN, text, "0,2") for text in ('["A", "C"]', "A项和C项", "B和D不对，所以选AC。", "ＡＣ")),
        (replace(EVEN, extra={"golds": (0, 2), "labels": "1234"}), "13. 12 minus 13 is 1", "0"),
        (EVEN, "none", None),
        (NUMBER, "3*4 is 12. The answer is 1,012. Or 7", "1012.0"),
        (NUMBER, "it costs $3 and then $12.50", "12.5"),
        *((NUMBER, text, "-5.0") for text in ("−5", "3-8=-5", "The answer is 3 - 8 = −5. It has 2 digits")),
        *((NUMBER, text, "12.0") for text in ("\\boxed{12}, in 3 steps", "10-12")),
        (NUMBER, ".5", "0.5"),
        (NUMBER, "no idea", None),
        (POET, "诗人李白。\n问", "诗人李白"),
        (Item("", "who", answer="St. Louis"), "St. Louis.", "stlouis"),
        (Item("", "who", answer="The Cat"), " cat!", "cat"),
        (Item("", "who", answer="cat"), " Cats. They purr.", "cats"),
        (Item("", "who", answer="cat"), "The answer is: **Cat**.", "cat"),
        *((Item("", "sum", answer="15"), text, text) for text in ("1.5", "-15", "1/5")),
        *((Item("", "letter", answer=text), f" {text}.", text.lower()) for text in "A+"),
    ],
)  # fmt: skip
def test_answers_are_found_in_what_was_written(item, written, answer):
    assert read_answer(item, written) == answer


def test_an_answer_that_was_thought_about_stands_after_the_last_marker():
    told = "Is it B? So the answer is C. No: So the answer is B."
    assert read_answer(CITY, told, is_thought=True) == "1"
    assert read_answer(CITY, "It is B.", is_thought=True) is None
    assert read_answer(NUMBER, "7 x 9 = 63. So the answer is 1012, not 63.", is_thought=True) == "1012.0"
    assert read_answer(NUMBER, "So the answer is 3 x 4 = 12, not 63.", is_thought=True) == "12.0"
    assert read_answer(HAN, "北京是首都。所以答案是A。", is_thought=True) == "0"
    for text in ("Therefore, **the answer is B**.", "巴黎。所以，答案是B。", "Hence $\\boxed{B}$."):
        assert read_answer(CITY, text, is_thought=True) == "1"


def test_right_is_one_spelling_and_several_options_earn_partial_credit():
    assert [right_answers(each) for each in (CITY, EVEN, NUMBER)] == [{"1"}, {"0,2"}, {"1012.0"}]
    assert right_answers(POET) == {"李白", "诗人李白"}
    assert [credit(EVEN, each) for each in ("0,2", "0", "1,3", None)] == [1.0, 0.75, 0.0, 0.5]
    assert majority(["1", None, "0", "0"]) == "0"
    assert majority(["1", "0", None]) == "1", "the first of those that are given as often"
    assert majority([None]) is None
