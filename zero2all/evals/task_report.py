"""Benchmarks in the report of a checkpoint: the section `tasks`, its table and its metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zero2all.common.language import columns, padded
from zero2all.common.language import translate as t
from zero2all.evals.contamination import contaminated_ids, split_accuracy, split_words
from zero2all.evals.items import CODE, Task
from zero2all.evals.judge import FormResult, judge, summary
from zero2all.evals.sandbox import is_isolated, protection
from zero2all.evals.tasks.list import TaskQuestions
from zero2all.infer.engine import Engine

PROBLEMS_SHOWN = 3
LEAST_NAME_COLUMNS = 16
NOT_ISOLATED = (
    "  The programs were NOT isolated: this kernel lacks Landlock and mount namespaces, or seccomp. Checks in Python "
    "held them, which stop accidents, not attacks. Run such code in a virtual machine."
)


def task_section(
    engine: Engine, questions: TaskQuestions, tasks: list[Task], contamination: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The section `tasks` of a report. `contamination`: what is known of the items in the training text."""
    results = judge(engine, tasks, questions.forms, questions.shots, questions.limit, run_code=questions.run_code)
    problems = [line for task in tasks for line in (f"{task.name} {problem}" for problem in task.problems)]
    problems += dict.fromkeys(line for result in results for line in result.problems)  # those of cloze come twice
    found = {task.name: contaminated_ids(contamination, task) for task in tasks}
    values = [_as_values(result, found[result.task]) for result in results]
    section = {"results": values, "summary": summary(results), "problems": problems}
    if questions.run_code and any(item.shape == CODE for task in tasks for item in task.items):
        section["protection"] = protection()
    return section


def _as_values(result: FormResult, found: dict[str, set[str]] | None) -> dict[str, Any]:
    values = asdict(result)
    del values["problems"]
    correct = {each.id: each.correct for each in result.per_item if each.correct is not None}
    if found is not None and correct:
        values["contamination"] = split_accuracy(correct, found)
    return {**values, "centred": result.centred, "centred_interval": result.centred_interval}


def task_figures(section: dict[str, Any]) -> dict[str, float]:
    """Metrics: the centred accuracy of each form and task, or the bits per byte of its right answers; the summary."""
    figures = {}
    for each in section["results"]:
        value = each["bits_per_byte"] if each["form"] == "bits" else each["centred"]
        if value is not None:
            figures[f"eval/tasks/{each['form']}/{each['task']}"] = value
        if each["form"] == "bits" and each["centred"] is not None:
            figures[f"eval/tasks/greedy/{each['task']}"] = each["centred"]
    for language, found in section["summary"].items():
        figures[f"eval/tasks/summary/{language}"] = found["score"]
    return figures


def task_lines(section: dict[str, Any]) -> list[str]:
    """The section as a table for a terminal."""
    width = max([LEAST_NAME_COLUMNS, *(columns(each["task"]) for each in section["results"])])
    figures = t("form       shots  items  accuracy  chance  above chance  (95 %)           bits/byte")
    lines = ["", f"{padded(t('benchmarks'), width + 2)} {figures}"]
    for each in section["results"]:
        accuracy = f"{each['accuracy']:>8.1%}  {each['chance']:>6.1%}" if each["accuracy"] is not None else " " * 16
        above = f"{each['centred']:>12.1%}" if each["centred"] is not None else " " * 12
        interval = ""
        if each["centred_interval"] is not None:
            low, high = each["centred_interval"]
            interval = f"{low:.1%} … {high:.1%}"
        bits = f"{each['bits_per_byte']:.4f}" if each["bits_per_byte"] is not None else ""
        lines.append(
            f"  {padded(each['task'], width)} {each['form']:<10} {each['shots']:>5} {each['items']:>6,}  {accuracy}  "
            f"{above}  {interval:<16} {bits:>9}".rstrip()
        )
        notes = [t(f"{count:,} skipped: {reason}") for reason, count in each["skipped"].items()]
        if each["border_spans"]:
            notes.append(t(f"{each['border_spans']:,} with a token across prompt and answer, scored exactly"))
        if "contamination" in each:
            notes.append(t(split_words(each["contamination"])))
        if notes:
            lines.append(f"    {'; '.join(notes)}")
    names = {"en": "English", "zh": "Chinese"}
    for language, found in section["summary"].items():
        forms = ", ".join(f"{task} ({form})" for task, form in found["forms"].items())
        lines.append(t(f"  {names[language]}: {found['score']:.1%} above chance, the mean of {forms}"))
    if section["summary"]:
        lines.append(t("  The form of a task is chosen on one half of its items and scored on the other."))
    if not is_isolated(section.get("protection", {})):
        lines.append(t(NOT_ISOLATED))
    problems = section["problems"]
    if problems:
        lines += [t("  left out:"), *(f"    {line}" for line in problems[:PROBLEMS_SHOWN])]
        if len(problems) > PROBLEMS_SHOWN:
            lines.append(t(f"    … and {len(problems) - PROBLEMS_SHOWN:,} more, in the report's file"))
    return lines
