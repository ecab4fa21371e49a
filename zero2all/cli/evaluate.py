"""`z2a eval RUN` and the verbs of the same word: `z2a eval run / …`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import Subparsers, add_group, add_verb, add_work, whole, workspace_of

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace
    from zero2all.infer.load import LoadedModel

WORD = "eval"
VERBS = ("run",)
"""The second words of `z2a eval`; any other one is the name of a run."""


def with_verb(words: list[str]) -> list[str]:
    """`eval NAME …` as `eval run NAME …`; other command lines, and `eval --help`, as they are."""
    if words[:1] != [WORD] or len(words) == 1 or words[1] in (*VERBS, "-h", "--help"):
        return words
    return [WORD, "run", *words[1:]]


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    inner = add_group(
        verbs,
        WORD,
        "judge a run: bits per byte on held-out text, probes (`z2a eval RUN` is `z2a eval run RUN`)",
        "z2a eval my-run --work my-workspace",
    )
    _register_run(inner)


def _register_run(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "run",
        "judge one checkpoint: bits per byte per channel on held-out text, and probes",
        "z2a eval run my-run --work my-workspace --probes raw/probes.jsonl",
        _run,
    )
    parser.add_argument("run", help="name of the run")
    add_work(parser)
    parser.add_argument("--step", type=whole(0), metavar="N", help="checkpoint to use (default: the newest)")
    _add_questions(parser)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    """What is asked of a checkpoint: the same flags for every verb that judges one."""
    parser.add_argument(
        "--probes",
        type=Path,
        default=None,
        metavar="FILE",
        help="questions to ask, one JSON object a line (default: none are asked)",
    )
    parser.add_argument(
        "--max-bytes",
        type=whole(1),
        default=1_000_000,
        metavar="N",
        help="held-out bytes to score per source (default 1000000)",
    )
    parser.add_argument(
        "--int8", action="store_true", help="score the held-out text once more with 8-bit weights: what they cost"
    )


def _check_questions(arguments: argparse.Namespace, workspace: Workspace, step: int | None) -> None:
    """Refuse what cannot be asked, before torch and the weights are loaded."""
    from zero2all.evals.inputs import check_inputs

    check_inputs(workspace, arguments.run, step, arguments.probes)


def _ask(arguments: argparse.Namespace, workspace: Workspace, loaded: LoadedModel) -> dict[str, Any]:
    """Ask one checkpoint everything that the flags ask for; returns its report, which is written beside the run."""
    from zero2all.evals.report import evaluate_run

    return evaluate_run(loaded, workspace, arguments.probes, arguments.max_bytes, arguments.int8)


def _run(arguments: argparse.Namespace) -> None:
    workspace = workspace_of(arguments)
    _check_questions(arguments, workspace, arguments.step)

    from zero2all.evals.report import report_lines
    from zero2all.infer.load import load_run

    report = _ask(arguments, workspace, load_run(workspace, arguments.run, arguments.step))
    print("\n".join(report_lines(report)))
