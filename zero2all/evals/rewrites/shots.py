"""R14: the examples of a few-shot prompt changed, the items as they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zero2all.evals.items import Item, Task
from zero2all.evals.rewrites.base import with_options

MANY_SHOTS = 5


@dataclass(frozen=True)
class ShotRewrite:
    """Another number of examples, or other examples."""

    name: str
    about: str
    count: int
    change: Callable[[Item, int, random.Random], Item] | None = None
    """Example and its place -> the changed example."""

    def task(self, task: Task, seed: int) -> Task:
        """The task with its examples changed."""
        if self.change is None:
            return task
        rng = random.Random(f"zero2all rewrite/{seed}/{self.name}/{task.name}")
        fitting = [shot for shot in task.shots if len(shot.choices) > 1 and shot.gold is not None]
        return replace(task, shots=tuple(self.change(shot, number, rng) for number, shot in enumerate(fitting)))


def _with_gold(shot: Item, gold: int) -> Item:
    return replace(shot, gold=gold, answer=shot.choices[gold])


def _wrong(shot: Item, _: int, rng: random.Random) -> Item:
    return _with_gold(shot, rng.choice([number for number in range(len(shot.choices)) if number != shot.gold]))


def _random(shot: Item, _: int, rng: random.Random) -> Item:
    return _with_gold(shot, rng.randrange(len(shot.choices)))


def _balanced(shot: Item, place: int, _: random.Random) -> Item:
    """The right option of the examples is A, B, C, D, A, … in turn."""
    count, gold = len(shot.choices), shot.gold or 0
    order: Sequence[int] = [(gold - place % count + number) % count for number in range(count)]
    return with_options(shot, [shot.choices[number] for number in order], order.index(gold), order)


SHOTS = (
    ShotRewrite("R14.0", "no examples", 0),
    ShotRewrite("R14.1", "one example", 1),
    ShotRewrite("R14.5", "five examples", MANY_SHOTS),
    ShotRewrite("R14.wrong", "five examples with wrong answers", MANY_SHOTS, _wrong),
    ShotRewrite("R14.random", "five examples with random answers", MANY_SHOTS, _random),
    ShotRewrite("R14.balanced", "five examples, each label as often", MANY_SHOTS, _balanced),
)
