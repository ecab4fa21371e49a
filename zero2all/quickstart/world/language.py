"""The languages of the small world: their words, which are data (`en.json`, `zh.json`), and the choices of a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zero2all.common.files import package_text
from zero2all.quickstart.world.facts import Fact, FactKey, Relation, Sentence, held_out_templates, tellings, varied


@dataclass(frozen=True)
class Language:
    """All words of the small world in one language."""

    name: str
    joiner: str
    """What comes between two sentences of a paragraph."""
    relations: tuple[Relation, ...]
    lead_ins: tuple[str, ...]
    """What may come before a statement."""
    question_lead_ins: tuple[str, ...]
    question_frames: tuple[str, ...]
    """Forms of a question with its reply, over `{q}` and `{a}`; the first is the one that is asked, and chatted in."""
    pins: dict[FactKey, str]
    arithmetic: ArithmeticWords
    stories: StoryBook
    sheet_openers: tuple[str, ...]
    """First sentences of some fact sheets."""
    quiz_openers: tuple[str, ...]
    """First lines of some quizzes and dialogues."""

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Every fact of this language."""
        return tuple(fact for relation in self.relations for fact in relation.facts)

    def template(self, relation: Relation, wording: str) -> str:
        """An answer-last wording as a template over `{s}` and `{a}`: questions stand in the first frame."""
        return varied(self.question_frames[0].replace("{q}", wording) if wording in relation.questions else wording)

    def held_out(self, seed: int) -> dict[FactKey, tuple[str, ...]]:
        """The templates each fact is never printed in."""
        return held_out_templates(self.relations, self.pins, self.random("held out", seed))

    def sentences(self, seed: int) -> list[Sentence]:
        """Every telling of every fact that the text may contain."""
        return list(tellings(self.relations, self.held_out(seed)))

    def calculations(self, seed: int) -> tuple[list[Calculation], list[Calculation]]:
        """(calculations for the text, held-out calculations)."""
        return split_calculations(self.random("calculations", seed))

    def random(self, purpose: str, seed: int) -> random.Random:
        """An independent stream per language and purpose. A string seeds through sha512, the same everywhere."""
        return random.Random(f"zero2all small world/{self.name}/{purpose}/{seed}")


# Sums and differences of whole numbers up to twenty, with some operand pairs kept out of the text.
#
# A held-out sum is kept out in both orders (3 + 4 and 4 + 3) and in every wording, in digits and in words. What the
# model says to it is therefore worked out, or guessed, but never remembered.


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


# Short stories from a grammar, and questions about the story just told.
#
# An arc is a plot: a title, a few scenes in order, each with several wordings, and questions with their answers. A
# story picks an arc, fills its slots (people, places, things, weather, feelings) once, and picks one wording per
# scene, so that the questions can be answered from the text and from nothing else.


DETAIL_SHARE = 0.35
ASIDE_SHARE = 0.25
QUESTIONS_SHARE = 0.65


@dataclass(frozen=True)
class Arc:
    """One plot."""

    title: str
    scenes: tuple[tuple[str, ...], ...]
    """Per scene its wordings."""
    questions: tuple[tuple[str, str], ...]
    """(question, answer), all answerable from every wording."""
    slots: dict[str, tuple[str, ...]]
    """Slot values of this plot; they replace the book's own where both have them."""


@dataclass(frozen=True)
class StoryBook:
    """The story words of one language."""

    people: tuple[tuple[tuple[str, ...], dict[str, str]], ...]
    """Groups of names that share their pronouns: (names, pronoun slots)."""
    slots: dict[str, tuple[str, ...]]
    openings: tuple[str, ...]
    details: tuple[str, ...]
    """Sentences that fit anywhere and change nothing."""
    asides: tuple[str, ...]
    """They lead into facts that someone in the story tells."""
    closings: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    """Questions that every story answers."""
    question_and_answer: str
    """The form of a question with its answer, over `{question}` and `{answer}`."""
    arcs: tuple[Arc, ...]


def tell(book: StoryBook, joiner: str, next_facts: Callable[[int], list[str]], rng: random.Random) -> tuple[str, str]:
    """One story as (title, text). `next_facts(n)` gives n fact sentences for the stories that weave some in."""
    arc = rng.choice(book.arcs)
    slots = _fill_slots(book, arc, rng)
    sentences = [rng.choice(book.openings), *(rng.choice(wordings) for wordings in arc.scenes)]
    if rng.random() < DETAIL_SHARE:
        sentences.insert(rng.randrange(1, len(sentences)), rng.choice(book.details))
    sentences = [sentence.format_map(slots) for sentence in sentences]
    if rng.random() < ASIDE_SHARE:
        sentences.append(rng.choice(book.asides).format_map(slots))
        sentences += next_facts(rng.randint(1, 3))
    sentences.append(rng.choice(book.closings).format_map(slots))
    text = joiner.join(sentences)
    if rng.random() < QUESTIONS_SHARE:
        asked = rng.sample(book.questions + arc.questions, rng.randint(2, 4))
        lines = (book.question_and_answer.format(question=question, answer=answer) for question, answer in asked)
        text += "\n" + "\n".join(line.format_map(slots) for line in lines)
    return arc.title.format_map(slots), text


def _fill_slots(book: StoryBook, arc: Arc, rng: random.Random) -> dict[str, str]:
    """One value per slot; hero and friend are two different people, the hero with pronouns."""
    names, pronouns = rng.choice(book.people)
    hero = rng.choice(names)
    friend = rng.choice([name for group, _ in book.people for name in group if name != hero])
    values = {name: rng.choice(options) for name, options in (book.slots | arc.slots).items()}
    return {**values, **pronouns, "hero": hero, "friend": friend}


def _load(name: str) -> Language:
    words = _tuples(json.loads(package_text(__package__, f"{name}.json")))
    stories = words["stories"]
    return Language(
        **words
        | {
            "relations": tuple(Relation(**relation) for relation in words["relations"]),
            "pins": {pin["fact"]: pin["template"] for pin in words["pins"]},
            "arithmetic": ArithmeticWords(**words["arithmetic"]),
            "stories": StoryBook(**stories | {"arcs": tuple(Arc(**arc) for arc in stories["arcs"])}),
        }
    )


def _tuples(value: Any) -> Any:
    """The same value with a tuple in place of every list."""
    if isinstance(value, dict):
        return {name: _tuples(member) for name, member in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


LANGUAGES = {name: _load(name) for name in ("en", "zh")}
