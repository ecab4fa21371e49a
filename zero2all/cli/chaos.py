"""`z2a chaos PLAN CONFIG`: train under the faults of a plan. `z2a chaos soak CONFIG`: random ones, and compare."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.cli import train as _train  # noqa: F401  declares the verb that this one runs
from zero2all.cli.parser import Parser
from zero2all.cli.track import print_goodput
from zero2all.cli.verb import add_declared, group, verb, workspace_of
from zero2all.common.errors import BadInputError, PreemptedError
from zero2all.common.progress import progress, tell

if TYPE_CHECKING:
    from zero2all.resilience.chaos import PlannedFault


group("""
    chaos: train under faults, to see what they do (`z2a chaos PLAN CONFIG` is `z2a chaos run PLAN CONFIG`)

    z2a chaos plan.yaml quickstart --work my-workspace
    """)


@verb("""
    chaos run: `z2a train` with the faults of a plan: kills, hangs, a full disk, damaged files …

    plan PLAN:path  YAML or JSON: a list such as - {fault: kill, step: 8}
    config --work
    --fresh         start the run over, and the plan with it
    --section.field

    z2a chaos run plan.yaml quickstart --work my-workspace --parallel.processes 2
    """)
def _run(arguments: argparse.Namespace) -> int:
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
    _print_faults(faults, happened(path))
    return code


def _print_faults(faults: Sequence[PlannedFault], happened: dict[int, dict[str, object]]) -> None:
    for number, fault in enumerate(faults):
        where = happened.get(number)
        if where is not None:
            tell(f"{fault.fault}: rank {where['rank']}, {where['point']}, step {where['step']}")
        elif not fault.every:
            tell(f"{fault.fault}: did not happen")


@verb("""
    chaos soak: random faults for a time, then the same steps without faults: are all bits equal?

    config --work
    --minutes N:int>=1 =30       how long (default: 30)
    --every SECONDS:int>=1 =120  one fault in so many (120)
    --seed N:int>=0 =0           of the faults (default: 0)
    --section.field

    z2a chaos soak quickstart --work my-workspace --minutes 30 --every 120
    """)
def _soak(arguments: argparse.Namespace) -> int:
    from zero2all.config import load_config
    from zero2all.parallel.launch import count_gpus, local_processes
    from zero2all.resilience.chaos import RECOVERY_SECONDS, PlannedFault, happened, install_plan, soak_plan
    from zero2all.track.goodput import run_goodput
    from zero2all.track.reader import RunReader
    from zero2all.train.checkpoints.find import newest_checkpoint

    config, workspace = load_config(arguments.config, arguments.overrides), workspace_of(arguments)
    seconds, chaos = arguments.minutes * 60.0, workspace.root / "chaos"
    on_cpu = config.parallel.device == "cpu" or not count_gpus()
    remembers = config.resilience.memory_steps(config.checkpoint.every_steps, on_cpu) > 0
    faults = soak_plan(seconds, arguments.every, local_processes(config.parallel), remembers, arguments.seed)
    memory = config.resilience.memory_folder
    soaked, alone = (workspace.run(f"{config.train.name}-{name}") for name in ("soak", "undisturbed"))

    def trained(run: Path, plan: Sequence[PlannedFault], *words: str) -> tuple[int, Path]:
        path = install_plan(plan, chaos, run, Path(memory) if memory else None, fresh=True)
        command = ["train", arguments.config, "--work", str(arguments.work), "--fresh", *arguments.overrides]
        planned = len(faults) if run == soaked else 0  # the other one has only the request to stop
        code = _watched(run.name, [*command, "--train.name", run.name, *words], path, planned, seconds)
        return code, path

    ends = ("--resilience.supervise", "true", "--resilience.deadline", str(seconds))
    code, path = trained(soaked, faults, *ends)
    _print_faults(faults, happened(path))
    count, last = len(happened(path)), f"{RECOVERY_SECONDS:g}"
    tell(f"faults: {len(faults)} planned (none in the last {last} s), {count} happened")
    log = path.with_suffix(".log")
    newest = newest_checkpoint(soaked) if soaked.is_dir() else None
    if code not in (0, PreemptedError.exit_code) or newest is None:
        tell(f"The run did not survive: exit code {code}. Its output is in {log}.")
        return 1
    print_goodput(run_goodput(RunReader(soaked)))
    # On a GPU a request to stop is read one step late, except where a save is due.
    save = ("--checkpoint.every_steps", str(newest.step), "--resilience.memory_every_steps", "0", "--no-supervisor")
    code, path = trained(alone, [PlannedFault("terminate", 0, step=newest.step)], *save)
    if _bits(soaked, newest.step) and _bits(soaked, newest.step) == _bits(alone, newest.step):
        tell(f"step {newest.step}: weights and optimizer state equal those of the undisturbed run, bit by bit")
        return 0
    tell(
        f"step {newest.step}: weights or optimizer state differ from the undisturbed run (exit code {code}). The "
        f"outputs are in {log} and {path.with_suffix('.log')}."
    )
    return 1


def _watched(name: str, words: Sequence[str], plan: Path, faults: int, seconds: float) -> int:
    """Run `z2a WORDS…` under a plan, its output in a file beside the plan, with a line that shows how far it is."""
    import subprocess
    import time

    from zero2all.common.fault import FAULTS
    from zero2all.resilience.chaos import happened

    environment = {**os.environ, FAULTS: str(plan)}
    with open(plan.with_suffix(".log"), "wb") as log, progress(name, seconds, "s") as bar:
        command = [sys.executable, "-m", "zero2all", *words]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(1.0)
                bar.advance(1.0, note=f"{len(happened(plan))} of {faults} faults" if faults else "")
        finally:
            process.terminate()
            process.wait()
    return process.returncode


def _bits(run: Path, step: int) -> dict[str, str]:
    """The checksums of all tensors of a checkpoint that was verified; empty where there is none."""
    from zero2all.train.checkpoints.layout import checkpoint_folder
    from zero2all.train.checkpoints.load import verified_checkpoint

    try:
        found = verified_checkpoint(checkpoint_folder(run, step))
    except (BadInputError, OSError):
        return {}
    files = found.manifest["files"].items()
    return {name: facts["crc32c"] for name, facts in files if name.endswith(".safetensors")}
