"""Rewrites in the report of a checkpoint: the section `rewrites`, its table and its metrics; and what R17 needs.

R17: train once on question and options without the answer, then ask. If a model gains much more from having read the
questions once than from as much other text, the questions carry their answers (in the options), or were half known.
This writes the text to train on and the items to ask; the training is that of any corpus:

    z2a eval my-run --tasks exam --data eval-data --rewrites R17     writes runs/my-run/eval/once/
    z2a corpus build once=.../once/train.jsonl --work once …          then pack, and train from the checkpoint
    z2a eval once --tasks exam --data .../once/ask
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.files import write_atomic
from zero2all.common.language import columns, padded
from zero2all.common.language import translate as t
from zero2all.evals.items import CONTINUE, LABELS, QUESTION, Item, Task
from zero2all.evals.rewrites.list import TRAIN_ONCE, chosen_rewrites
from zero2all.evals.rewrites.measure import forms_words, measure_rewrites
from zero2all.evals.rewrites.options import listed
from zero2all.evals.tasks.list import TaskQuestions
from zero2all.infer.engine import Engine

LEAST_NAME_COLUMNS = 26


def rewrite_section(engine: Engine, questions: TaskQuestions, tasks: Sequence[Task], once: Path) -> dict[str, Any]:
    """The section `rewrites` of a report; with R17, what to train on and ask is written to the folder `once`."""
    chains = chosen_rewrites(questions.rewrites)
    measured = measure_rewrites(engine, tasks, chains, questions.shots, questions.limit, forms=questions.forms)
    section: dict[str, Any] = {"tasks": measured}
    if TRAIN_ONCE in questions.rewrites:
        write_once(tasks, once)
        section["once"] = str(once)
    return section


def rewrite_figures(section: Mapping[str, Any]) -> dict[str, float]:
    """Metrics: the memorisation gap of each rewrite, and the consistency of each task."""
    figures = {}
    for task, found in section["tasks"].items():
        for row in found["rows"]:
            if row["gap"] is not None:
                figures[f"eval/rewrites/gap/{task}/{row['rewrite']}/{row['form']}"] = row["gap"]
        for form, share in found["consistency"].items():
            figures[f"eval/rewrites/consistency/{task}/{form}"] = share
    return figures


def rewrite_lines(section: Mapping[str, Any]) -> list[str]:
    """The section as a table for a terminal."""
    rewrites = [row["rewrite"] for found in section["tasks"].values() for row in found["rows"]]
    width = max([LEAST_NAME_COLUMNS, *map(columns, rewrites)])
    figures = t("form               items  original  expected  rewritten      gap  (95 %)         same  all right")
    lines = ["", f"{padded(t('rewrites'), width + 4)} {figures}"]
    for task, found in section["tasks"].items():
        lines.append(f"  {task}")
        if not found["rows"]:
            lines.append(t("    none of these rewrites is compared in the forms of --forms"))
        lines += [_row_line(row, width) for row in found["rows"] if row["items"]]
        for reason in dict.fromkeys(reason for row in found["rows"] if not row["items"] for reason in row["skipped"]):
            without = dict.fromkeys(
                row["rewrite"] for row in found["rows"] if reason in row["skipped"] and not row["items"]
            )
            lines.append(t(f"    all items left out ({reason}): {', '.join(without)}"))
        for forms, (low, high) in found["spread"].items():
            lines.append(t(f"    {forms}: gaps from {low:+.1%} to {high:+.1%}"))
        for form, share in found["consistency"].items():
            lines.append(t(f"    the same answer as {form} and under all its rewrites: {share:.1%} of the items"))
    if "once" in section:
        lines.append(
            t(f"  R17: the text to train on once and its questions are in {section['once']} (docs/benchmarks.md)")
        )
    return lines


def _row_line(row: Mapping[str, Any], width: int) -> str:
    low, high = row["gap_interval"]
    same, all_right = ("" if row[name] is None else f"{row[name]:.1%}" for name in ("same_answer", "all_right"))
    left_out = sum(row["skipped"].values())
    return (
        f"    {padded(row['rewrite'], width)} {forms_words(row):<18} {row['items']:>5} {row['original']:>9.1%} "
        f"{row['expected']:>9.1%} {row['rewritten']:>10.1%} {row['gap']:>+8.1%}  {low:>+6.1%} {high:>+6.1%} "
        f"{same:>6} {all_right:>10}" + (t(f"  ({left_out:,} left out)") if left_out else "")
    ).rstrip()


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
