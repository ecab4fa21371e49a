"""What an assistant wrote is taken apart as the template put it together; and the calculator."""

import contextlib
import itertools
import random
import re
from fractions import Fraction

import pytest

from tests.tokenizer.test_tokenizer_chat import WORDS, some_text
from zero2all.infer.tools import MOST_CALLS, TOOLS, calculate, read_answer, run_call
from zero2all.tokenizer.chat import Dialogue, Message
from zero2all.tokenizer.template import own_chat

WORDS = [word for word in WORDS if word != "<think>"]


def call(name="calculator", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def some_answer(rng):
    calls = tuple(call("f", x=some_text(rng, WORDS), n=[rng.randrange(9)]) for _ in range(rng.choice([0, 0, 1, 3])))
    text = some_text(rng, WORDS) if not calls or rng.random() < 0.5 else ""
    return Message("assistant", text, some_text(rng, WORDS) if rng.random() < 0.5 else "", calls)


def test_answers_come_apart_as_the_template_put_them_together_in_whatever_pieces_they_arrive(trained):
    rng, template = random.Random(3), own_chat(trained.tokenizer)
    for _ in range(300):
        message = some_answer(rng)
        parts = template.parts(Dialogue([Message("user", "?"), message]))
        answer = "".join(part.text for part in parts if part.counts and not part.is_control)
        assert read_answer(answer).message() == message
        cuts = sorted(rng.randint(0, len(answer)) for _ in range(6))
        shown = [*(read_answer(answer[:cut], is_whole=False) for cut in cuts), read_answer(answer)]
        for before, after in itertools.pairwise(shown):
            assert after.text.startswith(before.text)
            assert after.thought.startswith(before.thought)
            assert after.calls[: len(before.calls)] == before.calls


def test_text_is_held_back_only_as_long_as_it_may_become_a_mark():
    answer = "a < b\n<tool_cal"
    assert [read_answer(answer[:end], is_whole=False).text for end in (3, 5, 6, 8, 15)] == ["a ", *["a < b"] * 4]
    assert read_answer("a <b", is_whole=False).text == "a <b"
    assert read_answer(answer).text == answer, "at the end it is text"


GOOD = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def test_what_is_no_call_stays_text_and_is_counted():
    for answer, text, calls, refused in (
        (f'<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>{GOOD}', "", 2, 0),
        (f"<tool_call>no</tool_call> {GOOD}", "<tool_call>no</tool_call> ", 1, 1),
        ('x\n<tool_call>{"name": "f", "arg', 'x\n<tool_call>{"name": "f", "arg', 0, 1),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', None, 0, 1),
        ('<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>', None, 0, 1),
        ('<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 9000 + "</tool_call>", None, 0, 1),
        ('<tool_call>{"name": "f", "arguments": {"x": "' + "y" * 20_000 + '"}}</tool_call>', None, 0, 1),
        (GOOD * (MOST_CALLS + 1), GOOD, MOST_CALLS, 0),
        ("<tool_call>" * (MOST_CALLS + 5), None, 0, MOST_CALLS),
        (f"{GOOD}<think>x</think>", "<think>x</think>", 1, 0),
    ):
        found = read_answer(answer)
        assert (found.text, len(found.calls), found.refused) == (answer if text is None else text, calls, refused)


def test_the_prompt_may_have_opened_the_thought_and_calls_may_be_none():
    assert read_answer("hm\n</think>\n\nyes", begin="<think>\n") == read_answer("<think>\nhm\n</think>\n\nyes")
    assert read_answer("hm", begin="<think>\n").thought == "hm", "cut off while it thought"
    assert read_answer(GOOD, with_calls=False).text == GOOD


def test_arithmetic_is_exact():
    for expression, value in (
        ("2 + 3 * 4 =", "14"),
        ("-2^2 + 2**-1", "-3.5"),
        ("0.1 + 0.2 - 1,000.5", "-1000.2"),
        ("（1＋2）×3÷4", "2.25"),
        ("1/3", "1/3 (about 0.333333333333)"),
        ("123456789123456789 / 987654321987654322", "about 0.124999998861"),
        ("9" * 1000, "9" * 1000),
        ("0^0", "1"),
    ):
        assert calculate(expression) == value


def test_what_it_cannot_calculate_has_a_reason():
    for expression, said in (
        ("", "a number is expected before the end"),
        ("2 3", "'3' stands where an operator"),
        ("(1", "not closed"),
        ("1/(2-2)", "division by zero"),
        ("0^-1", "division by zero"),
        ("2^0.5", "no whole number"),
        ("9^9^9^9", "more than 1000 digits"),
        ("9^1000 * 9^1000", "more than 1000 digits"),
        ("1" * 1001, "more than 1000 characters"),
        ("(" * 500, "deeper than 50"),
        ("-" * 500 + "1", "deeper than 50"),
        ("__import__('os')", "a number is expected before _"),
        ("٣", "a number is expected before ٣"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            calculate(expression)


def test_random_expressions_have_their_exact_values_and_damaged_ones_a_value_or_a_reason():
    rng = random.Random(5)
    for _ in range(500):
        expression = str(rng.randrange(1, 100))
        for _ in range(rng.randrange(1, 6)):
            form, sign = rng.choice(("({0} {1} {2} / {3})", "({2} / {3} {1} {0})")), rng.choice("+-*")
            expression = form.format(expression, sign, rng.randrange(100), rng.randrange(1, 100))
        value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})
        assert calculate(f"{expression} - ({value})") == "0"
        letters = list(expression)
        letters[rng.randrange(len(letters))] = rng.choice("()^*/.,x")
        with contextlib.suppress(ValueError):
            calculate("".join(letters))


def test_a_call_is_answered_also_where_it_is_wrong():
    assert run_call(call(expression="6*7"), TOOLS) == "42"
    assert run_call(call("search", q="x"), TOOLS) == "error: there is no function search"
    for arguments in ({}, {"expression": 3}, {"expression": "x"}, {"expression": "1", "y": 2}):
        assert run_call(call(**arguments), TOOLS).startswith("error: ")


def test_a_result_is_appended_in_ids_and_gives_what_the_whole_conversation_gives(trained):
    template, encode = own_chat(trained.tokenizer), trained.tokenizer.encode_text
    asked, told, tools = [Message("user", "6 * 7?")], [Message("tool", "42<|message_end|>")], [TOOLS["calculator"].spec]
    wrote = Message("assistant", "I ask.", "hm", (call(expression="6*7"),))
    written = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    before = template.encode(Dialogue(asked, tools)) + encode(f"<think>\nhm\n</think>\n\nI ask.\n{written}")
    for thinking in (None, False):
        whole = template.encode(Dialogue([*asked, wrote, *told], tools, thinking))
        assert before + template.encode_after(told, thinking) == whole
