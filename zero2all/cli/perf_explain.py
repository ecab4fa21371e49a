"""`z2a perf explain`: what limited a run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.runs import open_run
from zero2all.cli.track import print_goodput
from zero2all.cli.verb import verb, write_json_result
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
