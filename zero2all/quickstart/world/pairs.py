"""Contrast pairs for a model trained on the small world: a fact in a wording that the text never uses for it, and the
same sentence with the answer of another fact. The text has neither of the two."""

from __future__ import annotations

from collections.abc import Iterator

from zero2all.evals.pair_file import Pair
from zero2all.quickstart.world.language import LANGUAGES


def pairs(language: str, seed: int) -> Iterator[Pair]:
    """Every pair of a language."""
    chosen = LANGUAGES[language]
    rng = chosen.random("pairs", seed)
    held_out = chosen.held_out(seed)
    for fact in chosen.facts:
        others = sorted({answer for _, answer in fact.relation.pairs} - {fact.answer})
        for template in held_out[fact.key]:
            number = fact.relation.answer_last.index(template)
            yield Pair(
                id=f"{chosen.name}/{fact.relation.name}/{fact.subject}/wording-{number}",
                channel=chosen.name,
                kind=fact.relation.family,
                right=fact.told(template),
                wrong=template.format(s=fact.subject, a=rng.choice(others)),
            )
