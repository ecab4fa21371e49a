"""`z2a perf bench …`: operators, training steps and one choice at a time; `z2a perf shapes` and `profile`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import (
    DEVICES,
    MODEL_HELP,
    Subparsers,
    add_config,
    add_flags,
    add_group,
    add_json,
    add_output,
    add_verb,
    add_work,
    count,
    duration,
    real,
    whole,
    workspace_of,
    write_json_result,
)
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    import torch

    from zero2all.measure.bench.samples import Bench

GPUS = ("a100-80g", "h100", "h200", "b200")
BENCH_CONFIG = "z2all-1b"
SECONDS = ("--seconds TIME", duration)
VERBS = {
    "dataloader": (10.0, "tokens/s of our loader over packed data, with one and more readers", "--work my-workspace"),
    "pin": (8.0, "copies to and from the GPU with pinned and with ordinary memory", "--seconds 4"),
    "numa": (8.0, "memory of the near and of far NUMA nodes, for threads and the GPU", "--seconds 4"),
    "allreduce": (20.0, "bus bandwidth of all-reduces over sizes, between processes of this machine", "--ranks 8"),
}
"""Verb -> usual seconds, what it measures, and the rest of an example."""
RENAMED = {
    "compile": "z2a perf bench ablate CONFIG --rows all-fused,fused-compile-block,fused-compile-trunk",
    "optimizer": "z2a perf bench ablate CONFIG --rows optimizer-fused,optimizer-eager,adamw-8bit,adamw-bf16,muon",
}


def register(inner: Subparsers) -> None:
    """Add the verbs."""
    example = "z2a perf bench ops z2all-1b --only rms_norm\n  z2a perf bench allreduce --ranks 2"
    about = "measure operators alone, training steps with one thing changed, or one choice: loader, copies, …"
    group = add_group(inner, "bench", about, example, RENAMED)
    _register_ops(group)
    _register_ablate(group)
    verbs = {}
    for name, (seconds, summary, more) in VERBS.items():
        takes_overrides = name == "dataloader"
        parser = verbs[name] = add_verb(group, name, summary, f"z2a perf bench {name} {more}", _bench, takes_overrides)
        parser.set_defaults(bench=name)
        add_flags(parser, (*SECONDS, seconds, f"measure for about this long (default {seconds:g})"))
        add_flags(parser, ("--device", DEVICES, DEVICES[0], "device (default: auto)"))
        add_json(parser)
    loader = ("--config CONFIG", str, None, "a run of the workspace, a preset or a YAML file")
    add_flags(verbs["dataloader"], loader)
    add_work(verbs["dataloader"])
    ranks = "processes (default: one per GPU; 2 on the CPU)"
    add_flags(verbs["allreduce"], ("--ranks N", whole(2, 64), None, ranks))
    _register_profile(inner)
    _register_shapes(inner)


def _measured(arguments: argparse.Namespace, device: torch.device) -> Bench:
    seconds: float = arguments.seconds
    if arguments.bench in ("pin", "numa"):
        from zero2all.measure.bench.copies import bench_numa, bench_pin

        return (bench_pin if arguments.bench == "pin" else bench_numa)(device, seconds)
    if arguments.bench == "allreduce":
        return _allreduce(arguments, device.type)
    from zero2all.cli.data import config_of
    from zero2all.measure.bench.copies import bench_dataloader
    from zero2all.train.run_data import open_run_data

    workspace = workspace_of(arguments)
    config, _ = config_of(arguments, workspace)
    data, _ = open_run_data(config, workspace, False)
    return bench_dataloader(data, config.train.tokens_per_step, device, seconds)


def _allreduce(arguments: argparse.Namespace, device: str) -> Bench:
    import torch

    from zero2all.measure.bench.allreduce import bench_allreduce

    gpus = torch.cuda.device_count()
    if device == "cuda" and arguments.ranks is not None and arguments.ranks > gpus:
        raise UsageError(
            f"--ranks is {arguments.ranks}, but NCCL takes one GPU for each rank and this machine has {gpus}. Use at "
            f"most {gpus}, or --device cpu."
        )
    return bench_allreduce(arguments.ranks or (gpus if device == "cuda" else 2), device, arguments.seconds)


def _bench(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.cli.terminal import print_fitted
    from zero2all.measure.bench.samples import device_and_threads

    bench = _measured(arguments, device_and_threads(arguments.device))
    if write_json_result(arguments.json, bench.as_json()):
        return
    if bench.rows:
        more = list(bench.rows[0].more)
        has_rate = any(row.rate for row in bench.rows)
        cells = [["case", "median", "spread", *(["rate"] if has_rate else []), *more, "times"]]
        for row in bench.rows:
            rate = [f"{row.rate:,.3g} {row.unit}" if row.rate else ""] if has_rate else []
            figures = [_time(row.median), f"±{50 * row.spread:.1f} %", *rate, *(row.more.get(one, "") for one in more)]
            cells.append([t(row.what), *figures, str(len(row.seconds))])
        print_table(cells, bench.about)
        print(t("Spread: half the distance of the quartiles, as a share of the median."))
    else:
        print(t(bench.about))
    for line in bench.left_out:
        print_fitted(t(f"Not measured: {t(line)}"))
    for line in bench.advice:
        print_fitted(t(line))


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"


def _register_ops(group: Subparsers) -> None:
    parser = add_verb(
        group,
        "ops",
        "measure each implementation of every operator: time, share of the floor, error against float64",
        "z2a perf bench ops z2all-1b --only rms_norm --json norm.json",
        _ops,
        takes_overrides=True,
    )
    add_config(parser, f"{MODEL_HELP} (default: {BENCH_CONFIG})", nargs="?", default=BENCH_CONFIG)
    add_flags(
        parser,
        ("--rows N", count, None, "tokens (default: a micro-batch; few on a CPU)"),
        ("--only OP", str, None, "one operator: rms_norm, linear/qkv, …"),
        (*SECONDS, 0.2, "minimum time per figure (default 0.2)"),
    )
    add_json(parser)


def _ops(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.estimate.run.batch import load_measured_config
    from zero2all.measure.op_bench import Bench as OperatorBench
    from zero2all.measure.op_bench import bench_cells, bench_operators

    config, _ = load_measured_config(arguments.config, arguments.overrides)

    def keep(bench: OperatorBench) -> None:
        if str(arguments.json) != "-":
            write_json_result(arguments.json, dataclasses.asdict(bench))

    bench = bench_operators(config, arguments.rows, arguments.only, arguments.seconds, keep)
    if write_json_result(arguments.json, dataclasses.asdict(bench)):
        return
    print_table(
        bench_cells(bench),
        f"{bench.device}, {bench.dtype}, {bench.samples} x {bench.seq_len} tokens; "
        f"copy {bench.ceilings.copy_bytes_per_second / 1e9:,.0f} GB/s, "
        f"matmul {bench.ceilings.matmul_flops_per_second / 1e12:.3g} TFLOPS",
    )


def _register_ablate(group: Subparsers) -> None:
    parser = add_verb(
        group,
        "ablate",
        "measure speed and memory of training with one operator changed at a time; can be resumed",
        "z2a perf bench ablate z2all-1b --batch 2x2048x16 --out ablation --budget-seconds 9m",
        _ablate,
        takes_overrides=True,
    )
    add_config(parser, MODEL_HELP, nargs="?")
    batch = "samples per pass x tokens x passes per iteration (default: 2x2048x16 and the config's own)"
    compile_jobs = "compile N rows beside each other, measure them in turn; the GPU must hold N (default 1)"
    report = "measure nothing; show the results in --out, also those of another machine"
    add_flags(
        parser,
        ("--list", bool, False, "show the rows and stop"),
        ("--rows NAME,…", str, None, "only these rows (default: all)"),
        ("--batch BxTxA,…", str, None, batch),
        (*SECONDS, 8.0, "minimum time measured per row (default 8)"),
        ("--warm-up-seconds TIME", real(0.0), 3.0, "minimum time of warm-up before (default 3)"),
        ("--budget-seconds TIME", duration, None, "start no row that would end later than this (default: measure all)"),
        ("--row-timeout-seconds TIME", duration, 900.0, "stop a row after this long (default 15m)"),
        ("--compile-jobs N", whole(1), 1, compile_jobs),
        ("--report", bool, False, report),
        ("--again", bool, False, "measure rows again even if results exist"),
    )
    add_output(parser, "--out", is_folder=True, help="folder of the results (default: ablation-CONFIG)")


def _ablate(arguments: argparse.Namespace) -> int:
    from zero2all.cli.table import print_table
    from zero2all.measure.variants import VARIANTS, named_variants, title_of

    if arguments.list:
        from zero2all.estimate.run.batch import load_measured_config

        config, _ = load_measured_config(arguments.config or BENCH_CONFIG, arguments.overrides)
        listed = [
            [
                variant.name,
                title_of(variant, config),
                json.dumps({**variant.ops, **variant.model, **variant.train, **variant.optim}),
            ]
            for variant in VARIANTS
        ]
        print_table([["row", "what it is", "changes"], *listed])
        return 0
    if arguments.config is None:
        raise UsageError(f"`z2a perf bench ablate` needs CONFIG: {MODEL_HELP}. Only --list does without.")
    from zero2all.estimate.run.batch import parse_batch
    from zero2all.measure.ablate import AblateOptions, ablate
    from zero2all.measure.summary import batch_tables, cells, device_of, heading, notes, write_report

    stem = Path(arguments.config).stem
    output = arguments.out or Path(f"ablation-{stem}")
    ablation = ablate(
        AblateOptions(
            source=arguments.config,
            output=output,
            overrides=arguments.overrides,
            batches=None if arguments.batch is None else [parse_batch(text) for text in arguments.batch.split(",")],
            variants=named_variants(None if arguments.rows is None else arguments.rows.split(",")),
            seconds=arguments.seconds,
            warm_up_seconds=arguments.warm_up_seconds,
            budget_seconds=arguments.budget_seconds,
            row_timeout_seconds=arguments.row_timeout_seconds,
            compile_jobs=arguments.compile_jobs,
            again=arguments.again,
            report_only=arguments.report,
        )
    )
    tables = batch_tables(ablation)
    for table in tables:
        print_table([heading(table), *cells(table)], f"{table.batch}: {table.batch.tokens:,} tokens per iteration")
    for line in notes(ablation, tables):
        print(line)
    written = write_report(ablation, output, f"{stem} on one {device_of(ablation)}")
    for line in written:
        print(line)
    if ablation.pending:
        names = ", ".join(f"{batch} {variant.name}" for batch, variant in ablation.pending)
        print(t(f"{len(ablation.pending)} rows are left: {names}. Run the same command again to continue."))
    return 0


def _register_shapes(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "shapes",
        "six rules for the sizes of a model, a config checked against them, and the fastest SwiGLU width near 8/3 h",
        "z2a perf shapes\n  z2a perf shapes --check z2all-1b --gpu h100 --out shapes\n"
        "  z2a perf shapes --gpu h100 --matmul 8192,14336,4096\n"
        "  z2a perf shapes --check my.yaml --measure --seconds 60 --json -",
        _shapes,
        takes_overrides=True,
    )
    gpu = "whose tiles and waves the arithmetic assumes (default h200)"
    measure = "time the products of each width here: on the GPU, or the CPU without one"
    add_flags(
        parser,
        ("--check CONFIG", str, None, MODEL_HELP),
        ("--gpu", GPUS, "h200", gpu),
        ("--matmul M,N,K", str, None, "what limits one product on --gpu: arithmetic or memory; its tiles and waves"),
        ("--measure", bool, False, measure),
        (*SECONDS, 60.0, "start no width after this long (default 60)"),
    )
    add_output(parser, "--out", is_folder=True, help="folder for shapes.png and shapes.json (default: none)")
    add_json(parser)


def _shapes(arguments: argparse.Namespace) -> None:
    if arguments.matmul is not None:
        _roofline(arguments)
        return
    from zero2all.cli.table import print_table
    from zero2all.estimate.machine import named_cluster
    from zero2all.estimate.shapes import RULES, check_shape, modelled_width, widths_near

    is_quiet = str(arguments.json) == "-"
    if not is_quiet:
        print_table([["", "rule", "why"], *([str(one.number), t(one.rule), t(one.why)] for one in RULES)])
    if arguments.check is None:
        if arguments.overrides or arguments.measure:
            raise UsageError("There is no config to check or measure. Name one: --check CONFIG.")
        write_json_result(arguments.json, {"rules": [dataclasses.asdict(one) for one in RULES]})
        return
    from zero2all.estimate.run.batch import load_measured_config
    from zero2all.measure.shape_widths import draw_shapes, shape_of

    config, _ = load_measured_config(arguments.check, arguments.overrides)
    machine, shape = named_cluster(arguments.gpu), shape_of(config)
    findings = check_shape(shape, machine)
    hidden, own, dtype = shape.model.hidden_size, shape.model.intermediate_size, config.train.precision
    widths = widths_near(hidden, shape.tensor, [own], multiple=shape.multiple)
    rows = [modelled_width(shape.tokens, hidden, width, shape.tensor, machine, dtype) for width in widths]
    result: dict[str, Any] = {
        "config": arguments.check,
        "gpu": arguments.gpu,
        "multiprocessors": machine.multiprocessors,
        "tokens_per_micro_batch": shape.tokens,
        "rules": [dataclasses.asdict(one) for one in RULES],
        "findings": [dataclasses.asdict(one) for one in findings],
        "widths_by_arithmetic": [_width_json(row) for row in rows],
    }
    if not is_quiet:
        print_table(_finding_cells(findings), f"{arguments.check} on {arguments.gpu}")
        about = f"SwiGLU by tiles and waves of {arguments.gpu}, {dtype}, {shape.tokens:,} tokens of a micro-batch"
        print_table(_width_cells(rows, hidden, own), about)
    if arguments.measure:
        rows = _measure(arguments, config, shape, widths, result, is_quiet) or rows
    if arguments.out is not None:
        said = draw_shapes(shape, machine, rows, arguments.out / "shapes.png")
        print(said, file=sys.stderr if is_quiet else None)
        write_json_result(arguments.out / "shapes.json", result)
    write_json_result(arguments.json, result)


def _roofline(arguments: argparse.Namespace) -> None:
    from zero2all.cli.perf_calculators import show
    from zero2all.estimate.gpus import GPUS as SHEETS
    from zero2all.estimate.model_calculators import roofline

    try:
        m, n, k = map(count, arguments.matmul.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"--matmul {arguments.matmul}: expected three sizes, such as 8192,14336,4096.") from None
    answer = roofline(m, n, k, SHEETS[arguments.gpu.removesuffix("-80g")])
    if not write_json_result(arguments.json, answer.as_json()):
        show(answer)


def _measure(
    arguments: argparse.Namespace, config: Any, shape: Any, widths: list[int], result: dict[str, Any], is_quiet: bool
) -> list[Any]:
    """Measured rows; the file in --out holds what was found after every width."""
    from zero2all.cli.table import print_table
    from zero2all.measure.shape_widths import MeasuredWidths, measure_shape

    def keep(found: MeasuredWidths) -> None:
        rows = [_width_json(row) for row in found.rows]
        result["widths_measured"] = {"device": found.device, "tokens": found.tokens, "widths": rows}
        if arguments.out is not None:
            write_json_result(arguments.out / "shapes.json", result)

    found = measure_shape(config, shape, widths, arguments.seconds, keep)
    if found.rows and not is_quiet:
        about = f"SwiGLU measured on {found.device}, {config.train.precision}, {found.tokens:,} tokens"
        print_table(_width_cells(found.rows, shape.model.hidden_size, shape.model.intermediate_size), about)
    return found.rows


def _finding_cells(findings: list[Any]) -> list[list[str]]:
    rows = [
        [str(one.rule), one.what, one.value, t("holds") if one.is_kept else t("broken"), t(one.says), t(one.nearest)]
        for one in findings
    ]
    return [["rule", "size", "value", "verdict", "because", "nearest that keeps it"], *rows]


def _width_cells(rows: list[Any], hidden: int, own: int) -> list[list[str]]:
    from zero2all.estimate.shapes import best_width, swiglu_products

    names = [f"{one.name} {one.kind}" for one in swiglu_products(1, 1, 1)]
    best, cells = best_width(rows, hidden), []
    for row in rows:
        marks = [t("advised")] if row is best else []
        marks += [t("the config's")] if row.width == own else []
        marks += [] if row.is_aligned else [t("rows not aligned")]
        times = [f"{1e3 * seconds:.3f}" for seconds in row.seconds]
        total = f"{1e3 * sum(row.seconds):.3f}"
        cells.append(
            [f"{row.width}", f"{row.width / hidden:.3f}", *times, total, f"{row.tflops:.4g}", ", ".join(marks)]
        )
    return [["width f", "f / h", *(f"{name} ms" for name in names), "ms", "TFLOPS", ""], *cells]


def _width_json(row: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "tflops": row.tflops}


def _register_profile(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "profile",
        "a few iterations of training taken apart: groups of kernels, the slowest with their floors, memory over time",
        "z2a perf profile z2all-1b --out profile\n  z2a perf profile quickstart --batch 16x128x1 --json -",
        _profile,
        takes_overrides=True,
    )
    add_config(parser, MODEL_HELP)
    batch = (
        "samples per pass x tokens x passes per iteration (default: the config's with at most 4 passes; on a CPU "
        "a small one)"
    )
    seconds = "profile fewer iterations if all would take longer than this (default 120)"
    add_flags(
        parser,
        ("--batch BxTxA", str, None, batch),
        ("--steps N", whole(1), 3, "iterations under the profiler (default 3)"),
        (*SECONDS, 120.0, seconds),
    )
    add_output(parser, "--out", is_folder=True, help="folder of the results (default: profile-CONFIG)")
    add_json(parser)


def _profile(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.estimate.run.batch import load_measured_config, parse_batch
    from zero2all.measure.profile import ProfileOptions, as_json, profile_config, tables_of, title_of, write_profile

    batch = None if arguments.batch is None else parse_batch(arguments.batch)
    config, _ = load_measured_config(arguments.config, arguments.overrides)
    name = Path(arguments.config).stem
    output = arguments.out or Path(f"profile-{name}")

    def keep(so_far: Any) -> None:
        write_json_result(output / "profile.json", as_json(so_far))

    options = ProfileOptions(name, output, batch, arguments.steps, arguments.seconds)
    found = profile_config(config, options, keep)
    written = write_profile(found, output)
    if str(arguments.json) != "-":
        for number, cells in enumerate(tables_of(found)):
            print_table(cells, None if number else title_of(found))
        for line in (*map(t, found.notes), *written):
            print(line)
    write_json_result(arguments.json, as_json(found))
