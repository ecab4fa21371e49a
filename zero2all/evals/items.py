"""The items of a benchmark: a question, its options, the right answer; and the task that gathers them.

Every reader in `tasks/` turns files into these, every form in `forms.py` asks them, every rewrite changes them. No
torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FORMS = ("cloze", "choice", "bits", "generate")
"""Ways to ask an item: see `forms.py`."""


@dataclass(frozen=True)
class Item:
    """One question with its right answer."""

    id: str
    """Unique within its task."""
    question: str
    """Without the options."""
    choices: tuple[str, ...] = ()
    """Texts of the options; empty: an open answer."""
    gold: int | None = None
    """Number of the right choice."""
    answer: str = ""
    """The right answer as text; the right choice where there are choices."""
    language: str = "en"
    """en, zh or code."""
    subject: str = ""
    context: str = ""
    """A passage before the question."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What only this kind of item has, such as the tests of HumanEval, or other right answers (`aliases`)."""


@dataclass(frozen=True)
class Task:
    """A benchmark as read from its files."""

    name: str
    language: str
    items: tuple[Item, ...]
    shots: tuple[Item, ...] = ()
    """Examples for few-shot prompts; never among the items."""
    forms: tuple[str, ...] = ("cloze", "choice", "bits")
    """Forms that fit it, of FORMS."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of items left out on reading."""
    problems: tuple[str, ...] = ()
    """Each item left out, in words: where it stands and what is wrong with it."""

    @property
    def chance(self) -> float:
        """Accuracy of guessing: the mean of 1 / choices; 0 where the answer is open."""
        shares = [1 / len(item.choices) if item.choices else 0.0 for item in self.items]
        return sum(shares) / len(shares) if shares else 0.0


class ItemError(ValueError):
    """One item cannot be used; the reason is short, so that items with the same one can be counted together."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


MISSING_COLUMN = "missing column"
GOLD_OUTSIDE = "gold outside the options"
EMPTY_TEXT = "empty text"
NOT_READABLE = "not readable"
DUPLICATE = "duplicate id"


def check_item(item: Item) -> Item:
    """The item itself, if it can be asked and judged; else an ItemError."""
    if not item.question.strip() and not item.context.strip() and not item.choices:
        raise ItemError(EMPTY_TEXT, "the question is empty")
    if item.choices:
        if item.gold is None or not 0 <= item.gold < len(item.choices):
            raise ItemError(GOLD_OUTSIDE, f"the right answer is option {item.gold} of {len(item.choices)}")
        if len(item.choices) < 2:
            raise ItemError(GOLD_OUTSIDE, "there is only one option")
        empty = [number for number, text in enumerate(item.choices, 1) if not text.strip()]
        if empty:
            raise ItemError(EMPTY_TEXT, f"option {empty[0]} is empty")
    elif not item.answer.strip():
        raise ItemError(EMPTY_TEXT, "the right answer is empty")
    return item


@dataclass
class Problems:
    """Collects the items that could not be used."""

    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, place: str, error: ItemError) -> None:
        """Note the item at `place`."""
        self.counts[error.reason] += 1
        self.lines.append(f"{place}: {error}")

    def merge(self, others: Iterable[Problems]) -> Problems:
        """This one, with those of others added."""
        for other in others:
            self.lines += other.lines
            self.counts += other.counts
        return self
