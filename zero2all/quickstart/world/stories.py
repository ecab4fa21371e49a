"""Short stories from a grammar, and questions about the story just told.

An arc is a plot: a title, a few scenes in order, each with several wordings, and questions with their answers. A
story picks an arc, fills its slots (people, places, things, weather, feelings) once, and picks one wording per
scene, so that the questions can be answered from the text and from nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

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
