"""`z2a quickstart` and `z2a speedrun`, which is the same over a text of your own."""

import argparse
import sys
from pathlib import Path

from zero2all.cli.verb import default_work, is_workspace, verb
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

QUICK_MINUTES = 5


@verb(
    """
    quickstart: the whole journey in minutes: build a corpus, train a tokenizer and a model, evaluate it

    --work DIR:path    workspace (default: Z2A_WORK, or quickstart, or quickstart-own with --data)
    --data PATH:path   use your own file or folder of text: `z2a speedrun` with five minutes
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
    if arguments.map and arguments.data is None:
        raise UsageError("--map names fields of your own data; give its path with --data.")
    if arguments.full and arguments.data is not None:
        raise UsageError(
            "--full tunes the chat model that the quickstart makes of its own text; with --data there is none. Leave "
            "out --full, and tune the finished model with z2a sft, z2a dpo and z2a rl."
        )
    if arguments.data is not None:
        _speedrun_with(arguments, QUICK_MINUTES * 60, "quickstart-own")
        return

    from zero2all.quickstart.pipeline import clear_workspace, run_quickstart
    from zero2all.quickstart.summary import print_summary

    work = arguments.work or default_work() or Path("quickstart")
    if arguments.fresh:
        clear_workspace(work)
    print_summary(run_quickstart(config, work, accept_changes=arguments.accept_changes, full=arguments.full))


@verb("""
    speedrun: your own text and a time -> the best model that this machine makes of it in that time

    --data PATH:path         your file or folder of text; conversations in it make a chat model as well (default: what
        is packed in the workspace)
    --work DIR:path          workspace (default: Z2A_WORK, or speedrun)
    |! --minutes M:float>0   time for everything: text, training, judging, export
    |! --money X:float>0     the same as money, with --price
    --price P:float>0        price of the machine for an hour
    --config CONFIG          begin with this config (default: quickstart on a CPU, z2all-100m on a GPU)
    --map FIELD=RAW,…        raw fields of your data to use: content=body,title=name
    --yes                    go on with the plan without asking
    --fresh                  delete an earlier speedrun in this workspace
    --accept-changes         continue training even if settings changed
    --section.field

    z2a speedrun --data my-texts/ --minutes 60
    z2a speedrun --data my-texts/ --money 20 --price 2.5 --yes
    """)
def _speedrun(arguments: argparse.Namespace) -> None:
    if arguments.money is not None and arguments.price is None:
        raise UsageError("--money needs the price of the machine for an hour: --price 2.5.")
    hours = arguments.minutes / 60 if arguments.money is None else arguments.money / arguments.price
    _speedrun_with(arguments, 3600 * hours, "speedrun")


def _speedrun_with(arguments: argparse.Namespace, seconds: float, name: str) -> None:
    """A speedrun over --data."""
    from zero2all.config import load_config
    from zero2all.corpus import parse_mapping
    from zero2all.quickstart.own_text import look_at, refuse_too_little

    source = getattr(arguments, "config", None)
    config = load_config(source or "quickstart", arguments.overrides)
    own = None
    if arguments.data is not None:
        own = look_at(arguments.data, parse_mapping(arguments.map) if arguments.map else None)
        refuse_too_little(own)
    elif not is_workspace(arguments.work or default_work() or Path(name)):
        raise UsageError("Give your text with --data, or a workspace with packed data with --work.")

    from zero2all.parallel.launch import command_started
    from zero2all.quickstart.pipeline import clear_workspace, preset_for, run_quickstart
    from zero2all.quickstart.speedrun import Budget
    from zero2all.quickstart.summary import print_summary

    work = arguments.work or default_work() or Path(name)
    if arguments.fresh:
        preset = load_config(source or preset_for(config), arguments.overrides)
        clear_workspace(work, preset.train.name if own is None else None)
    asks = not getattr(arguments, "yes", True)
    if asks and not sys.stdin.isatty():
        raise UsageError("There is no terminal to ask on. Add --yes to go on with the plan without asking.")
    began = command_started() if arguments.is_own_process else None
    budget = Budget(seconds, getattr(arguments, "price", None), _confirmed if asks else lambda: True, began)
    print_summary(
        run_quickstart(
            config, work, own, accept_changes=arguments.accept_changes, budget=budget, source=source,
            overrides=arguments.overrides,
        )
    )  # fmt: skip


def _confirmed() -> bool:
    """Ask a person."""
    return input(t("Go on? [Y/n] ")).strip().lower() in ("", "y", "yes")
