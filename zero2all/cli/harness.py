"""`z2a eval harness`: the standard harness (lm-eval) on a run; `z2a eval export-tasks`: our sets as its tasks."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.benchmarks import add_data, names
from zero2all.cli.runs import add_run_name
from zero2all.cli.verb import Subparsers, add_verb, whole, workspace_of
from zero2all.common.language import translate as t


def register(inner: Subparsers) -> None:
    """Add both verbs to `z2a eval`."""
    parser = add_verb(
        inner,
        "harness",
        "run tasks of lm-eval on one checkpoint, offline (pip install 'zero2all[lmeval]')",
        "z2a eval harness my-run --work my-workspace --tasks z2a_my_questions_cloze --include lm-tasks",
        _harness,
    )
    add_run_name(parser)
    parser.add_argument(
        "--tasks", type=names, required=True, metavar="NAMES", help="names of tasks, separated by commas"
    )
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder with tasks that lm-eval does not have")
    parser.add_argument("--step", type=whole(0), metavar="N", help="checkpoint to use (default: the newest)")
    parser.add_argument("--shots", type=whole(0), metavar="N", help="examples in a prompt (default: as the task says)")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="only the first N items of each task")

    parser = add_verb(
        inner,
        "export-tasks",
        "write benchmarks, or a set of your own, as tasks of lm-eval: YAML and JSON lines",
        "z2a eval export-tasks lm-tasks --data eval-data --tasks cmmlu,my-questions",
        _export,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to")
    add_data(parser)
    parser.add_argument("--tasks", type=names, default=("all",), metavar="NAMES", help="which ones (default: all)")
    parser.add_argument("--shots", type=whole(0), metavar="N", help="examples in a prompt (default: as the set says)")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="only the first N items of each")


def _harness(arguments: argparse.Namespace) -> None:
    from zero2all.evals.lm_harness import harness_lines, require_lm_eval, run_harness

    require_lm_eval()
    workspace = workspace_of(arguments)

    from zero2all.common.progress import say
    from zero2all.evals.options import report_path, write_report
    from zero2all.infer.engine import Engine
    from zero2all.infer.load import load_model

    loaded = load_model(arguments.run, workspace, arguments.step)
    found = run_harness(Engine(loaded), arguments.tasks, arguments.include, arguments.shots, arguments.limit)
    settings = {name: getattr(arguments, name) for name in ("tasks", "shots", "limit")}
    settings["include"] = None if arguments.include is None else str(arguments.include)
    report = {"run": loaded.name, "step": loaded.step, "tokens": loaded.tokens, "settings": settings, **found}
    print("\n".join(harness_lines(report)))
    if loaded.config is not None and loaded.folder is not None:
        path = report_path(loaded.folder, loaded.step, "harness-")
        write_report(path, report, say)
        print(t(f"written to {path}"))


def _export(arguments: argparse.Namespace) -> None:
    from zero2all.evals.lm_tasks import write_tasks
    from zero2all.evals.tasks.list import read_tasks

    for each in write_tasks(
        arguments.folder, read_tasks(arguments.data, arguments.tasks), shots=arguments.shots, limit=arguments.limit
    ):
        left_out = t(f", {each.left_out:,} left out (no such form in lm-eval)") if each.left_out else ""
        print(t(f"{each.name}: {each.items:,} items{left_out}"))
    print(t(f"run them with: z2a eval harness RUN --include {arguments.folder} --tasks NAME"))
