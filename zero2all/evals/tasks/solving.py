"""Problems whose solution is written out: GSM8K (arithmetic in words), HumanEval (Python functions)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from zero2all.evals.items import CODE, NOT_READABLE, Item, ItemError
from zero2all.evals.tasks.files import DataFile, cell, text
from zero2all.evals.tasks.reader import Reader


def _gsm8k(row: Any, _: DataFile) -> Iterator[Item]:
    """The answer is a solution, with calculator marks `<<3*4=12>>`, and `#### 12` as its last line."""
    solution, mark, number = text(row, "answer").rpartition("####")
    if not mark:
        raise ItemError(NOT_READABLE, "the answer has no line with #### and the number")
    worked = re.sub(r"<<.*?>>", "", solution).strip()
    number = number.strip().replace(",", "")
    answer = f"{worked} The answer is {number}.".replace("\n", " ").strip()
    yield Item("", text(row, "question"), answer=answer, extra={"number": number})


def _humaneval(row: Any, _: DataFile) -> Iterator[Item]:
    extra = {"test": str(cell(row, "test")), "entry_point": text(row, "entry_point")}
    head, body = str(cell(row, "prompt")), str(cell(row, "canonical_solution"))
    yield Item(text(row, "task_id"), head, answer=body, language="code", extra=extra, shape=CODE)


SOLVING = (
    Reader("gsm8k", "en", _gsm8k, ("test",), ("train",), ("bits", "generate")),
    Reader("humaneval", "code", _humaneval, ("test", ""), forms=("bits", "generate"), default_shots=0),
)
