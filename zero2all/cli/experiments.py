"""`z2a scaling`, `z2a mixture` and `z2a sweep`: the law that one's own runs follow, the best shares of one's sources,
and settings side by side."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zero2all.cli.terminal import print_table
from zero2all.cli.verb import group, print_json, verb, workspace_of, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import counted, human_count, human_seconds, progress, say, scaled, tell

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace
    from zero2all.experiments.study import Result, Task
    from zero2all.experiments.sweep import Axis, Sweep, SweepPlan
    from zero2all.experiments.sweep_report import Row
    from zero2all.packed.shard_format import PackedSplit

group("""
    scaling: fit a scaling law to your own runs

    z2a scaling fit 'ladder-*' --work my-workspace
    """)


@verb("""
    scaling fit: fit a law of the loss to runs of several sizes and lengths, and say what a budget should buy

    runs+ RUN                     names of runs, also with * and ?; branches count with their trunk
    --work --json
    | --flops* FLOPS:float>0      budget of 6 N D, such as 1e18; may be repeated (default: that of the largest run, and
        10 times that)
    | --tokens* TOKENS:count      the budget for which so many tokens are best, such as 2B; may be repeated
    --beyond FACTOR:float>=1 =10  warn where size or tokens are more times those of the largest run (default 10)
    --out PNG:out                 draw the runs and the law

    z2a scaling fit 'ladder-*' --flops 1e19 --out law.png --work my-workspace
    """)
def _fit(arguments: argparse.Namespace) -> None:
    from zero2all.experiments.law import fit, flops_for_tokens
    from zero2all.experiments.scaling import draw, read_points, tables

    points, left_out = read_points(workspace_of(arguments), arguments.runs)
    for name, reason in left_out.items():
        say(f"left out: {name}: {reason}")
    found, unique = fit(points), max(point.unique_tokens for point in points)
    budgets = [flops_for_tokens(found.law, tokens, unique) for tokens in arguments.tokens] or arguments.flops
    budgets = budgets or [factor * max(point.flops for point in points) for factor in (1, 10)]
    if arguments.out:
        draw(found, arguments.out, budgets, unique)
    rows = tables(found, budgets, unique)
    if arguments.json:
        print_json({**rows, "left_out": left_out})
        return
    tell("loss = E + A / N^alpha + B / D^beta; N: parameters in matrix products, D: tokens; [10 %, 90 %]")
    for table in rows.values():
        body = [[_cell(*each) for each in row.items()] for row in table]
        print_table([[name.replace("_", " ") for name in table[0]], *body])
    if (open_by := max(row["n"].high / row["n"].low for row in rows["budgets"])) > 4:
        tell(f"WARNING: these runs leave the best size open by a factor of {open_by:.3g}: add sizes, or longer runs.")
    if (far := max(row["beyond the runs"] for row in rows["budgets"])) > arguments.beyond:
        tell(f"WARNING: {far:.3g} times the largest run, and beyond {arguments.beyond:g} times the law is a guess.")


def _cell(name: str, value: Any) -> str:
    if hasattr(value, "low"):
        return f"{_cell(name, value.value)} [{_cell(name, value.low)}, {_cell(name, value.high)}]"
    if value is None or isinstance(value, str):
        return value or ""
    if name.startswith("off"):
        return f"{value:+.2%}"
    return human_count(value) if name in ("n", "tokens", "unique_tokens") else f"{value:.5g}"


group("""
    mixture: which shares of your sources are best, from small runs

    z2a mixture try quickstart --work my-workspace
    """)


@verb("""
    mixture try: train small runs over mixtures of the sources, and predict the best one

    config --work
    --name NAME =mixture     name of the study and beginning of the names of its runs (default mixture)
    --runs N:int>=4          mixtures to try (default: three for each source and three)
    --target TOKENS:count    tokens of the large run: no source is then read more than 4 times
    --weights W              what a channel counts, such as en=2,zh=1 (default: all alike)
    --at-once N:int>=1       runs at the same time (default: what the machine has room for)
    --section.field

    z2a mixture try quickstart --work my-workspace --train.steps 300 --target 50M
    """)
def _try(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import write_atomic
    from zero2all.config import config_yaml
    from zero2all.experiments.mixture import Trial, caps_for, choose, propose
    from zero2all.experiments.sweep import Axis, Sweep

    workspace = workspace_of(arguments)
    splits = splits_of(workspace, arguments)
    unique = {split.name: split.tokens for split in splits}
    if len(unique) < 2:
        raise UsageError(f"The packed data has one source ({', '.join(unique)}). A mixture needs at least two.")
    weights = _weights(arguments.weights, list(dict.fromkeys(split.channel for split in splits)))
    caps = caps_for(unique, arguments.target) if arguments.target else None
    tried = propose(unique, arguments.runs or 0, caps=caps)
    if len(tried) < len(unique) + 2:
        most = 3 * len(unique) + 3
        raise UsageError(f"{len(tried)} runs are too few for {len(unique)} sources: try {most} mixtures.")
    axis = Axis("data.mixture", tuple(_written(mixture) for mixture in tried))
    sweep = Sweep(plan_of(arguments, (axis,)), arguments.name, workspace, splits)
    run_and_say(sweep)
    assert sweep.study is not None
    trials = []
    for trial, mixture in zip(sweep.trials, tried, strict=True):
        result = sweep.study.results[trial.run]
        if "failed" not in result:
            bits = {channel: scores["bits_per_byte"] for channel, scores in result["channels"].items()}
            trials.append(Trial(mixture, bits))
    if not trials:
        raise UsageError("no trial was trained to its end")
    found = choose(trials, caps, weights)
    for name, share in found.mixture.items():
        tell(f"{name}: {share.value:.3f} ({share.low:.3f} to {share.high:.3f})")
    objective = found.objective
    tell(f"expected: {objective.value:.4f} bits per byte ({objective.low:.4f} to {objective.high:.4f})")
    for line in found.words():
        tell(line)
    path = sweep.study.folder / "mixture.yaml"
    best = _written({name: share.value for name, share in found.mixture.items()})
    write_atomic(path, config_yaml(sweep.config_of((best,), f"{arguments.name}-best")).encode())
    say(f"the config with this mixture: {path}")


@verb("""
    mixture anneal: what a source is worth: short decays on different mixtures, all from one checkpoint of a run

    run                      the run whose checkpoint is taken
    --work
    --name NAME =value       name of the study and beginning of the names of its runs (default value)
    --step N:int>=1          checkpoint to begin with (default: the newest)
    --steps! N:int>=2        steps of each decay
    --try/tries* MIXTURE     a mixture, such as '{new: 0.3, old: 0.7}'; may be repeated; the run's own is tried first
    --at-once N:int>=1 =1    decays at the same time (default 1)

    z2a mixture anneal my-run --steps 100 --try '{books: 0.3, web: 0.7}' --work my-workspace
    """)
def _anneal(arguments: argparse.Namespace) -> None:
    from zero2all.config import load_config
    from zero2all.config.rules import with_value
    from zero2all.experiments.study import Branch, open_study, run_tasks, task_of
    from zero2all.train.checkpoints.layout import list_checkpoints, require_checkpoint, step_of
    from zero2all.train.run_data import open_data
    from zero2all.train.saved_config import CONFIG_FILE, load_run_config

    workspace = workspace_of(arguments)
    run = workspace.existing_run(arguments.run)
    require_checkpoint(run, arguments.step)
    config, step = load_run_config(run), arguments.step or max(map(step_of, list_checkpoints(run)))
    mixtures: list[dict[str, float] | None] = [None]
    for text in arguments.tries:
        tried = load_config(run / CONFIG_FILE, [f"--data.mixture={text}"])
        open_data(tried, workspace, None)  # or an error: it has a source that is not packed
        mixtures.append(tried.data.mixture)
    plan = {"run": arguments.run, "step": step, "steps": arguments.steps, "mixtures": mixtures}
    with open_study(workspace, arguments.name, plan) as study:
        tasks = []
        for number, mixture in enumerate(mixtures):
            branch = Branch(arguments.run, step, arguments.steps, "linear", 0.0, mixture)
            named = with_value(config, "train.name", f"{arguments.name}-{number:03d}")
            tasks.append(task_of(named, arguments.steps, 1 / arguments.at_once, branch=branch))
        run_tasks(study, tasks, lambda *_: [], arguments.at_once)
        results = [study.results[task.key] for task in tasks]
    own = results[0].get("channels", {})
    rows = [["mixture", *own, "to the run's own mixture"]]
    for mixture, result in zip(mixtures, results, strict=True):
        bits = {channel: scores["bits_per_byte"] for channel, scores in result.get("channels", {}).items()}
        name = "the run's own" if mixture is None else _written(mixture)
        changes = [f"{channel} {bits[channel] - own[channel]['bits_per_byte']:+.4f}" for channel in bits]
        shown = [f"{bits[channel]:.4f}" if channel in bits else result.get("failed", "") for channel in own]
        rows.append([name, *shown, ", ".join(changes) if mixture else ""])
    print_table(rows, "bits per byte after the decay")


def _written(mixture: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {share:.4f}" for name, share in mixture.items()) + "}"


def _weights(text: str | None, channels: list[str]) -> dict[str, float] | None:
    if text is None:
        return None
    try:
        found = {name.strip(): float(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        found = {}
    if not (found.keys() <= set(channels) and 0 < sum(found.values()) < 1e9 and min(found.values()) >= 0):
        raise UsageError(f"--weights: got {text!r}, expected channels with numbers, such as {channels[0]}=2.")
    return {name: found.get(name, 0.0) for name in channels}


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
