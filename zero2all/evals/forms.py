"""Ways to ask an item. A small model knows the answer long before it understands what A, B, C and D are for.

- cloze: the text of each choice is scored after the question. Per byte, since longer texts are always less likely; and
  by PMI, log P(choice | question) - log P(choice | "Answer:"), since some texts are likely after anything.
- choice: the choices stand in the prompt with labels, and the labels are scored.
- bits: bits per byte of the right answer alone. It moves before accuracy does, and has no chance level.
- generate: the model writes, and the answer is looked for in what it wrote.
- think: it writes how it comes to the answer first, and ends with `So the answer is`, as the examples do.

Where several options may be right, choice asks each option by itself, and what is written names all of them.

Few-shot prompts put solved examples of another split before the item, the same ones for the same seed. The wording is
Chinese for Chinese items.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from zero2all.evals.answers import MARKERS, shown_labels
from zero2all.evals.items import BLANK, CODE, CONTINUE, LABELS, QUESTION, SENTENCE, Item, Task, language_of, proposed
from zero2all.evals.scorer import Question
from zero2all.tokenizer.chat import Message


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
    """Words in the item's language."""
    return WORDINGS[language_of(item)]


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
    """What to write after, and when to stop."""

    item: Item
    asked: tuple[tuple[str, str], ...]
    """Examples and what is answered to them; last the item, and how its answer begins."""
    stop: tuple[str, ...]
    max_new_tokens: int

    @property
    def prompt(self) -> str:
        """All of it as one text to be continued."""
        return "\n\n".join(question + answer for question, answer in self.asked)


def conversation(writing: Writing) -> list[Message]:
    """The same as messages: the examples are turns, and the question says what the answer is to look like. An item may
    be a conversation itself."""
    if "turns" in writing.item.extra:
        return [Message(("user", "assistant")[n % 2], turn) for n, turn in enumerate(writing.item.extra["turns"])]
    language, marker = language_of(writing.item), MARKERS[language_of(writing.item)]
    is_thought = bool(writing.asked[-1][1])
    if is_thought:
        how = f"先想一想，最后写“{marker}”和答案。" if language == "zh" else f"Think first, then end with: {marker} ..."
    else:
        how = "只写答案。" if language == "zh" else "Give the answer only."
    messages = []
    for question, answer in writing.asked:
        asked = question.removesuffix("\n" + wording_of(writing.item).answer)
        messages += [Message("user", f"{asked}\n{how}"), Message("assistant", answer.strip())]
    return messages[:-1]


CODE_STOPS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n@", "\nassert ", "\n```")
"""A function ends where something else begins at the left margin."""
STOPS = ("\n\n", "\nQuestion:", "\n问题：")
ANSWER_TOKENS, CHAT_TOKENS, SOLUTION_TOKENS, CODE_TOKENS = 64, 192, 320, 512


def generate(item: Item, shots: Sequence[Item], labels: str = LABELS) -> Writing:
    """The item as a text to be continued by the model itself."""
    if item.shape == CODE:
        return Writing(item, ((item.question, ""),), CODE_STOPS, CODE_TOKENS)
    if "turns" in item.extra:
        return Writing(item, (), (), CHAT_TOKENS)
    asked = [(_listing(shot, labels), _given(shot, labels)) for shot in shots]
    most = SOLUTION_TOKENS if "number" in item.extra else ANSWER_TOKENS
    return Writing(item, (*asked, (_listing(item, labels), "")), STOPS, most)


def think(item: Item, shots: Sequence[Item], labels: str = LABELS, most: int = SOLUTION_TOKENS) -> Writing:
    """The item to be thought about first: the examples do so, and end with the marker and the answer."""
    asked = [(_listing(shot, labels), _reasoned(shot, item.language, labels)) for shot in shots]
    return Writing(item, (*asked, (_listing(item, labels), THOUGHTS[language_of(item)])), STOPS, most)


THOUGHTS = {"en": " Let us think step by step.", "zh": "先想一想。"}


def _listing(item: Item, labels: str) -> str:
    """The question, with its options where it does not list them itself."""
    return _labelled(item, labels) if item.choices and "labels" not in item.extra else _open(item)


def _given(item: Item, labels: str) -> str:
    """The answer to an example: labels, or text."""
    shown = shown_labels(item, labels)
    if not item.choices or not shown:
        return _after(item, item.answer)
    return wording_of(item).before_answer + "".join(shown[number] for number in item.golds or (item.gold or 0,))


def _reasoned(shot: Item, language: str, labels: str) -> str:
    given = _given(shot, labels).strip()
    if "number" in shot.extra:
        given = str(shot.extra["number"])
    if language == "zh":
        return f"{THOUGHTS['zh']}{shot.extra['reasoning']}{MARKERS['zh']}{given}。"
    return f"{THOUGHTS['en']} {shot.extra['reasoning']} {MARKERS['en']} {given}."


def thought_examples(item: Item, shots: Sequence[Item], count: int) -> list[Item]:
    """Examples with a way to the answer: those of the task that have one, else ours, as many as are asked for."""
    own = [shot for shot in shots if shot.extra.get("reasoning")]
    ours = [each for each in THOUGHT if each.language == language_of(item) and bool(each.golds) <= bool(item.golds)]
    if not item.choices:
        ours = [replace(each, choices=(), gold=None) for each in ours]
    return (own or ours[:: -1 if item.golds else 1])[:count]


def _example(language: str, question: str, choices: str, golds: tuple[int, ...], reasoning: str) -> Item:
    texts = tuple(choices.split("|"))
    extra: dict[str, Any] = {"reasoning": reasoning, **({"golds": golds} if len(golds) > 1 else {})}
    return Item("", question, texts, golds[0], texts[golds[0]], language, extra=extra)


THOUGHT = (
    _example(
        "en", "Tom has 3 boxes with 4 pens in each. He gives 5 pens away. How many pens are left?", "5|7|12|17", (1,),
        "3 boxes with 4 pens are 3 × 4 = 12 pens. 12 - 5 = 7.",
    ),
    _example(
        "en", "Which animal lays eggs?", "a cat|a cow|a hen|a dog", (2,),
        "Cats, cows and dogs give birth to their young. A hen is a bird, and birds lay eggs.",
    ),
    _example(
        "en", "Which of these numbers are even?", "2|3|8|9", (0, 2),
        "2 and 8 can be divided by 2. 3 and 9 cannot.",
    ),
    _example(
        "zh", "小明有3盒铅笔，每盒4支。他送出5支，还剩几支？", "5|7|12|17", (1,),
        "3盒铅笔，每盒4支，一共3×4=12支。12-5=7。",
    ),
    _example(
        "zh", "下列动物中，哪一种下蛋？", "猫|牛|母鸡|狗", (2,), "猫、牛和狗生幼崽。母鸡是鸟，鸟下蛋。"
    ),
    _example("zh", "下列数中，哪些是偶数？", "2|3|8|9", (0, 2), "2和8能被2整除，3和9不能。"),
)  # fmt: skip
"""Our own examples of thinking first, for tasks that bring none."""


def each_option(item: Item) -> list[Question]:
    """Every option proposed by itself: is it right? The two texts that may follow are yes and no."""
    yes_no = ("对", "错") if language_of(item) == "zh" else (" True", " False")
    return [Question(_open(replace(item, question=proposed(item, choice))), yes_no) for choice in item.choices]


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
