"""`z2a quickstart`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.verb import Subparsers, add_verb


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "quickstart",
        "the whole journey in minutes: make a corpus, train a tokenizer and a model, evaluate and talk to it",
        "z2a quickstart --data my-texts/",
        _quickstart,
        takes_overrides=True,
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=None,
        metavar="DIR",
        help="workspace (default: quickstart, or quickstart-own with --data)",
    )
    parser.add_argument("--data", type=Path, default=None, metavar="PATH", help="use your own file or folder of text")
    parser.add_argument(
        "--map", default=None, metavar="FIELD=RAW,…", help="raw fields of your data to use: content=body,title=name"
    )
    parser.add_argument("--fresh", action="store_true", help="delete an earlier quickstart in this workspace")
    parser.usage = (
        "z2a quickstart [-h] [--work DIR] [--data PATH] [--map FIELD=RAW,…] [--fresh] [--section.field VALUE …]"
    )


def _quickstart(arguments: argparse.Namespace) -> None:
    from zero2all.config import load_config

    config = load_config("quickstart", arguments.overrides)  # before torch: a typing error is answered at once

    from zero2all.corpus import parse_mapping

    mapping = parse_mapping(arguments.map) if arguments.map else None

    from zero2all.quickstart.choices import given_fields
    from zero2all.quickstart.journey import run_journey
    from zero2all.quickstart.summary import print_summary

    work = arguments.work or Path("quickstart" if arguments.data is None else "quickstart-own")
    given = given_fields(arguments.overrides)
    print_summary(run_journey(config, work, arguments.data, arguments.fresh, given=given, mapping=mapping))
