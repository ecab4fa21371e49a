"""HumanEval answers that were written elsewhere, judged: each is run with its tests in the sandbox.

{"task_id": "HumanEval/0", "completion": "    return 1\\n"}      several lines of a task: several samples
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from zero2all.common import jsonio
from zero2all.common.cores import usable_cores
from zero2all.evals.items import Task
from zero2all.evals.question_files import read_question_file, refuse
from zero2all.evals.sandbox import SandboxLimits, program_of, protection, run_program


def read_completions(path: Path, task: Task) -> dict[str, list[str]]:
    """The completions by task_id. The error names every line that cannot be used."""
    found: dict[str, list[str]] = {}
    known, problems = {item.id for item in task.items}, []
    for number, line in enumerate(read_question_file(path, "completions").split(b"\n"), 1):
        try:
            row = jsonio.loads_strict(line) if line.strip() else None
        except ValueError as error:
            problems.append(f"line {number} is not JSON ({error})")
            continue
        name, text = (row.get(field) if isinstance(row, dict) else None for field in ("task_id", "completion"))
        if isinstance(text, str) and isinstance(name, str) and name in known:
            found.setdefault(name, []).append(text)
        elif line.strip():
            example = jsonio.dumps_line({"task_id": task.items[0].id, "completion": "    return 1"}).decode().strip()
            problems.append(
                f"line {number}: expected a task_id of {task.name} and a text: {example}; got {str(name)[:80]!r}"
            )
    refuse(path, problems)
    return found


def judge_completions(found: Mapping[str, Sequence[str]], task: Task) -> dict[str, Any]:
    """Run all; pass@1, and pass@k with k as many as every task has."""
    items = {item.id: item for item in task.items}
    programs = [program_of(items[name], text) for name, texts in found.items() for text in texts]
    with ThreadPoolExecutor(usable_cores()) as pool:
        ran = iter(list(pool.map(lambda program: run_program(program, SandboxLimits()), programs)))
    outcomes = {name: [next(ran) for _ in texts] for name, texts in found.items()}
    shares = {
        f"pass@{k}": fmean(pass_at_k(len(each), each.count("passed"), k) for each in outcomes.values())
        for k in sorted({1, min(map(len, outcomes.values()))})
    }
    counts = {"tasks": len(found), "of": len(items), "completions": len(programs)}
    return {**counts, **shares, "protection": protection(), "outcomes": outcomes}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of these samples, drawn without putting back, hold a right one."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)
