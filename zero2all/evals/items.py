"""The items of a benchmark: a question, its options, the right answer; and the task that gathers them.

Every reader in `tasks/` turns files into these, every form in `forms.py` asks them, every rewrite changes them. No
torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero2all.common.errors import UsageError

FORMS = ("cloze", "choice", "bits", "generate", "think")
"""Ways to ask an item: see `forms.py`."""
CHAT_FORM = "chat"
"""Beside them, of the tasks in `chat_tasks.py` alone: what is answered in a conversation, judged by rules."""
WRITTEN = ("generate", "think")
"""Forms in which the model writes; the others compare likelihoods."""


BEST = "best"
"""Of all forms: the one in which a model does best on the split of the examples."""


def check_forms(forms: Sequence[str] | None) -> None:
    """Refuse a form that does not exist; None are all."""
    unknown = [form for form in forms or () if form not in FORMS and (form != BEST or len(forms or ()) > 1)]
    if unknown:
        raise UsageError(f"There is no form {unknown[0]!r}. The forms are {', '.join(FORMS)}; or {BEST} alone.")


LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

QUESTION, CONTINUE, BLANK, SENTENCE, CODE = "question", "continue", "blank", "sentence", "code"
"""How an item reads (`Item.shape`): a question with an answer; a text that goes on with the right choice; a text with
a blank (`_`) for it; choices that are whole sentences; the head of a function to be written."""


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
    """What only this kind of item has: the tests of HumanEval, other right answers (`aliases`), `number`: the answer
    as a number, `reasoning`: the way to it, `labels`: those that the question lists its options with, `golds`; of a
    conversation its `turns` and the rules of a `right` answer."""
    shape: str = QUESTION

    @property
    def golds(self) -> tuple[int, ...]:
        """Numbers of all right choices, where there may be several; else none."""
        return tuple(self.extra.get("golds", ()))


def language_of(item: Item) -> str:
    """The language of words that we put around an item: code is asked for in English."""
    return "zh" if item.language == "zh" else "en"


def proposed(item: Item, choice: str) -> str:
    """The question whether one option is right."""
    if item.language == "zh":
        return f"{item.question}\n选项“{choice}”对不对？"
    return f"{item.question}\nProposed answer: {choice}. True or false?"


@dataclass(frozen=True)
class Task:
    """A benchmark as read from its files."""

    name: str
    language: str
    items: tuple[Item, ...]
    shots: tuple[Item, ...] = ()
    """Examples for few-shot prompts; never among the items."""
    forms: tuple[str, ...] = FORMS
    """Forms that fit it, of FORMS."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of items left out on reading."""
    problems: tuple[str, ...] = ()
    """Each item left out, in words: where it stands and what is wrong with it."""
    default_shots: int = 5


MISSING_COLUMN = "missing column"
GOLD_OUTSIDE = "gold outside the options"
EMPTY_TEXT = "empty text"
NOT_READABLE = "not readable"
DUPLICATE = "duplicate id"
NO_ANSWER = "no right answer given"
BLANKS = "not exactly one blank"
ONE_WORD = "only one word"
ONE_OPTION = "only one option"
EQUAL_OPTIONS = "the right option stands twice"


class ItemError(ValueError):
    """One item cannot be used; items with the same `reason` are counted together."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def check_item(item: Item) -> Item:
    """The item itself, if it can be asked and judged; else an ItemError."""
    if item.shape != SENTENCE and not item.question.strip() and not item.context.strip():
        raise ItemError(EMPTY_TEXT, "the question is empty")
    if item.choices:
        if len(item.choices) < 2:
            raise ItemError(ONE_OPTION, "there is only one option")
        if item.gold is None or not 0 <= item.gold < len(item.choices):
            raise ItemError(GOLD_OUTSIDE, f"the right answer is number {item.gold} of {len(item.choices)} options")
        empty = [number for number, text in enumerate(item.choices, 1) if not text.strip()]
        if empty:
            raise ItemError(EMPTY_TEXT, f"option {empty[0]} is empty")
        if item.golds and not set(item.golds) <= set(range(len(item.choices))):
            raise ItemError(GOLD_OUTSIDE, f"the right answers are {item.golds} (from 0) of {len(item.choices)} options")
        if [text.strip() for text in item.choices].count(item.choices[item.gold].strip()) > 1:
            raise ItemError(EQUAL_OPTIONS, "another option has the same text as the right one")
    elif not item.answer.strip():
        raise ItemError(EMPTY_TEXT, "the right answer is empty")
    return item
