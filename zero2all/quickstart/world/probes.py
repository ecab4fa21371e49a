"""The probes for a model trained on the small world.

A probe is a prompt and its one right answer: a fact in a wording that the text never uses for it, a fact in a
wording that the text never uses at all (`new_wording`, harder and reported apart), or a held-out calculation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from zero2all.evals.probe_file import Probe
from zero2all.quickstart.world.arithmetic import LARGEST_NUMBER, SMALLEST_PROBED_RESULT
from zero2all.quickstart.world.facts import Fact, asked
from zero2all.quickstart.world.language import LANGUAGES, Language

FOILS_PER_PROBE = 10
ARITHMETIC_PROBES = 30
ARITHMETIC = "arithmetic"


def probes(language: str, seed: int) -> list[Probe]:
    """Every probe of a language: held-out wordings, new wordings, held-out calculations."""
    chosen = LANGUAGES[language]
    return [*_fact_probes(chosen, seed), *_arithmetic_probes(chosen, seed)]


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
        foils=rng.sample(others, min(FOILS_PER_PROBE, len(others))),
        new_wording=wording == "new-wording",
    )


def _arithmetic_probes(language: Language, seed: int) -> Iterator[Probe]:
    rng = language.random("arithmetic probes", seed)
    held_out = [one for one in language.calculations(seed)[1] if one.result >= SMALLEST_PROBED_RESULT]
    rng.shuffle(held_out)
    for number, calculation in enumerate(held_out[:ARITHMETIC_PROBES]):
        templates = language.arithmetic.templates(calculation)
        prompt, joiner = asked(templates[number % len(templates)], x=calculation.left, y=calculation.right)
        others = [n for n in range(SMALLEST_PROBED_RESULT, LARGEST_NUMBER + 1) if n != calculation.result]
        yield Probe(
            id=f"{language.name}/{ARITHMETIC}/{calculation.left}{calculation.operator}{calculation.right}",
            channel=language.name,
            family=ARITHMETIC,
            prompt=prompt,
            joiner=joiner,
            answer=str(calculation.result),
            foils=[str(n) for n in rng.sample(others, FOILS_PER_PROBE)],
        )
