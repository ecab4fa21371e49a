"""What the verbs that take benchmarks share: which ones, and from which folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.common.engine import EngineConfig
    from zero2all.common.workspace import Workspace
    from zero2all.evals.items import Task


def names(text: str) -> tuple[str, ...]:
    """A type for add_argument: `a,b` -> the names, each once."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected names such as cmmlu,piqa")
    return found


def add_data(parser: argparse.ArgumentParser) -> None:
    """The folder with the files of benchmarks."""
    about = "folder with a folder of files for each benchmark (default eval-data)"
    parser.add_argument("--data", type=Path, default=Path("eval-data"), metavar="DIR", help=about)


def files_of(wanted: Sequence[str]) -> tuple[str, ...]:
    """The names of tasks that are read from files."""
    from zero2all.quickstart.world.questions import QUIZ_NAME

    return tuple(name for name in wanted if name != QUIZ_NAME)


def made_tasks(wanted: Sequence[str]) -> tuple[Task, ...]:
    """The tasks that need no files: the quiz of the quickstart's small world."""
    from zero2all.quickstart.world.questions import QUIZ_NAME, quiz_tasks

    if QUIZ_NAME not in wanted:
        return ()
    from zero2all.quickstart.pipeline import WORLD_SEED

    return tuple(quiz_tasks(WORLD_SEED))


def named_tasks(wanted: Sequence[str], data: Path) -> list[Task]:
    """The tasks of these names."""
    from zero2all.evals.tasks.list import read_tasks

    from_files = files_of(wanted)
    return [*(read_tasks(data, from_files) if from_files else ()), *made_tasks(wanted)]


def look_for(workspace: Workspace, tasks: Sequence[Task], engine: EngineConfig) -> None:
    """Look for the items of tasks in the training text, and print what was found."""
    from zero2all.evals.contamination import REPORT_NAME, contamination_lines, find_contamination

    report = find_contamination(workspace, tasks, engine)
    print("\n".join(contamination_lines(report)))
    speed = report["bytes"] / 1e6 / max(report["seconds"], 1e-3)
    print(t(f"{report['bytes'] / 1e6:,.1f} MB of corpus at {speed:,.1f} MB/s; {workspace.root / REPORT_NAME}"))
