"""HumanEval answers that were written elsewhere, judged: each is run with its tests in the sandbox.

    {"task_id": "HumanEval/0", "completion": "    return 1\\n"}      several lines of a task: several samples

pass@k = 1 - C(n - c, k) / C(n, k)      of a task with c right among n samples, the mean over the tasks: the chance that
                                        one of k samples drawn from these is right, without the bias of trying k once
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from zero2all.common import jsonio
from zero2all.common.cores import usable_cores
from zero2all.common.errors import UsageError
from zero2all.common.progress import progress
from zero2all.evals.items import Task
from zero2all.evals.question_files import read_question_file, refuse
from zero2all.evals.sandbox import SandboxLimits, program_of, protection, run_program


def read_completions(path: Path, task: Task) -> dict[str, list[str]]:
    """The completions by task_id. The error names every line that cannot be used."""
    found: dict[str, list[str]] = {}
    known, problems = {item.id for item in task.items}, []
    for number, line in enumerate(read_question_file(path, "completions").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = jsonio.loads_strict(line)
            name, text = (row.get(field) if isinstance(row, dict) else None for field in ("task_id", "completion"))
            if not isinstance(name, str) or not isinstance(text, str):
                raise ValueError('expected {"task_id": "HumanEval/0", "completion": "    return 1"}')
            if name not in known:
                raise ValueError(f"{task.name} has no task_id {name[:80]!r}; it has {task.items[0].id} and others")
            found.setdefault(name, []).append(text)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    refuse(path, problems)
    return found


def judge_completions(found: Mapping[str, Sequence[str]], task: Task, k: int | None = None) -> dict[str, Any]:
    """Run all; `k`: samples that may be tried (default: as many as every task has)."""
    fewest = min(map(len, found.values()))
    if k is not None and k > fewest:
        raise UsageError(f"--k {k}: a task has only {fewest} completions. Give each at least {k}, or a smaller --k.")
    items = {item.id: item for item in task.items if item.id in found}
    programs = [(name, program_of(items[name], text)) for name, texts in found.items() for text in texts]
    outcomes: dict[str, list[str]] = {name: [] for name in found}
    with ThreadPoolExecutor(usable_cores()) as pool, progress(task.name, total=len(programs), unit="step") as bar:
        for (name, _), outcome in zip(
            programs, pool.map(lambda each: run_program(each[1], SandboxLimits()), programs), strict=True
        ):
            outcomes[name].append(outcome)
            bar.advance(1)
    passed = [(len(each), each.count("passed")) for each in outcomes.values()]
    shares = {f"pass@{k}": fmean(pass_at_k(n, c, k) for n, c in passed) for k in sorted({1, k or fewest})}
    counts = {"tasks": len(found), "of": len(task.items), "completions": len(programs)}
    return {**counts, **shares, "protection": protection(), "outcomes": outcomes}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of these samples, drawn without putting back, hold a right one."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)
