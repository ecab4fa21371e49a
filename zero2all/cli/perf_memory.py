"""`z2a perf memory`: where the memory of a run goes, and whether it fits."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.verb import verb, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.estimate.cards import Card
    from zero2all.predict.memory_report import MemoryReport


@verb("""
    perf memory: where the memory of a training run goes, phase by phase; whether it fits a GPU, and what would make it
        fit

    MODEL_CONFIG
    --gpu NAME  4090, a100-40g, a100-80g, h100, h200, b200, … (default: this machine's)
    --memory-gib N:float>0  memory of another GPU, in GiB (2^30 bytes), as torch reports it
    --ranks N:int>=1 =1  processes, one per GPU (default 1)
    JSON
    --section.field

    z2a perf memory z2all-1b --gpu h200
    z2a perf memory z2all-1b --gpu a100-80g --train.micro_batch_samples 32
    z2a perf memory big.yaml --memory-gib 24 --ranks 8 --parallel.zero 2 --json -
    """)
def _memory(arguments: argparse.Namespace) -> None:
    from zero2all.predict.memory_report import as_json, memory_report

    report = memory_report(arguments.config, arguments.overrides, _card(arguments), arguments.ranks)
    if not write_json_result(arguments.json, as_json(report)):
        _print(report)


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
    from zero2all.predict.memory_report import changes_table, parts_table, phases_table, verdict

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
