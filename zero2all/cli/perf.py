"""`z2a perf`: its verbs, of which `ops`, `ops bench`, `ablate`, `infer` and `link` are declared here."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from zero2all.cli import limits, perf_bench, perf_plan, perf_predict, perf_runs
from zero2all.cli.perf_predict import PROFILE
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
    real,
    whole,
    write_json_result,
)
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

ABLATE_EXAMPLE = "z2a perf ablate z2all-1b --batch 2x2048x16 --output ablation --budget-seconds 540"
PERF_EXAMPLE = """z2a perf params llama-3.1-8b
  z2a perf memory z2all-1b --gpu h200
  z2a perf calibrate z2all-1b
  z2a perf plan z2all-1b --gpus 64 --cluster h100
  z2a perf ablate z2all-1b
  z2a perf explain my-run"""


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    about = "how large, how fast, how long: calculators, measurements, predictions, and what a run's record says"
    inner = add_group(verbs, "perf", about, PERF_EXAMPLE)
    _register_ops(inner)
    _register_ablate(inner)
    _register_infer(inner)
    limits.register(inner)
    perf_plan.register_memory(inner)
    _register_link(inner)
    for more in (perf_predict, perf_plan, perf_bench, perf_runs):
        more.register(inner)


def _register_ops(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "ops",
        "list the implementations of every operator on this machine; with bench, measure each one",
        "z2a perf ops z2all-1b\n  z2a perf ops bench z2all-1b --only rms_norm --json norm.json",
        _ops,
        takes_overrides=True,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[bench] [CONFIG]",
        help=f"bench: measure; CONFIG: {MODEL_HELP} (default: list for this device, bench z2all-1b)",
    )
    add_flags(
        parser,
        ("--rows N", count, None, "bench: tokens (default: a micro-batch; few on a CPU)"),
        ("--only OP", str, None, "bench: one operator: rms_norm, linear/qkv, …"),
        ("--seconds N", real(0.0), 0.2, "bench: minimum seconds per figure (default 0.2)"),
    )
    add_json(parser)
    parser.usage = (
        "z2a perf ops [-h] [bench] [CONFIG] [--rows N] [--only OP] [--seconds N] [--json FILE]\n"
        "                    [--section.field VALUE …]"
    )


BENCH_CONFIG = "z2all-1b"


def _ops(arguments: argparse.Namespace) -> None:
    words = list(arguments.words)
    is_bench = words[:1] == ["bench"]
    words = words[is_bench:]
    if len(words) > 1:
        raise UsageError(f"`z2a perf ops` takes one config; got {' and '.join(words)}.")
    if is_bench:
        _bench(arguments, words[0] if words else BENCH_CONFIG)
        return
    from zero2all.cli.table import print_table
    from zero2all.measure.op_bench import context_here, describe, list_cells, listed_operators

    config = None
    if words:
        from zero2all.estimate.run.batch import load_measured_config

        config, _ = load_measured_config(words[0], arguments.overrides)
    elif arguments.overrides:
        raise UsageError(f"`{arguments.overrides[0]}` sets a config field. Name the config too.")
    entries = listed_operators(config)
    if not write_json_result(arguments.json, entries):
        print_table(list_cells(entries), describe(context_here(config)))


def _bench(arguments: argparse.Namespace, source: str) -> None:
    from zero2all.cli.table import print_table
    from zero2all.estimate.run.batch import load_measured_config
    from zero2all.measure.op_bench import Bench, bench_cells, bench_operators

    config, _ = load_measured_config(source, arguments.overrides)

    def keep(bench: Bench) -> None:
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


def _register_ablate(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "ablate",
        "measure speed and memory of training with one operator changed at a time; can be resumed",
        ABLATE_EXAMPLE,
        _ablate,
        takes_overrides=True,
    )
    add_config(parser, MODEL_HELP, nargs="?")
    batch = "samples per pass x tokens x passes per iteration (default: 2x2048x16 and the config's own)"
    compile_jobs = "compile N rows beside each other, measure them in turn; the GPU must hold N (default 1)"
    report = "measure nothing; show the results in --output, also those of another machine"
    add_flags(
        parser,
        ("--list", bool, False, "show the rows and stop"),
        ("--rows NAME,…", str, None, "only these rows (default: all)"),
        ("--batch BxTxA,…", str, None, batch),
        ("--seconds N", real(0.0), 8.0, "minimum seconds measured per row (default 8)"),
        ("--warm-up-seconds N", real(0.0), 3.0, "minimum seconds of warm-up before (default 3)"),
        ("--budget-seconds N", real(0.0), None, "start no row that would end later than this (default: measure all)"),
        ("--row-timeout-seconds N", real(1.0), 900.0, "stop a row after this many seconds (default 900)"),
        ("--compile-jobs N", whole(1), 1, compile_jobs),
        ("--report", bool, False, report),
        ("--again", bool, False, "measure rows again even if results exist"),
    )
    add_output(parser, "--output", is_folder=True, help="folder of the results (default: ablation-CONFIG)")


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
        raise UsageError(f"`z2a perf ablate` needs CONFIG: {MODEL_HELP}. Only --list does without.")
    from zero2all.estimate.run.batch import parse_batch
    from zero2all.measure.ablate import AblateOptions, ablate
    from zero2all.measure.summary import batch_tables, cells, device_of, heading, notes, write_report

    stem = Path(arguments.config).stem
    output = arguments.output or Path(f"ablation-{stem}")
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


def _register_infer(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "infer",
        "measure generation: time to first token, tokens/s over batch sizes, share of the bandwidth",
        "z2a perf infer z2all-100m --batch 1,8\n  z2a perf infer my-run --output inference",
        _infer,
        takes_overrides=True,
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"a run, a Hugging Face folder, or, for random weights, {MODEL_HELP}"
    )
    dtypes, dtype = (
        ("float32", "bfloat16", "float16"),
        "dtype of the weights (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    add_flags(
        parser,
        ("--batch N,…", str, None, "sequences at once (default: 1,8,64,256 on a GPU, 1,8 on a CPU)"),
        ("--prompt N", count, 128, "tokens of a prompt (default 128)"),
        ("--new N", count, None, "tokens of an answer (default: 256 on a GPU, 32 on a CPU)"),
        ("--device", DEVICES, DEVICES[0], "device (default: auto)"),
        ("--dtype", dtypes, None, dtype),
    )
    parser.add_argument("--no-int8", action="store_true", help="skip the rows with 8-bit weights")
    add_output(parser, "--output", is_folder=True, help="folder of the results (default: inference-MODEL)")
    add_work(parser)


def _infer(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.common.workspace import Workspace
    from zero2all.measure.infer import InferOptions, cells, measure_inference, write_picture, write_results

    output = arguments.output or Path(f"inference-{Path(arguments.model).stem}")
    found = measure_inference(
        InferOptions(
            source=arguments.model,
            workspace=Workspace(arguments.work),
            overrides=arguments.overrides,
            batches=None if arguments.batch is None else _sizes(arguments.batch),
            prompt_tokens=arguments.prompt,
            new_tokens=arguments.new,
            device=arguments.device,
            dtype=arguments.dtype,
            with_int8=not arguments.no_int8,
        ),
        lambda so_far: write_results(so_far, output),
    )
    print_table(
        cells(found),
        f"{found.model} on {found.device}: prompts of {found.prompt_tokens}, {found.new_tokens} new tokens; "
        f"copy {found.copy_bytes_per_second / 1e9:,.0f} GB/s; {found.decoder}",
    )
    print(output / "inference.json")
    print(write_picture(found, output))


def _sizes(text: str) -> list[int]:
    try:
        return [whole(1)(each) for each in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--batch {text}: {error}, such as 1,8,64.") from None


def _register_link(inner: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        inner,
        "link",
        "train over a slow link: bytes, seconds and loss of every scheme, and which one to take",
        "z2a perf link z2all-1b --gbit 1 --groups 2 --step-seconds 3.4",
        _link,
        takes_overrides=True,
    )
    add_config(parser, MODEL_HELP)
    add_work(parser)
    above = real(0.0, is_open=True)
    parser.add_argument("--gbit", type=above, required=True, metavar="N", help="speed of the link in Gbit/s")
    seconds = "measured seconds that a group computes in a step (default: predicted from the profile of this machine)"
    groups = ("--groups N", whole(2), 2, "groups it joins (default 2)")
    cluster = ("--cluster NAME", str, None, "from data sheets: a100-80g, h100, h200, b200")
    add_flags(parser, groups, ("--step-seconds N", above, None, seconds), cluster, PROFILE)
    add_json(parser)


def _link(arguments: argparse.Namespace) -> int:
    from zero2all.cli.table import print_table
    from zero2all.common.workspace import Workspace
    from zero2all.measure.slow_link_report import link_notes, link_report, link_rows

    asked = (arguments.gbit, arguments.groups, arguments.step_seconds, arguments.profile, arguments.cluster)
    report = link_report(arguments.config, arguments.overrides, *asked, Workspace(arguments.work))
    if not write_json_result(arguments.json, report.as_json()):
        size = f"{report.parameters:,} parameters, {arguments.groups} groups, {arguments.gbit:g} Gbit/s"
        print_table(link_rows(report), f"{arguments.config}: {size}")
        print("\n".join(link_notes(report)))
    return 0
