"""The facts of the small world as benchmark tasks that need no files: what the model has read, asked as it was read.

    quickstart-facts-en, -zh           every fact in a wording of the text; the wordings that are held out for it, and the
                                       one that is never printed, are the paraphrases that the rewrite R18 asks instead
    quickstart-sums-en, -zh            calculations of the text
    quickstart-unseen-sums-en, -zh     calculations that are in the text in no wording: facts never read

A model that repeats sentences keeps its score on the first and loses it under R18 and on the last.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from zero2all.evals.items import CONTINUE, Item, Task
from zero2all.quickstart.world.arithmetic import LARGEST_NUMBER, SMALLEST_PROBED_RESULT, Calculation
from zero2all.quickstart.world.facts import asked
from zero2all.quickstart.world.language import LANGUAGES, Language

QUIZ_NAME = "quickstart-facts"
CHOICES = 4
SUMS = 40


def quiz_tasks(seed: int) -> list[Task]:
    """All tasks of the quiz, for the world of this seed."""
    tasks = []
    for language in LANGUAGES.values():
        read, unseen = language.calculations(seed)
        items = {
            QUIZ_NAME: _facts(language, seed),
            "quickstart-sums": _sums(language, read, seed),
            "quickstart-unseen-sums": _sums(language, unseen, seed),
        }
        for name, found in items.items():
            forms = ("cloze", "choice")
            tasks.append(Task(f"{name}-{language.name}", language.name, tuple(found), forms=forms, default_shots=0))
    return tasks


def _facts(language: Language, seed: int) -> Iterator[Item]:
    rng = language.random("quiz", seed)
    held_out = language.held_out(seed)
    for fact in language.facts:
        printed = [template for template in fact.relation.answer_last if template not in held_out[fact.key]]
        wording = rng.choice(printed)
        others = sorted({answer for _, answer in fact.relation.pairs} - {fact.answer})
        unread = [fact.asked(template)[0] for template in (*held_out[fact.key], fact.relation.new_wording)]
        name = f"{fact.relation.name}/{fact.subject}"
        yield _item(language, name, fact.asked(wording)[0], fact.answer, others, rng, fact.relation.family, unread)


def _sums(language: Language, calculations: Sequence[Calculation], seed: int) -> Iterator[Item]:
    rng = language.random("quiz sums", seed)
    fitting = [each for each in calculations if each.result >= SMALLEST_PROBED_RESULT]
    for each in rng.sample(fitting, min(SUMS, len(fitting))):
        template = rng.choice(language.arithmetic.templates(each))
        prompt, _ = asked(template, x=each.left, y=each.right)
        near = [each.result + step for step in (-2, -1, 1, 2)]
        others = [str(n) for n in near if SMALLEST_PROBED_RESULT <= n <= LARGEST_NUMBER]
        name = f"{each.left}{each.operator}{each.right}"
        yield _item(language, name, prompt, str(each.result), others, rng, "sums", ())


def _item(
    language: Language,
    name: str,
    prompt: str,
    answer: str,
    others: list[str],
    rng: random.Random,
    subject: str,
    paraphrases: Sequence[str],
) -> Item:
    choices = [answer, *rng.sample(others, min(CHOICES - 1, len(others)))]
    rng.shuffle(choices)
    return Item(
        name,
        prompt,
        tuple(choices),
        choices.index(answer),
        answer,
        language.name,
        subject,
        extra={"paraphrases": tuple(paraphrases)},
        shape=CONTINUE,
    )
