"""`z2a train`."""

from __future__ import annotations

import argparse

from zero2all.cli.verb import Subparsers, add_verb, add_work, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "train",
        "train a model on the packed data, or continue a run",
        "z2a train configs/z2all-100m.yaml --work my-workspace --optim.lr_max 3e-4",
        _train,
        takes_overrides=True,
    )
    parser.add_argument(
        "config", metavar="CONFIG", help="a preset (quickstart, z2all-100m, z2all-1b) or the path of a YAML file"
    )
    add_work(parser)
    parser.add_argument("--print-config", action="store_true", help="show the resolved config and stop")
    parser.add_argument("--fresh", action="store_true", help="forget an earlier run of this name and start over")
    parser.add_argument("--accept-changes", action="store_true", help="continue a run although its settings changed")
    parser.usage = (
        "z2a train [-h] CONFIG [--work DIR] [--section.field VALUE …]\n"
        "                 [--print-config] [--fresh] [--accept-changes]"
    )


def _train(arguments: argparse.Namespace) -> None:
    from zero2all.config import config_yaml, load_config

    config = load_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(config_yaml(config), end="")
        return
    workspace = workspace_of(arguments)
    from zero2all.train.loop import train

    summary = train(config, workspace, fresh=arguments.fresh, accept_changes=arguments.accept_changes)
    print(f"{summary.run}: step {summary.step}, {summary.tokens:,} tokens, {summary.tokens_per_second:,.0f} tokens/s")
    for name, value in summary.held_out.items():
        print(f"  {name:<28} {value:.4f}")
