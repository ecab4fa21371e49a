"""`z2a eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.verb import Subparsers, add_verb, add_work, whole, workspace_of
from zero2all.common.workspace import Workspace
from zero2all.evals.options import OWN_PAIRS, OWN_PROBES, EvalOptions, default_file


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "eval",
        "bits per byte on held-out and other text, probes, contrast pairs",
        "z2a eval my-run --work my-workspace --all-steps",
        _eval,
    )
    parser.add_argument("run", help="name of the run")
    add_work(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=whole(0), metavar="N", help="checkpoint to use (default: the newest)")
    which.add_argument(
        "--all-steps", action="store_true", help="every checkpoint that was not evaluated with these settings before"
    )
    for name, of in (("probes", "questions to ask"), ("pairs", "contrast pairs to tell apart")):
        parser.add_argument(
            f"--{name}",
            metavar="FILE",
            help=f"{of}: YAML, or one JSON object a line (default: raw/{name}.jsonl of the workspace where there is "
            f"one, else our own; none: none)",
        )
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="a text file of your own, or a folder of them, to score as well; may be given several times",
    )
    parser.add_argument(
        "--stride",
        type=whole(0),
        default=0,
        metavar="N",
        help="score long texts in windows that begin N tokens apart, so that tokens have context (default 0: windows "
        "do not overlap)",
    )
    parser.add_argument(
        "--max-bytes",
        type=whole(1),
        default=1_000_000,
        metavar="N",
        help="held-out bytes to score per source, and bytes of each --text file (default 1000000)",
    )
    parser.add_argument(
        "--int8", action="store_true", help="score the held-out text once more with 8-bit weights: what they cost"
    )


def _eval(arguments: argparse.Namespace) -> None:
    from zero2all.evals.inputs import check_inputs

    workspace = workspace_of(arguments)
    options = options_of(arguments, workspace)
    check_inputs(workspace, arguments.run, arguments.step, options)  # before torch and the weights are loaded

    from zero2all.evals.report import evaluate_run, evaluate_steps, report_lines, step_lines
    from zero2all.infer.load import load_run

    if arguments.all_steps:
        reports = list(evaluate_steps(workspace, arguments.run, options))
        print("\n".join(step_lines(reports)))
        return
    loaded = load_run(workspace, arguments.run, arguments.step)
    print("\n".join(report_lines(evaluate_run(loaded, workspace, options))))


def options_of(arguments: argparse.Namespace, workspace: Workspace) -> EvalOptions:
    """What the words of the command line ask for."""
    return EvalOptions(
        max_bytes=arguments.max_bytes,
        stride=arguments.stride,
        probes=_file(arguments.probes, workspace, "probes.jsonl", OWN_PROBES),
        pairs=_file(arguments.pairs, workspace, "pairs.jsonl", OWN_PAIRS),
        texts=tuple(arguments.text),
        int8=arguments.int8,
    )


def _file(given: str | None, workspace: Workspace, name: str, own: Path) -> Path | None:
    if given is None:
        return default_file(workspace, name, own)
    return None if given == "none" else Path(given)
