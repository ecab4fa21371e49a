"""R17: train once on question and options without the answer, then ask.

If a model gains much more from having read the questions once than from as much other text, the questions carry their
answers (in the options), or were half known. This writes the text to train on and the items to ask; the training
is that of any corpus:

    z2a eval my-run --tasks exam --data eval-data --rewrites R17     writes runs/my-run/eval/once/
    z2a corpus build once=.../once/train.jsonl --work once …          then pack, and train from the checkpoint
    z2a eval once --tasks exam --data .../once/ask
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero2all.common import jsonio
from zero2all.common.files import write_atomic
from zero2all.evals.items import CONTINUE, LABELS, QUESTION, Item, Task
from zero2all.evals.rewrites.options import listed


def write_once(tasks: Sequence[Task], folder: Path) -> dict[str, int]:
    """`train.jsonl` with a document for every question and its options, and `ask/<task>/test.jsonl` with the items, as
    sets of one's own. Returns how many items each task gave; those of other shapes are left out."""
    documents: list[bytes] = []
    counts: dict[str, int] = {}
    for task in tasks:
        fitting = [item for item in task.items if item.choices and item.shape in (QUESTION, CONTINUE)]
        documents += [jsonio.dumps_line({"text": unanswered(item)}) for item in fitting]
        write_atomic(folder / "ask" / task.name / "test.jsonl", b"".join(map(_as_line, fitting)))
        counts[task.name] = len(fitting)
    write_atomic(folder / "train.jsonl", b"".join(documents))
    return counts


def unanswered(item: Item) -> str:
    """Passage, question and options, and nothing that tells which is right."""
    text = listed(item, LABELS)
    return f"{item.context}\n{text}" if item.context else text


def _as_line(item: Item) -> bytes:
    names = ("id", "question", "language", "subject", "context")
    return jsonio.dumps_line(
        {**{name: getattr(item, name) for name in names}, "choices": list(item.choices), "answer": item.gold}
    )
