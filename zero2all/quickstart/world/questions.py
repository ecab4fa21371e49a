"""What to ask a model trained on the small world: probes, contrast pairs, and benchmark tasks that need no files.

A probe is a prompt and its one right answer: a fact in a wording that the text never uses for it, a fact in a
wording that the text never uses at all (`new_wordings`, harder and reported apart), or a held-out calculation.

A pair is a fact in a wording that the text never uses for it, and the same sentence with the answer of another fact.
The text has neither of the two.

    quickstart-facts-en, -zh          every fact, in a wording in which the text tells it. The wordings held out for it
                                      and the one that is never printed are what the rewrite R18 asks instead
    quickstart-unread-facts-en, -zh   facts of the same kind about people the text does not know: nobody can know them

A model that repeats sentences keeps its score on the first and loses it under R18; on the last it can only guess.
"""

import random
from collections.abc import Iterator, Sequence

from zero2all.evals.items import CONTINUE, Item, Task
from zero2all.evals.question_files import Pair, Probe
from zero2all.quickstart.world.facts import Fact, asked
from zero2all.quickstart.world.language import LANGUAGES, LARGEST_NUMBER, SMALLEST_PROBED_RESULT, Language

FOILS_PER_PROBE = 10
ARITHMETIC_PROBES = 30
ARITHMETIC = "arithmetic"
QUIZ_NAME = "quickstart-facts"
CHOICES = 4
UNREAD_RELATIONS = ("town", "teacher")
"""Relations over invented people: a new person makes a new fact."""
UNREAD_PEOPLE = {
    "en": (
        *("Maren Holt", "Casper Dunn", "Linnea Ash", "Corin Blake", "Petra Gale", "Otto Birch"),
        *("Thea Lark", "Ansel Reed", "Dorit Lane", "Bram Colter", "Yvette Moss", "Nils Harrow"),
    ),
    "zh": (
        *("方竹青", "唐雨辰", "贺一帆", "潘若溪", "汪子墨", "余秋白"),
        *("叶知秋", "段清远", "简星河", "陶然之", "洪晚舟", "康乐天"),
    ),
}


def probes(language: str, seed: int) -> list[Probe]:
    """Every probe of a language: held-out wordings, new wordings, held-out calculations."""
    chosen = LANGUAGES[language]
    return [*_fact_probes(chosen, seed), *_arithmetic_probes(chosen, seed)]


def _fact_probes(language: Language, seed: int) -> Iterator[Probe]:
    rng = language.random("foils", seed)
    held_out = language.held_out(seed)
    for place, fact in enumerate(language.facts):
        for wording in held_out[fact.key]:
            number = fact.relation.answer_last.index(wording)
            yield _fact_probe(language, fact, wording, f"wording-{number}", rng)
        yield _fact_probe(language, fact, _new_wording(fact, place), "new-wording", rng)


def _new_wording(fact: Fact, place: int) -> str:
    """One of those that are never printed, each for about as many facts."""
    return fact.relation.new_wordings[place % len(fact.relation.new_wordings)]


def _fact_probe(language: Language, fact: Fact, template: str, wording: str, rng: random.Random) -> Probe:
    prompt, joiner = _asked(language, fact, template)
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


def _asked(language: Language, fact: Fact, wording: str) -> tuple[str, str]:
    return asked(language.template(fact.relation, wording), s=fact.subject)


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


def pairs(language: str, seed: int) -> Iterator[Pair]:
    """Every pair of a language."""
    chosen = LANGUAGES[language]
    rng = chosen.random("pairs", seed)
    held_out = chosen.held_out(seed)
    for fact in chosen.facts:
        others = sorted({answer for _, answer in fact.relation.pairs} - {fact.answer})
        for wording in held_out[fact.key]:
            number, template = fact.relation.answer_last.index(wording), chosen.template(fact.relation, wording)
            yield Pair(
                id=f"{chosen.name}/{fact.relation.name}/{fact.subject}/wording-{number}",
                channel=chosen.name,
                kind=fact.relation.family,
                right=fact.told(template),
                wrong=template.format(s=fact.subject, a=rng.choice(others)),
            )


def quiz_tasks(seed: int) -> list[Task]:
    """All tasks of the quiz, for the world of this seed."""
    tasks = []
    for language in LANGUAGES.values():
        for name, items in ((QUIZ_NAME, _read(language, seed)), ("quickstart-unread-facts", _unread(language, seed))):
            task = Task(f"{name}-{language.name}", language.name, tuple(items), forms=("cloze", "choice"))
            tasks.append(task)
    return tasks


def _read(language: Language, seed: int) -> Iterator[Item]:
    rng = language.random("quiz", seed)
    held_out = language.held_out(seed)
    for place, fact in enumerate(language.facts):
        # Without variants, and in no frame: the text surely has it as it is.
        fixed = {each for each in fact.relation.answer_last if "[" not in each}.difference(fact.relation.questions)
        printed = sorted(fixed.difference(held_out[fact.key]))
        unprinted = [*held_out[fact.key], _new_wording(fact, place)]
        yield _item(language, fact, rng.choice(printed), unprinted, rng)


def _unread(language: Language, seed: int) -> Iterator[Item]:
    rng = language.random("unread facts", seed)
    for relation in language.relations:
        if relation.name in UNREAD_RELATIONS:
            for person in UNREAD_PEOPLE[language.name]:
                fact = Fact(relation, person, rng.choice(relation.pairs)[1])
                wording, *others = rng.sample(relation.answer_last, 3)
                yield _item(language, fact, wording, others, rng)


def _item(language: Language, fact: Fact, wording: str, others: Sequence[str], rng: random.Random) -> Item:
    wrong = sorted({answer for _, answer in fact.relation.pairs} - {fact.answer})
    choices = [fact.answer, *rng.sample(wrong, CHOICES - 1)]
    rng.shuffle(choices)
    return Item(
        f"{fact.relation.name}/{fact.subject}",
        _asked(language, fact, wording)[0],
        tuple(choices),
        choices.index(fact.answer),
        fact.answer,
        language.name,
        fact.relation.family,
        extra={"paraphrases": tuple(_asked(language, fact, each)[0] for each in others)},
        shape=CONTINUE,
    )
