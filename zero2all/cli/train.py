"""`z2a train`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.cli.parser import Parser
from zero2all.cli.terminal import print_table
from zero2all.cli.verb import add_declared, verb, workspace_of
from zero2all.common.errors import PeerFailureError, UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import say, tell

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace
    from zero2all.config import RunConfig
    from zero2all.config.rules import Filled
    from zero2all.resilience.supervisor import Watch
    from zero2all.train.guards.documents import Decode


@verb(
    """
    train: train a model on the packed data, or continue a run

    config CONFIG                a preset (quickstart, four-phases, z2all-100m, z2all-1b, llm-zero2all-1b, z2all-moe) or
        the path of a YAML file
    --work
    --print-config               show the resolved config and stop
    --print-schedule             show the learning rate over the steps and stop
    --dry-run                    check everything and overfit one batch; write nothing
    --plan-only                  show mesh, layout, memory and traffic of the run, computed without running it, and stop
    --gpu NAME                   with --plan-only: plan for this GPU, such as 4090, a100-80g or h100
    --json                       with --plan-only: print JSON
    --group N:int>=0             the number of this group, with diloco.groups (also in the environment:
        Z2A_GROUP)
    --fresh                      delete an earlier run of this name and start over
    --accept-changes             continue a run even if its settings changed
    --take-over                  take over the run from a process on another host that you know is dead
    --no-supervisor              start the processes without watching them: a failure ends the run
    --nodes N or MIN:MAX:nodes   machines of the run; each runs this command. MIN:MAX: it goes on while at least MIN are
        there
    --node-rank R:int>=0         which of them this one is, from 0 (default: Slurm's number)
    --rendezvous HOST:PORT       machine 0 as the others reach it
    --rendezvous-bind HOST:PORT  where machine 0 listens, if that is not --rendezvous: in a container whose port is
        forwarded
    --interface NAME             network interface for the data (default: the one towards machine 0)
    --secret-file FILE:path      who knows the secret in it may take part (default: Z2A_SECRET, else a file beside the
        run)
    --section.field

    z2a train configs/z2all-100m.yaml --work my-workspace --optim.lr_max 3e-4
    """,
    usage="""\
z2a train [-h] CONFIG [--work DIR] [--section.field VALUE …]
                 [--print-config] [--print-schedule] [--dry-run]
                 [--plan-only] [--gpu NAME] [--json]
                 [--group N] [--fresh] [--accept-changes] [--take-over]
                 [--no-supervisor]
                 [--nodes N or MIN:MAX] [--node-rank R] [--rendezvous HOST:PORT]
                 [--rendezvous-bind HOST:PORT] [--interface NAME]
                 [--secret-file FILE]""",
)
def _train(arguments: argparse.Namespace) -> int:
    from zero2all.common.signals import end_before_the_start, stop_signals_to

    with stop_signals_to(end_before_the_start, interrupts=False):  # until the supervisor or the loop takes them
        return _train_or_show(arguments)


def _train_or_show(arguments: argparse.Namespace) -> int:
    from zero2all.common.secret import VARIABLE, given_secret
    from zero2all.config import ConfigError, config_yaml, load_with_rules

    overrides = list(arguments.overrides)
    if arguments.group is not None:
        overrides.append(f"--diloco.group={arguments.group}")
    try:
        config, filled = load_with_rules(arguments.config, overrides)
    except ConfigError as error:
        if arguments.plan_only and error.config is not None:
            _check_layout(error.config, str(error))
        raise
    if arguments.group is not None and not config.diloco.groups:
        raise UsageError(
            f"--group is {arguments.group}, but diloco.groups is empty: this run would train alone. Set "
            f"the addresses of all groups there, or leave --group out."
        )
    if arguments.print_config:
        print(config_yaml(config, filled=filled), end="")
        return 0
    if arguments.print_schedule:
        from zero2all.config.schedule import schedule_lines

        print("\n".join(schedule_lines(config.train.steps, config.optim.lr_max, config.schedule, config.stages)))
        return 0
    if arguments.plan_only:
        return _plan(arguments, config)
    if arguments.gpu is not None:
        raise UsageError(
            f"--gpu {arguments.gpu} names a GPU to plan for, and goes with --plan-only. A run takes the GPUs of this "
            f"machine."
        )
    workspace = workspace_of(arguments)
    run = workspace.run(config.train.name)
    if filled and not arguments.fresh and any(run.glob("checkpoints/step-*")):
        from zero2all.train.saved_config import load_run_config

        config, filled = load_with_rules(arguments.config, overrides, saved=load_run_config(run))
    if arguments.dry_run:
        from zero2all.train.plan import dry_run

        dry_run(config, workspace, _decoder(workspace))
        return 0
    if arguments.secret_file is not None:
        os.environb[VARIABLE.encode()] = given_secret(arguments.secret_file) or b""
    is_worker = "LOCAL_RANK" in os.environ  # started by torchrun or by us
    if not is_worker:
        _say_rules(filled)
        from zero2all.parallel.launch import local_processes, make_rules, run_processes
        from zero2all.parallel.nodes import find_nodes, use_interface

        nodes = find_nodes(arguments.nodes, arguments.node_rank, arguments.rendezvous, arguments.rendezvous_bind)
        if arguments.interface:
            use_interface(arguments.interface)
        processes = local_processes(config.parallel)
        supervised = config.resilience.supervise and not arguments.no_supervisor
        if config.resilience.peers and not (supervised and nodes.count > 1):
            say("z2a: resilience.peers has no effect: copies need several machines, each with its supervisor.")
        if supervised or processes > 1 or nodes.count > 1:
            watch = _watch(config, workspace) if supervised else None
            rules = make_rules(config, config.resilience, nodes, processes, supervised, run)
            return run_processes(processes, arguments.command_line, watch, nodes, rules=rules)
    from zero2all.resilience.heartbeat import attach, failed

    attach()
    try:
        return _train_here(arguments, config, workspace)
    except BaseException as error:
        if failed(error) and isinstance(error, PeerFailureError):
            error.is_said = True
        raise


def _say_rules(filled: list[Filled]) -> None:
    """One line: the values that rules gave."""
    if filled:
        shown = [each.name + ("" if isinstance(each.value, dict) else f" {each.value}") for each in filled]
        say(f"z2a: values from rules: {', '.join(shown)}. `--print-config` shows each rule; see docs/learning.md.")


def _watch(config: RunConfig, workspace: Workspace) -> Watch:
    from zero2all.resilience.supervisor import Watch

    run, folder = workspace.run(config.train.name), config.resilience.memory_folder

    def forget() -> None:
        from zero2all.resilience.slots import remove

        remove(run, None if folder is None else Path(folder))

    return Watch(
        config.resilience,
        run,
        watches_phases=True,
        once=("--fresh",),
        preload="zero2all.train.run" if sys.platform == "linux" else "",  # whose sockets it needs
        at_good_end=forget,
    )


def _train_here(arguments: argparse.Namespace, config: RunConfig, workspace: Workspace) -> int:
    from zero2all.finetune.objectives import objective_of
    from zero2all.parallel.launch import command_started
    from zero2all.train.run import train
    from zero2all.train.validate import held_out_in_words

    summary = train(
        config,
        workspace,
        fresh=arguments.fresh,
        accept_changes=arguments.accept_changes,
        take_over=arguments.take_over,
        make_decode=_decoder(workspace),
        make_objective=objective_of,
        say=tell,
        started=command_started(),
    )
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return 0  # the first process of each machine prints the result
    tell(f"{summary.run}: step {summary.step}, {summary.tokens:,} tokens, {summary.tokens_per_second:,.0f} tokens/s")
    if int(os.environ.get("RANK", "0")) > 0:
        return 0  # the rest is printed by rank 0
    if summary.first_loss_seconds is not None:
        print("  " + t(f"{summary.first_loss_seconds:.1f} s from the start of the command to the first loss"))
    if summary.held_out_scores:
        print("  " + t(held_out_in_words(summary.held_out_scores, config.data)))
    for name, value in summary.held_out.items():
        print(f"  {name:<28} {value:.4f}")
    return 0


def _check_layout(config: RunConfig, known: str) -> None:
    """UsageError with the problems of the layout below those that are `known`, so that one round shows all."""
    from zero2all.train.plan import check_spread, machine_problems, processes_of

    processes = processes_of(config.parallel)
    try:
        check_spread(config, processes, machine_problems(config.parallel, processes))
    except UsageError as error:
        raise UsageError(f"{known}\n{error}") from None


def _plan(arguments: argparse.Namespace, config: RunConfig) -> int:
    import json

    from zero2all.common.workspace import Workspace
    from zero2all.estimate.gpus import named_card
    from zero2all.train.plan import (
        make_plan,
        plan_notes,
        plan_tables,
        plan_values,
        processes_of,
        with_planned_vocabulary,
    )

    config, notes = with_planned_vocabulary(config, Workspace(arguments.work))
    plan = make_plan(config, processes_of(config.parallel), card=named_card(arguments.gpu) if arguments.gpu else None)
    if arguments.json:
        print(json.dumps(plan_values(plan), indent=2))
        return 0
    for title, rows in plan_tables(plan):
        print(title)
        print_table(rows)
    print("\n".join([*notes, *plan_notes(plan)]))
    return 0


def _decoder(workspace: Workspace) -> Callable[[], Decode]:
    """Loads the tokenizer when the first page needs it; a run without incidents never does."""

    def load() -> Decode:
        from zero2all.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(workspace.tokenizer)
        return lambda ids: tokenizer.decode(ids, skip_control=False)

    return load


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
