"""All rewrites by name, and what `--rewrites` may say: names, `R1` for all that begin with `R1.`, `R13+R2` for one
after the other, or `all`."""

from __future__ import annotations

from collections.abc import Sequence

from zero2all.common.errors import UsageError
from zero2all.common.schema import nearest_hint
from zero2all.evals.rewrites.base import Rewrite
from zero2all.evals.rewrites.options import OPTIONS
from zero2all.evals.rewrites.wording import WORDING

REWRITES = {rewrite.name: rewrite for rewrite in (*OPTIONS, *WORDING)}
NO_LONGER = ("R11.width", "R11.traditional", "R11.numerals", "R12", "R14", "R15", "R17")
"""Rewrites of earlier versions."""
Chain = tuple[Rewrite, ...]
"""Rewrites one after the other."""


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
        found |= {name: (REWRITES[name],) for name in names}
    return found


def _one(name: str) -> Rewrite:
    if name not in REWRITES:
        raise _unknown(name)
    return REWRITES[name]


def _unknown(name: str) -> UsageError:
    if name in NO_LONGER or _family(name) in NO_LONGER:
        return UsageError(
            f"The rewrite {name} was removed. docs/benchmarks.md lists those there are; --shots asks with another "
            f"number of examples."
        )
    known = [*dict.fromkeys(map(_family, REWRITES)), *REWRITES, "all"]
    return UsageError(f"There is no rewrite {name!r}. {nearest_hint(name, known)} docs/benchmarks.md lists all.")
