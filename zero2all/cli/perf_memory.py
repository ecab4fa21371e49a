"""`z2a perf memory`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from zero2all.cli.verb import (
    MODEL_HELP,
    Subparsers,
    add_config,
    add_flags,
    add_json,
    add_output,
    add_verb,
    real,
    whole,
    write_json_result,
)
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.limits.cards import Card
    from zero2all.perf.memory import MemoryReport


def register(inner: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        inner,
        "memory",
        "where the memory of a training run goes, phase by phase; whether it fits a GPU, and what would make it fit",
        "z2a perf memory z2all-1b --gpu h200\n"
        "  z2a perf memory z2all-1b --gpu a100-80g --train.micro_batch_samples 32 --picture memory.png\n"
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
    add_output(parser, "--picture", help="draw the phases as stacked bars against the card (PNG)")


def _memory(arguments: argparse.Namespace) -> None:
    from zero2all.perf.memory import as_json, memory_report, write_picture

    report = memory_report(arguments.config, arguments.overrides, _card(arguments), arguments.ranks)
    is_quiet = write_json_result(arguments.json, as_json(report))
    if not is_quiet:
        _print(report)
    if arguments.picture is not None:
        said = write_picture(report, arguments.picture)
        print(said, file=sys.stderr if is_quiet else None)


def _card(arguments: argparse.Namespace) -> Card | None:
    """The GPU that is asked about; None: that of this machine."""
    from zero2all.limits.cards import GIB, HOPPER, Card, named_card

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
    from zero2all.perf.memory import changes_table, parts_table, phases_table, verdict

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
    for place, count in (("host memory", report.estimate.host), ("disk", report.estimate.disk)):
        if count:
            print(t(f"{place}: {count / 2**30:.2f} GiB per process"))
    print(t(verdict(report)))
    if not report.fits and not any(change.fits for change in report.changes):
        print(t("None of these changes is enough, nor any two of them: use more GPUs, or a smaller model."))
    if report.changes and not report.fits:
        print_table(changes_table(report), "what would need less memory, computed by the same estimate")
