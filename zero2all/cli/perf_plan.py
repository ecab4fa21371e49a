"""`z2a perf plan`: how to spread a run over GPUs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from zero2all.cli.verb import verb, write_json_result
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.estimate.machine import Machine
    from zero2all.predict.layout_search import LayoutPlan


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
    from zero2all.cli.table import print_table
    from zero2all.predict.batch import load_measured_config
    from zero2all.predict.layout_search import config_of, plan_cells, plan_json, plan_layouts
    from zero2all.predict.models import load_model_config, precision_notes

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
    from zero2all.estimate.answer import said
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
