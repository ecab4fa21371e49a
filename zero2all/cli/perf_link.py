"""`z2a perf link`."""

from __future__ import annotations

import argparse

from zero2all.cli.perf_predict import PROFILE
from zero2all.cli.verb import (
    MODEL_HELP,
    Subparsers,
    add_config,
    add_flags,
    add_json,
    add_verb,
    add_work,
    real,
    whole,
    write_json_result,
)


def register(inner: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        inner,
        "link",
        "train over a slow link: bytes, seconds and loss of every scheme, and which one to take",
        "z2a perf link z2all-1b --gbit 1 --groups 2 --step-seconds 3.4",
        _link,
        takes_overrides=True,
    )
    add_config(parser, MODEL_HELP)
    add_work(parser)
    above = real(0.0, is_open=True)
    parser.add_argument("--gbit", type=above, required=True, metavar="N", help="speed of the link in Gbit/s")
    seconds = "measured seconds that a group computes in a step (default: predicted from the profile of this machine)"
    groups = ("--groups N", whole(2), 2, "groups it joins (default 2)")
    cluster = ("--cluster NAME", str, None, "from data sheets: a100-80g, h100, h200, b200")
    add_flags(parser, groups, ("--step-seconds N", above, None, seconds), cluster, PROFILE)
    add_json(parser)


def _link(arguments: argparse.Namespace) -> int:
    from zero2all.cli.table import print_table
    from zero2all.common.workspace import Workspace
    from zero2all.perf.link import link_notes, link_report, link_rows

    asked = (arguments.gbit, arguments.groups, arguments.step_seconds, arguments.profile, arguments.cluster)
    report = link_report(arguments.config, arguments.overrides, *asked, Workspace(arguments.work))
    if not write_json_result(arguments.json, report.as_json()):
        size = f"{report.parameters:,} parameters, {arguments.groups} groups, {arguments.gbit:g} Gbit/s"
        print_table(link_rows(report), f"{arguments.config}: {size}")
        print("\n".join(link_notes(report)))
    return 0
