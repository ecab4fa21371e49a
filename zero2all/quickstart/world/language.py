"""The languages of the small world: their words, which are data (`en.json`, `zh.json`), and the choices of a seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from zero2all.common.files import package_text
from zero2all.quickstart.world.arithmetic import ArithmeticWords, Calculation, split_calculations
from zero2all.quickstart.world.facts import Fact, FactKey, Relation, Sentence, held_out_templates, tellings, varied
from zero2all.quickstart.world.stories import Arc, StoryBook


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
