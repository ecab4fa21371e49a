"""`z2a perf ops`, `z2a perf bench` and `z2a perf ablate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from zero2all.cli.verb import Subparsers, add_group, add_verb, real, whole

ABLATE_EXAMPLE = "z2a perf ablate z2all-1b --batch 2x2048x16 --output ablation --budget-seconds 540"
CONFIG_HELP = "a preset (quickstart, z2all-100m, z2all-1b) or the path of a YAML file"


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    inner = add_group(verbs, "perf", "measure operators and training steps on this machine", ABLATE_EXAMPLE)
    _register_ablate(inner)


def _register_ablate(inner: Subparsers) -> None:
    parser = add_verb(
        inner,
        "ablate",
        "speed and memory of training with one operator changed at a time; resumes",
        ABLATE_EXAMPLE,
        _ablate,
        takes_overrides=True,
    )
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    parser.add_argument("--list", action="store_true", help="show the rows and stop")
    parser.add_argument("--rows", default=None, metavar="NAME,…", help="only these rows (default: all)")
    parser.add_argument(
        "--batch",
        default=None,
        metavar="BxTxA,…",
        help="samples a pass x tokens x passes an iteration (default: 2x2048x16, the seed's, and the config's own)",
    )
    parser.add_argument(
        "--seconds", type=real(0.0), default=8.0, metavar="N", help="least steady state of a row (default 8)"
    )
    parser.add_argument(
        "--warm-up-seconds", type=real(0.0), default=3.0, metavar="N", help="least time before that (default 3)"
    )
    parser.add_argument(
        "--budget-seconds",
        type=real(0.0),
        default=None,
        metavar="N",
        help="begin no row that would not be over by then (default: measure all)",
    )
    parser.add_argument(
        "--row-timeout-seconds", type=real(1.0), default=900.0, metavar="N", help="end a row after this (default 900)"
    )
    parser.add_argument(
        "--output", type=Path, default=None, metavar="DIR", help="folder of the results (default: ablation-CONFIG)"
    )
    parser.add_argument("--again", action="store_true", help="measure rows although their results are there")
    parser.add_argument(
        "--warm-starts", action="store_true", help="start compiled rows twice: first step with a warm cache, too"
    )


def _ablate(arguments: argparse.Namespace) -> int:
    from zero2all.cli.table import print_table
    from zero2all.perf.variants import VARIANTS, named_variants, title_of

    if arguments.list:
        from zero2all.perf.measured_config import load_measured_config

        config, _ = load_measured_config(arguments.config, arguments.overrides)
        listed = [
            [variant.name, title_of(variant, config), json.dumps({**variant.ops, **variant.model})]
            for variant in VARIANTS
        ]
        print_table([["row", "what it is", "changes"], *listed])
        return 0
    from zero2all.perf.ablate import AblateOptions, ablate
    from zero2all.perf.batch import parse_batch
    from zero2all.perf.report import write_report
    from zero2all.perf.summary import batch_tables, cells, heading, notes

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
            again=arguments.again,
            warm_starts=arguments.warm_starts,
        )
    )
    tables = batch_tables(ablation)
    for table in tables:
        print_table([heading(table), *cells(table)], f"{table.batch}: {table.batch.tokens:,} tokens an iteration")
    for line in notes(ablation, tables):
        print(line)
    written = write_report(ablation, output, f"{stem} on one {ablation.environment['gpu'] or 'CPU'}")
    for line in written:
        print(line)
    if ablation.pending:
        names = ", ".join(f"{batch} {variant.name}" for batch, variant in ablation.pending)
        print(f"{len(ablation.pending)} rows are left: {names}. Run the same command again to continue.")
    return 0
