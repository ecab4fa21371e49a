"""Facts, the wordings that tell them, and which wording is held out for which fact.

A relation (capital, day, job, ...) has a list of (subject, answer) pairs and a set of templates over `{s}` and
`{a}`. In an answer-last template nothing but punctuation follows `{a}`, so the text before it is a question that
a plain language model can complete. Reverse templates put the answer elsewhere; they are for training only.
Words in brackets are variants: `[Which|What] city` prints the one or the other. Some sentences have words in them that
do not belong there, so that a model learns to find a fact by its names.
A question names the subject or the answer; the other one is the reply. What surrounds both is a frame of the language
(`Q: ... A: ...`, a dialogue, two lines), and statements and questions may follow a lead-in ("I read that ..."). So a
few dozen wordings make thousands of sentences, and a model learns which words matter.

For every fact two answer-last templates are held out, in all variants and frames and after all lead-ins: the fact is
never printed in them, while other facts are. The templates in `new_wordings` are never printed at all.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HELD_OUT_PER_FACT = 2

STATEMENT, CARD, QUESTION, DIALOGUE = "statement", "card", "question", "dialogue"
VARIANTS = re.compile(r"\[([^\[\]]*)\]")

FactKey = tuple[str, str]
"""(relation name, subject): what names a fact within one language."""


@dataclass(frozen=True)
class Relation:
    """One kind of fact and all the ways to tell it."""

    name: str
    family: str
    """Facts of one family are reported together."""
    pairs: tuple[tuple[str, str], ...]
    """(subject, answer)."""
    statements: tuple[str, ...]
    cards: tuple[str, ...]
    """Notes rather than sentences: a field and its value."""
    questions: tuple[str, ...]
    """Questions and requests, without a reply."""
    dialogues: tuple[str, ...]
    replies: tuple[str, ...]
    """Replies to a question that names the subject, over `{a}` and without their full stop."""
    new_wordings: tuple[str, ...]
    """Answer-last, asked of the trained model, never printed. Their author had not seen the others."""
    reverse_statements: tuple[str, ...]
    reverse_questions: tuple[str, ...]

    @property
    def answer_last(self) -> tuple[str, ...]:
        """The templates that can be held out and asked."""
        return self.statements + self.cards + self.questions + self.dialogues

    @property
    def facts(self) -> tuple[Fact, ...]:
        """The pairs as facts."""
        return tuple(Fact(self, subject, answer) for subject, answer in self.pairs)


@dataclass(frozen=True)
class Fact:
    """One subject and its one answer."""

    relation: Relation
    subject: str
    answer: str

    @property
    def key(self) -> FactKey:
        """The name of this fact within its language."""
        return self.relation.name, self.subject

    def told(self, template: str) -> str:
        """The sentence or question this template makes of the fact."""
        return template.format(s=self.subject, a=self.answer)

    def replies(self, question: str) -> tuple[str, ...]:
        """What answers a question: the subject or the answer, whichever it does not name; the shortest first."""
        return tuple(map(self.told, self.relation.replies)) if "{s}" in question else (self.subject,)


def varied(template: str, choose: Callable[[list[str]], str] = lambda variants: variants[0]) -> str:
    """The template with one of the variants in each pair of brackets; without `choose`, the first."""
    return VARIANTS.sub(lambda found: choose(found[1].split("|")), template)


def asked(template: str, **slots: object) -> tuple[str, str]:
    """The prompt that an answer-last template makes, and the joiner between prompt and answer."""
    before_answer = varied(template).partition("{a}")[0].format(**slots)
    prompt = before_answer.rstrip()
    return prompt, before_answer[len(prompt) :]


@dataclass(frozen=True)
class Sentence:
    """One permitted telling of a fact."""

    fact: FactKey
    style: str
    text: str
    replies: tuple[str, ...]
    """To a question; else empty."""
    names: tuple[str, str]
    """Subject and answer, which stay as they are."""


def held_out_templates(
    relations: tuple[Relation, ...], pinned: dict[FactKey, str], rng: random.Random
) -> dict[FactKey, tuple[str, ...]]:
    """The templates each fact is never printed in. Every template is held out for about as many facts.

    `pinned` are held out whatever the seed: the documentation shows them.
    """
    held_out: dict[FactKey, tuple[str, ...]] = {}
    for relation in relations:
        times_held_out: Counter[str] = Counter()
        # Pinned facts choose first, so that the others can even out what they took.
        for fact in sorted(relation.facts, key=lambda fact: fact.key not in pinned):
            chosen = [pinned[fact.key]] if fact.key in pinned else []
            free = [template for template in relation.answer_last if template not in chosen]
            rng.shuffle(free)
            free.sort(key=lambda template: times_held_out[template])
            chosen += free[: HELD_OUT_PER_FACT - len(chosen)]
            times_held_out.update(chosen)
            held_out[fact.key] = tuple(chosen)
    return held_out


def tellings(relations: tuple[Relation, ...], held_out: dict[FactKey, tuple[str, ...]]) -> Iterator[Sentence]:
    """Every telling of every fact that the text may contain."""
    for relation in relations:
        styled = (
            (STATEMENT, relation.statements + relation.reverse_statements),
            (CARD, relation.cards),
            (QUESTION, relation.questions + relation.reverse_questions),
            (DIALOGUE, relation.dialogues),
        )
        for fact in relation.facts:
            for style, templates in styled:
                for template in templates:
                    if template not in held_out[fact.key]:
                        replies = fact.replies(template) if style == QUESTION else ()
                        yield Sentence(fact.key, style, fact.told(template), replies, (fact.subject, fact.answer))
