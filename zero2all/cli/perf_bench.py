"""`z2a perf bench …`: one choice measured at a time, and the advice that follows."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.verb import (
    Subparsers,
    add_group,
    add_json,
    add_verb,
    add_work,
    real,
    whole,
    workspace_of,
    write_json_result,
)
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    import torch

    from zero2all.config import RunConfig
    from zero2all.perf.batch import BatchShape
    from zero2all.perf.bench.samples import Bench

CONFIG_HELP = "a preset or the path of a YAML file (default: z2all-100m on a GPU, quickstart on a CPU)"
CPU_BATCH = (2, 256, 1)


def register(inner: Subparsers) -> None:
    """Add the verbs."""
    example = "z2a perf bench allreduce --ranks 2\n  z2a perf bench compile quickstart --json compile.json"
    verbs = add_group(inner, "bench", "measure one choice at a time: loader, copies, compile, optimizer, …", example)
    loader = add_verb(
        verbs,
        "dataloader",
        "tokens/s of our loader over packed data, with one and more readers",
        "z2a perf bench dataloader --work my-workspace --data.seq_len 512",
        _dataloader,
        takes_overrides=True,
    )
    loader.add_argument("--config", metavar="CONFIG", help="a run of the workspace, a preset or a YAML file")
    add_work(loader)
    _common(loader, seconds=10.0)
    pin = add_verb(
        verbs, "pin", "copies to and from the GPU with pinned and with ordinary memory", "z2a perf bench pin", _pin
    )
    _common(pin, seconds=8.0)
    numa = add_verb(
        verbs, "numa", "memory of the near and of far NUMA nodes, for threads and the GPU", "z2a perf bench numa", _numa
    )
    _common(numa, seconds=8.0)
    compiled = add_verb(
        verbs,
        "compile",
        "training steps without torch.compile, with compiled blocks and with a compiled trunk",
        "z2a perf bench compile z2all-100m --batch 8x1024x1",
        _compile,
        takes_overrides=True,
    )
    _config_and_batch(compiled)
    _common(compiled, seconds=5.0)
    compiled.add_argument(
        "--row-seconds", type=real(1.0), default=240.0, metavar="N", help="stop a case after this long (default 240)"
    )
    collection = add_verb(
        verbs,
        "gc",
        "training steps with Python's own garbage collection and with our schedule",
        "z2a perf bench gc quickstart --seconds 20",
        _gc,
        takes_overrides=True,
    )
    _config_and_batch(collection)
    _common(collection, seconds=10.0)
    optimizer = add_verb(
        verbs,
        "optimizer",
        "time and memory of an update by each optimizer",
        "z2a perf bench optimizer z2all-100m --json optimizer.json",
        _optimizer,
        takes_overrides=True,
    )
    optimizer.add_argument("config", nargs="?", metavar="CONFIG", help=CONFIG_HELP)
    _common(optimizer, seconds=10.0)
    reduce = add_verb(
        verbs,
        "allreduce",
        "bus bandwidth of all-reduces over sizes, between processes of this machine",
        "z2a perf bench allreduce --ranks 8 --json allreduce.json",
        _allreduce,
    )
    about = "processes (default: one per GPU; 2 on the CPU)"
    reduce.add_argument("--ranks", type=whole(2, 64), default=None, metavar="N", help=about)
    _common(reduce, seconds=20.0)


def _config_and_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=CONFIG_HELP)
    about = "samples per pass x tokens x passes per iteration (default: the config's micro-batch; small on a CPU)"
    parser.add_argument("--batch", default=None, metavar="BxTxA", help=about)


def _common(parser: argparse.ArgumentParser, seconds: float) -> None:
    about = f"measure for about this long (default {seconds:g})"
    parser.add_argument("--seconds", type=real(0.0, is_open=True), default=seconds, metavar="N", help=about)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    add_json(parser)


def _device(arguments: argparse.Namespace) -> torch.device:
    from zero2all.perf.bench.samples import device_and_threads

    return device_and_threads(arguments.device)


def _load(arguments: argparse.Namespace, device: torch.device) -> tuple[str, RunConfig]:
    from zero2all.perf.batch import load_measured_config

    source = arguments.config or ("z2all-100m" if device.type == "cuda" else "quickstart")
    return source, load_measured_config(source, arguments.overrides)[0]


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


def _dataloader(arguments: argparse.Namespace) -> None:
    from zero2all.cli.data import config_of
    from zero2all.perf.bench.data import bench_dataloader
    from zero2all.train.setup import open_run_data

    workspace = workspace_of(arguments)
    config, _ = config_of(arguments, workspace)
    data, _ = open_run_data(config, workspace, False)
    _show(bench_dataloader(data, config.train.tokens_per_step, _device(arguments), arguments.seconds), arguments)


def _pin(arguments: argparse.Namespace) -> None:
    from zero2all.perf.bench.copies import bench_pin

    _show(bench_pin(_device(arguments), arguments.seconds), arguments)


def _numa(arguments: argparse.Namespace) -> None:
    from zero2all.perf.bench.copies import bench_numa

    _show(bench_numa(_device(arguments), arguments.seconds), arguments)


def _compile(arguments: argparse.Namespace) -> None:
    from zero2all.perf.bench.training import bench_compile

    device = _device(arguments)
    source, config = _load(arguments, device)
    batch = _batch(arguments, config, device)
    _show(
        bench_compile(source, arguments.overrides, batch, device, arguments.seconds, arguments.row_seconds), arguments
    )


def _gc(arguments: argparse.Namespace) -> None:
    from zero2all.perf.bench.training import bench_gc

    device = _device(arguments)
    _, config = _load(arguments, device)
    _show(bench_gc(config, _batch(arguments, config, device), device, arguments.seconds), arguments)


def _optimizer(arguments: argparse.Namespace) -> None:
    from zero2all.perf.bench.training import bench_optimizer

    device = _device(arguments)
    _, config = _load(arguments, device)
    _show(bench_optimizer(config, device, arguments.seconds), arguments)


def _allreduce(arguments: argparse.Namespace) -> None:
    import torch

    from zero2all.common.errors import UsageError
    from zero2all.perf.bench.allreduce import bench_allreduce

    device, gpus = _device(arguments).type, torch.cuda.device_count()
    if device == "cuda" and arguments.ranks is not None and arguments.ranks > gpus:
        raise UsageError(
            f"--ranks is {arguments.ranks}, but NCCL takes one GPU for each rank and this machine has {gpus}. Use at "
            f"most {gpus}, or --device cpu."
        )
    ranks = arguments.ranks or (gpus if device == "cuda" else 2)
    _show(bench_allreduce(ranks, device, arguments.seconds), arguments)


def _show(bench: Bench, arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.cli.terminal import print_fitted

    if write_json_result(arguments.json, bench.as_json()):
        return
    if bench.rows:
        more = list(bench.rows[0].more)
        has_rate = any(row.rate for row in bench.rows)
        cells = [["case", "median", "spread", *(["rate"] if has_rate else []), *more, "times"]]
        for row in bench.rows:
            rate = [f"{row.rate:,.3g} {row.unit}" if row.rate else ""] if has_rate else []
            cells.append(
                [
                    *(t(row.what), _time(row.median), f"±{50 * row.spread:.1f} %", *rate),
                    *(row.more.get(name, "") for name in more),
                    str(len(row.seconds)),
                ]
            )
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
