"""All rewrites by name, with those of the examples of a prompt (R14), and what `--rewrites` may say: names, `R1` for
all that begin with `R1.`, `R13+R2` for one after the other, or `all`."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zero2all.common.errors import UsageError
from zero2all.common.schema import nearest_hint
from zero2all.evals.items import Item, Task
from zero2all.evals.rewrites.base import Rewrite, with_options
from zero2all.evals.rewrites.options import OPTIONS
from zero2all.evals.rewrites.wording import NUMBERS, SURFACE, WORDING

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


_ALL: tuple[Rewrite | ShotRewrite, ...] = (*OPTIONS, *WORDING, *SURFACE, *NUMBERS, *SHOTS)
REWRITES = {rewrite.name: rewrite for rewrite in _ALL}
Chain = tuple[Rewrite, ...] | ShotRewrite
"""Rewrites one after the other, or one of the examples."""


def _family(name: str) -> str:
    return name.partition(".")[0]


def chosen_rewrites(words: Sequence[str]) -> dict[str, Chain]:
    """What `--rewrites` asks for, by the name it is reported under."""
    found: dict[str, Chain] = {}
    for word in words:
        if word == "all":
            names = list(REWRITES)
        elif "+" in word:
            found[word] = tuple(_one(name) for name in word.split("+"))
            continue
        else:
            names = [name for name in REWRITES if word in (name, _family(name))]
        if not names:
            raise _unknown(word)
        for name in names:
            rewrite = REWRITES[name]
            found[name] = rewrite if isinstance(rewrite, ShotRewrite) else (rewrite,)
    return found


def _one(name: str) -> Rewrite:
    rewrite = REWRITES.get(name)
    if isinstance(rewrite, Rewrite):
        return rewrite
    if rewrite is not None:
        raise UsageError(f"The rewrite {name} changes the examples of a prompt; it cannot be joined to others with +.")
    raise _unknown(name)


def _unknown(name: str) -> UsageError:
    if name == "R17":
        return UsageError("R17 trains before it asks: `z2a eval once RUN --tasks NAMES`.")
    known = [*dict.fromkeys(map(_family, REWRITES)), *REWRITES, "all"]
    return UsageError(f"There is no rewrite {name!r}. {nearest_hint(name, known)} docs/benchmarks.md lists all.")
