"""`z2a train` and `z2a plot`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.verb import Subparsers, add_verb, add_work, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
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

    plot = add_verb(
        verbs, "plot", "draw the curves of a run", "z2a plot my-run --work my-workspace --png run.png", _plot
    )
    plot.add_argument("run", help="name of the run")
    add_work(plot)
    plot.add_argument(
        "--png", type=Path, default=None, metavar="FILE", help="picture to write (default: curves.png in the run)"
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


def _plot(arguments: argparse.Namespace) -> None:
    from zero2all.track.plot import plot_run

    run = workspace_of(arguments).existing_run(arguments.run)
    png = arguments.png or run / "curves.png"
    plot_run(run, png)
    print(png)
