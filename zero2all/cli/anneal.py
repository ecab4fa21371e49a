"""`z2a anneal RUN`: let the learning rate of a run fall to its end from where it stands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.runs import add_run_name
from zero2all.cli.verb import Subparsers, add_flags, add_verb, real, whole, workspace_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t

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
        "anneal a run: lower its learning rate from where it is now, and end the run there",
        "z2a anneal my-run --steps 500 --work my-workspace",
        _anneal,
    )
    add_run_name(parser)
    fall = "steps over which the rate falls; the run ends after them (default: a fifth of the steps so far)"
    add_flags(parser, ("--steps N", whole(1), None, fall))
    parser.add_argument("--shape", choices=SHAPES, default="1-sqrt", help="shape of the decay (default 1-sqrt)")
    mixture = "weights of the sources from there on, as in data.mixture: '{en: 1, zh: 2}' (default: as before)"
    add_flags(
        parser,
        ("--to-share S", real(0, 1), 0.0, "final rate as a share of the current rate (default 0)"),
        ("--mixture WEIGHTS", str, None, mixture),
    )


def _anneal(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import counted
    from zero2all.common.schema import Problem, build
    from zero2all.config.schedule import learning_rate
    from zero2all.config.training import AnnealConfig
    from zero2all.packed.config import mixture_problems
    from zero2all.train.anneal import ANNEAL_FILE, begun_anneal, request_anneal
    from zero2all.train.checkpoints.find import newest_checkpoint
    from zero2all.train.run_data import check_anneal
    from zero2all.train.saved_config import load_run_config

    workspace = workspace_of(arguments)
    run = workspace.existing_run(arguments.run)
    config = load_run_config(run)
    begun = begun_anneal(run)
    if begun is not None:
        raise UsageError(
            f"{run.name} has been annealing since step {begun.from_step:,}, over "
            f"{counted(begun.steps, 'step')} (see {run / ANNEAL_FILE}). A run can be annealed only "
            "once. To try another decay, train a run with another name."
        )
    made = _steps_made(run)
    if made == 0:
        raise UsageError(f"{run.name} has no steps yet, so there is no learning rate to lower. Train it first.")
    rate = learning_rate(made - 1, config.train.steps, config.optim.lr_max, config.schedule, config.stages)
    if rate == 0.0:
        raise UsageError(
            f"The learning rate of {run.name} is already 0 at step {made:,}, so there is nothing to anneal."
        )
    steps = arguments.steps or max(1, round(DEFAULT_SHARE * made))
    values = {"from_step": made, "steps": steps, "shape": arguments.shape, "to_share": arguments.to_share}
    problems: list[Problem] = []
    asked = build(AnnealConfig, {**values, "mixture": _mixture(arguments.mixture)}, "", problems)
    problems += [] if problems else mixture_problems(asked.mixture, "--mixture")
    if problems:
        raise UsageError(" ".join(str(problem) for problem in problems))
    check_anneal(config, workspace, newest_checkpoint(run), asked)
    if (run / ANNEAL_FILE).is_file():
        print(t("This replaces an earlier request, which has not begun."))
    request_anneal(run, steps, arguments.shape, arguments.to_share, asked.mixture)
    print(
        t(
            f"{run.name}, at step {made:,} of {config.train.steps:,}: the learning rate will fall from "
            f"{rate:.3g} to {rate * arguments.to_share:.3g} over {counted(steps, 'step')} ({arguments.shape}), "
            "and the run ends there. If it is training now, this starts within a few steps. Otherwise it "
            "starts when you continue the run with `z2a train`."
        )
    )
    if asked.mixture is not None:
        print(t(f"The mixture from there on: {arguments.mixture}"))


def _mixture(text: str | None) -> object:
    """What was given as --mixture; its content is checked with the rest."""
    from zero2all.common.yamlio import YamlError, loads

    try:
        found = None if text is None else loads(text)
        if text is not None and found is None:
            raise UsageError("--mixture is empty. Write it like '{en: 1, zh: 2}', or leave it out.")
        return found
    except YamlError as error:
        raise UsageError(f"--mixture is not YAML: {error}. Write it like '{{en: 1, zh: 2}}'.") from error


def _steps_made(run: Path) -> int:
    """As far as metrics and checkpoints tell."""
    from zero2all.track.reader import read_run
    from zero2all.train.checkpoints.layout import list_checkpoints, step_of

    saved = max((step_of(folder) for folder in list_checkpoints(run)), default=0)
    try:
        series = read_run(run).series.get("loss")
    except BadInputError:  # no metrics
        return saved
    return max(saved, int(series.step[-1])) if series is not None and len(series) else saved
