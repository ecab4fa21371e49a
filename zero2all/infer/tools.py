"""What an assistant wrote, taken apart, and the calculator that it may call.

    <think> thought </think> text <tool_call>{"name": ..., "arguments": {...}}</tool_call>

So our template writes it, and Qwen's and Hermes'. The marks are text: a thought is one only at the beginning, and a
call that does not parse stays text and is counted. The calculator reads arithmetic itself, within limits (5 ms at most,
where it was measured); `eval` would run whatever a model wrote.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from zero2all.common import jsonio
from zero2all.infer.text import possible_beginning
from zero2all.tokenizer.chat import LEARNED_ROLE, Message

THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
MOST_CALLS = 32
"""Of one answer, those that do not parse included; what comes after them is text."""
LONGEST_CALL = 1 << 14  # characters


@dataclass(frozen=True)
class Written:
    """What an assistant wrote."""

    text: str = ""
    thought: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    """As OpenAI's API writes them, but the arguments are an object."""
    refused: int = 0
    """Calls that did not parse; they stand in the text."""

    def message(self) -> Message:
        """As a turn of the conversation."""
        return Message(LEARNED_ROLE, self.text, self.thought, self.calls)


def read_answer(answer: str, is_whole: bool = True, begin: str = "", with_calls: bool = True) -> Written:
    """The parts of an answer. Of one that is still being written, what can be no part of a mark: later readings only
    add to it. `begin`: how the prompt has begun it already; `with_calls`: calls are looked for, else they are text."""
    answer, thought = begin + answer, ""
    opened = answer.lstrip()
    if opened.startswith(THINK):
        thought, mark, answer = opened.removeprefix(f"{THINK}\n").removeprefix(THINK).partition(THINK_END)
        if not mark:
            return Written(thought=_settled(thought, THINK_END, is_whole))
        thought = thought.removesuffix("\n")
        answer = answer.removeprefix("\n").removeprefix("\n")
    elif not is_whole and THINK.startswith(opened):
        return Written()
    text, refused = "", 0
    calls: list[Mapping[str, Any]] = []
    while with_calls and len(calls) + refused < MOST_CALLS and CALL in answer:
        before, _, rest = answer.partition(CALL)
        body, mark, after = rest.partition(CALL_END)
        if not mark and not is_whole and len(rest) <= LONGEST_CALL:
            return Written(text + before.removesuffix("\n"), thought, tuple(calls), refused)
        if (call := _call_in(body) if mark and len(body) <= LONGEST_CALL else None) is not None:
            calls.append(call)
            text, answer = text + before.removesuffix("\n"), after
        else:
            text, answer, refused = text + before + CALL, rest, refused + 1
    return Written(text + (_settled(answer, CALL, is_whole) if with_calls else answer), thought, tuple(calls), refused)


def _settled(text: str, mark: str, is_whole: bool) -> str:
    """Without an end that may become the mark, or the line end that the template writes before it."""
    return text if is_whole else text[: len(text) - possible_beginning(text, (mark, f"\n{mark}"))]


def _call_in(text: str) -> Mapping[str, Any] | None:
    try:
        value = jsonio.loads_strict(text.encode("utf-8", "replace"))
        return call_of(value["name"], value["arguments"])
    except (ValueError, TypeError, KeyError):
        return None


def call_of(name: Any, arguments: Any) -> Mapping[str, Any] | None:
    """A call; None where these are no name or no arguments."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# ---- the calculator -------------------------------------------------------------------------------------------


MOST_DIGITS = 1000
"""Of the expression, and of every number on the way."""
MOST_BITS = MOST_DIGITS * 3322 // 1000
MOST_DEPTH = 50
SHOWN_DIGITS = 30
"""A fraction with more is shown rounded."""
OPERATORS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    **{"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)},
    "^": (4, operator.pow),
}
"""With how strongly each binds; a sign before a number binds with 3."""
SIGNS = str.maketrans("×÷−＋－＊／（）", "*/-+-*/()")
TOKEN = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9,])|[0-9]*\.?[0-9]+|\*\*|\S")


def calculate(expression: str) -> str:
    """The value of an expression, exactly: a whole number, a decimal one, or a fraction with its rounded value.
    ValueError where it is none, or beyond the limits."""
    written = expression.translate(SIGNS).strip().removesuffix("=")
    if len(written) > MOST_DIGITS:
        raise ValueError(f"the expression has more than {MOST_DIGITS} characters")
    tokens = [token.replace(",", "") or "," for token in TOKEN.findall(written.replace("**", "^"))][::-1]
    value = _read(tokens, 1, 0)
    if tokens:
        raise ValueError(f"{tokens[-1]!r} stands where an operator is expected")
    top, bottom = Decimal(value.numerator), Decimal(value.denominator)
    if not 10**SHOWN_DIGITS % value.denominator:
        return f"{Context(prec=2 * MOST_DIGITS).divide(top, bottom):f}"
    rounded = f"about {Context(prec=12).divide(top, bottom)}"
    return f"{value} ({rounded})" if len(str(value)) <= SHOWN_DIGITS else rounded


def _read(tokens: list[str], level: int, depth: int) -> Fraction:
    """A value and the operators after it that bind at least as strongly as `level`; the next token stands last."""
    if depth > MOST_DEPTH:
        raise ValueError(f"the expression is nested deeper than {MOST_DEPTH} levels")
    token = tokens.pop() if tokens else "the end"
    if token in ("+", "-"):
        value = _read(tokens, 3, depth + 1) * (-1 if token == "-" else 1)
    elif token == "(":
        value = _read(tokens, 1, depth + 1)
        if not tokens or tokens.pop() != ")":
            raise ValueError("a parenthesis is not closed")
    elif token[-1] in "0123456789":
        value = Fraction(token)
    else:
        raise ValueError(f"a number is expected before {token}")
    while tokens and tokens[-1] in OPERATORS and OPERATORS[tokens[-1]][0] >= level:
        sign = tokens.pop()
        binds, calculated = OPERATORS[sign]
        other = _read(tokens, binds + (sign != "^"), depth + 1)  # powers are read from the right
        if sign == "^" and (other.denominator != 1 or _bits(value) * abs(other) > MOST_BITS):
            raise ValueError(f"an exponent is no whole number, or the power has more than {MOST_DIGITS} digits")
        try:
            value = calculated(value, other)
        except ZeroDivisionError:
            raise ValueError("division by zero") from None
        if _bits(value) > MOST_BITS:
            raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


class Tool(NamedTuple):
    """A function that an assistant may call: as OpenAI's API describes it, and what does it. A TypeError or ValueError
    says what is wrong with the arguments."""

    spec: Mapping[str, Any]
    run: Callable[..., str]


CALCULATOR = {
    "name": "calculator",
    "description": "Calculates an expression of numbers, + - * / ^ and parentheses.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
TOOLS = {"calculator": Tool({"type": "function", "function": CALCULATOR}, calculate)}


def run_call(call: Mapping[str, Any], tools: Mapping[str, Tool]) -> str:
    """What the tool answers. What is wrong with the call is an answer, too, from which the model may go on."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        return tools[name].run(**arguments) if name in tools else f"error: there is no function {name[:80]}"
    except (TypeError, ValueError, AttributeError) as error:
        return f"error: {error}"
