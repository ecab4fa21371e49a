"""Two models, or two checkpoints, on the same items: their difference with a paired interval.

    z2a eval diff my-run@1000 my-run          the report of step 1,000 against the newest one

Both answered the same questions, so each item is compared with itself: of 1,000 items that both get right or wrong
alike, only the others say which is better. Of right and wrong, the interval is Bonett and Price's; of bits, the normal
one of the paired differences. A difference whose interval holds 0 is none.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json_object
from zero2all.common.language import cells, table_lines
from zero2all.common.language import translate as t
from zero2all.common.workspace import Workspace
from zero2all.evals.judge import Z95
from zero2all.evals.rewrites.measure import mean_gap
from zero2all.evals.signal import read_reports
from zero2all.evals.tasks.list import SHARED_FOLDERS

Key = tuple[str, str]
"""What was asked, and how."""
Answers = dict[str, tuple[float, float]]
"""By id: right (0 or 1, or partial credit) and 1; or bits and bytes."""


def report_of(workspace: Workspace, name: str) -> tuple[str, dict[str, Any]]:
    """A report by its file, by `RUN@STEP`, or the newest of a run; with the name to show."""
    if name.endswith(".json") and Path(name).is_file():
        return Path(name).stem, read_json_object(Path(name))
    run, _, step = name.partition("@")
    if step and not step.isdecimal():
        raise UsageError(f"{name}: the step must be a number, as in {run}@1000.")
    reports = read_reports(workspace.existing_run(run))
    found = [report for report in reports if not step or report["step"] == int(step)]
    if not found:
        steps = ", ".join(str(report["step"]) for report in reports) or "none"
        raise BadInputError(
            f"{name} has no report of an evaluation{f' of step {step}' if step else ''}; there are: {steps}. "
            f"Evaluate it first: z2a eval {run} --tasks NAMES"
        )
    return f"{run}@{found[-1]['step']}", found[-1]


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for everything that both were asked: the figures, and other - one with its interval and p."""
    try:
        first, second = dict(_asked(one)), dict(_asked(other))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInputError("One of the two is no report of `z2a eval RUN`: those are named step-….json.") from error
    rows, changed = [], changed_data(one, other)
    for (name, form), answers in first.items():
        both = sorted(answers.keys() & second.get((name, form), {}).keys())
        if not both or SHARED_FOLDERS.get(task := name.rpartition(": ")[2], task) in changed:
            continue
        before, after = ([each[item] for item in both] for each in (answers, second[name, form]))
        is_bits = form == "bits"
        size = sum(size for _, size in before) if is_bits else len(both)
        gaps = [new - old for (old, _), (new, _) in zip(before, after, strict=True)]
        if is_bits:
            gap, interval, p = _of_bits(gaps, size)
        else:
            gap, interval, p = mean_gap(gaps)
        values = [sum(value for value, _ in each) / size for each in (before, after)]
        found = {"name": name, "form": form, "items": len(both), "one": values[0], "other": values[1]}
        rows.append({**found, "difference": gap, "interval": interval, "p": p})
    return rows


def changed_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """The folders of both whose files are not the same: an id may stand for another question, so they are left out."""
    files: list[dict[str, str]] = [{}, {}]
    for kept, report in zip(files, (one, other), strict=True):
        for part in ("suites", "tasks"):
            kept |= (report.get("settings", {}).get(part) or {}).get("data", {})
    asked = ({path.partition("/")[0] for path in kept} for kept in files)
    return {path.partition("/")[0] for path, _ in files[0].items() ^ files[1].items()}.intersection(*asked)


def _of_bits(gaps: list[float], size: float) -> tuple[float, tuple[float, float], float]:
    scale = len(gaps) / size
    middle, error = fmean(gaps) * scale, (stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf) * scale
    p = math.erfc(abs(middle) / error / math.sqrt(2)) if error else float(not middle)
    return middle, (middle - Z95 * error, middle + Z95 * error), p


def _asked(report: Mapping[str, Any]) -> Iterator[tuple[Key, Answers]]:
    """What a report says of each item, by what was asked."""
    results = [(each["task"], each) for each in report.get("tasks", {}).get("results", ())]
    for suite, found in report.get("suites", {}).items():
        results += [(f"{suite}: {each['task']}", each) for each in found["tasks"]]
    for name, each in results:
        items = [item for item in each["per_item"] if item["correct"] is not None]
        yield (name, each["form"] if each["form"] != "bits" else "greedy"), _right(items, "correct")
        if each["form"] == "bits":
            bits = {item["id"]: (item["bits"], item["bytes"]) for item in each["per_item"] if item["bits"] is not None}
            yield (name, "bits"), bits
        yield (name, f"{each['form']} credit"), _right(items, "credit")
    probes = [{**each, "id": each["probe"]["id"]} for each in report.get("probe_results", ())]
    yield ("probes", "accuracy"), _right(probes, "correct")
    pairs = [
        (each["pair"]["id"], each["right_logprob"] > each["wrong_logprob"]) for each in report.get("pair_results", ())
    ]
    yield ("pairs", "accuracy"), _right([{"id": name, "right": right} for name, right in pairs], "right")


def _right(items: Any, field: str) -> Answers:
    return {str(item["id"]): (float(item[field]), 1.0) for item in items if item.get(field) is not None}


def diff_lines(one: str, other: str, rows: list[dict[str, Any]]) -> list[str]:
    """The rows for a terminal."""
    if not rows:
        return [t("Nothing was asked of both: evaluate them with the same --tasks, --probes or --pairs.")]
    shown = []
    for row in rows:
        how = ".4f" if row["form"] == "bits" else ".1%"
        formats = {"form": "", "items": ",", "one": how, "other": how, "difference": f"+{how}", "interval": f"+{how}"}
        mark = " " if row["interval"][0] <= 0 <= row["interval"][1] else "*"
        shown.append([row["name"], *cells(row, formats), f"{row['p']:.3f} {mark}"])
    heading = t("name | form | items | first | second | difference | (95 %) | p")
    lines = [t(f"{other} against {one}, the same items"), "", *table_lines(heading, shown)]
    clear = sum(not row["interval"][0] <= 0 <= row["interval"][1] for row in rows)
    by_luck = len(rows) / 20
    lines.append(t(f"* {clear} of {len(rows)} differ beyond their interval; by luck about {by_luck:.1f} would."))
    return lines
