"""`z2a eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.verb import Subparsers, add_verb, add_work, whole, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "eval",
        "bits per byte per channel on held-out text, and probes",
        "z2a eval my-run --work my-workspace --probes raw/probes.jsonl",
        _eval,
    )
    parser.add_argument("run", help="name of the run")
    add_work(parser)
    parser.add_argument("--step", type=whole(0), metavar="N", help="checkpoint to use (default: the newest)")
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


def _eval(arguments: argparse.Namespace) -> None:
    from zero2all.evals.inputs import check_inputs

    workspace = workspace_of(arguments)
    check_inputs(workspace, arguments.run, arguments.step, arguments.probes)  # before torch and the weights are loaded

    from zero2all.evals.report import evaluate_run, report_lines
    from zero2all.infer.load import load_run

    loaded = load_run(workspace, arguments.run, arguments.step)
    report = evaluate_run(loaded, workspace, arguments.probes, arguments.max_bytes, arguments.int8)
    print("\n".join(report_lines(report)))
