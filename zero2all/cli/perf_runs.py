"""`z2a perf simulate`, `z2a perf explain` and `z2a perf diff`: a run that is to come, one that was, and two of them."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from zero2all.cli.runs import add_run, open_run
from zero2all.cli.track import print_goodput
from zero2all.cli.verb import (
    Subparsers,
    add_flags,
    add_json,
    add_verb,
    add_work,
    amount,
    count,
    duration,
    real,
    whole,
    write_json_result,
)
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.estimate.simulate import Outcome, Plan, Slowness
    from zero2all.measure.explain import Explanation
    from zero2all.measure.run_diff import RunDiff

SIMULATE_EXAMPLE = """z2a perf simulate --nodes 2048 --tokens 15.6T --tokens-per-gpu-second 220 --price 2
  z2a perf simulate --nodes 2048 --time 54d --mtbf 3.1h --save 60s --restart 10m
  z2a perf simulate --nodes 16 --time 30d --interval 1h --slow-nodes 0.001,1.2,24"""


def register(inner: Subparsers) -> None:
    """Add the verbs about runs that were."""
    _register_explain(inner)
    _register_diff(inner)


def register_simulate(inner: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        inner,
        "simulate",
        "simulate a run of months with failures, checkpoints and slow nodes: goodput, days, cost",
        SIMULATE_EXAMPLE,
        _simulate,
    )
    positive = real(0.0, is_open=True)
    parser.add_argument("--nodes", type=whole(1), required=True, metavar="N", help="nodes that train")
    rate_help = "failures per GPU-hour (default 1.97e-05: 419 in 54 days on 16,384 GPUs, Llama 3)"
    shares_help = "shares of the kinds of failure (default process=0.75,node=0.2,network=0.05)"
    add_flags(
        parser,
        ("--gpus-per-node N", whole(1), 8, "GPUs of a node (default 8)"),
        ("--tokens N", count, None, "tokens to train on, with --tokens-per-gpu-second"),
        ("--tokens-per-gpu-second N", amount, None, "speed of a GPU while nothing disturbs"),
        ("--time TIME", duration, None, "undisturbed training, such as 54d, instead of --tokens"),
        ("--failures-per-gpu-hour X", real(0.0), None, rate_help),
        ("--mtbf TIME", duration, None, "mean time between failures of the whole run, instead"),
        ("--shares KIND=X,…", str, None, shares_help),
    )
    for flag, unit, about in PLAN_FLAGS:
        add_flags(parser, (f"{flag} {unit}", PLAN_UNITS[unit], None, about))
    slow_help = "slow nodes: per node and day, how many times as long a step takes, hours until found"
    link_help = "slow links: per node and day, speed as a share of their rate, hours until found"
    share_help = "share of a step that waits for communication, at the links' rate (default 0)"
    speed_help = "speed of all links as a share of the rate with which the speed was measured (default 1)"
    add_flags(
        parser,
        ("--slow-nodes X,X,X", str, None, slow_help),
        ("--slow-links X,X,X", str, None, link_help),
        ("--communication-share SHARE", real(0.0, 1.0), 0.0, share_help),
        ("--link-speed X", positive, 1.0, speed_help),
        ("--repetitions N", whole(2, 1_000), 200, "how often it is simulated (default 200)"),
        ("--seed N", whole(0), 0, "seed of the random events (default 0)"),
    )
    add_json(parser)


PLAN_UNITS = {"N": whole(0), "SHARE": real(0.0, 1.0), "X": real(0.0), "TIME": duration}
PLAN_FLAGS = (
    ("--hang-share", "SHARE", "share of failures that hang and are noticed at the time-out (default 0.1)"),
    ("--hang", "TIME", "time-out of a hang (default 10m)"),
    ("--restart", "TIME", "from a failure to the first new step (default 5m)"),
    ("--replace", "TIME", "more when a node is replaced (default 3m)"),
    ("--repair", "TIME", "repair of a node, on average (default 24h)"),
    ("--spare-nodes", "N", "nodes held ready (default 0)"),
    ("--least-nodes", "N", "elastic: go on with as few nodes as this (default: wait for all)"),
    ("--interval", "TIME", "training between two checkpoints (default: Daly's interval)"),
    ("--save", "TIME", "until a checkpoint is on disk (default 60s)"),
    ("--stall", "TIME", "training that a save stops; less than --save: asynchronous (default: all of it)"),
    ("--memory-interval", "TIME", "training between two copies in memory (default: no copies)"),
    ("--memory-stall", "TIME", "training that such a copy stops (default 0.5s)"),
    ("--memory-copies", "N", "1: survives a process; 2: on another node too, survives a node (default 1)"),
    ("--price", "X", "price of a GPU-hour"),
)
"""Flags of a plan; a time is its field of the same name and `_seconds`."""


def _simulate(arguments: argparse.Namespace) -> None:
    from zero2all.estimate.simulate import simulate

    plan = _plan(arguments)
    outcome = simulate(plan, arguments.repetitions, arguments.seed)
    if not write_json_result(arguments.json, _simulation_json(outcome, arguments.tokens)):
        _print_simulation(outcome, arguments.tokens)


def _plan(arguments: argparse.Namespace) -> Plan:
    from zero2all.estimate.simulate import HOUR, Plan, Slowness, slowdown_of_links

    has_tokens = arguments.tokens is not None
    if has_tokens != (arguments.tokens_per_gpu_second is not None) or has_tokens == (arguments.time is not None):
        raise UsageError("Say how long the run is: --tokens with --tokens-per-gpu-second, or --time, and not both.")
    if arguments.mtbf is not None and arguments.failures_per_gpu_hour is not None:
        raise UsageError("--mtbf and --failures-per-gpu-hour both say how often a failure comes. Give one of them.")
    gpus = arguments.nodes * arguments.gpus_per_node
    work = arguments.tokens / (arguments.tokens_per_gpu_second * gpus) if has_tokens else arguments.time
    work *= slowdown_of_links(arguments.communication_share, arguments.link_speed)
    fields: dict[str, Any] = {"work_seconds": work, "nodes": arguments.nodes, "gpus_per_node": arguments.gpus_per_node}
    if arguments.mtbf is not None:
        fields["failures_per_gpu_hour"] = HOUR / (arguments.mtbf * gpus)
    elif arguments.failures_per_gpu_hour is not None:
        fields["failures_per_gpu_hour"] = arguments.failures_per_gpu_hour
    for flag, unit, _ in PLAN_FLAGS:
        name = flag.removeprefix("--").replace("-", "_")
        if (value := getattr(arguments, name)) is not None:
            field = f"{name}_seconds" if unit == "TIME" else name
            fields["price_per_gpu_hour" if name == "price" else field] = value
    if arguments.shares is not None:
        fields["shares"] = _shares(arguments.shares)
    if arguments.slow_nodes is not None:
        fields["slow_nodes"] = Slowness(*_three("--slow-nodes", arguments.slow_nodes))
    if arguments.slow_links is not None:
        fields["slow_links"] = _slow_links(arguments)
    return Plan(**fields)


def _slow_links(arguments: argparse.Namespace) -> Slowness:
    from zero2all.estimate.simulate import Slowness, slowdown_of_links

    rate, speed, hours = _three("--slow-links", arguments.slow_links)
    if not 0 < speed <= 1 or not arguments.communication_share:
        raise UsageError(
            f"--slow-links {arguments.slow_links}: the second number is the speed of a slow link, a share of its rate "
            f"above 0 and at most 1, and --communication-share says which share of a step waits for the links."
        )
    slower = slowdown_of_links(arguments.communication_share, arguments.link_speed * speed)
    return Slowness(rate, slower / slowdown_of_links(arguments.communication_share, arguments.link_speed), hours)


def _shares(text: str) -> dict[str, float]:
    try:
        return {kind.strip(): float(share) for kind, share in (each.split("=") for each in text.split(","))}
    except ValueError:
        raise UsageError(
            f"--shares {text}: expected kinds and shares, such as process=0.75,node=0.2,network=0.05."
        ) from None


def _three(flag: str, text: str) -> tuple[float, float, float]:
    try:
        first, second, third = (real(0.0)(each) for each in text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"{flag} {text}: expected three numbers of at least 0, such as 0.001,1.2,24.") from None
    return first, second, third


def _bands(outcome: Outcome, tokens: float | None) -> dict[str, tuple[str, tuple[float, float, float]]]:
    """Name -> format and the 10, 50 and 90 % points."""
    from zero2all.estimate.simulate import DAY, band

    low, middle, high = band(outcome.wall_seconds)
    # The bands of days and goodput are of the same repetitions, so a long run is one with a low goodput.
    bands = {
        "days": (".4g", (low / DAY, middle / DAY, high / DAY)),
        "goodput, %": (".2f", band(100 * outcome.goodput)),
        "failures": (",.0f", band(outcome.failures)),
    }
    if outcome.cost is not None:
        bands["cost of all GPUs held"] = (",.0f", band(outcome.cost))
    if tokens is not None:
        bands["tokens per second"] = (",.0f", band(tokens / outcome.wall_seconds))
    return bands


def _print_simulation(outcome: Outcome, tokens: float | None) -> None:
    from zero2all.cli.table import print_table
    from zero2all.estimate.simulate import DAY

    plan = outcome.plan
    mean = plan.mean_seconds_between_failures
    failing = t(f"a failure every {mean / 3600:.3g} h") if math.isfinite(mean) else t("no failures")
    print(
        t(
            f"{plan.nodes} nodes x {plan.gpus_per_node} GPUs, {plan.spare_nodes} spare; {plan.work_seconds / DAY:.4g} "
            f"days undisturbed; {failing}; a checkpoint every {plan.interval:,.0f} s"
        )
    )
    if (closed := plan.closed_form) is not None:
        print(
            t(
                f"closed form, without hangs, spares and slow nodes: Young's interval {closed.young:,.0f} s, Daly's "
                f"{closed.daly:,.0f} s; goodput {closed.goodput:.2%}"
            )
        )
    rows = [["", "10 %", "50 %", "90 %"]]
    for name, (form, values) in _bands(outcome, tokens).items():
        rows.append([t(name), *(format(value, form) for value in values)])
    print_table(rows, f"{len(outcome.wall_seconds)} repetitions")
    spent = {name: values.mean() / DAY for name, values in outcome.parts.items() if values.any()}
    shares = outcome.shares()
    print_table(
        [
            ["where the time goes", "days", "%"],
            *([t(name), f"{days:.3g}", f"{100 * shares[name]:.2f}"] for name, days in spent.items()),
        ],
        "mean of the repetitions",
    )


def _simulation_json(outcome: Outcome, tokens: float | None) -> dict[str, Any]:
    import dataclasses

    bands = {
        name: dict(zip(("p10", "p50", "p90"), values, strict=True))
        for name, (_, values) in _bands(outcome, tokens).items()
    }
    return {
        "convention": "goodput: undisturbed time / wall time; shares: of wall time, mean of the repetitions",
        "plan": {**dataclasses.asdict(outcome.plan), "interval_used_seconds": outcome.plan.interval},
        "repetitions": len(outcome.wall_seconds),
        "bands": bands,
        "shares": outcome.shares(),
    }


# ---- explain and diff ----


def _register_explain(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "explain",
        "say what limits a run and what to change, from its own metrics: time, speed, memory, interruptions",
        "z2a perf explain my-run",
        _explain,
    )
    add_run(parser)
    card_help = "memory of the card, where the run did not record it"
    parser.add_argument("--card-gib", type=real(0.0, is_open=True), default=None, metavar="N", help=card_help)
    add_json(parser)


def _explain(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.measure.explain import as_json, explain
    from zero2all.measure.run_record import read_record

    with open_run(arguments.run, arguments) as run:
        explanation = explain(read_record(run.folder, arguments.card_gib))
        if not write_json_result(arguments.json, as_json(explanation)):
            print(t(explanation.limit))
            for number, finding in enumerate(explanation.findings, 1):
                share = f" ({100 * finding.share:.1f} %)" if finding.share else ""
                print(f"\n{number}. {t(finding.what)}{share}: {t(finding.evidence)}")
                print(f"   {t('advice:')} {t(finding.change)}\n   {t('expected gain:')} {t(finding.worth)}")
            print()
            if explanation.record.account.total_seconds:
                print_goodput(explanation.record.account)
            for title, rows in _explain_tables(explanation):
                print_table(rows, title)


def _explain_tables(explanation: Explanation) -> list[tuple[str, list[list[str]]]]:
    record = explanation.record
    tables = []
    if step := sum(record.parts.values()):
        rows = [["part of a step", "ms", "%"]]
        parts = sorted(record.parts.items(), key=lambda part: -part[1])
        rows += [[t(name), f"{1e3 * spent:,.3f}", f"{100 * spent / step:.1f}"] for name, spent in parts]
        tables.append(("mean of steady steps (without the first rows of each start)", rows))
    tables.append(("speed and memory", [["figure", "value", "convention"], *_figure_rows(explanation)]))
    if record.missing:
        tables.append(("not in this run's record", [["what is missing"], *([t(each)] for each in record.missing)]))
    return tables


def _figure_rows(explanation: Explanation) -> list[list[str]]:
    record, rows = explanation.record, []
    if record.speed is not None:
        speed = record.speed
        rows.append(
            [t("tokens/s"), f"{speed.value:,.0f} ± {speed.error:,.0f}", t("all processes, median of steady steps")]
        )
        if record.flops is not None:
            for name, flops in record.flops.items():
                achieved = f"{speed.value * flops / record.processes / 1e12:,.4g} TFLOP/s"
                mfu = record.mfu(name)
                share = "" if mfu is None else f", MFU {mfu:.1%}"
                rows.append([t("model FLOPs"), achieved + share, t(f"{name}, per device, {flops:.4g} FLOP a token")])
    for name in ("allocated", "peak", "reserved"):
        if (size := record.memory(name)) is not None:
            share = "" if record.card_bytes is None else f" ({size / record.card_bytes:.1%})"
            rows.append(
                [t(f"GPU memory {name}"), f"{size / 2**30:.2f} GiB{share}", t("largest logged, rank 0, of its card")]
            )
    return rows


def _register_diff(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "diff",
        "compare two runs: config, machine, speed, memory, loss at equal tokens, each beside its noise",
        "z2a perf diff before after",
        _diff,
    )
    parser.add_argument("runs", nargs=2, metavar="RUN", help="name of a run in the workspace, or a run's folder")
    add_work(parser)
    add_json(parser)


def _diff(arguments: argparse.Namespace) -> None:
    from zero2all.measure.run_diff import as_json, diff_runs
    from zero2all.measure.run_record import read_record

    with open_run(arguments.runs[0], arguments) as first, open_run(arguments.runs[1], arguments) as second:
        diff = diff_runs(read_record(first.folder), read_record(second.folder))
        if not write_json_result(arguments.json, as_json(diff)):
            _print_diff(diff)


def _print_diff(diff: RunDiff) -> None:
    from zero2all.cli.table import print_table
    from zero2all.track.listing import distinct_names

    names = distinct_names([diff.first.reader.folder, diff.second.reader.folder])
    for title, differences in (("config", diff.config), ("machine, versions, operators", diff.machine)):
        if differences:
            shown = [[name, *("–" if value is None else str(value) for value in pair)] for name, *pair in differences]
            print_table([["field", *names], *shown], title)
        else:
            print(t(f"{title}: no difference is recorded"))
    rows = [["figure", *names, "change", "noise", "verdict"]]
    for each in diff.figures:
        noise = each.error / abs(each.first) if each.first else math.nan
        figures = (f"{value:,.5g}" for value in (each.first, each.second))
        change = "–" if math.isnan(each.change) else f"{100 * each.change:+.2f} %"
        rows.append(
            [t(each.name), *figures, change, "–" if math.isnan(noise) else f"± {100 * noise:.2g} %", t(each.verdict)]
        )
    print_table(rows, "the second run beside the first (noise: one standard error of the difference)")
    if diff.loss_tokens is not None:
        low, high = diff.loss_tokens
        print(t(f"Losses are compared between {low:,} and {high:,} tokens, which both runs have seen."))
    print(t("The noise is that inside each run. Runs that differ only in their seed differ more in loss."))
    for record in (diff.first, diff.second):
        for gap in record.missing:
            print(f"{record.name}: {t(gap)}")
