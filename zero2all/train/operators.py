"""The operators of a run: chosen by every process for itself, and the same in all of them.

Some are tried out before they are taken (`zero2all.ops.trial`), and a trial may fail in one process only: another GPU,
a full disk, a broken install on one of the nodes. Processes that compute in different ways would still train, at the
pace of the slowest and with sums nobody can explain. So they compare first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import Ops, resolve
from zero2all.parallel.world import World


def resolve_together(config: OpsConfig, context: OpContext, world: World) -> Ops:
    """`resolve`, in all processes; where one cannot, or takes something else, all of them say so and end."""
    ops: Ops | None = None
    problem = ""
    try:
        ops = resolve(config, context)
    except UsageError as error:
        problem = str(error)
    said = world.gather((problem, {} if ops is None else ops.taken))
    for rank, (theirs, _) in enumerate(said):
        if theirs:
            raise UsageError(theirs if world.size == 1 else f"In process {rank}: {theirs}")
    assert ops is not None
    first = said[0][1]
    for rank, (_, taken) in enumerate(said):
        for operator, name in taken.items():
            if name != first[operator]:
                raise UsageError(
                    f"The processes do not compute alike: {operator} is {first[operator]} in process 0 and {name} in "
                    f"process {rank}. `z2a perf ops` on each machine says why; make them alike, or name one that runs "
                    f"on all: --ops.{operator} {name}."
                )
    return ops


def changed_operators(before: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """What differs from what a checkpoint remembers of its operators (`Prepared.details`), for a person."""
    known = {operator: choice.get("got") for operator, choice in before.items()}
    return [f"{name} {known[name]} -> {got}" for name, got in now.items() if known.get(name) not in (None, got)]
