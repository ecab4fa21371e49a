"""`z2a perf shapes` and `profile`, and `z2a perf bench …`: one choice measured at a time, and what follows from it."""

from __future__ import annotations

import argparse
import dataclasses
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
    real,
    whole,
    workspace_of,
    write_json_result,
)
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    import torch

    from zero2all.config import RunConfig
    from zero2all.estimate.run.batch import BatchShape
    from zero2all.measure.bench.samples import Bench

CPU_BATCH = (2, 256, 1)
GPUS = ("a100-80g", "h100", "h200", "b200")
ABOUT_CONFIG = "a preset or the path of a YAML file (default: z2all-100m on a GPU, quickstart on a CPU)"
ABOUT_BATCH = "samples per pass x tokens x passes per iteration (default: the config's micro-batch; small on a CPU)"
VERBS = {
    "dataloader": (10.0, "tokens/s of our loader over packed data, with one and more readers", "--work my-workspace"),
    "pin": (8.0, "copies to and from the GPU with pinned and with ordinary memory", "--seconds 4"),
    "numa": (8.0, "memory of the near and of far NUMA nodes, for threads and the GPU", "--seconds 4"),
    "compile": (
        5.0,
        "training steps without torch.compile, with compiled blocks and with a compiled trunk",
        "z2all-100m",
    ),
    "gc": (
        10.0,
        "training steps with Python's own garbage collection and with our schedule",
        "quickstart --seconds 20",
    ),
    "optimizer": (10.0, "time and memory of an update by each optimizer", "z2all-100m --json optimizer.json"),
    "allreduce": (20.0, "bus bandwidth of all-reduces over sizes, between processes of this machine", "--ranks 8"),
}
"""Verb -> usual seconds, what it measures, and the rest of an example."""


def register(inner: Subparsers) -> None:
    """Add the verbs."""
    _register_shapes(inner)
    _register_profile(inner)
    example = "z2a perf bench allreduce --ranks 2\n  z2a perf bench compile quickstart --json compile.json"
    group = add_group(inner, "bench", "measure one choice at a time: loader, copies, compile, optimizer, …", example)
    verbs = {}
    for name, (seconds, summary, more) in VERBS.items():
        takes_config = name in ("compile", "gc", "optimizer")
        overrides = takes_config or name == "dataloader"
        parser = verbs[name] = add_verb(group, name, summary, f"z2a perf bench {name} {more}", _bench, overrides)
        parser.set_defaults(bench=name)
        if takes_config:
            add_config(parser, ABOUT_CONFIG, nargs="?")
        if name in ("compile", "gc"):
            add_flags(parser, ("--batch BxTxA", str, None, ABOUT_BATCH))
        about = f"measure for about this long (default {seconds:g})"
        add_flags(parser, ("--seconds N", real(0.0, is_open=True), seconds, about))
        add_flags(parser, ("--device", DEVICES, DEVICES[0], "device (default: auto)"))
        add_json(parser)
    loader = ("--config CONFIG", str, None, "a run of the workspace, a preset or a YAML file")
    add_flags(verbs["dataloader"], loader)
    add_work(verbs["dataloader"])
    add_flags(verbs["compile"], ("--row-seconds N", real(1.0), 240.0, "stop a case after this long (default 240)"))
    ranks = "processes (default: one per GPU; 2 on the CPU)"
    add_flags(verbs["allreduce"], ("--ranks N", whole(2, 64), None, ranks))


def _measured(arguments: argparse.Namespace, device: torch.device) -> Bench:
    seconds: float = arguments.seconds
    if arguments.bench in ("pin", "numa"):
        from zero2all.measure.bench.copies import bench_numa, bench_pin

        return (bench_pin if arguments.bench == "pin" else bench_numa)(device, seconds)
    if arguments.bench == "dataloader":
        from zero2all.cli.data import config_of
        from zero2all.measure.bench.copies import bench_dataloader
        from zero2all.train.setup import open_run_data

        workspace = workspace_of(arguments)
        config, _ = config_of(arguments, workspace)
        data, _ = open_run_data(config, workspace, False)
        return bench_dataloader(data, config.train.tokens_per_step, device, seconds)
    if arguments.bench == "allreduce":
        return _allreduce(arguments, device.type)
    from zero2all.estimate.run.batch import load_measured_config
    from zero2all.measure.bench.training import bench_compile, bench_gc, bench_optimizer

    source = arguments.config or ("z2all-100m" if device.type == "cuda" else "quickstart")
    config, _ = load_measured_config(source, arguments.overrides)
    if arguments.bench == "optimizer":
        return bench_optimizer(config, device, seconds)
    batch = _batch(arguments, config, device)
    if arguments.bench == "gc":
        return bench_gc(config, batch, device, seconds)
    return bench_compile(source, arguments.overrides, batch, device, seconds, arguments.row_seconds)


def _batch(arguments: argparse.Namespace, config: RunConfig, device: torch.device) -> BatchShape:
    from zero2all.estimate.run.batch import BatchShape, check_batch, own_batch, parse_batch

    if arguments.batch is not None:
        batch = parse_batch(arguments.batch)
    elif device.type == "cuda":
        own = own_batch(config)
        batch = BatchShape(own.samples, own.seq_len, 1)
    else:
        samples, seq_len, passes = CPU_BATCH
        batch = BatchShape(samples, min(seq_len, config.model.max_seq_len), passes)
    check_batch(batch, config)
    return batch


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


def _register_shapes(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "shapes",
        "six rules for the sizes of a model, a config checked against them, and the fastest SwiGLU width near 8/3 h",
        "z2a perf shapes\n  z2a perf shapes --check z2all-1b --gpu h100 --output shapes\n"
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
        ("--measure", bool, False, measure),
        ("--seconds N", real(0.0), 60.0, "start no width after this many (default 60)"),
    )
    add_output(parser, "--output", is_folder=True, help="folder for shapes.png and shapes.json (default: none)")
    add_json(parser)


def _shapes(arguments: argparse.Namespace) -> None:
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
    if arguments.output is not None:
        said = draw_shapes(shape, machine, rows, arguments.output / "shapes.png")
        print(said, file=sys.stderr if is_quiet else None)
        write_json_result(arguments.output / "shapes.json", result)
    write_json_result(arguments.json, result)


def _measure(
    arguments: argparse.Namespace, config: Any, shape: Any, widths: list[int], result: dict[str, Any], is_quiet: bool
) -> list[Any]:
    """Measured rows; the file in --output holds what was found after every width."""
    from zero2all.cli.table import print_table
    from zero2all.measure.shape_widths import MeasuredWidths, measure_shape

    def keep(found: MeasuredWidths) -> None:
        rows = [_width_json(row) for row in found.rows]
        result["widths_measured"] = {"device": found.device, "tokens": found.tokens, "widths": rows}
        if arguments.output is not None:
            write_json_result(arguments.output / "shapes.json", result)

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
        "z2a perf profile z2all-1b --output profile\n  z2a perf profile quickstart --batch 16x128x1 --json -",
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
        ("--seconds N", real(0.0), 120.0, seconds),
    )
    add_output(parser, "--output", is_folder=True, help="folder of the results (default: profile-CONFIG)")
    add_json(parser)


def _profile(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.estimate.run.batch import load_measured_config, parse_batch
    from zero2all.measure.profile import as_json, profile_config, tables_of, title_of, write_profile

    batch = None if arguments.batch is None else parse_batch(arguments.batch)
    config, _ = load_measured_config(arguments.config, arguments.overrides)
    name = Path(arguments.config).stem
    output = arguments.output or Path(f"profile-{name}")

    def keep(so_far: Any) -> None:
        write_json_result(output / "profile.json", as_json(so_far))

    found = profile_config(name, config, batch, arguments.steps, arguments.seconds, output, keep)
    written = write_profile(found, output)
    if str(arguments.json) != "-":
        for number, cells in enumerate(tables_of(found)):
            print_table(cells, None if number else title_of(found))
        for line in (*map(t, found.notes), *written):
            print(line)
    write_json_result(arguments.json, as_json(found))
