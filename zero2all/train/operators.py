"""The operators of a run: every process chooses its own, and all must choose the same.

Some are tried before they are chosen (`zero2all.ops.trial`), and a trial may fail in one process only: another GPU, a
full disk, a broken install on one node. Processes with different operators would still train, at the pace of the
slowest and with results that cannot be explained. So they compare their choices first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero2all.common.errors import UsageError, for_all_ranks
from zero2all.config import with_new_names
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import Ops, resolve
from zero2all.parallel.world import World


def resolve_together(config: OpsConfig, context: OpContext, world: World) -> Ops:
    """`resolve` in all processes; if one fails or chooses something else, all end with the same error."""
    ops = world.run_together(lambda: resolve(config, context))
    first, *others = world.gather(ops.taken)
    for rank, taken in enumerate(others, 1):
        for operator, name in taken.items():
            if name != first[operator]:
                problem = UsageError(
                    f"The processes chose different operators: {operator} is {first[operator]} on rank 0 and {name} on "
                    f"rank {rank}. Run `z2a perf ops` on each machine to see why. Fix the difference, or choose one "
                    f"that runs on all of them: --ops.{operator} {name}."
                )
                raise for_all_ranks(problem)
    return ops


def changed_operators(before: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Differences to the operators recorded in a checkpoint (`Prepared.details`), as text."""
    known = with_new_names({operator: choice.get("got") for operator, choice in before.items()}, "ops")
    return [f"{name} {known[name]} -> {got}" for name, got in now.items() if known.get(name) not in (None, got)]
