"""The facts of the small world as benchmark tasks that need no files.

    quickstart-facts-en, -zh          every fact, in a wording in which the text tells it. The wordings held out for it
                                      and the one that is never printed are what the rewrite R18 asks instead
    quickstart-unread-facts-en, -zh   facts of the same kind about people the text does not know: nobody can know them

A model that repeats sentences keeps its score on the first and loses it under R18; on the last it can only guess.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from zero2all.evals.items import CONTINUE, Item, Task
from zero2all.quickstart.world.facts import Fact
from zero2all.quickstart.world.language import LANGUAGES, Language

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
    for fact in language.facts:
        printed = [template for template in fact.relation.answer_last if template not in held_out[fact.key]]
        unprinted = [*held_out[fact.key], fact.relation.new_wording]
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
        fact.asked(wording)[0],
        tuple(choices),
        choices.index(fact.answer),
        fact.answer,
        language.name,
        fact.relation.family,
        extra={"paraphrases": tuple(fact.asked(template)[0] for template in others)},
        shape=CONTINUE,
    )
