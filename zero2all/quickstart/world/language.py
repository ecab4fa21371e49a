"""What a language must bring to the small world, and the choices a seed makes in it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from zero2all.quickstart.world.arithmetic import ArithmeticWords, Calculation, split_calculations
from zero2all.quickstart.world.facts import Fact, FactKey, Pin, Relation, held_out_templates
from zero2all.quickstart.world.stories import StoryBook


@dataclass(frozen=True)
class Language:
    """All words of the small world in one language."""

    name: str
    joiner: str
    """What stands between two sentences of a paragraph."""
    relations: tuple[Relation, ...]
    pins: tuple[Pin, ...]
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

    def held_out(self, seed: int) -> dict[FactKey, tuple[str, ...]]:
        """The templates each fact is never printed in."""
        return held_out_templates(self.relations, self.pins, self.random("held out", seed))

    def calculations(self, seed: int) -> tuple[list[Calculation], list[Calculation]]:
        """(calculations for the text, held-out calculations)."""
        return split_calculations(self.random("calculations", seed))

    def random(self, purpose: str, seed: int) -> random.Random:
        """An independent stream per language and purpose. A string seeds through sha512, the same everywhere."""
        return random.Random(f"zero2all small world/{self.name}/{purpose}/{seed}")
