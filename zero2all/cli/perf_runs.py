"""`z2a perf simulate` and `z2a perf explain`: a run that is to come, and one that was."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from zero2all.cli.runs import open_run
from zero2all.cli.track import print_goodput
from zero2all.cli.verb import real, verb, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.estimate.simulate import Outcome, Plan, Slowness
    from zero2all.measure.explain import Explanation

PLAN_FLAGS = (
    *("hang_share", "hang", "restart", "replace", "repair", "spare_nodes", "least_nodes", "interval", "save", "stall"),
    *("memory_interval", "memory_stall", "memory_copies", "price"),
)
"""Flags that are fields of a plan; a time is its field of the same name and `_seconds`."""
WITHOUT_UNIT = {"price": "price_per_gpu_hour", **{name: name for name in ("hang_share", "memory_copies")}}
WITHOUT_UNIT |= {name: name for name in ("spare_nodes", "least_nodes")}


@verb("""
    perf simulate: simulate a run of months with failures, checkpoints and slow nodes: goodput, days, cost

    --nodes! N:int>=1  nodes that train
    --gpus-per-node N:int>=1 =8  GPUs of a node (default 8)
    --tokens N:count  tokens to train on, with --tokens-per-gpu-second
    --tokens-per-gpu-second N:amount  speed of a GPU while nothing disturbs
    --time TIME:duration  undisturbed training, such as 54d, instead of --tokens
    --failures-per-gpu-hour X:float>=0  failures per GPU-hour (default 1.97e-05: 419 in 54 days on 16,384 GPUs, Llama 3)
    --mtbf TIME:duration  mean time between failures of the whole run, instead
    --shares KIND=X,…  shares of the kinds of failure (default process=0.75,node=0.2,network=0.05)
    --hang-share SHARE:float>=0..1  share of failures that hang and are noticed at the time-out (default 0.1)
    --hang TIME:duration  time-out of a hang (default 10m)
    --restart TIME:duration  from a failure to the first new step (default 5m)
    --replace TIME:duration  more when a node is replaced (default 3m)
    --repair TIME:duration  repair of a node, on average (default 24h)
    --spare-nodes N:int>=0  nodes held ready (default 0)
    --least-nodes N:int>=0  elastic: go on with as few nodes as this (default: wait for all)
    --interval TIME:duration  training between two checkpoints (default: Daly's interval)
    --save TIME:duration  until a checkpoint is on disk (default 60s)
    --stall TIME:duration  training that a save stops; less than --save: asynchronous (default: all of it)
    --memory-interval TIME:duration  training between two copies in memory (default: no copies)
    --memory-stall TIME:duration  training that such a copy stops (default 0.5s)
    --memory-copies N:int>=0  1: survives a process; 2: on another node too, survives a node (default 1)
    --price X:float>=0  price of a GPU-hour
    --slow-nodes X,X,X  slow nodes: per node and day, how many times as long a step takes, hours until found
    --slow-links X,X,X  slow links: per node and day, speed as a share of their rate, hours until found
    --communication-share SHARE:float>=0..1 =0  share of a step that waits for communication, at the links' rate
        (default 0)
    --link-speed X:float>0 =1  speed of all links as a share of the rate with which the speed was measured (default 1)
    --repetitions N:int>=2..1000 =200  how often it is simulated (default 200)
    --seed N:int>=0 =0  seed of the random events (default 0)
    JSON

    z2a perf simulate --nodes 2048 --tokens 15.6T --tokens-per-gpu-second 220 --price 2
    z2a perf simulate --nodes 2048 --time 54d --mtbf 3.1h --save 60s --restart 10m
    z2a perf simulate --nodes 16 --time 30d --interval 1h --slow-nodes 0.001,1.2,24
    """)
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
    for name in PLAN_FLAGS:
        if (value := getattr(arguments, name)) is not None:
            fields[WITHOUT_UNIT.get(name, f"{name}_seconds")] = value
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


# ---- explain ----


@verb("""
    perf explain: say what limits a run and what to change, from its own metrics: time, speed, memory, interruptions

    ANY_RUN
    --card-gib N:float>0  memory of the card, where the run did not record it
    JSON

    z2a perf explain my-run
    """)
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
