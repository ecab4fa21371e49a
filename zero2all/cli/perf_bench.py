"""`z2a perf bench …`: one choice measured at a time, and the advice that follows."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.verb import (
    DEVICES,
    Subparsers,
    add_config,
    add_flags,
    add_group,
    add_json,
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
    from zero2all.perf.batch import BatchShape
    from zero2all.perf.bench.samples import Bench

CPU_BATCH = (2, 256, 1)
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
        from zero2all.perf.bench.copies import bench_numa, bench_pin

        return (bench_pin if arguments.bench == "pin" else bench_numa)(device, seconds)
    if arguments.bench == "dataloader":
        from zero2all.cli.data import config_of
        from zero2all.perf.bench.data import bench_dataloader
        from zero2all.train.setup import open_run_data

        workspace = workspace_of(arguments)
        config, _ = config_of(arguments, workspace)
        data, _ = open_run_data(config, workspace, False)
        return bench_dataloader(data, config.train.tokens_per_step, device, seconds)
    if arguments.bench == "allreduce":
        return _allreduce(arguments, device.type)
    from zero2all.perf.batch import load_measured_config
    from zero2all.perf.bench.training import bench_compile, bench_gc, bench_optimizer

    source = arguments.config or ("z2all-100m" if device.type == "cuda" else "quickstart")
    config, _ = load_measured_config(source, arguments.overrides)
    if arguments.bench == "optimizer":
        return bench_optimizer(config, device, seconds)
    batch = _batch(arguments, config, device)
    if arguments.bench == "gc":
        return bench_gc(config, batch, device, seconds)
    return bench_compile(source, arguments.overrides, batch, device, seconds, arguments.row_seconds)


def _batch(arguments: argparse.Namespace, config: RunConfig, device: torch.device) -> BatchShape:
    from zero2all.perf.batch import BatchShape, check_batch, own_batch, parse_batch

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

    from zero2all.perf.bench.allreduce import bench_allreduce

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
    from zero2all.perf.bench.samples import device_and_threads

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
