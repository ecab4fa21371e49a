"""`z2a chaos PLAN CONFIG`: train under the faults of a plan."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zero2all.cli import train as _train  # noqa: F401  declares the verb that this one runs
from zero2all.cli.parser import Parser
from zero2all.cli.verb import add_declared, verb, workspace_of
from zero2all.common.progress import tell


@verb("""
    chaos: train under the faults of a plan: kills, hangs, a full disk, damaged files …

    plan PLAN:path  YAML or JSON: a list such as - {fault: kill, step: 8}
    config --work
    --fresh         start the run over, and the plan with it
    --section.field

    z2a chaos plan.yaml quickstart --work my-workspace --parallel.processes 2
    """)
def _chaos(arguments: argparse.Namespace) -> int:
    from zero2all.common.fault import FAULTS
    from zero2all.config import load_config
    from zero2all.parallel.launch import local_processes
    from zero2all.resilience.chaos import happened, install_plan, read_plan

    config = load_config(arguments.config, arguments.overrides)
    workspace = workspace_of(arguments)
    faults = read_plan(arguments.plan, local_processes(config.parallel), config.train.steps)
    run, memory = workspace.run(config.train.name), config.resilience.memory_folder
    path = install_plan(faults, workspace.root / "chaos", run, Path(memory) if memory else None, arguments.fresh)
    os.environ[FAULTS] = str(path)
    words = ["train", arguments.config, "--work", str(arguments.work), *(["--fresh"] if arguments.fresh else [])]
    parser = Parser(prog="z2a")
    add_declared(parser.add_subparsers(), "train")
    found = parser.parse_args(words)
    found.overrides, found.command_line = arguments.overrides, [*words, *arguments.overrides]
    code: int = found.handler(found)
    marks = happened(path)
    for number, fault in enumerate(faults):
        where = marks.get(number)
        if where is not None:
            tell(f"{fault.fault}: rank {where['rank']}, {where['point']}, step {where['step']}")
        elif not fault.every:
            tell(f"{fault.fault}: did not happen")
    return code
