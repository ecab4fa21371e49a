"""`z2a supervise`: restarts, hang detection and pages for any program that torchrun could start."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zero2all.cli.verb import Subparsers, add_verb, whole
from zero2all.common.errors import UsageError


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "supervise",
        "run any training script under the supervisor: restarts, hangs found, a page for each failure",
        "z2a supervise --processes 2 --silence 300 -- python train.py --epochs 3",
        _supervise,
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the program and its arguments, after --")
    parser.add_argument(
        "--processes", type=whole(1), default=1, metavar="N", help="how many to start; each gets RANK, WORLD_SIZE, …"
    )
    parser.add_argument(
        "--silence",
        type=whole(1),
        metavar="SECONDS",
        help="a process hangs when it prints nothing and calls no zero2all.resilience.beat() for so long",
    )
    parser.add_argument(
        "--restarts", type=whole(0), default=3, metavar="N", help="restarts in a row without progress (default: 3)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("supervised"), metavar="DIR", help="where pages go (default: supervised)"
    )


def _supervise(arguments: argparse.Namespace) -> int:
    from shutil import which

    from zero2all.parallel.launch import run_processes
    from zero2all.resilience.config import ResilienceConfig
    from zero2all.resilience.supervisor import Watch

    if which(arguments.command[0]) is None:
        raise UsageError(f"There is no program `{arguments.command[0]}`. Give a command, such as -- python train.py.")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # or a script that prints would be silent
    watch = Watch(
        ResilienceConfig(restarts=arguments.restarts),
        arguments.folder,
        watches_phases=arguments.silence is None,
        silence_seconds=arguments.silence,
        is_foreign=True,
    )
    return run_processes(arguments.processes, arguments.command, watch, module=False)
