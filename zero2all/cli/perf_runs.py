"""`z2a perf simulate`, `z2a perf explain` and `z2a perf diff`: a run that is to come, one that was, and two of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import Subparsers, add_output, add_verb, real, whole
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.limits.simulate import Change, Outcome, Plan, Slowness

JSON_HELP = "also write it as JSON; - writes only that, to standard output"
SIMULATE_EXAMPLE = """z2a perf simulate --nodes 2048 --tokens 15.6e12 --tokens-per-gpu-second 400 --spare-nodes 32 \\
    --stall-seconds 2 --memory-interval-seconds 60 --price 2 --picture months.png
  z2a perf simulate --nodes 16 --days 30 --interval-seconds 3600 --slow-nodes 0.001,1.2,24"""


def register(inner: Subparsers) -> None:
    """Add the verbs."""
    _register_simulate(inner)


def _register_simulate(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "simulate",
        "simulate a run of months with failures, checkpoints and slow nodes: goodput, days, cost, what helps most",
        SIMULATE_EXAMPLE,
        _simulate,
    )
    add = parser.add_argument
    positive = real(0.0, is_open=True)
    add("--nodes", type=whole(1), required=True, metavar="N", help="nodes that train")
    add("--gpus-per-node", type=whole(1), default=8, metavar="N", help="GPUs of a node (default 8)")
    add("--tokens", type=positive, default=None, metavar="N", help="tokens to train on, with --tokens-per-gpu-second")
    add(
        "--tokens-per-gpu-second",
        type=positive,
        default=None,
        metavar="N",
        help="speed of a GPU while nothing disturbs",
    )
    add("--days", type=positive, default=None, metavar="N", help="days of undisturbed training, instead of --tokens")
    rate_help = "failures per GPU-hour (default 1.97e-05: 419 in 54 days on 16,384 GPUs, Llama 3)"
    add("--failures-per-gpu-hour", type=real(0.0), default=None, metavar="X", help=rate_help)
    shares_help = "shares of the kinds of failure (default process=0.75,node=0.2,network=0.05)"
    add("--shares", default=None, metavar="KIND=X,…", help=shares_help)
    for flag, unit, about in PLAN_FLAGS:
        kind = whole(0) if unit == "N" else real(0.0, 1.0) if unit == "SHARE" else real(0.0)
        add(flag, type=kind, default=None, metavar=unit, help=about)
    slow_help = "slow nodes: per node and day, how many times as long a step takes, hours until found"
    add("--slow-nodes", default=None, metavar="X,X,X", help=slow_help)
    link_help = "slow links: per node and day, speed as a share of their rate, hours until found"
    add("--slow-links", default=None, metavar="X,X,X", help=link_help)
    share_help = "share of a step that waits for communication, at the links' rate (default 0)"
    add("--communication-share", type=real(0.0, 1.0), default=0.0, metavar="SHARE", help=share_help)
    speed_help = "speed of all links as a share of the rate with which the speed was measured (default 1)"
    add("--link-speed", type=positive, default=1.0, metavar="X", help=speed_help)
    add(
        "--repetitions", type=whole(2, 10_000), default=200, metavar="N", help="how often it is simulated (default 200)"
    )
    add("--seed", type=whole(0), default=0, metavar="N", help="seed of the random events (default 0)")
    add("--no-changes", action="store_true", help="do not simulate what single changes would be worth")
    add_output(parser, "--picture", help="PNG: progress over time with its band, and where the time went")
    add_output(parser, "--json", help=JSON_HELP)


PLAN_FLAGS = (
    ("--hang-share", "SHARE", "share of failures that hang and are noticed at the time-out (default 0.1)"),
    ("--hang-seconds", "S", "time-out of a hang (default 600)"),
    ("--restart-seconds", "S", "from a failure to the first new step (default 300)"),
    ("--replace-seconds", "S", "more when a node is replaced (default 180)"),
    ("--repair-hours", "H", "repair of a node, on average (default 24)"),
    ("--spare-nodes", "N", "nodes held ready (default 0)"),
    ("--least-nodes", "N", "elastic: go on with as few nodes as this (default: wait for all)"),
    ("--interval-seconds", "S", "training between two checkpoints (default: Daly's interval)"),
    ("--save-seconds", "S", "until a checkpoint is on disk (default 60)"),
    ("--stall-seconds", "S", "training that a save stops; less than --save-seconds: asynchronous (default: all of it)"),
    ("--memory-interval-seconds", "S", "training between two copies in memory (default: no copies)"),
    ("--memory-stall-seconds", "S", "training that such a copy stops (default 0.5)"),
    ("--memory-copies", "N", "1: survives a process; 2: on another node too, survives a node (default 1)"),
    ("--price", "X", "price of a GPU-hour"),
)
"""Flags whose names are fields of a plan, except the price."""


def _simulate(arguments: argparse.Namespace) -> None:
    from zero2all.limits.simulate import simulate, worth_of_changes

    plan = _plan(arguments)
    outcome = simulate(plan, arguments.repetitions, arguments.seed)
    changes = [] if arguments.no_changes else worth_of_changes(outcome, arguments.seed)
    if not _write_json(arguments.json, lambda: _simulation_json(outcome, changes, arguments.tokens)):
        _print_simulation(outcome, changes, arguments.tokens)
    if arguments.picture is not None:
        from zero2all.perf.run_pictures import write_simulation

        _try_picture(lambda: write_simulation(outcome, arguments.picture))


def _plan(arguments: argparse.Namespace) -> Plan:
    from zero2all.limits.simulate import DAY, Plan, Slowness, slowdown_of_links

    has_tokens = arguments.tokens is not None
    if has_tokens != (arguments.tokens_per_gpu_second is not None) or has_tokens == (arguments.days is not None):
        raise UsageError("Say how long the run is: --tokens with --tokens-per-gpu-second, or --days, and not both.")
    if has_tokens:
        gpus = arguments.nodes * arguments.gpus_per_node
        work = arguments.tokens / (arguments.tokens_per_gpu_second * gpus)
    else:
        work = arguments.days * DAY
    work *= slowdown_of_links(arguments.communication_share, arguments.link_speed)
    fields: dict[str, Any] = {"work_seconds": work, "nodes": arguments.nodes, "gpus_per_node": arguments.gpus_per_node}
    for flag in ("--failures-per-gpu-hour", *(flag for flag, _, _ in PLAN_FLAGS)):
        name = flag.removeprefix("--").replace("-", "_")
        if (value := getattr(arguments, name)) is not None:
            fields["price_per_gpu_hour" if name == "price" else name] = value
    if arguments.shares is not None:
        fields["shares"] = _shares(arguments.shares)
    if arguments.slow_nodes is not None:
        fields["slow_nodes"] = Slowness(*_three("--slow-nodes", arguments.slow_nodes))
    if arguments.slow_links is not None:
        fields["slow_links"] = _slow_links(arguments)
    return Plan(**fields)


def _slow_links(arguments: argparse.Namespace) -> Slowness:
    from zero2all.limits.simulate import Slowness, slowdown_of_links

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
    from zero2all.limits.simulate import DAY, band

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


def _print_simulation(outcome: Outcome, changes: Sequence[Change], tokens: float | None) -> None:
    from zero2all.cli.table import print_table
    from zero2all.limits.simulate import DAY

    plan = outcome.plan
    mean = plan.mean_seconds_between_failures
    print(
        t(
            f"{plan.nodes} nodes x {plan.gpus_per_node} GPUs, {plan.spare_nodes} spare; {plan.work_seconds / DAY:.4g} "
            f"days undisturbed; a failure every {mean / 3600:.3g} h; a checkpoint every {plan.interval:,.0f} s"
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
    if changes:
        rows = [["change", "days saved", "±", "goodput, %", "cost saved"]]
        for change in changes:
            cost = "–" if change.cost_saved is None else f"{change.cost_saved:,.0f}"
            days, noise = f"{change.days_saved:.3g}", f"{2 * change.days_noise:.2g}"
            rows.append([t(change.name), days, noise, f"{100 * change.goodput:.2f}", cost])
        print_table(rows, "what one change is worth, simulated (± two standard errors)")


def _simulation_json(outcome: Outcome, changes: Sequence[Change], tokens: float | None) -> dict[str, Any]:
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
        "progress": {
            "seconds": outcome.times.tolist(),
            **{f"p{p}": line.tolist() for p, line in zip((10, 50, 90), outcome.progress, strict=True)},
        },
        "changes": [dataclasses.asdict(change) for change in changes],
    }


def _write_json(path: Path | None, value: Any) -> bool:
    """Write what the function `value` gives; whether standard output is taken by it."""
    if path is None:
        return False
    if str(path) == "-":
        print(json.dumps(value(), ensure_ascii=False, indent=1))
        return True
    from zero2all.common.files import write_json

    write_json(path, value())
    return False


def _try_picture(draw: Any) -> None:
    try:
        draw()
    except ImportError as error:
        raise UsageError(f"There is no picture, because {error.name} is not installed. Install matplotlib.") from None
