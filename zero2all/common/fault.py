"""Faults that a plan injects into a run, for tests and drills: `fault_point("step", 12)` does nothing without a plan.

The variable ZERO2ALL_FAULTS names a JSON file: a list of `{point, fault, rank, step, times}`. `rank` and `step` may be
absent (any). A fault happens `times` times (1), counted in files beside the plan, so that a restarted process does not
meet it again.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError

FAULTS = "ZERO2ALL_FAULTS"


class InjectedError(RuntimeError):
    """The error that the fault `raise` raises."""


def _raise() -> None:
    raise InjectedError("injected by the fault plan")


def _sleep() -> None:
    while True:
        time.sleep(3600)


KINDS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "raise": _raise,
    "sleep": _sleep,
    "hold_gil": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
}


def fault_point(point: str, step: int | None = None) -> None:
    """Be the victim of the faults that the plan has for this point, rank and step."""
    path = os.environ.get(FAULTS)
    if path is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    for number, each in enumerate(_plan(path)):
        here = each["point"] == point and each.get("rank") in (None, rank) and each.get("step") in (None, step)
        if here and any(_is_first(Path(f"{path}.{number}-{time}")) for time in range(each.get("times", 1))):
            KINDS[each["fault"]]()


@cache
def _plan(path: str) -> list[dict[str, Any]]:
    plan: list[dict[str, Any]] = json.loads(Path(path).read_bytes())
    unknown = sorted({str(each.get("fault")) for each in plan} - set(KINDS))
    if unknown:
        raise UsageError(f"{path} names unknown faults: {', '.join(unknown)}. Available: {', '.join(KINDS)}.")
    return plan


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
