"""All rewrites by name, and what `--rewrites` may say: names, `R1` for all that begin with `R1.`, `R13+R2` for one
after the other, or `all`."""

from __future__ import annotations

from collections.abc import Sequence

from zero2all.common.errors import UsageError
from zero2all.common.schema import nearest_hint
from zero2all.evals.rewrites.base import Rewrite
from zero2all.evals.rewrites.numbers import NUMBERS
from zero2all.evals.rewrites.options import OPTIONS
from zero2all.evals.rewrites.shots import SHOTS, ShotRewrite
from zero2all.evals.rewrites.surface import SURFACE
from zero2all.evals.rewrites.wording import WORDING

TRAIN_ONCE = "R17"
"""Trains on the questions before they are asked: written as text to train on (see `once.py`), not asked here."""

_ALL: tuple[Rewrite | ShotRewrite, ...] = (*OPTIONS, *WORDING, *SURFACE, *NUMBERS, *SHOTS)
REWRITES = {rewrite.name: rewrite for rewrite in _ALL}
Chain = tuple[Rewrite, ...] | ShotRewrite
"""Rewrites one after the other, or one of the examples."""


def _family(name: str) -> str:
    return name.partition(".")[0]


def chosen_rewrites(words: Sequence[str]) -> dict[str, Chain]:
    """What `--rewrites` asks for, by the name it is reported under; without R17."""
    found: dict[str, Chain] = {}
    for word in words:
        if word == TRAIN_ONCE:
            continue
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
    known = [*dict.fromkeys(map(_family, REWRITES)), *REWRITES, TRAIN_ONCE, "all"]
    return UsageError(f"There is no rewrite {name!r}. {nearest_hint(name, known)} docs/benchmarks.md lists all.")
