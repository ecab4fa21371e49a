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


def _without_examples(files: list[DataFile]) -> list[DataFile]:
    """Their repositories have model solutions, examples and (GSM8K) a second wording beside the questions."""
    others = ("example", "socratic")
    return [file for file in files if not any(word in str(file).lower() for word in others)]


BOTH: dict[str, Any] = {"forms": ("bits", "generate"), "choose": _without_examples}
SOLVING = (
    Reader("gsm8k", "en", _gsm8k, ("test",), ("train",), **BOTH),
    Reader("humaneval", "code", _humaneval, ("test", ""), default_shots=0, **BOTH),
)
