"""Ways to ask an item. A small model knows the answer long before it understands what A, B, C and D are for.

- cloze: the text of each choice is scored after the question. Per byte, since longer texts are always less likely; and
  by PMI, log P(choice | question) - log P(choice | "Answer:"), since some texts are likely after anything.
- choice: the choices stand in the prompt with labels, and the labels are scored.
- bits: bits per byte of the right answer alone. It moves before accuracy does, and has no chance level.
- generate: the model writes, and the answer is looked for in what it wrote.

Few-shot prompts put solved examples of another split before the item, the same ones for the same seed. The wording is
Chinese for Chinese items.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from zero2all.evals.items import BLANK, CODE, CONTINUE, LABELS, QUESTION, SENTENCE, Item, Task
from zero2all.evals.scorer import Question


@dataclass(frozen=True)
class Wording:
    """The words around an item in one language."""

    question: str
    answer: str
    before_answer: str
    """What stands between `answer` and the answer itself."""
    option: str
    """One labelled choice, of `label` and `text`."""


WORDINGS = {
    "en": Wording("Question: {}", "Answer:", " ", "{label}. {text}"),
    "zh": Wording("问题：{}", "答案：", "", "{label}．{text}"),
}


@dataclass(frozen=True)
class PromptedItem:
    """One item made into a prompt with texts that may follow."""

    item: Item
    questions: tuple[Question, ...]
    """One with all continuations; or, for a blank, one of each choice."""
    unconditional: Question | None = None
    """The same continuations after a prompt that says nothing, for PMI."""
    by_bytes: bool = True
    """Whether continuations differ in length, so that they are compared per byte."""


def wording_of(item: Item) -> Wording:
    """Words in the item's language; code is asked for in English."""
    return WORDINGS.get(item.language, WORDINGS["en"])


def cloze(item: Item, shots: Sequence[Item]) -> PromptedItem:
    """The text of each choice after the question."""
    if item.shape == BLANK:  # what follows the blank is scored: the same text after each choice
        before, after = item.question.split("_")
        beginning = _joined(shots, _solved)
        return PromptedItem(
            item, tuple(Question(beginning + before + choice, (after,)) for choice in item.choices), None, False
        )
    if item.shape == SENTENCE:
        return PromptedItem(item, (Question("", item.choices),), None, False)
    question = Question(_joined(shots, _solved) + _open(item), tuple(_after(item, choice) for choice in item.choices))
    nothing = None if item.shape == CONTINUE else Question(wording_of(item).answer, question.continuations)
    return PromptedItem(item, (question,), nothing)


def choice(item: Item, shots: Sequence[Item], labels: str = LABELS) -> PromptedItem:
    """The label of each choice, after the question and all choices. The labels share the prompt, so an item costs one
    pass over it."""
    prompt = _joined(shots, lambda shot: _labelled(shot, labels) + _label_after(shot, shot.gold or 0, labels))
    continuations = tuple(_label_after(item, number, labels) for number in range(len(item.choices)))
    return PromptedItem(item, (Question(prompt + _labelled(item, labels), continuations),), None, False)


def gold(item: Item, shots: Sequence[Item]) -> PromptedItem:
    """The right answer alone, after the question."""
    if item.shape in (BLANK, SENTENCE):
        asked = cloze(item, shots)
        right = asked.questions[item.gold or 0] if item.shape == BLANK else Question("", (item.answer,))
        return PromptedItem(item, (right,), None, False)
    return PromptedItem(
        item, (Question(_joined(shots, _solved) + _open(item), (_after(item, item.answer),)),), None, False
    )


@dataclass(frozen=True)
class Writing:
    """A prompt to write after, and when to stop."""

    item: Item
    prompt: str
    stop: tuple[str, ...]
    max_new_tokens: int


CODE_STOPS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n@", "\nassert ", "\n```")
"""A function ends where something else begins at the left margin."""


def generate(item: Item, shots: Sequence[Item], labels: str = LABELS) -> Writing:
    """The item as a text to be continued by the model itself."""
    if item.shape == CODE:
        return Writing(item, item.question, CODE_STOPS, 512)
    if item.choices:
        asked = choice(item, shots, labels)
        return Writing(item, asked.questions[0].prompt, ("\n",), 8)
    most = 320 if "number" in item.extra else 64
    return Writing(item, _joined(shots, _solved) + _open(item), ("\n\n", "\nQuestion:", "\n问题："), most)


NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def is_right(item: Item, written: str, labels: str = LABELS) -> bool:
    """Whether the answer that stands in `written` is the right one; not for code, which must be run."""
    if item.choices:
        return extract_label(written, labels[: len(item.choices)]) == labels[item.gold or 0]
    if "number" in item.extra:
        found = extract_number(written)
        return found is not None and found == float(item.extra["number"])
    accepted = {normalised(answer) for answer in (item.answer, *item.extra.get("aliases", ()))}
    return normalised(written.strip().partition("\n")[0]) in accepted


def extract_label(written: str, labels: str) -> str | None:
    """The first label that stands alone: not the A of `An`."""
    found = re.search(rf"(?<![A-Za-z])[{re.escape(labels)}](?![A-Za-z])", written)
    return found.group() if found else None


def extract_number(written: str) -> float | None:
    """The number after `answer is` or `####`, or else the last one."""
    named = re.search(rf"(?:####|answer is|答案是|答案：)\s*[$¥]?\s*({NUMBER})", written)
    numbers = [named.group(1)] if named else re.findall(NUMBER, written)
    return float(numbers[-1].replace(",", "")) if numbers else None


def normalised(answer: str) -> str:
    """For comparison: small letters, no articles, no punctuation, no spaces."""
    return re.sub(r"[\W_]+", "", re.sub(r"\b(a|an|the)\b", " ", answer.lower()))


class Shots:
    """Examples for the items of a task: of an item's own subject where there are any, never the item itself, the same
    for all items of a subject and seed (so that they share the computation)."""

    def __init__(self, task: Task, count: int, seed: int = 0) -> None:
        self.task, self.count, self.seed = task, count, seed
        self._by_subject: dict[str, list[Item]] = {}
        for shot in task.shots:
            self._by_subject.setdefault(shot.subject, []).append(shot)
        self._orders: dict[str, list[Item]] = {}

    def of(self, item: Item) -> tuple[Item, ...]:
        """The examples of one item."""
        if not self.count:
            return ()
        if item.subject not in self._orders:
            pool = self._by_subject.get(item.subject) or list(self.task.shots)
            rng = random.Random(f"{self.seed} {self.task.name} {item.subject}")
            self._orders[item.subject] = rng.sample(pool, len(pool))
        asked = _asked(item.context, item.question, item.choices)
        others = (
            shot for shot in self._orders[item.subject] if _asked(shot.context, shot.question, shot.choices) != asked
        )
        return tuple(islice(others, self.count))


@lru_cache(maxsize=1024)
def _asked(context: str, question: str, choices: tuple[str, ...]) -> tuple[str, frozenset[str]]:
    """What an item asks, whatever the case, the spaces and the order of the options."""
    return _letters(context + question), frozenset(() if question else map(_letters, choices))


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


def _joined(shots: Sequence[Item], show: Callable[[Item], str]) -> str:
    return "".join(f"{show(shot)}\n\n" for shot in shots)


def _solved(shot: Item) -> str:
    if shot.shape == BLANK:
        return shot.question.replace("_", shot.answer)
    return shot.answer if shot.shape == SENTENCE else _open(shot) + _after(shot, shot.answer)


def _open(item: Item) -> str:
    """The item up to where the answer begins."""
    if item.shape != QUESTION:
        return item.question
    words = wording_of(item)
    passage = f"{item.context}\n" if item.context else ""
    return f"{passage}{words.question.format(item.question)}\n{words.answer}"


def _after(item: Item, answer: str) -> str:
    if item.shape == CODE:
        return answer
    return (" " if item.shape == CONTINUE and item.language != "zh" else wording_of(item).before_answer) + answer


def _labelled(item: Item, labels: str) -> str:
    words = wording_of(item)
    options = [words.option.format(label=label, text=each) for label, each in zip(labels, item.choices, strict=False)]
    passage = [item.context] if item.context else []
    return "\n".join([*passage, words.question.format(item.question), *options, words.answer])


def _label_after(item: Item, number: int, labels: str) -> str:
    return wording_of(item).before_answer + labels[number]
