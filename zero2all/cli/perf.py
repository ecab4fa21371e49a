"""`z2a perf`: its verbs, of which `ops` and `infer` are declared here."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli import perf_bench, perf_calculators, perf_plan, perf_predict, perf_runs
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
    whole,
    write_json_result,
)
from zero2all.common.errors import UsageError

PERF_EXAMPLE = """z2a perf model llama-3.1-8b
  z2a perf memory z2all-1b --gpu h200
  z2a perf calibrate z2all-1b
  z2a perf plan z2all-1b --gpus 64 --cluster h100
  z2a perf bench ablate z2all-1b
  z2a perf explain my-run"""
RENAMED = {
    **dict.fromkeys(("params", "flops", "zero", "inference"), "z2a perf model"),
    "time": "z2a perf cost",
    **dict.fromkeys(("batch", "comm"), "z2a train CONFIG --plan-only"),
    "bubble": "z2a perf predict",
    **dict.fromkeys(("failure", "checkpoint"), "z2a perf simulate"),
    "roofline": "z2a perf shapes --matmul M,N,K",
    "verify": "z2a perf predict CONFIG --verify",
    "scoreboard": "z2a perf predict --scoreboard",
    "ablate": "z2a perf bench ablate",
    "tokens": "z2a tokenizer eval",
    "link": "z2a train CONFIG --plan-only",
}


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    about = "how large, how fast, how long: calculators, predictions, measurements, and what a run's record says"
    inner = add_group(verbs, "perf", about, PERF_EXAMPLE, RENAMED)
    perf_calculators.register(inner)
    perf_plan.register_memory(inner)
    perf_predict.register(inner)
    perf_plan.register(inner)
    perf_runs.register_simulate(inner)
    _register_ops(inner)
    perf_bench.register(inner)
    _register_infer(inner)
    perf_runs.register(inner)


def _register_ops(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "ops",
        "list the implementations of every operator on this machine",
        "z2a perf ops z2all-1b",
        _ops,
        takes_overrides=True,
    )
    add_config(parser, f"{MODEL_HELP} (default: those for this device)", nargs="?")
    add_json(parser)


def _ops(arguments: argparse.Namespace) -> None:
    if arguments.config == "bench":
        raise UsageError("`z2a perf ops bench` is now `z2a perf bench ops`.")
    from zero2all.cli.table import print_table
    from zero2all.measure.op_bench import context_here, describe, list_cells, listed_operators

    config = None
    if arguments.config is not None:
        from zero2all.estimate.run.batch import load_measured_config

        config, _ = load_measured_config(arguments.config, arguments.overrides)
    elif arguments.overrides:
        raise UsageError(f"`{arguments.overrides[0]}` sets a config field. Name the config too.")
    entries = listed_operators(config)
    if not write_json_result(arguments.json, entries):
        print_table(list_cells(entries), describe(context_here(config)))


def _register_infer(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "infer",
        "measure generation: time to first token, tokens/s over batch sizes, share of the bandwidth",
        "z2a perf infer z2all-100m --batch 1,8\n  z2a perf infer my-run --out inference",
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
    add_output(parser, "--out", is_folder=True, help="folder of the results (default: inference-MODEL)")
    add_work(parser)


def _infer(arguments: argparse.Namespace) -> None:
    from zero2all.cli.table import print_table
    from zero2all.common.workspace import Workspace
    from zero2all.measure.infer import InferOptions, cells, measure_inference, write_picture, write_results

    output = arguments.out or Path(f"inference-{Path(arguments.model).stem}")
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
