"""A set of your own: JSON lines or CSV with question, choices and answer.

    {"question": "首都是？", "choices": ["北京", "上海"], "answer": "北京"}
    {"question": "2 + 2 =", "answer": "4"}

`answer` is the text of the right choice, its letter, or (in JSON) its number from 0; without choices, a text or a list
of texts that are all right. A CSV has the choices in columns
A, B, C, … or in one column, separated by |. May be given as well: id, context, subject, language (en, zh), and shape:
`continue` for a text that goes on with the right choice, without the words Question and Answer around it (The capital
of France is → Paris). Files with train or dev in their name give the examples of few-shot prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zero2all.evals.items import CONTINUE, LABELS, NO_ANSWER, NOT_READABLE, QUESTION, Item, ItemError
from zero2all.evals.tasks.files import DataFile, cell, text
from zero2all.evals.tasks.reader import Reader, gold_of, with_choices


def _own(row: Any, _: DataFile) -> Iterator[Item]:
    question, answer, choices = text(row, "question"), cell(row, "answer"), _choices(row)
    language = str(row.get("language") or ("zh" if re.search(r"[\u4e00-\u9fff]", question) else "en"))
    more: dict[str, Any] = {
        "language": language,
        "subject": str(row.get("subject") or ""),
        "context": str(row.get("context") or ""),
    }
    more["shape"] = str(row.get("shape") or QUESTION)
    if more["shape"] not in (QUESTION, CONTINUE):
        raise ItemError(NOT_READABLE, f"the shape is {more['shape']!r}, not {QUESTION} or {CONTINUE}")
    name = str(row.get("id") or "")
    answers = [str(each).strip() for each in answer] if isinstance(answer, list) else [str(answer).strip()]
    if not choices:
        if not answers:
            raise ItemError(NO_ANSWER, "it has no right answer")
        yield Item(name, question, answer=answers[0], **more, extra={"aliases": answers[1:]} if answers[1:] else {})
        return
    if isinstance(answer, list):
        reason = f"it has {len(answers)} answers and choices; a question with choices has one answer"
        raise ItemError(NOT_READABLE, reason)
    labels = LABELS[: len(choices)]
    if isinstance(answer, int):
        gold = answer
    elif answers[0] in choices:
        gold = choices.index(answers[0])
    else:  # a letter, or a text that is no option: then the texts are listed
        gold = gold_of(answers[0], list(labels) if len(answers[0]) == 1 else choices)
    yield replace(with_choices(question, choices, gold, **more), id=name)


def _choices(row: Any) -> list[str]:
    given = row.get("choices")
    if isinstance(given, str):
        given = given.split("|") if given else []
    if given is None:
        given = [row[label] for label in LABELS if row.get(label)]
    return [str(choice).strip() for choice in given]


def own_reader(name: str) -> Reader:
    """The reader of a set that is none of the public ones."""
    return Reader(name, "", _own, ("test", "", "val"), ("train", "dev"), is_own=True)
