"""`z2a perf explain`, `memory`, `plan`, `calibrate`, and `predict`, which also checks a prediction by real steps."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from zero2all.cli.runs import open_run
from zero2all.cli.terminal import print_table
from zero2all.cli.track import print_goodput
from zero2all.cli.verb import share, verb, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.estimate.gpus import Card
    from zero2all.estimate.machine import Machine
    from zero2all.measure.calibrate import Calibration
    from zero2all.measure.explain import Explanation
    from zero2all.predict.layout_search import LayoutPlan
    from zero2all.predict.memory_report import MemoryReport
    from zero2all.predict.step_prediction import Prediction

GIB = 2**30


@verb("""
    perf explain: say what limits a run and what to change, from its own metrics: time, speed, memory, interruptions

    ANY_RUN
    --card-gib N:float>0  memory of the card, where the run did not record it
    JSON

    z2a perf explain my-run
    """)
def _explain(arguments: argparse.Namespace) -> None:
    from zero2all.measure.explain import as_json, explain, read_record

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
    if (speed := record.speed) is not None:
        value = f"{speed.value:,.0f} ± {speed.error:,.0f}"
        rows.append([t("tokens/s"), value, t("all processes, median of steady steps")])
        for name, flops in (record.flops or {}).items():
            achieved = f"{speed.value * flops / record.processes / 1e12:,.4g} TFLOP/s"
            mfu = record.mfu(name)
            share = "" if mfu is None else f", MFU {mfu:.1%}"
            rows.append([t("model FLOPs"), achieved + share, t(f"{name}, per device, {flops:.4g} FLOP a token")])
    for name in ("allocated", "peak", "reserved"):
        if (size := record.memory(name)) is not None:
            share = "" if record.card_bytes is None else f" ({size / record.card_bytes:.1%})"
            value = f"{size / 2**30:.2f} GiB{share}"
            rows.append([t(f"GPU memory {name}"), value, t("largest logged, rank 0, of its card")])
    return rows


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
    from zero2all.estimate.model_calculators import said
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


share(
    """
    --batch BxTxA  samples per pass x tokens x passes per step, in each data-parallel process (default: its share of
        the config's)
    """,
    "BATCH",
)


@verb("""
    perf calibrate: measure what this machine can do, under sustained load, and keep it as a profile

    configs* CONFIG  models whose own shapes are measured: a preset, a YAML file, a run's folder, or a published model:
        llama-3.1-8b, mixtral-8x7b, … (default: z2all-1b, on a CPU quickstart)
    --seconds TIME:duration =180  begin no figure after this (default 180); the same command continues
    BATCH
    --again  measure everything again
    --profile FILE:out  file of the profile (default: by device in ~/.cache/zero2all/profiles)
    JSON
    --section.field

    z2a perf calibrate z2all-1b
    z2a perf calibrate z2all-1b z2all-moe --seconds 240
    """)
def _calibrate(arguments: argparse.Namespace) -> None:
    from zero2all.measure.calibrate import calibrate, default_config
    from zero2all.predict.batch import check_batch, load_measured_config, own_batch, parse_batch

    configs = []
    for source in arguments.configs or [default_config()]:
        config, _ = load_measured_config(source, arguments.overrides)
        batch = own_batch(config) if arguments.batch is None else parse_batch(arguments.batch)
        check_batch(batch, config)
        configs.append((config, batch))
    found = calibrate(configs, arguments.seconds, arguments.again, arguments.profile)
    told = {"left": found.left, "failed": found.failed, "gpu": found.gpu, "anchors": found.anchors}
    if write_json_result(arguments.json, {"profile": str(found.path), **told}):
        return
    print_table(_profile_rows(found.machine), f"{found.machine.name}: {found.measured} figures measured")
    print("\n".join(_calibration_notes(found)))


def _profile_rows(machine: Machine) -> list[list[str]]:
    """The most telling figures of a profile."""
    rows = [
        ["what", "value"],
        [t("copy bandwidth (read and written)"), f"{machine.stream_bytes_per_second / 1e9:,.1f} GB/s"],
    ]
    for dtype in machine.peak_flops:
        own = [one for one in machine.matmuls if one.dtype == dtype]
        for kind in ("forward", "dgrad", "wgrad"):
            rates = [2e-12 * one.m * one.n * one.k / one.seconds for one in own if one.kind == kind]
            if rates:
                cells = f"{max(rates):,.4g} / {sum(rates) / len(rates):,.4g} TFLOPS, {len(rates)}"
                rows.append([t(f"{dtype} {kind}: best / mean, shapes"), cells])
    spreads = sorted(one.spread for one in machine.matmuls)
    rows.append([t("spread of a figure (IQR / median), median"), f"{100 * spreads[len(spreads) // 2]:.1f} %"])
    rows.append([t("shortest kernel"), f"{1e6 * machine.launch_seconds:.1f} µs"])
    rows.append([t("host, per operator"), f"{1e6 * machine.host_op_seconds:.1f} µs"])
    rows.append([t("rate under load / in a burst"), f"{machine.hot_over_cold:.3f}"])
    for name, curve in machine.copy.items():
        size, seconds = curve.points[-1]
        rows.append([t(f"copy {name}"), f"{size / seconds / 1e9:.1f} GB/s"])
    rows += [[t(f"memory: {name}"), f"{size / 2**20:,.0f} MiB"] for name, size in machine.overhead.items()]
    return [*rows, [t("power under load"), f"{machine.watts:.0f} W"]] if machine.watts else rows


def _calibration_notes(found: Calibration) -> list[str]:
    from zero2all.measure.calibrate import reasons

    lines = [t(f"profile: {found.path}")]
    for one in found.anchors.values():
        if one["sm_mhz"]:
            lines.append(t(f"clock in real steps: {one['sm_mhz']:.0f} MHz, {one['celsius']:.0f} °C"))
        lines.append(
            t(f"a real step: {one['seconds']:.4f} s; the sum of its figures before its clock: {one['predicted']:.4f} s")
        )
    lines += [t(f"not measured: {line}") for line in reasons(found.failed)]
    if found.left:
        lines.append(
            t(f"{len(found.left)} figures are left, from {found.left[0]} on. Run the same command again to continue.")
        )
    return lines


@verb("""
    perf predict: predict step time, tokens/s, MFU, memory, energy and cost of a run, from the profile of a machine

    MODEL_CONFIG
    BATCH
    MACHINE
    --gpus N:int>=1 =1  processes, one GPU each (default 1)
    --price USD:float>=0  price of a GPU for an hour, for the cost
    --verify  run a few real steps too, and compare
    --seconds TIME:duration =6  with --verify: measure about this long (default 6)
    --timeout TIME:duration =300  with --verify: stop the run after this (default 5m)
    JSON
    --section.field

    z2a perf predict z2all-1b --batch 16x2048x16
    z2a perf predict z2all-1b --cluster h100 --gpus 16 --parallel.zero 1 --price 2.5
    z2a perf predict z2all-1b --batch 16x2048x4 --verify
    """)
def _predict(arguments: argparse.Namespace) -> None:
    if arguments.verify:
        _verify(arguments)
        return
    from zero2all.measure.verify import PredictionTarget, prediction_for
    from zero2all.predict.batch import load_measured_config, parse_batch, precision_notes

    config, notes = load_measured_config(arguments.config, arguments.overrides)
    batch = None if arguments.batch is None else parse_batch(arguments.batch)
    asked = PredictionTarget(arguments.cluster, arguments.profile, arguments.gpus, arguments.price)
    found = prediction_for(config, batch, asked)
    if write_json_result(arguments.json, found.as_json()):
        return
    machine = found.machine
    if machine.multiprocessors:
        notes += precision_notes(config, arguments.config, arguments.overrides)
    on = f"{arguments.gpus} x {machine.name} ({t(machine.source)})"
    title = f"{arguments.config} on {on}, {config.train.precision}, batch {found.batch}"
    print_table(_prediction_rows(found), title)
    print_table(_part_rows(found), "seconds of a step by part, of one process")
    print("\n".join([*map(t, notes), *_prediction_notes(found)]))


def _prediction_rows(found: Prediction) -> list[list[str]]:
    from zero2all.common.progress import human_seconds

    step = found.step
    low, high = step.interval
    rows = [
        ["what", "value", "how"],
        [t("step, estimate"), f"{step.estimate:.4f} s", t("sum of the parts below")],
        [t("90 % interval"), f"{low:.4f} – {high:.4f} s", ""],
        [t("lower bound"), f"{step.lower:.4f} s", t("peak arithmetic and bandwidth, nothing waits")],
        [t("upper bound"), f"{step.upper:.4f} s", t("nothing hidden, slow kernels")],
        [t("tokens/s"), f"{step.tokens_per_second:,.0f}", t(f"{step.tokens:,} tokens a step, all processes")],
    ]
    for name, value in found.mfu.items():
        rows.append([t(f"MFU, {name}"), f"{100 * value:.1f} %", t("model FLOPs / (time x processes x peak)")])
    capacity = found.machine.memory_bytes
    run = f"{found.steps:,} steps, {found.budget_tokens / 1e9:.2f} B tokens; no failures, checkpoints, evaluation"
    rows += [
        [t("peak allocated"), f"{found.peak_bytes / GIB:.2f} GiB", t("per process, on the device")],
        [t("peak reserved"), f"{found.reserved_bytes / GIB:.2f} GiB", t("with what the allocator keeps")],
        [t("device in use"), f"{found.needed_bytes / GIB:.2f} GiB", t(f"of {capacity / GIB:.1f} GiB; with context")],
        [t("whole run"), human_seconds(found.run_seconds), t(run)],
    ]
    if found.machine.watts:
        power = t(f"{found.machine.watts:.0f} W x {found.settings.processes}, GPUs alone")
        rows.append([t("energy"), f"{found.joules / 3.6e6:,.1f} kWh", power])
    if found.cost is not None:
        hours = found.run_seconds / 3600 * found.settings.processes
        rows.append([t("cost"), f"{found.cost:,.2f} USD", f"{hours:,.1f} h x {found.machine.price_per_hour:g} USD"])
    return rows


def _part_rows(found: Prediction) -> list[list[str]]:
    rows = [["part", "lower", "estimate", "upper", "hidden time", "share", "TFLOP", "GB"]]
    for part in found.step.parts:
        figures = [f"{value:.4f}" for value in (part.lower, part.estimate, part.upper, part.hidden)]
        share = f"{100 * part.estimate / found.step.estimate:.1f} %"
        work = [f"{part.flops / 1e12:,.1f}" if part.flops else "", f"{part.bytes / 1e9:,.2f}" if part.bytes else ""]
        rows.append([t(part.name), *figures, share, *work])
    return rows


def _prediction_notes(found: Prediction) -> list[str]:
    lines = []
    if not found.fits:
        short = (found.needed_bytes - found.machine.memory_bytes) / GIB
        lines.append(t(f"It does not fit: {short:.1f} GiB are missing. `z2a perf memory` says what would make it fit."))
    if found.cost is None:
        lines.append(t("No cost: the price of a GPU is not known. Give it with --price."))
    if found.machine.left:
        lines.append(
            t(
                f"The profile is incomplete: {found.machine.left} figures were not measured, so the interval is wide. "
                f"Run `z2a perf calibrate` again."
            )
        )
    if found.machine.source != "measured":
        lines.append(t("From data sheets: within 10 to 20 %. `z2a perf calibrate` on the machine makes it closer."))
    return lines


def _verify(arguments: argparse.Namespace) -> None:
    from zero2all.measure.verify import PredictionTarget, ShortRun, comparison, machine_line, verify
    from zero2all.predict.batch import load_measured_config, own_batch, parse_batch

    config, _ = load_measured_config(arguments.config, arguments.overrides)
    batch = own_batch(config) if arguments.batch is None else parse_batch(arguments.batch)
    asked = PredictionTarget(arguments.cluster, arguments.profile, arguments.gpus)
    run = ShortRun(batch, arguments.seconds, arguments.timeout)
    found = verify(arguments.config, arguments.overrides, run, asked)
    rows = comparison(found)
    if not write_json_result(arguments.json, found.as_json()):
        print_table(rows, f"{arguments.config}, batch {batch}: {machine_line(found.prediction.machine)}")
