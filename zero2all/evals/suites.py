"""One score that people can compare: a suite asks fixed tasks, each in one fixed form, of the same items every time.

    centred = (accuracy - chance) / (1 - chance)     of a task: 0 is guessing, 1 is all right
    score   = mean of the tasks' centred accuracies  of a suite

Items are those that come first by a hash of their text. One that is longer than the model's context counts as a guess,
so that every model is asked the same ones. The interval, 95 %, is MOVER's (Zou and Donner 2008) of those of the tasks:
the mean less sqrt(sum of (centred - lower end)²) / tasks, and so upwards. A suite that lacks a task has another name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.schema import nearest_hint
from zero2all.evals.chat_tasks import KINDS, chat_task
from zero2all.evals.items import CHAT_FORM, Item, Task
from zero2all.evals.tasks.list import TaskQuestions, read_tasks

if TYPE_CHECKING:
    from zero2all.evals.judge import FormResult
    from zero2all.infer.engine import Engine
    from zero2all.infer.load import LoadedModel

VERSION = 1
"""Every change of the table, of a number here or of what is asked in a chat is a new version."""
ITEMS = 1000
"""Of each task, without examples before them: a short context holds them, and most published values are such."""
SUITES = {
    "core-en": {  # task: form. Not winogrande and boolq, too noisy; arc_challenge and mmlu move later than arc_easy
        "blimp": "cloze",  # grammar: the first to move, an n-gram model is above chance
        "lambada": "bits",  # the last word of a passage, written greedily: 0 at first, then a long way up
        "hellaswag": "cloze",  # a scene to continue: smooth, from about 100 M on
        "piqa": "cloze",  # everyday physics: 51 to 74 % in models of 64 M to 1.1 B
        "arc_easy": "cloze",  # school science, facts of the training text: 28 to 58 % in the same models
    },
    "core-zh": {  # not ceval: exams again
        "zhoblimp": "cloze",  # grammar, as blimp
        "c3": "cloze",  # reading: the passage helps before facts are known
        "cmmlu": "cloze",  # exams, facts: by label at chance up to 1 B
    },
    **{f"chat-{language}": {f"{kind}-{language}": CHAT_FORM for kind in KINDS} for language in ("en", "zh")},
}


@dataclass(frozen=True)
class SuiteQuestions:
    """Suites to ask, as the command line names them."""

    names: tuple[str, ...]
    data: Path
    """Folder with one folder for each task."""

    def read(self) -> tuple[dict[str, Task], dict[str, str]]:
        """Their tasks by name, and why others cannot be asked; an error for a suite that does not exist or has none."""
        tasks: dict[str, Task] = {}
        missing: dict[str, str] = {}
        for suite in self.names:
            if suite not in SUITES:
                raise UsageError(f"There is no suite {suite!r}. {nearest_hint(suite, SUITES)}")
            for name, form in SUITES[suite].items():
                if form == CHAT_FORM:
                    tasks[name] = chat_task(name)
                    continue
                try:
                    (task,) = read_tasks(self.data, [name])
                    if (count := len(fixed_items(task.items))) < ITEMS:
                        raise BadInputError(f"Of its items {count:,} can be asked, not {ITEMS:,}: files are missing.")
                    tasks[name] = task
                except BadInputError as error:
                    missing[name] = str(error)
            if not tasks.keys() & SUITES[suite].keys():
                download = f"z2a eval download {' '.join(SUITES[suite])} --data {self.data}"
                raise BadInputError(f"No task of {suite} is in {self.data}. Where there is a network: `{download}`")
        return tasks, missing

    def record(self) -> dict[str, Any]:
        """These settings as a report keeps them, with the checksum of every file."""
        names = tuple(name for suite in self.names for name, form in SUITES[suite].items() if form != CHAT_FORM)
        return {"suites": self.names, "version": VERSION, **TaskQuestions(names, self.data).record()}

    def check(self, loaded: LoadedModel) -> None:
        """Refuse a model that has not learned to answer, where answers are asked for."""
        from zero2all.infer.chat import choose  # loads torch

        chats = [suite for suite in self.names if CHAT_FORM in SUITES[suite].values()]
        if chats and choose(loaded).how != "template":
            raise UsageError(
                f"{', '.join(chats)} cannot be asked of {loaded.name}: as far as is known it has learned no chat "
                f"template. Ask a run of `z2a sft`, `z2a dpo` or `z2a rl`, or leave the suite out."
            )


def fixed_items(items: Sequence[Item]) -> tuple[Item, ...]:
    """The items that a suite asks, whatever their order, their names and their files; each text once."""
    found = {}
    for item in items:
        text = "\0".join([item.context, item.question, *item.choices, item.answer])
        found[hashlib.sha256(text.encode()).digest()] = item
    return tuple(found[rank] for rank in sorted(found)[:ITEMS])


def ask_task(engine: Engine, task: Task, form: str, loaded: LoadedModel | None = None) -> FormResult:
    """What the model makes of these items in this form. `loaded`: its template, for the form `chat`."""
    from zero2all.evals.judge import JudgeOptions, judge, wilson  # loads torch
    from zero2all.infer.chat import chat_prompt

    asked = replace(task, items=fixed_items(task.items), skipped={})
    how = JudgeOptions((form,), shots=0)
    if loaded is not None and form == CHAT_FORM:
        how = JudgeOptions(shots=0, chat=partial(chat_prompt, loaded, frame="template"))
    found = judge(engine, [asked], how)[0]
    chances = {item.id: 1 / len(item.choices) if item.choices else 0.0 for item in asked.items}
    chances |= {each.id: each.chance for each in found.per_item}
    right = sum((chances | {each.id: float(bool(each.correct)) for each in found.per_item}).values())
    count, chance = len(chances), fmean(chances.values())
    return replace(found, items=count, chance=chance, accuracy=right / count, interval=wilson(right, count))


def mean_score(results: Sequence[FormResult]) -> dict[str, Any]:
    """The mean of the centred accuracies, with its interval."""
    found = [(each.centred or 0.0, *(each.centred_interval or (0.0, 0.0))) for each in results]
    centred, lows, highs = zip(*found, strict=True)
    mean, below, above = fmean(centred), math.dist(centred, lows) / len(found), math.dist(highs, centred) / len(found)
    return {"score": mean, "interval": (mean - below, mean + above)}
