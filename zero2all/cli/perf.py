"""`z2a perf`: what its verbs share; `explain`, `memory`, `plan`; and those that measure: `ops`, `profile`, `allreduce`,
`shapes`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli import perf_calculators, perf_predict
from zero2all.cli.runs import open_run
from zero2all.cli.track import print_goodput
from zero2all.cli.verb import TYPES, amount, count, duration, group, share, verb, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.measure.explain import Explanation


@verb("""
    perf explain: say what limits a run and what to change, from its own metrics: time, speed, memory, interruptions

    ANY_RUN
    --card-gib N:float>0  memory of the card, where the run did not record it
    JSON

    z2a perf explain my-run
    """)
def _explain(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.measure.explain import as_json, explain
    from zero2all.measure.run_record import read_record

    with open_run(arguments.run, arguments) as run:
        explanation = explain(read_record(run.folder, arguments.card_gib))
        if not write_json_result(arguments.json, as_json(explanation)):
            print(t(explanation.limit))
            for number, finding in enumerate(explanation.findings, 1):
                share = f" ({100 * finding.share:.1f} %)" if finding.share else ""
                print(f"\n{number}. {t(finding.what)}{share}: {t(finding.evidence)}")
                print(f"   {t('advice:')} {t(finding.change)}\n   {t('expected gain:')} {t(finding.worth)}")
            print()
            if explanation.record.account.total_seconds:
                print_goodput(explanation.record.account)
            for title, rows in _explain_tables(explanation):
                print_table(rows, title)


def _explain_tables(explanation: Explanation) -> list[tuple[str, list[list[str]]]]:
    record = explanation.record
    tables = []
    if step := sum(record.parts.values()):
        rows = [["part of a step", "ms", "%"]]
        parts = sorted(record.parts.items(), key=lambda part: -part[1])
        rows += [[t(name), f"{1e3 * spent:,.3f}", f"{100 * spent / step:.1f}"] for name, spent in parts]
        tables.append(("mean of steady steps (without the first rows of each start)", rows))
    tables.append(("speed and memory", [["figure", "value", "convention"], *_figure_rows(explanation)]))
    if record.missing:
        tables.append(("not in this run's record", [["what is missing"], *([t(each)] for each in record.missing)]))
    return tables


def _figure_rows(explanation: Explanation) -> list[list[str]]:
    record, rows = explanation.record, []
    if record.speed is not None:
        speed = record.speed
        rows.append(
            [t("tokens/s"), f"{speed.value:,.0f} ± {speed.error:,.0f}", t("all processes, median of steady steps")]
        )
        if record.flops is not None:
            for name, flops in record.flops.items():
                achieved = f"{speed.value * flops / record.processes / 1e12:,.4g} TFLOP/s"
                mfu = record.mfu(name)
                share = "" if mfu is None else f", MFU {mfu:.1%}"
                rows.append([t("model FLOPs"), achieved + share, t(f"{name}, per device, {flops:.4g} FLOP a token")])
    for name in ("allocated", "peak", "reserved"):
        if (size := record.memory(name)) is not None:
            share = "" if record.card_bytes is None else f" ({size / record.card_bytes:.1%})"
            rows.append(
                [t(f"GPU memory {name}"), f"{size / 2**30:.2f} GiB{share}", t("largest logged, rank 0, of its card")]
            )
    return rows


if TYPE_CHECKING:
    from zero2all.estimate.gpus import Card
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
    from zero2all.estimate.gpus import GIB, HOPPER, Card, named_card

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


if TYPE_CHECKING:
    from zero2all.estimate.machine import Machine
    from zero2all.predict.layout_search import LayoutPlan


@verb("""
    perf plan: find the fastest layout on N GPUs: micro-batch, recompute, ZeRO and every axis; write its config

    MODEL_CONFIG
    --gpus! N:int>=1  number of GPUs
    MACHINE
    --network-gbps N:float>=0  network of each GPU between nodes, in Gbit/s per direction (default: the cluster's)
    --top N:int>=1 =10  layouts to show (default 10)
    --measure N:int>=1  measure the best N on the GPU of this machine
    --seconds TIME:duration =8  measured time per layout (default 8)
    --timeout TIME:duration =300  stop a measurement then (default 5m)
    --out FILE:out  write the config of the best layout
    JSON
    --section.field

    z2a perf plan z2all-1b --gpus 8 --cluster h100 --out planned.yaml
    z2a perf plan z2all-1b --gpus 1 --cluster h200 --measure 3
    z2a train planned.yaml
    """)
def _plan(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.predict.batch import load_measured_config, load_model_config, precision_notes
    from zero2all.predict.layout_search import config_of, plan_cells, plan_json, plan_layouts

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
    from zero2all.predict.layout_search import compare

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


RENAMED = {
    **dict.fromkeys(("params", "flops", "zero", "inference"), "z2a perf model"),
    "time": "z2a perf cost",
    **dict.fromkeys(("batch", "comm", "link"), "z2a train CONFIG --plan-only"),
    "bubble": "z2a perf predict",
    **dict.fromkeys(("failure", "checkpoint", "simulate"), "z2a perf failures"),
    "roofline": "z2a perf shapes --matmul M,N,K",
    "verify": "z2a perf predict CONFIG --verify",
    "scoreboard": "z2a perf predict CONFIG --verify",
    "tokens": "z2a tokenizer eval",
    "diff": "z2a plot RUN RUN",
    "bench": "z2a perf allreduce",
    "ablate": "python benchmarks/ablate.py",
    "infer": "python benchmarks/generate.py",
}
"""A verb of before -> the command that does it now, or the program in the repository."""

OTHER_VERBS = (perf_calculators, perf_predict)
"""The files that declare the verbs which are not declared here."""
TYPES.update(duration=duration, amount=amount)

group(
    """
    perf: how large, how fast, how long: calculators, predictions, measurements, and what a run's record says

    z2a perf model llama-3.1-8b
    z2a perf memory z2all-1b --gpu h200
    z2a perf calibrate z2all-1b
    z2a perf plan z2all-1b --gpus 64 --cluster h100
    z2a perf explain my-run
    """,
    RENAMED,
)
share(
    """
    config CONFIG  a preset, a YAML file, a run's folder, or a published model: llama-3.1-8b, mixtral-8x7b, …
    """,
    "MODEL_CONFIG",
)
share("--json FILE:out  also write the result as JSON; - prints only that", "JSON")
share(
    """
    --cluster NAME       from data sheets: a100-80g, h100, h200, b200
    --profile FILE:path  a profile that `z2a perf calibrate` wrote (default: the one of this machine)
    """,
    "MACHINE",
)


@verb("""
    perf ops: list the implementations of every operator on this machine

    config? CONFIG  a preset, a YAML file, a run's folder, or a published model: llama-3.1-8b, mixtral-8x7b, …
        (default: those for this device)
    JSON
    --section.field

    z2a perf ops z2all-1b
    """)
def _ops(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.measure.operators import context_here, describe, list_cells, listed_operators

    config = None
    if arguments.config is not None:
        from zero2all.predict.batch import load_measured_config

        config, _ = load_measured_config(arguments.config, arguments.overrides)
    elif arguments.overrides:
        raise UsageError(f"`{arguments.overrides[0]}` sets a config field. Name the config too.")
    entries = listed_operators(config)
    if not write_json_result(arguments.json, entries):
        print_table(list_cells(entries), describe(context_here(config)))


@verb("""
    perf profile: a few steps of training taken apart: groups of kernels, parts of a step, the slowest kernels with
        their floors

    MODEL_CONFIG
    --batch BxTxA      samples per pass x tokens x passes per step (default: the config's with at most 4 passes; on a
        CPU a small one)
    --steps N:int>=1 =3  steps under the profiler (default 3)
    --out DIR:outdir   folder of the results (default: profile-CONFIG)
    JSON
    --section.field

    z2a perf profile z2all-1b --out profile
    z2a perf profile quickstart --batch 16x128x1 --json -
    """)
def _profile(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.common.files import write_json
    from zero2all.measure.profile import TRACE_NAME, as_json, profile_config, tables_of, title_of
    from zero2all.predict.batch import load_measured_config, parse_batch

    batch = None if arguments.batch is None else parse_batch(arguments.batch)
    config, _ = load_measured_config(arguments.config, arguments.overrides)
    name = Path(arguments.config).stem
    output: Path = arguments.out or Path(f"profile-{name}")
    found = profile_config(name, config, batch, arguments.steps, output)
    write_json(output / "profile.json", as_json(found))
    if not write_json_result(arguments.json, as_json(found)):
        for number, cells in enumerate(tables_of(found)):
            print_table(cells, None if number else title_of(found))
        print("\n".join([*map(t, found.notes), str(output / TRACE_NAME), str(output / "profile.json")]))


@verb("""
    perf allreduce: bus bandwidth of all-reduces over sizes, between processes of this machine

    --ranks N:int>=2..64      processes (default: one per GPU; 2 on the CPU)
    --seconds TIME:duration =20  measure for about this long (default 20)
    --device auto|cpu|cuda =auto  device (default: auto)
    JSON

    z2a perf allreduce --ranks 8
    """)
def _allreduce(arguments: argparse.Namespace) -> int:
    from zero2all.cli.table import print_table
    from zero2all.measure.allreduce import allreduce_advice, allreduce_cells, measure_allreduces, possible_ranks

    device, ranks = possible_ranks(arguments.device, arguments.ranks)
    if "LOCAL_RANK" not in os.environ:
        from zero2all.parallel.launch import run_processes

        return run_processes(ranks, arguments.command_line)
    found = measure_allreduces(device, arguments.seconds)
    if os.environ["RANK"] == "0" and not write_json_result(arguments.json, [one.as_json() for one in found]):
        about = f"{len(found)} sizes, {ranks} ranks; bus bandwidth = 2 (n - 1) / n x bytes / time"
        print_table(allreduce_cells(found), about)
        print(t(allreduce_advice(found)))
    return 0


@verb("""
    perf shapes: six rules for the sizes of a model, a config checked against them, and what limits one product

    --check CONFIG  a preset, a YAML file, a run's folder, or a published model: llama-3.1-8b, mixtral-8x7b, …
    --gpu a100-80g|h100|h200|b200 =h200  whose tiles and waves the arithmetic assumes (default h200)
    --matmul M,N,K  what limits one product on --gpu: arithmetic or memory; its tiles and waves
    JSON
    --section.field

    z2a perf shapes
    z2a perf shapes --check z2all-1b --gpu h100
    z2a perf shapes --gpu h100 --matmul 8192,14336,4096
    """)
def _shapes(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.estimate.shapes import RULES

    if arguments.matmul is not None:
        _roofline(arguments)
        return
    result: dict[str, Any] = {"rules": [dataclasses.asdict(one) for one in RULES]}
    tables: list[tuple[list[list[str]], str | None]] = [
        ([["", "rule", "why"], *([str(one.number), t(one.rule), t(one.why)] for one in RULES)], None)
    ]
    if arguments.check is not None:
        from zero2all.estimate.machine import named_cluster
        from zero2all.estimate.shapes import check_shape
        from zero2all.predict.batch import load_measured_config, shape_of

        config, _ = load_measured_config(arguments.check, arguments.overrides)
        findings = check_shape(shape_of(config), named_cluster(arguments.gpu))
        result |= {"config": arguments.check, "gpu": arguments.gpu}
        result["findings"] = [dataclasses.asdict(one) for one in findings]
        tables.append((_finding_cells(findings), f"{arguments.check} on {arguments.gpu}"))
    elif arguments.overrides:
        raise UsageError("There is no config to check. Name one: --check CONFIG.")
    if not write_json_result(arguments.json, result):
        for cells, title in tables:
            print_table(cells, title)


def _roofline(arguments: argparse.Namespace) -> None:
    from zero2all.estimate.gpus import GPUS
    from zero2all.estimate.model_calculators import roofline

    try:
        m, n, k = map(count, arguments.matmul.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"--matmul {arguments.matmul}: expected three sizes, such as 8192,14336,4096.") from None
    answer = roofline(m, n, k, GPUS[arguments.gpu.removesuffix("-80g")])
    if not write_json_result(arguments.json, answer.as_json()):
        perf_calculators.show(answer)


def _finding_cells(findings: list[Any]) -> list[list[str]]:
    rows = [
        [str(one.rule), one.what, one.value, t("holds") if one.is_kept else t("broken"), t(one.says), t(one.nearest)]
        for one in findings
    ]
    return [["rule", "size", "value", "verdict", "because", "nearest that keeps it"], *rows]
