"""`z2a quickstart`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.verb import WORK_VARIABLE, Subparsers, add_flags, add_verb, default_work
from zero2all.common.errors import UsageError


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "quickstart",
        "the whole journey in minutes: build a corpus, train a tokenizer and a model, evaluate it",
        "z2a quickstart --data my-texts/",
        _quickstart,
        takes_overrides=True,
    )
    where = f"workspace (default: {WORK_VARIABLE}, or quickstart, or quickstart-own with --data)"
    add_flags(
        parser,
        ("--work DIR", Path, default_work(), where),
        ("--data PATH", Path, None, "use your own file or folder of text"),
        ("--map FIELD=RAW,…", str, None, "raw fields of your data to use: content=body,title=name"),
        ("--fresh", bool, False, "delete an earlier quickstart in this workspace"),
        ("--accept-changes", bool, False, "continue training even if settings changed"),
    )
    flags = "[-h] [--work DIR] [--data PATH] [--map FIELD=RAW,…] [--fresh] [--accept-changes] [--section.field VALUE …]"
    parser.usage = f"z2a quickstart {flags}"


def _quickstart(arguments: argparse.Namespace) -> None:
    from zero2all.config import load_config

    # Before torch is imported: a mistyped field or an empty folder is reported at once.
    config = load_config("quickstart", arguments.overrides)

    from zero2all.corpus import parse_mapping
    from zero2all.quickstart.own_text import given_fields, look_at, refuse_too_little

    if arguments.map and arguments.data is None:
        raise UsageError("--map names fields of your own data; give its path with --data.")
    mapping = parse_mapping(arguments.map) if arguments.map else None
    own = None if arguments.data is None else look_at(arguments.data, mapping)
    if own is not None:
        refuse_too_little(own)

    from zero2all.quickstart.pipeline import clear_workspace, run_quickstart
    from zero2all.quickstart.summary import print_summary

    work = arguments.work or Path("quickstart" if arguments.data is None else "quickstart-own")
    if arguments.fresh:
        clear_workspace(work)
    given = given_fields(arguments.overrides)
    print_summary(run_quickstart(config, work, own, given=given, accept_changes=arguments.accept_changes))
