"""Exams with lettered options: CMMLU, C-Eval, MMLU, ARC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from zero2all.evals.items import LABELS, Item
from zero2all.evals.tasks.files import DataFile, cell, text
from zero2all.evals.tasks.reader import Reader, gold_of, with_choices

FOUR = tuple("ABCD")


def _subject(file: DataFile) -> str:
    """`anatomy` of `test/anatomy.csv`, `val/anatomy_val.csv` and `anatomy/val-00000-of-00001.parquet`."""
    if re.match(r"(train|dev|val|test)-\d", file.stem):
        return file.name.split("/")[-2] if "/" in file.name else ""
    return re.sub(r"_(train|dev|val|test)$", "", file.stem)


def lettered(language: str) -> Any:
    """Rows with the columns question, A, B, C, D, answer, in small or capital letters."""

    def read(row: Any, file: DataFile) -> Iterator[Item]:
        question, answer = text(row, "question", "Question"), text(row, "answer", "Answer")
        choices = [text(row, label) for label in FOUR]
        yield with_choices(question, choices, gold_of(answer, FOUR), language=language, subject=_subject(file))

    return read


def _mmlu(row: Any, file: DataFile) -> Iterator[Item]:
    if "choices" not in row:
        yield from lettered("en")(row, file)
        return
    answer = cell(row, "answer")
    gold = gold_of(answer, FOUR) if isinstance(answer, str) else int(answer)
    subject = str(row.get("subject") or _subject(file))
    yield with_choices(text(row, "question"), cell(row, "choices"), gold, subject=subject)


def _all_or_each(files: list[DataFile]) -> list[DataFile]:
    """The hub has every subject once in its own folder and once in `all`."""
    return [file for file in files if "all" in file.name.split("/")[:-1]] or files


def _arc(row: Any, file: DataFile) -> Iterator[Item]:
    """The original nests the options below the question and calls it a stem; the hub has two lists."""
    question = cell(row, "question")
    if isinstance(question, dict):
        options, question = cell(question, "choices"), text(question, "stem")
        labels, texts = [option["label"] for option in options], [option["text"] for option in options]
    else:
        options = cell(row, "choices")
        labels, texts = list(options["label"]), list(options["text"])
    item = with_choices(str(question).strip(), texts, gold_of(text(row, "answerKey"), labels), subject=file.stem)
    yield Item(text(row, "id"), item.question, item.choices, item.gold, item.answer)


def _arc_reader(part: str) -> Reader:
    """Both parts come together, and the original has a CSV without options beside each file."""
    return Reader(
        f"arc_{part}",
        "en",
        _arc,
        ("test",),
        ("train", "val", "dev"),
        suffixes=(".jsonl", ".parquet"),
        choose=lambda files: [file for file in files if part in str(file).lower()],
    )


EXAMS = (
    Reader("cmmlu", "zh", lettered("zh"), ("test",), ("dev",)),
    Reader("ceval", "zh", lettered("zh"), ("val",), ("dev",)),  # the answers of its test split are not public
    Reader(
        "mmlu", "en", _mmlu, ("test",), ("dev", "val"), header=("question", *LABELS[:4], "answer"), choose=_all_or_each
    ),
    _arc_reader("easy"),
    _arc_reader("challenge"),
)
