"""`z2a quickstart`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.verb import default_work, verb
from zero2all.common.errors import UsageError


@verb(
    """
    quickstart: the whole journey in minutes: build a corpus, train a tokenizer and a model, evaluate it

    --work DIR:path    workspace (default: Z2A_WORK, or quickstart, or quickstart-own with --data)
    --data PATH:path   use your own file or folder of text
    --map FIELD=RAW,…  raw fields of your data to use: content=body,title=name
    --full             with two more runs from its chat model: one tuned on pairs of answers (DPO), one on rewards (RL)
    --fresh            delete an earlier quickstart in this workspace
    --accept-changes   continue training even if settings changed
    --section.field

    z2a quickstart --data my-texts/
    """,
    usage="z2a quickstart [-h] [--work DIR] [--data PATH] [--map FIELD=RAW,…] [--full] [--fresh] [--accept-changes] "
    "[--section.field VALUE …]",
)
def _quickstart(arguments: argparse.Namespace) -> None:
    from zero2all.config import load_config

    # Before torch is imported: a mistyped field or an empty folder is reported at once.
    config = load_config("quickstart", arguments.overrides)

    from zero2all.corpus import parse_mapping
    from zero2all.quickstart.own_text import given_fields, look_at, refuse_too_little

    if arguments.map and arguments.data is None:
        raise UsageError("--map names fields of your own data; give its path with --data.")
    if arguments.full and arguments.data is not None:
        raise UsageError(
            "--full tunes the chat model that the quickstart makes of its own text; with --data there is none. Leave "
            "out --full, and tune the finished model with z2a sft, z2a dpo and z2a rl."
        )
    mapping = parse_mapping(arguments.map) if arguments.map else None
    own = None if arguments.data is None else look_at(arguments.data, mapping)
    if own is not None:
        refuse_too_little(own)

    from zero2all.quickstart.pipeline import clear_workspace, run_quickstart
    from zero2all.quickstart.summary import print_summary

    work = arguments.work or default_work() or Path("quickstart" if arguments.data is None else "quickstart-own")
    if arguments.fresh:
        clear_workspace(work)
    given = given_fields(arguments.overrides)
    print_summary(run_quickstart(config, work, own, None, given, arguments.accept_changes, full=arguments.full))
