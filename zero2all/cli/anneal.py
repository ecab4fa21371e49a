"""`z2a anneal RUN`: let the learning rate of a run fall to its end from where it stands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.runs import add_run_name
from zero2all.cli.verb import Subparsers, add_verb, real, whole, workspace_of

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = ("linear", "1-sqrt", "cosine")
DEFAULT_SHARE = 0.2
"""Of the steps made so far."""


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "anneal",
        "end a run well: let its learning rate fall from where it stands, whatever is scheduled",
        "z2a anneal my-run --steps 500 --work my-workspace",
        _anneal,
    )
    add_run_name(parser)
    parser.add_argument(
        "--steps",
        type=whole(1),
        default=None,
        metavar="N",
        help="steps over which the rate falls; the run ends with them (default: a fifth of those made so far)",
    )
    parser.add_argument("--shape", choices=SHAPES, default="1-sqrt", help="how it falls (default 1-sqrt)")
    parser.add_argument(
        "--to-share",
        type=real(0, 1),
        default=0.0,
        metavar="S",
        help="last rate as a share of the present one (default 0)",
    )


def _anneal(arguments: argparse.Namespace) -> None:
    from zero2all.common.errors import UsageError
    from zero2all.common.progress import counted
    from zero2all.config.schedule import learning_rate
    from zero2all.config.training import AnnealConfig
    from zero2all.train.anneal import ANNEAL_FILE, begun_anneal, request_anneal
    from zero2all.train.checkpoints.find import newest_checkpoint
    from zero2all.train.saved_config import load_run_config
    from zero2all.train.setup import check_anneal

    workspace = workspace_of(arguments)
    run = workspace.existing_run(arguments.run)
    config = load_run_config(run)
    begun = begun_anneal(run)
    if begun is not None:
        raise UsageError(
            f"{run.name} anneals since step {begun.from_step:,}, over {counted(begun.steps, 'step')} "
            f"(see {run / ANNEAL_FILE}). "
            f"A run anneals once; for another end, train a run of another name."
        )
    made = _steps_made(run)
    if made == 0:
        raise UsageError(f"{run.name} has made no step yet, so there is no rate to fall from. Train it first.")
    rate = learning_rate(made - 1, config.train.steps, config.optim.lr_max, config.schedule, config.stages)
    if rate == 0.0:
        raise UsageError(
            f"The learning rate of {run.name} is 0 at step {made:,}: it cannot fall any further, and nothing would be "
            f"learned on the way."
        )
    steps = arguments.steps or max(1, round(DEFAULT_SHARE * made))
    if config.data.max_epochs:
        asked = AnnealConfig(from_step=made, steps=steps, shape=arguments.shape, to_share=arguments.to_share)
        check_anneal(config, workspace, newest_checkpoint(run), asked)
    request_anneal(run, steps, arguments.shape, arguments.to_share)
    print(
        f"{run.name}, at step {made:,} of {config.train.steps:,}: the learning rate will fall from {rate:.3g} to "
        f"{rate * arguments.to_share:.3g} over {counted(steps, 'step')} ({arguments.shape}), and the run ends there.\n"
        f"If it is training, this begins within a few steps; otherwise when you start it again with its `z2a train` "
        "command."
    )


def _steps_made(run: Path) -> int:
    """As far as metrics and checkpoints tell."""
    from zero2all.common.errors import BadInputError
    from zero2all.track.reader import read_run
    from zero2all.train.checkpoints.layout import list_checkpoints, step_of

    saved = max((step_of(folder) for folder in list_checkpoints(run)), default=0)
    try:
        series = read_run(run).series.get("loss")
    except BadInputError:  # no metrics
        return saved
    return max(saved, int(series.step[-1])) if series is not None and len(series) else saved
