"""R12: other numbers in the question, and the answer worked out anew.

The way to the answer must be known: the equations of a written solution (`3 * 4 = 12`, as in GSM8K), or a question
with two numbers of which exactly one of + - × ÷ gives the answer.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from zero2all.evals.items import CONTINUE, QUESTION, Item
from zero2all.evals.rewrites.base import Rewrite, with_options

NUMBER = re.compile(r"(?<![\w.,])\d+(?:\.\d+)?(?![\w]|[.,]\d)")
EQUATION = re.compile(r"((?:[\d.,$]+|[-+*/()x×÷ ])*\d[\d.,)]*\s*)=\s*\$?(-?\d[\d,]*(?:\.\d+)?)")
OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
TRIES = 20


class _UnclearError(ValueError):
    """The way to the answer is not known."""


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _evaluated(expression: str, values: Mapping[Fraction, Fraction]) -> Fraction:
    """The value of an expression with other numbers in the places of some."""

    def visit(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Expression):
            return visit(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            number = Fraction(str(node.value))
            return values.get(number, number)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            try:
                return Fraction(OPERATORS[type(node.op)](visit(node.left), visit(node.right)))
            except ZeroDivisionError as error:
                raise _UnclearError("it divides by zero") from error
        raise _UnclearError("it is not plain arithmetic")

    plain = re.sub(r"[$,]", "", expression).replace("×", "*").replace("x", "*").replace("÷", "/").strip()
    try:
        return visit(ast.parse(plain, mode="eval"))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _UnclearError("it is not an expression") from error


def _steps(item: Item) -> list[tuple[str, Fraction]]:
    """The equations that lead to the answer, the last one giving it."""
    answer = _answer(item)
    found = [(expression, _value(result)) for expression, result in EQUATION.findall(item.answer)]
    if found:
        known: dict[Fraction, Fraction] = {}
        right = all(_evaluated(expression, known) == result for expression, result in found)
        if not right or found[-1][1] != answer:
            raise _UnclearError("its equations do not lead to the answer")
        return found
    numbers = NUMBER.findall(item.question)
    if len(numbers) != 2:
        raise _UnclearError("it has no equations, and not two numbers")
    left, right_hand = numbers
    ways = [f"{left} {sign} {right_hand}" for sign in "+-*/" if sign != "/" or _value(right_hand)]
    ways = [way for way in ways if _evaluated(way, {}) == answer]
    if len(ways) != 1 or left == right_hand:
        raise _UnclearError("no calculation gives the answer, or more than one does")
    return [(ways[0], answer)]


def _answer(item: Item) -> Fraction:
    text = str(item.extra.get("number", item.answer)).strip()
    if not re.fullmatch(r"-?\d[\d,]*(?:\.\d+)?", text):
        raise _UnclearError("its answer is not a number")
    return _value(text)


def _other_numbers(item: Item, rng: random.Random) -> Sequence[Item]:
    if item.shape not in (QUESTION, CONTINUE):
        return ()
    try:
        steps = _steps(item)
        for _ in range(TRIES):
            made = _attempt(item, steps, rng)
            if made is not None:
                return (made,)
    except _UnclearError:
        pass
    return ()


def _attempt(item: Item, steps: Sequence[tuple[str, Fraction]], rng: random.Random) -> Item | None:
    """The item with every whole number of the question changed, if all results stay of their kind (whole, positive)."""
    texts = NUMBER.findall(item.question)
    used = {_value(number) for expression, _ in steps for number in re.findall(r"\d[\d,]*(?:\.\d+)?", expression)}
    given = {_value(text) for text in texts if "." not in text}
    changed = {
        number: Fraction(rng.randint(2, max(9, int(number) * 2))) for number in sorted(given & used) if number > 1
    }
    if not changed or all(old == new for old, new in changed.items()) or {result for _, result in steps} & given:
        return None
    values = dict(changed)
    for expression, result in steps:
        worked_out = _evaluated(expression, values)
        if worked_out <= 0 or (result.denominator == 1) != (worked_out.denominator == 1):
            return None
        values[result] = worked_out
    answer = values[steps[-1][1]]
    if answer.denominator != 1:
        return None
    asked = NUMBER.sub(lambda found: str(changed.get(_value(found.group()), found.group())), item.question)
    return _with_answer(replace(item, question=asked), _answer(item), answer)


def _with_answer(item: Item, before: Fraction, answer: Fraction) -> Item | None:
    if item.choices:
        try:
            moved = [str(_value(choice.strip()) - before + answer) for choice in item.choices]
        except ValueError:
            return None
        return with_options(item, moved, item.gold or 0, [-1] * len(moved))
    extra = {**item.extra, "number": str(answer)} if "number" in item.extra else item.extra
    return replace(item, answer=str(answer), extra={**extra, "aliases": ()})


NUMBERS = (Rewrite("R12", "other numbers, answer worked out anew", _other_numbers),)
