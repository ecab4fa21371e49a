"""What the verbs that take benchmarks share: which ones, and from which folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero2all.common.engine import EngineConfig
    from zero2all.common.workspace import Workspace
    from zero2all.evals.items import Task


def names(text: str) -> list[str]:
    """A type for add_argument: `a,b` -> [a, b]."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected names with commas between them")
    return found


def add_data(parser: argparse.ArgumentParser) -> None:
    """The folder with the files of benchmarks."""
    about = "folder with a folder of files for each benchmark (default: benchmarks)"
    parser.add_argument("--data", type=Path, default=Path("benchmarks"), metavar="DIR", help=about)


def named_tasks(wanted: Sequence[str], data: Path) -> list[Task]:
    """The tasks of these names: from files below `data`, and the quiz of the quickstart's small world, which needs
    none."""
    from zero2all.evals.tasks.list import read_tasks
    from zero2all.quickstart.world.quiz import QUIZ_NAME, quiz_tasks

    from_files = [name for name in wanted if name != QUIZ_NAME]
    found = read_tasks(data, from_files) if from_files else []
    if QUIZ_NAME in wanted:
        from zero2all.quickstart.journey import WORLD_SEED

        found += quiz_tasks(WORLD_SEED)
    return found


def look_for(workspace: Workspace, tasks: Sequence[Task], engine: EngineConfig) -> None:
    """Look for the items of tasks in the training text, and print what was found."""
    from zero2all.evals.contamination import REPORT_NAME, contamination_lines, find_contamination

    report = find_contamination(workspace, tasks, engine)
    print("\n".join(contamination_lines(report)))
    speed = report["bytes"] / 1e6 / max(report["seconds"], 1e-3)
    print(f"{report['bytes'] / 1e6:,.1f} MB of corpus at {speed:,.1f} MB/s; {workspace.root / REPORT_NAME}")
