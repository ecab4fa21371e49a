"""`z2a perf plan` and `z2a perf memory`: how to spread a run over GPUs, and whether it fits."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from zero2all.cli.perf_predict import PROFILE
from zero2all.cli.verb import (
    MODEL_HELP,
    Subparsers,
    add_config,
    add_flags,
    add_json,
    add_output,
    add_verb,
    duration,
    real,
    whole,
    write_json_result,
)
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.estimate.cards import Card
    from zero2all.estimate.machine import Machine
    from zero2all.estimate.run.memory_report import MemoryReport
    from zero2all.estimate.run.plan import LayoutPlan

EXAMPLE = """z2a perf plan z2all-1b --gpus 8 --cluster h100 --out planned.yaml
  z2a perf plan z2all-1b --gpus 1 --cluster h200 --measure 3
  z2a train planned.yaml"""


def register(inner: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        inner,
        "plan",
        "find the fastest layout on N GPUs: micro-batch, recompute, ZeRO and every axis; write its config",
        EXAMPLE,
        _plan,
        takes_overrides=True,
    )
    add_config(parser, MODEL_HELP)
    parser.add_argument("--gpus", type=whole(1), required=True, metavar="N", help="number of GPUs")
    network = "network of each GPU between nodes, in Gbit/s per direction (default: the cluster's)"
    add_flags(
        parser,
        ("--cluster NAME", str, None, "from data sheets: a100-80g, h100, h200, b200"),
        PROFILE,
        ("--network-gbps N", real(0.0), None, network),
        ("--top N", whole(1), 10, "layouts to show (default 10)"),
        ("--measure N", whole(1), None, "measure the best N on the GPU of this machine"),
        ("--seconds TIME", duration, 8.0, "measured time per layout (default 8)"),
        ("--timeout TIME", duration, 300.0, "stop a measurement then (default 5m)"),
    )
    add_output(parser, "--out", help="write the config of the best layout")
    add_json(parser)


def _plan(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.estimate.run.batch import load_measured_config
    from zero2all.estimate.run.models import load_model_config, precision_notes
    from zero2all.estimate.run.plan import config_of, plan_cells, plan_json, plan_layouts

    config, notes = load_measured_config(arguments.config, arguments.overrides)
    notes += precision_notes(config, arguments.config, arguments.overrides)
    wanted = max(arguments.top, arguments.measure or 0)
    plan = plan_layouts(config, arguments.gpus, _machine(arguments), wanted, arguments.overrides)
    if arguments.measure is not None:
        from zero2all.measure.verify import measure_candidates

        plan = measure_candidates(plan, arguments.measure, arguments.seconds, arguments.timeout)
    if arguments.out is not None:
        from zero2all.common.files import write_atomic
        from zero2all.config import config_yaml

        whole_config, _ = load_model_config(arguments.config, arguments.overrides)
        text = config_yaml(config_of(whole_config, plan.candidates[0].row))
        write_atomic(arguments.out, text.encode())
    if write_json_result(arguments.json, plan_json(plan)):
        return
    print_table(plan_cells(plan.candidates[: arguments.top]), _title(plan))
    print("\n".join([*map(t, notes), *_notes(plan)]))
    if arguments.out is not None:
        nodes = -(-arguments.gpus // plan.machine.gpus_per_node)
        start = f"z2a train {arguments.out}"
        if nodes > 1:
            start = f"{start} --nodes {nodes} --node-rank N --rendezvous HOST:PORT"
        print(t(f"{arguments.out}: for {arguments.gpus} ranks; start it with `{start}`"))


def _machine(arguments: argparse.Namespace) -> Machine:
    from zero2all.measure.machine_profiles import named_machine

    machine = named_machine(arguments.cluster, arguments.profile)
    if arguments.network_gbps is None:
        return machine
    if len(machine.links) < 2 or arguments.network_gbps == 0:
        raise UsageError(f"--network-gbps {arguments.network_gbps:g} needs a cluster of nodes and a number above 0.")
    slow = dataclasses.replace(machine.links[-1], bytes_per_second=arguments.network_gbps * 1e9 / 8)
    return dataclasses.replace(machine, links=(*machine.links[:-1], slow))


def _title(plan: LayoutPlan) -> str:
    machine, precision = plan.machine, plan.config.train.precision
    return t(
        f"{plan.gpus} x {machine.name} ({t(machine.source)}), {precision}: predicted seconds of a step and tokens/s of "
        f"all GPUs; MFU causal; GiB allocated by the fullest process"
    )


def _notes(plan: LayoutPlan) -> list[str]:
    from zero2all.estimate.answer import said
    from zero2all.estimate.run.plan import compare

    best = plan.candidates[0]
    lines = [
        t(
            f"{plan.considered:,} layouts keep the rules. {plan.tried:,} were predicted in full; the others are slower "
            f"by what they compute alone."
        )
    ]
    if plan.held:
        fields = ", ".join(f"--{name} {value}" for name, value in plan.held.items())
        lines.append(t(f"As you set it, in all of them: {fields}"))
    parts = ", ".join(f"{t(part.name)} {said(part.estimate, 's')}" for part in best.time.parts if part.estimate > 5e-5)
    lines.append(t(f"The best: {parts}"))
    measured = [one for one in plan.candidates if "tokens_per_second" in one.measured]
    if len(measured) > 1:
        chosen = max(measured, key=lambda one: one.tokens_per_second)
        behind = 1 - chosen.measured["tokens_per_second"] / measured[0].measured["tokens_per_second"]
        count = len(measured)
        lines.append(
            t(f"The layout predicted to be fastest is {behind:.1%} slower than the fastest of {count} measured.")
        )
    for number, other in enumerate(plan.candidates[1:4], 2):
        lines.append(t(f"  against number {number}: {compare(best, other)}"))
    lines += [t("What another choice would cost:"), *(f"  {line}" for line in plan.alternatives)]
    lines.append(t("Rejected, by the first rule that a layout breaks, with the numbers of one of them:"))
    for rule, count in sorted(plan.rejected.items(), key=lambda one: -one[1]):
        if count:
            lines.append(f"  {count:>8,}  {t(rule)}")
    return lines


def register_memory(inner: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        inner,
        "memory",
        "where the memory of a training run goes, phase by phase; whether it fits a GPU, and what would make it fit",
        "z2a perf memory z2all-1b --gpu h200\n"
        "  z2a perf memory z2all-1b --gpu a100-80g --train.micro_batch_samples 32 --out memory.png\n"
        "  z2a perf memory big.yaml --memory-gib 24 --ranks 8 --parallel.zero 2 --json -",
        _memory,
        takes_overrides=True,
    )
    add_config(parser, MODEL_HELP)
    memory = "memory of another GPU, in GiB (2^30 bytes), as torch reports it"
    add_flags(
        parser,
        (
            "--gpu NAME",
            str,
            None,
            "4090, a100-40g, a100-80g, h100, h200, b200, … (default: this machine's)",
        ),
        ("--memory-gib N", real(0.0, is_open=True), None, memory),
        ("--ranks N", whole(1), 1, "processes, one per GPU (default 1)"),
    )
    add_json(parser)
    add_output(parser, "--out", help="draw the phases as stacked bars against the card (PNG)")


def _memory(arguments: argparse.Namespace) -> None:
    from zero2all.estimate.run.memory_report import as_json, memory_report, write_picture

    report = memory_report(arguments.config, arguments.overrides, _card(arguments), arguments.ranks)
    is_quiet = write_json_result(arguments.json, as_json(report))
    if not is_quiet:
        _print(report)
    if arguments.out is not None:
        said = write_picture(report, arguments.out)
        print(said, file=sys.stderr if is_quiet else None)


def _card(arguments: argparse.Namespace) -> Card | None:
    """The GPU that is asked about; None: that of this machine."""
    from zero2all.estimate.cards import GIB, HOPPER, Card, named_card

    if arguments.gpu is not None and arguments.memory_gib is not None:
        raise UsageError("--gpu and --memory-gib both say how much memory there is. Give one of them.")
    if arguments.gpu is not None:
        return named_card(arguments.gpu)
    if arguments.memory_gib is not None:
        return Card(f"a GPU of {arguments.memory_gib:g} GiB", arguments.memory_gib * GIB, HOPPER)
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "This machine has no GPU that torch can use. Say which one is meant with --gpu, or how much memory it has "
            "with --memory-gib."
        )
    return None


def _print(report: MemoryReport) -> None:
    from zero2all.cli.table import print_table
    from zero2all.estimate.run.memory_report import changes_table, parts_table, phases_table, verdict

    settings = report.settings
    for note in report.notes:
        print(t(note))
    print_table(
        parts_table(report),
        f"one process of {report.ranks}: micro-batches of {settings.micro_batch_samples} x {settings.seq_len} tokens, "
        f"{settings.passes} per step; GiB = 2^30 bytes",
    )
    print_table(
        phases_table(report),
        f"peak = what is there all the time + the worst phase ({t(report.estimate.worst.name)}); allocated by torch",
    )
    if report.estimate.host:
        print(t(f"host memory: {report.estimate.host / 2**30:.2f} GiB per process"))
    print(t(verdict(report)))
    if not report.fits and not any(change.fits for change in report.changes):
        print(t("None of these changes is enough, nor any two of them: use more GPUs, or a smaller model."))
    if report.changes and not report.fits:
        print_table(changes_table(report), "what would need less memory, computed by the same estimate")
