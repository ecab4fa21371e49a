"""Bare `z2a` and `z2a help`: the journey in one screen, and the next sensible command for this folder."""

import argparse
import shlex
from pathlib import Path

from zero2all.cli.runs import Run, look_at_run, run_folders
from zero2all.cli.terminal import print_fitted
from zero2all.cli.verb import WORK_VARIABLE, default_work, enclosing_workspace, is_workspace, verb, workspaces_below
from zero2all.common.language import translate as t

JOURNEY = """\
From raw text to a language model of your own.

  z2a corpus build     clean raw files, drop duplicates, hold out text
  z2a tokenizer train  learn a vocabulary
  z2a pack             encode the corpus into token shards
  z2a train            train a model; the same command continues it
  z2a eval             evaluate it: bits per byte, probes, benchmarks
  z2a sft              teach it to answer, from conversations
  z2a dpo              teach it which of two answers is better
  z2a rl               let it try, and teach it what earned a reward
  z2a chat, z2a serve  talk to it here or in the browser
  z2a export           write it as a Hugging Face folder

  z2a quickstart       all of this in minutes on two CPU cores
  z2a runs, z2a board  list the runs, watch them in the browser
"""
HELP = "Help: `z2a help VERB` for one verb, `z2a --help` for all verbs."
MANY = 3
"""Workspaces and runs that are named; more are counted."""


@verb("""
    help: show the journey and what comes next, or explain a verb

    words* WORD  the verb to explain: train, corpus build, …

    z2a help train
    """)
def _help(arguments: argparse.Namespace) -> None:
    if not arguments.words:
        print_overview()
        return
    parser = arguments.whole_parser()
    for word in arguments.words:
        if not parser.verbs:
            break  # `z2a help train quickstart`: the rest are its arguments
        parser = parser.verb(word)
    parser.print_help()


def print_overview() -> None:
    """Print the journey, where this folder stands, and the next commands."""
    print_fitted("\n".join([t(JOURNEY), *_here(), "", t(HELP)]))


def _here() -> list[str]:
    """What to say of this folder: it is in the workspace that the environment names, in another one, or above one."""
    named = default_work()
    if named is not None:
        return _standing(named) if is_workspace(named) else _nothing_named(named)
    if is_workspace(Path()):
        return _standing(Path())
    if (around := enclosing_workspace()) is not None:
        return _standing(around)
    below = workspaces_below()
    if len(below) > 1:
        names = ", ".join(folder.name for folder in below[:MANY]) + (", …" if len(below) > MANY else "")
        return [t(f"This folder holds {len(below)} workspaces: {names}. The newest:"), *_standing(below[0])]
    return _standing(below[0]) if below else nothing_here()


def _nothing_named(named: Path) -> list[str]:
    return [
        t(f"{WORK_VARIABLE} is {named}, which is not a workspace yet. Next:"),
        f"  unset {WORK_VARIABLE}",
        "  z2a quickstart",
        "  z2a corpus build NAME=PATH",
    ]


def nothing_here() -> list[str]:
    """What to do in a folder without a workspace."""
    return [
        t("There is no workspace here yet. Next:"),
        "  z2a quickstart",
        "  z2a quickstart --data FOLDER_WITH_YOUR_TEXT",
        "  z2a corpus build NAME=PATH --work my-workspace",
    ]


def _standing(work: Path) -> list[str]:
    """What a workspace has, and the commands that come next."""
    runs = [look_at_run(folder) for folder in run_folders(work / "runs")]
    stages = {"corpus": "report.json", "tokenizer": "tokenizer.json", "packed": "report.json"}
    there = [name for name, mark in stages.items() if (work / name / mark).is_file()]
    if there:
        have = t(f"Workspace {work.resolve()}: {', '.join(there)}.")
    else:
        have = t(f"Workspace {work.resolve()} is empty.")
    lines = [have, *_runs_in_words(runs)]
    is_default = work in (Path(), default_work(), enclosing_workspace())
    flag = "" if is_default else f" --work {shlex.quote(str(work))}"
    return [*lines, t("Next:"), *(f"  {command}" for command in next_commands(work, flag, there, runs))]


def _runs_in_words(runs: list[Run]) -> list[str]:
    lines = []
    for run in runs[:MANY]:
        state = t(run.state)
        if run.step is None:
            lines.append(t(f"  run {run.name}: {state}, no step yet"))
        else:
            steps = "?" if run.steps is None else f"{run.steps:,}"
            loss = "?" if run.loss is None else f"{run.loss:.4f}"
            lines.append(t(f"  run {run.name}: {state}, step {run.step:,} of {steps}, training loss {loss}"))
    if len(runs) > MANY:
        lines.append(t(f"  and {len(runs) - MANY:,} more (`z2a runs`)"))
    return lines


def next_commands(work: Path, flag: str, there: list[str], runs: list[Run]) -> list[str]:
    """The commands that come next in a workspace; `flag` names it."""
    if "corpus" not in there and not runs and "packed" not in there:
        return [f"z2a quickstart{flag or ' --work .'}", f"z2a corpus build NAME=PATH{flag}"]
    if runs:
        return _after_training(work, flag, runs)
    if "tokenizer" not in there:
        return [f"z2a corpus report{flag}", f"z2a tokenizer train{flag} --vocab-size 32000"]
    if "packed" not in there:
        return [f"z2a tokenizer eval{flag}", f"z2a pack{flag}"]
    return [f"z2a data stats{flag}", f"z2a train z2all-100m{flag} --dry-run", f"z2a train z2all-100m{flag}"]


def _after_training(work: Path, flag: str, runs: list[Run]) -> list[str]:
    newest = min(runs, key=lambda run: float("inf") if run.seconds_ago is None else run.seconds_ago)
    name = "" if len(runs) == 1 else f" {shlex.quote(newest.name)}"
    if newest.state in ("running", "stalled"):
        return [f"z2a watch{name}{flag}", _board(work)]
    if newest.state == "finished":
        return [f"z2a eval{name}{flag}", f"z2a chat{name}{flag}", _board(work)]
    config = shlex.quote(str(work / "runs" / newest.name / "config.yaml"))
    return [f"z2a train {config}{flag}", _board(work)]


def _board(work: Path) -> str:
    return "z2a board" if work in (Path(), default_work()) else f"z2a board {shlex.quote(str(work))}"
