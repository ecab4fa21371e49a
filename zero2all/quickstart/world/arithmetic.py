"""Sums and differences of whole numbers up to twenty, with some operand pairs kept out of the text.

A held-out sum is kept out in both orders (3 + 4 and 4 + 3) and in every wording, in digits and in words. What the
model says to it is therefore worked out, or guessed, but never remembered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LARGEST_NUMBER = 20
HELD_OUT_SHARE = 0.15
SPELLED_OUT_SHARE = 0.4
SMALLEST_PROBED_RESULT = 3
"""1 and 2 begin longer results (10, 20); among 3 to 20 no written result is the beginning of another."""


@dataclass(frozen=True)
class Calculation:
    """`left + right` or `left - right`."""

    operator: str
    left: int
    right: int

    @property
    def result(self) -> int:
        """What it comes to."""
        return self.left + self.right if self.operator == "+" else self.left - self.right


@dataclass(frozen=True)
class ArithmeticWords:
    """How a language writes calculations. Templates over `{x}`, `{y}` and the result `{a}`, which comes last."""

    additions: tuple[str, ...]
    subtractions: tuple[str, ...]
    numerals: tuple[str, ...]
    """The numbers from zero to twenty in words."""

    def templates(self, calculation: Calculation) -> tuple[str, ...]:
        """The templates that fit its operator."""
        return self.additions if calculation.operator == "+" else self.subtractions


def split_calculations(rng: random.Random) -> tuple[list[Calculation], list[Calculation]]:
    """All calculations up to twenty, as (for the text, held out)."""
    groups: list[list[Calculation]] = []
    for left in range(1, LARGEST_NUMBER + 1):
        for right in range(1, LARGEST_NUMBER + 1):
            if left <= right and left + right <= LARGEST_NUMBER:
                orders = sorted({(left, right), (right, left)})
                groups.append([Calculation("+", first, second) for first, second in orders])
            if left >= right:
                groups.append([Calculation("-", left, right)])
    rng.shuffle(groups)
    wanted = round(HELD_OUT_SHARE * sum(map(len, groups)))
    for_text: list[Calculation] = []
    held_out: list[Calculation] = []
    for group in groups:
        (held_out if len(held_out) < wanted else for_text).extend(group)
    return for_text, held_out


def written(calculation: Calculation, words: ArithmeticWords, rng: random.Random) -> str:
    """The calculation as one sentence, in a random wording."""
    template = rng.choice(words.templates(calculation))
    numbers = (calculation.left, calculation.right, calculation.result)
    if "=" not in template and rng.random() < SPELLED_OUT_SHARE:
        x, y, a = (words.numerals[number] for number in numbers)
        sentence = template.format(x=x, y=y, a=a)
        return sentence[0].upper() + sentence[1:]
    return template.format(x=numbers[0], y=numbers[1], a=numbers[2])
