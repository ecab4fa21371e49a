"""`z2a perf`: what its verbs share, and those that measure: `ops`, `profile`, `shapes`."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from zero2all.cli import perf_calculators, perf_predict
from zero2all.cli.terminal import print_table
from zero2all.cli.verb import TYPES, amount, count, duration, group, share, verb, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

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
    **dict.fromkeys(("bench", "allreduce"), "z2a doctor --ranks N"),
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
