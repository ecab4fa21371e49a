"""What a rewrite is, and the lineage of a rewritten item.

A rewrite makes one or more items of an item (all rotations of the options, say), or none where it does not fit.
Rewrites can be put one after the other; each item then names all of them, the seed and the item it began as in
`extra["lineage"]`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero2all.evals.items import WRITTEN, Item

LINEAGE = "lineage"

Make = Callable[[Item, random.Random], Sequence[Item]]
"""An item and randomness of its own -> the rewritten items; none where the rewrite does not fit."""


@dataclass(frozen=True)
class Rewrite:
    """One way to ask an item otherwise."""

    name: str
    about: str
    make: Make
    baseline: str = ""
    """Form in which the original is asked for the comparison; empty: the same as the rewritten one."""
    form: str = ""
    """Form in which rewritten items are asked; empty: each form of the original."""
    written: Make | None = None
    """What to make of an item for the forms in which the model writes; None: the same."""
    is_written: bool = True
    """Whether it can be asked in these forms; one that compares likelihoods cannot."""


def of_choices(make: Callable[[Item, random.Random], Item | Sequence[Item] | None]) -> Make:
    """A rewrite for plain questions with options; whole sentences, blanks and code do not fit."""

    def made(item: Item, rng: random.Random) -> Sequence[Item]:
        if item.shape not in ("question", "continue") or len(item.choices) < 2 or item.gold is None:
            return ()
        found = make(item, rng)
        return () if found is None else (found,) if isinstance(found, Item) else found

    return made


def with_options(
    item: Item, choices: Sequence[str], gold: int, order: Sequence[int] | None = None, **more: Any
) -> Item:
    """The item with other options. `order` says which of the options before each one is; -1: none of them."""
    earlier = order_of(item)
    order = range(len(choices)) if order is None else order
    if earlier is not None:
        now = tuple(earlier[number] if number >= 0 else -1 for number in order)
        more["extra"] = {**more.get("extra", item.extra), "order": now}
        if more["extra"].get("golds"):  # the right ones of several, where they stand now
            more["extra"]["golds"] = tuple(place for place, number in enumerate(order) if number in item.golds)
    return replace(item, choices=tuple(choices), gold=gold, answer=choices[gold], **more)


def order_of(item: Item) -> tuple[int, ...] | None:
    """Which option of the original each option is; -1: none of them. None: an open answer."""
    order = item.extra.get("order")
    return tuple(order) if order is not None else tuple(range(len(item.choices))) or None


def lineage_of(item: Item) -> Mapping[str, Any] | None:
    """How a rewritten item came about: origin (an id), rewrites, seed, variant; None for an original."""
    found: Mapping[str, Any] | None = item.extra.get(LINEAGE)
    return found


def origin_of(item: Item) -> str:
    """The id of the item that this one was made of; its own where it is an original."""
    lineage = lineage_of(item)
    return item.id if lineage is None else lineage["origin"]


def rewritten(item: Item, rewrites: Sequence[Rewrite], seed: int = 0, form: str = "") -> list[Item]:
    """The items that some rewrites, one after the other, make of an item to be asked in this form; none where one of
    them does not fit."""
    items = [item]
    for rewrite in rewrites:
        made = []
        for each in items:
            rng = random.Random(f"zero2all rewrite/{seed}/{rewrite.name}/{each.id}")
            variants = (rewrite.written if form in WRITTEN and rewrite.written else rewrite.make)(each, rng)
            if not variants:
                return []
            made += [_with_lineage(variant, each, rewrite, seed, number) for number, variant in enumerate(variants)]
        items = made
    return items


def _with_lineage(made: Item, before: Item, rewrite: Rewrite, seed: int, variant: int) -> Item:
    lineage = {
        "origin": origin_of(before),
        "rewrites": [*(lineage_of(before) or {}).get("rewrites", ()), rewrite.name],
        "seed": seed,
        "variant": variant,
    }
    return replace(made, id=f"{before.id}#{rewrite.name}.{variant}", extra={**made.extra, LINEAGE: lineage})
