"""Conversations of the small world, for fine-tuning: questions about its facts, and what it does not know.

Facts are asked in the wordings for questions, without frames, so that a chat model answers what a person types. For
every fact one wording is kept out: it is what the chat is tested with, a wording held out of the text where that is a
question. Refused are questions of every kind about other things (`chat_en.json`, `chat_zh.json`): those whose subject
alone is unknown, such as the capital of another country, and those that ask something else of a known one. Sums are
refused, too: a model of this size cannot do them, and would otherwise say any number.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from zero2all.common.files import package_text
from zero2all.quickstart.world.facts import Fact, FactKey, asked, varied
from zero2all.quickstart.world.language import LANGUAGES, Language
from zero2all.quickstart.world.questions import UNREAD_PEOPLE

SHARES = {"fact": 0.46, "sum": 0.04, "greeting": 0.03, "outside": 0.32, "near": 0.15}
"""Of the turns."""
REVERSE_SHARE = 0.1
LEAD_IN_SHARE = 0.2
MORE_TURNS_SHARE = 0.25
"""Of the conversations: another question follows, and another."""
PAIR_SHARES = {"invented": 0.35, "refused": 0.15, "unknown": 0.5}
"""Of the preference pairs, by what is worse: another value, a refusal, or a value for what nobody can know."""
SLOT = re.compile(r"\{(\w+?)2?\}")
Turn = tuple[str, str]
"""(question, answer)."""


@dataclass(frozen=True)
class ChatQuestion:
    """What to ask the chat model."""

    language: str
    kind: str
    """fact, sum or outside."""
    fact: FactKey | None
    question: str
    answer: str
    """What the reply has to have."""


@cache
def chat_words(language: str) -> dict[str, Any]:
    """The words of questions about other things."""
    words: dict[str, Any] = json.loads(package_text(__package__, f"chat_{language}.json"))
    return words


def refusal(language: str) -> str:
    """What the model says to what it does not know."""
    return str(chat_words(language)["refusals"][0])


def conversations(language: str, count: int, seed: int) -> Iterator[list[Turn]]:
    """So many conversations of a language."""
    writer = _Writer(LANGUAGES[language], seed)
    for _ in range(count):
        turns = [writer.turn()]
        while writer.rng.random() < MORE_TURNS_SHARE:
            turns.append(writer.turn())
        yield turns


def preferences(language: str, count: int, seed: int) -> Iterator[dict[str, str]]:
    """So many pairs of a language: a question of conversations, a better answer and a worse one."""
    writer = _Writer(LANGUAGES[language], seed, "preferences")
    for _ in range(count):
        yield dict(zip(("prompt", "chosen", "rejected"), writer.pair(), strict=True))


def sum_prompts(language: str, seed: int) -> Iterator[dict[str, str]]:
    """Every sum for training: as conversations ask it, which is refused, and as the text begins it, not always so."""
    chosen, rng = LANGUAGES[language], LANGUAGES[language].random("sum prompts", seed)
    for one in chosen.calculations(seed)[0]:
        begun, _ = asked(rng.choice(chosen.arithmetic.templates(one)), x=one.left, y=one.right)
        for prompt in (_sum_question(language, one.left, one.operator, one.right), begun):
            yield {"prompt": prompt, "answer": str(one.result)}


def chat_questions(language: str, seed: int) -> Iterator[ChatQuestion]:
    """Every fact and the held-out sums, in wordings that no conversation has for them."""
    chosen = LANGUAGES[language]
    kept = _kept_out(chosen, seed)
    for fact in chosen.facts:
        yield ChatQuestion(language, "fact", fact.key, varied(fact.told(kept[fact.key])), fact.answer)
    for one in chosen.calculations(seed)[1]:
        yield ChatQuestion(
            language, "sum", None, _sum_question(language, one.left, one.operator, one.right), str(one.result)
        )


def _kept_out(language: Language, seed: int) -> dict[FactKey, str]:
    """The question of each fact that no conversation asks."""
    rng, held_out = language.random("chat questions", seed), language.held_out(seed)
    found = {}
    for fact in language.facts:
        questions = [each for each in held_out[fact.key] if each in fact.relation.questions]
        found[fact.key] = questions[0] if questions else rng.choice(fact.relation.questions)
    return found


def _sum_question(language: str, left: int, operator: str, right: int) -> str:
    words = {"en": {"+": "plus", "-": "minus"}, "zh": {"+": "加", "-": "减"}}[language][operator]
    return f"What is {left} {words} {right}?" if language == "en" else f"{left}{words}{right}是多少？"


class _Writer:
    """Writes one turn after the other."""

    def __init__(self, language: Language, seed: int, purpose: str = "conversations") -> None:
        self.language, self.words = language, chat_words(language.name)
        self.rng = language.random(purpose, seed)
        self.varied = partial(varied, choose=self.rng.choice)
        self.sums = language.calculations(seed)[0]
        self.stop = "." if language.name == "en" else "。"
        kept, held_out = _kept_out(language, seed), language.held_out(seed)
        self.asked = [
            (fact, question)
            for fact in language.facts
            for question in fact.relation.questions
            if question != kept[fact.key] and question not in held_out[fact.key]
        ]
        self.reverse = [(fact, question) for fact in language.facts for question in fact.relation.reverse_questions]
        self.left: list[tuple[Fact, str]] = []
        self._kinds: dict[str, Callable[[], Turn]] = {
            "fact": self._fact,
            "sum": self._sum,
            "greeting": lambda: tuple(self.rng.choice(self.words["greetings"])),
            "outside": partial(self._refused, "outside"),
            "near": partial(self._refused, "near"),
        }

    def turn(self) -> Turn:
        """A question and its answer."""
        return self._kinds[self.rng.choices(list(SHARES), list(SHARES.values()))[0]]()

    def _fact(self) -> Turn:
        if self.rng.random() < REVERSE_SHARE:
            fact, question = self.rng.choice(self.reverse)
            same = [other for other in fact.relation.facts if other.answer == fact.answer]
            return self._led(fact.told(self.varied(question)), fact), f"{self.rng.choice(same).subject}{self.stop}"
        if not self.left:
            self.left = self.rng.sample(self.asked, len(self.asked))
        fact, question = self.left.pop()
        return self._led(fact.told(self.varied(question)), fact), f"{fact.answer}{self.stop}"

    def pair(self) -> tuple[str, str, str]:
        """A question, the better answer, and the worse one."""
        kind = self.rng.choices(list(PAIR_SHARES), list(PAIR_SHARES.values()))[0]
        fact, question = self.rng.choice(self.asked)
        others = [other.answer for other in fact.relation.facts if other.answer != fact.answer]
        invented = f"{self.rng.choice(others)}{self.stop}"
        if kind == "unknown":
            return *self._refused(self.rng.choice(["outside", "near"])), invented
        worse = invented if kind == "invented" else refusal(self.language.name)
        return self._led(fact.told(self.varied(question)), fact), f"{fact.answer}{self.stop}", worse

    def _led(self, text: str, fact: Fact | None = None) -> str:
        """Some after a lead-in."""
        if self.rng.random() >= LEAD_IN_SHARE:
            return text
        keeps = fact is not None and text.startswith((fact.subject, fact.answer, "I "))
        return self.varied(self.rng.choice(self.language.question_lead_ins)) + (
            text if keeps else text[0].lower() + text[1:]
        )

    def _sum(self) -> Turn:
        one = self.rng.choice(self.sums)
        return _sum_question(self.language.name, one.left, one.operator, one.right), refusal(self.language.name)

    def _refused(self, kind: str) -> Turn:
        question = SLOT.sub(lambda slot: self._slot(slot[1]), self.rng.choice(self.words[kind]))
        return self._led(question), self.rng.choice(self.words["refusals"])

    def _slot(self, name: str) -> str:
        words, rng = self.words, self.rng
        if name == "name":
            return _stranger(self.language.name, words["people"], rng)
        if name == "known":
            return rng.choice([fact.subject for fact in self.language.facts if fact.relation.family == "person"])
        if name == "country":
            return rng.choice(
                [*words["subjects"], *(f.subject for f in self.language.facts if f.relation.name == "capital")]
            )
        of = {"outside": words["subjects"], "month": words["months"]}
        return str(rng.choice(of[name] if name in of else words["slots"][name]))


def _stranger(language: str, people: dict[str, list[str]], rng: random.Random) -> str:
    """The name of somebody whom neither the text nor its tests know."""
    while True:
        first, last = rng.choice(people["first"]), rng.choice(people["last"])
        more = rng.choice(["", rng.choice(people["first"])])
        name = f"{first} {last}" if language == "en" else f"{last}{first}{more}"
        if name not in UNREAD_PEOPLE[language]:
            return name
