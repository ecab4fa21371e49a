"""`z2a scaling`: the law that the losses of one's own runs follow."""

from __future__ import annotations

import argparse
from typing import Any

from zero2all.cli.verb import group, verb, workspace_of
from zero2all.common.progress import human_count, say, tell

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
    from zero2all.cli.table import print_table
    from zero2all.common.jsonio import dumps_pretty
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
        print(dumps_pretty({**rows, "left_out": left_out}).decode(), end="")
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
