"""`z2a sweep`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero2all.cli.verb import verb, workspace_of, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import counted, human_count, human_seconds, progress, say

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace
    from zero2all.experiments.study import Result, Task
    from zero2all.experiments.sweep import Axis, Sweep, SweepPlan
    from zero2all.experiments.sweep_report import Row
    from zero2all.packed.shard_format import PackedSplit


@verb("""
    sweep: train a config with other settings and seeds, several at once, and say which are better than noise

    config --work
    --over*! FIELD=VALUES  a field and its values, such as optim.lr_max=1e-3,2e-3; factors on what the config or a rule
        gives: optim.lr_max=x0.5,x1,x2; size=3M,6M: sizes of the model; may be repeated: every combination is trained
    --name NAME =sweep     name of the study and beginning of the names of its runs (default sweep)
    --seeds N:int>=1 =1    runs of each combination; differences need at least 3 (default 1)
    --metric METRIC =bpb   what is compared: bpb or loss, on all held-out text or on a channel: bpb/en (default bpb)
    | --halving            judge by short decays at 1/9 and 1/4 of the run, after which a third goes on, at least two
    | --budgets TOKENS     also finish every run at these smaller budgets, such as 40M,80M, by decays from its constant
        rate: points for `z2a scaling fit`
    | --search tpe|gp|random  let Optuna choose values, also within ranges such as optim.lr_max=1e-4..1e-2
    --trials N:int>=1 =20  combinations that a search tries (default 20)
    --at-once N:int>=1     runs at the same time (default: what the machine has room for)
    --transfer CONFIG      write this larger config with the factors that the sizes of this sweep found, extrapolated
    --plan-only            print what would be trained, and stop
    --json FILE:out        also write the result as JSON; - prints only that
    --section.field

    z2a sweep quickstart --over optim.lr_max=x0.5,x1,x2 --seeds 3 --work my-workspace
    z2a sweep my.yaml --over size=3M,6M,12M --over optim.lr_max=x0.5,x1,x2 --transfer z2all-100m
    """)
def _sweep(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.config import load_config
    from zero2all.experiments.sweep import METRICS, Sweep, parse_axis
    from zero2all.experiments.sweep_report import findings, sweep_rows, table, write_report
    from zero2all.experiments.transfer import place_of_factors

    axes = tuple(map(parse_axis, arguments.over))
    if any(axis.is_range for axis in axes) and not arguments.search:
        raise UsageError("A range LOW..HIGH needs --search. Without it give values: optim.lr_max=1e-3,2e-3.")
    if len({axis.field for axis in axes}) < len(axes):
        raise UsageError("--over has a field twice. Give all its values at once: optim.lr_max=1e-3,2e-3.")
    if arguments.transfer:  # what is wrong with it is said before the work
        place_of_factors(axes)
        load_config(arguments.transfer)
    workspace = workspace_of(arguments)
    splits, (name, _, channel) = splits_of(workspace, arguments), arguments.metric.partition("/")
    if name not in METRICS or (channel and channel not in {split.channel for split in splits}):
        raise UsageError(f"--metric: got {arguments.metric!r}, expected bpb, loss, bpb/CHANNEL or loss/CHANNEL.")
    sweep = Sweep(plan_of(arguments, axes), arguments.name, workspace, splits)
    if arguments.plan_only:
        print_table([["run", *(axis.field for axis in sweep.plan.axes), "seed", "steps"], *_planned(sweep)])
        return
    run_and_say(sweep)
    rows = sweep_rows(sweep)
    write_report(sweep, rows)
    values = {"name": sweep.name, "findings": findings(sweep, rows), "table": table(sweep, rows)}
    if not write_json_result(arguments.json, values):
        print_table(table(sweep, rows))
        for line in findings(sweep, rows):
            print(t(line))
    _write_configs(sweep, rows, arguments)


def plan_of(arguments: argparse.Namespace, axes: tuple[Axis, ...]) -> SweepPlan:
    """The plan that is asked for."""
    from zero2all.common.cores import usable_cores
    from zero2all.common.progress import scaled
    from zero2all.config import load_config
    from zero2all.experiments.sweep import HALVING_RUNGS, SweepPlan, budget_rungs
    from zero2all.parallel.launch import count_gpus

    asked = vars(arguments)
    rungs = HALVING_RUNGS if asked.get("halving") else ()
    if asked.get("budgets"):
        config = load_config(arguments.config, arguments.overrides)
        try:
            budgets = [scaled(part) for part in arguments.budgets.split(",")]
        except ValueError:
            raise UsageError(f"--budgets: got {arguments.budgets!r}, expected tokens such as 40M,80M.") from None
        rungs = budget_rungs(budgets, config.train.steps * config.train.tokens_per_step)
    cores = usable_cores()
    return SweepPlan(
        arguments.config,
        tuple(arguments.overrides),
        axes,
        asked.get("seeds", 1),
        asked.get("metric", "bpb"),
        rungs,
        bool(asked.get("halving")),
        asked.get("search"),
        arguments.trials if asked.get("search") else 0,
        arguments.at_once or (max(1, cores - 1) if count_gpus() else cores),
    )


def splits_of(workspace: Workspace, arguments: argparse.Namespace) -> list[PackedSplit]:
    """The packed sources."""
    from zero2all.config import load_config
    from zero2all.packed.remote import packed_root
    from zero2all.packed.shard_format import open_split, packed_sources

    packed = packed_root(workspace.packed, load_config(arguments.config, arguments.overrides).data)
    return [open_split(packed, name, "train") for name in packed_sources(packed)]


def run_and_say(sweep: Sweep) -> None:
    """Train all trials, with a bar and a line for each that ends."""
    total = sweep.planned_steps()
    per_step = sweep.trials[0].config.train.tokens_per_step if sweep.trials else 0
    parts = [counted(len(sweep.trials) or sweep.plan.trials * sweep.plan.seeds, "trial"), f"{sweep.at_once} at once"]
    parts += [f"{total:,} steps, {human_count(total * per_step)} tokens in all"] if sweep.trials else []
    say(f"{sweep.name}: {', '.join(parts)}")
    with progress("trials", total or None, "steps") as bar:

        def on_result(task: Task, result: Result) -> None:
            bar.advance(result.get("steps", 0), task.run)
            said = result.get("failed") or f"{sweep.plan.metric} {sweep.metric(result):.4f}"
            say(f"{task.key:<24} {human_seconds(result.get('seconds', 0)):>6}  {said}")

        sweep.run(on_result)


def _write_configs(sweep: Sweep, rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """The config of the best setting, and the larger one with what the sizes say."""
    from zero2all.common.files import write_atomic
    from zero2all.config import config_yaml, load_config
    from zero2all.config.rules import with_value
    from zero2all.experiments.transfer import transfer, transferred_overrides
    from zero2all.model.config import parameter_counts

    assert sweep.study is not None
    if rows and math.isfinite(rows[0].mean.value):
        path = sweep.study.folder / "best.yaml"
        write_atomic(path, config_yaml(sweep.config_of(rows[0].settings, f"{sweep.name}-best")).encode())
        say(f"the config of the best: {path}")
    if arguments.transfer:
        large = load_config(arguments.transfer)
        if large.model.vocab_size is None:
            large = with_value(large, "model.vocab_size", sweep.vocabulary)
        found = transfer(sweep, parameter_counts(large.model)["matmul"])
        print("\n".join(map(t, found.words)))
        path = sweep.study.folder / "transfer.yaml"
        written = load_config(arguments.transfer, list(transferred_overrides(large, found)))
        write_atomic(path, config_yaml(written).encode())
        say(f"the config with {found.field} x{found.factor:.2f}: {path}")


def _planned(sweep: Sweep) -> list[list[str]]:
    from zero2all.experiments.sweep_report import shown

    return [
        [trial.run, *map(shown, trial.settings), str(trial.config.train.seed), f"{trial.config.train.steps:,}"]
        for trial in sweep.trials
    ]
