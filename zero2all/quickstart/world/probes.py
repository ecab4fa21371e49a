"""What to ask a model trained on the small world, and a search for probes that the text gives away.

A probe is a prompt and its one right answer: a fact in a wording that the text never uses for it, a fact in a
wording that the text never uses at all (`new_wording`, harder, to be reported apart), or a held-out calculation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from zero2all.quickstart.world.arithmetic import LARGEST_NUMBER, SMALLEST_PROBED_RESULT, asked
from zero2all.quickstart.world.facts import Fact
from zero2all.quickstart.world.language import Language, language_named

FOILS_PER_PROBE = 10
ARITHMETIC_PROBES = 30
ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Probe:
    """One question to a trained model."""

    id: str
    channel: str
    """`en` or `zh`."""
    family: str
    """`capital`, `day`, `person` or `arithmetic`."""
    prompt: str
    """Text to continue; no space at its end."""
    joiner: str
    """What the text has between prompt and answer: a space or nothing."""
    answer: str
    foils: tuple[str, ...]
    """Wrong answers of the same relation, to rank the right one against."""
    new_wording: bool
    """The wording occurs nowhere in the text, not even with another fact."""


def probes(language: str, seed: int) -> list[Probe]:
    """Every probe of a language: held-out wordings, new wordings, held-out calculations."""
    chosen = language_named(language)
    return [*_fact_probes(chosen, seed), *_arithmetic_probes(chosen, seed)]


def find_leaks(text: str, language: str, seed: int) -> list[Probe]:
    """The probes whose prompt and answer stand together somewhere in `text`; case and line breaks do not matter.

    The right answer must be none. In digits, `3 + 4 = 7` is not found inside `13 + 4 = 17`.
    """
    flat = _flatten(text)
    leaked = []
    for probe in probes(language, seed):
        told = _flatten(probe.prompt + probe.joiner + probe.answer)
        if told in flat and re.search(rf"(?<!\d){re.escape(told)}(?!\d)", flat):
            leaked.append(probe)
    return leaked


def _fact_probes(language: Language, seed: int) -> Iterator[Probe]:
    rng = language.random("foils", seed)
    held_out = language.held_out(seed)
    for fact in language.facts:
        for template in held_out[fact.key]:
            number = fact.relation.answer_last.index(template)
            yield _fact_probe(language, fact, template, f"wording-{number}", rng)
        yield _fact_probe(language, fact, fact.relation.new_wording, "new-wording", rng)


def _fact_probe(language: Language, fact: Fact, template: str, wording: str, rng: random.Random) -> Probe:
    prompt, joiner = fact.asked(template)
    others = sorted({answer for _, answer in fact.relation.pairs} - {fact.answer})
    return Probe(
        id=f"{language.name}/{fact.relation.name}/{fact.subject}/{wording}",
        channel=language.name,
        family=fact.relation.family,
        prompt=prompt,
        joiner=joiner,
        answer=fact.answer,
        foils=tuple(rng.sample(others, min(FOILS_PER_PROBE, len(others)))),
        new_wording=wording == "new-wording",
    )


def _arithmetic_probes(language: Language, seed: int) -> Iterator[Probe]:
    rng = language.random("arithmetic probes", seed)
    held_out = [one for one in language.calculations(seed)[1] if one.result >= SMALLEST_PROBED_RESULT]
    rng.shuffle(held_out)
    for number, calculation in enumerate(held_out[:ARITHMETIC_PROBES]):
        templates = language.arithmetic.templates(calculation)
        prompt, joiner = asked(calculation, templates[number % len(templates)])
        others = [n for n in range(SMALLEST_PROBED_RESULT, LARGEST_NUMBER + 1) if n != calculation.result]
        yield Probe(
            id=f"{language.name}/{ARITHMETIC}/{calculation.left}{calculation.operator}{calculation.right}",
            channel=language.name,
            family=ARITHMETIC,
            prompt=prompt,
            joiner=joiner,
            answer=str(calculation.result),
            foils=tuple(str(n) for n in rng.sample(others, FOILS_PER_PROBE)),
            new_wording=False,
        )


def _flatten(text: str) -> str:
    return " ".join(text.lower().split())
