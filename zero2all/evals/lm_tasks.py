"""Our sets as tasks of lm-eval: one YAML and one JSONL file for each task and form.

The prompts are written out, few-shot examples included, so that the harness asks exactly what `judge` asks. `cloze` and
`choice` become multiple choice. `generate` becomes generation with exact match (numbers: the last one that was
written). Bits per byte of the right answer have no counterpart in lm-eval, and programs are not run there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zero2all.common.errors import BadInputError
from zero2all.common.files import write_atomic
from zero2all.evals import forms
from zero2all.evals.items import BLANK, CODE, Item, Task

PREFIX = "z2a"
"""Begins the names of our tasks, so that they never hide one of lm-eval's."""
FORMS = ("cloze", "choice", "generate")
"""Those of our forms that lm-eval has."""
NUMBER_FILTER = {
    "name": "number",
    "filter": [
        {"function": "regex", "regex_pattern": forms.NUMBER, "group_select": -1},
        {"function": "take_first"},
    ],
}


@dataclass(frozen=True)
class Written:
    """One task of lm-eval in the folder."""

    name: str
    items: int
    left_out: int
    """Items that have no such form in lm-eval."""


def write_tasks(
    folder: Path,
    tasks: Iterable[Task],
    wanted: Sequence[str] = FORMS,
    shots: int | None = None,
    limit: int | None = None,
) -> list[Written]:
    """Write each task in each of the wanted forms that fit it. The YAML files name the JSONL files by their full path:
    a folder that was moved must be written again."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for task in tasks:
        for form in wanted:
            if form not in FORMS:
                raise BadInputError(f"lm-eval has no form {form!r}. Expected: {', '.join(FORMS)}.")
            if form in task.forms:
                found.append(_write(folder.resolve(), task, form, shots, limit))
    kept = [each for each in found if each.items]
    if not kept:
        raise BadInputError(f"None of the tasks has an item in one of the forms {', '.join(wanted)}: nothing to write.")
    return kept


def _write(folder: Path, task: Task, form: str, shots: int | None, limit: int | None) -> Written:
    name = "_".join([PREFIX, re.sub(r"\W+", "_", task.name), form])
    count = task.default_shots if shots is None else shots
    items = task.items[:limit]
    kept = [item for item in items if _fits(item, form)]
    if kept:
        shots_of = forms.Shots(task, count).of
        rows = [{"id": item.id, **_row(item, form, shots_of(item))} for item in kept]
        lines = folder / f"{name}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(lines, text.encode())
        asked = _asked(form, is_blank=kept[0].shape == BLANK, is_number="number" in kept[0].extra)
        until = {} if form != "generate" else {"generation_kwargs": _stops(kept[0])}
        about = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(lines)}}}
        whole = {**about, "test_split": "test", **asked, **until, "num_fewshot": 0, "metadata": {"version": 1}}
        text = yaml.safe_dump(whole, allow_unicode=True, sort_keys=False)
        write_atomic(folder / f"{name}.yaml", text.encode())
    return Written(name, len(kept), len(items) - len(kept))


def _fits(item: Item, form: str) -> bool:
    return bool(item.choices) if form != "generate" else not item.choices and item.shape != CODE


def _row(item: Item, form: str, shots: Sequence[Item]) -> dict[str, Any]:
    if form == "generate":
        number = item.extra.get("number")
        answer = item.answer if number is None else f"{number:g}" if isinstance(number, float) else str(number)
        return {"prompt": forms.generate(item, shots).prompt, "answer": answer}
    asked = forms.cloze(item, shots) if form == "cloze" else forms.choice(item, shots)
    if form == "cloze" and item.shape == BLANK:
        (after,) = {each.continuations[0] for each in asked.questions}
        return {"choices": [each.prompt for each in asked.questions], "prompt": after, "gold": item.gold}
    (question,) = asked.questions
    return {"prompt": question.prompt, "choices": list(question.continuations), "gold": item.gold}


def _asked(form: str, is_blank: bool, is_number: bool) -> dict[str, Any]:
    """How lm-eval reads a row."""
    if form == "generate":
        strict = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
        asked = {"output_type": "generate_until", "doc_to_text": "prompt", "doc_to_target": "answer"}
        if is_number:
            return {**asked, "filter_list": [NUMBER_FILTER], "metric_list": [{**strict, "regexes_to_ignore": [","]}]}
        return {**asked, "metric_list": [{**strict, "ignore_case": True, "ignore_punctuation": True}]}
    # A blank has several contexts and one continuation: lm-eval then wants the number of the right one as the text.
    text, target = ("gold", "prompt") if is_blank and form == "cloze" else ("prompt", "gold")
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm", "acc_bytes")
    ]
    return {
        "output_type": "multiple_choice",
        "doc_to_text": text,
        "doc_to_choice": "choices",
        "doc_to_target": target,
        "target_delimiter": "",
        "metric_list": metrics,
    }


def _stops(item: Item) -> dict[str, Any]:
    asked = forms.generate(item, ())
    return {"until": list(asked.stop), "max_gen_toks": asked.max_new_tokens, "do_sample": False}
