"""Faults that a plan injects into a run, for tests and drills: `fault_point("step", 12)` does nothing without a plan.

The variable Z2A_FAULTS names a JSON file: a list of `{fault, point, rank, step, due, until, times, every}`. What
is absent matches anything; `due` and `until` are seconds of the monotonic clock, `rank: all` means each rank on its
own. A fault happens `times` times (1), or `every` time. Files beside the plan keep what has happened, so that a
restarted process does not meet it again. `z2a chaos` writes such files from plans that people write
(resilience/chaos.py).
"""

import ctypes
import errno
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.progress import say

FAULTS = "Z2A_FAULTS"
POINTS = {
    "start": "the start of a run or of its continuation, before the first step",
    "step": "before a step",
    "update": "after the gradients are summed, before the optimizer",
    "memory": "in a save to memory, before the buffer is valid",
    "file": "in a save to disk, before each file",
    "manifest": "in a save to disk, before the manifest",
    "rename": "after the manifest, before the rename that commits the checkpoint",
    "renamed": "after that rename",
    "delete": "before the files of an old checkpoint are deleted",
    "validate": "before a validation",
}
Fault = dict[str, Any]


class InjectedError(RuntimeError):
    """The error that the fault `raise` raises."""


def fault_point(point: str, step: int | None = None, **objects: Any) -> None:
    """Be the victim of the faults that the plan has for this point, rank and step. `objects` are what a fault may
    damage."""
    path = os.environ.get(FAULTS)
    if path is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    for number, each in enumerate(_plan(path)):
        is_here = each["point"] == point and each.get("rank") in (None, "all", rank)
        is_now = each.get("due", 0.0) <= time.monotonic() <= each.get("until", float("inf"))
        if is_here and is_now and each.get("step") in (None, step):
            mark = f"{path}.{number}-{rank if each.get('rank') == 'all' else ''}"
            times = () if each.get("every") else range(each.get("times", 1))
            if each.get("every") or any(_is_first(Path(f"{mark}-{count}"), rank, point, step) for count in times):
                say(f"z2a: Fault {number + 1} of the plan: {each['fault']} in rank {rank} ({point}, step {step}).")
                KINDS[each["fault"]](each | objects)


@cache
def _plan(path: str) -> list[Fault]:
    plan: list[Fault] = json.loads(Path(path).read_bytes())
    unknown = sorted({str(each.get("fault")) for each in plan} - set(KINDS))
    if unknown:
        raise UsageError(f"{path} names unknown faults: {', '.join(unknown)}. Available: {', '.join(KINDS)}.")
    return plan


def _is_first(mark: Path, rank: int, point: str, step: int | None) -> bool:
    try:
        with open(mark, "x") as file:
            json.dump({"rank": rank, "point": point, "step": step, "time": time.time()}, file)
    except FileExistsError:
        return False
    return True


def _raise(_: Fault) -> None:
    raise InjectedError("injected by the fault plan")


def _sleep(_: Fault) -> None:
    while True:
        time.sleep(3600)


def _fail_to_write(number: int) -> Callable[[Fault], None]:
    def fail(_: Fault) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def flip_byte(path: Path, first: int = 0) -> None:
    """Change one byte of a file, at or after `first`; which one follows from its size."""
    size = path.stat().st_size
    with open(path, "r+b", buffering=0) as file:
        place = random.Random(size).randrange(first, size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def _flip_file(fault: Fault) -> None:
    """In the largest file of the newest checkpoint, if there is one."""
    files = Path(fault["run"]).glob("checkpoints/step-????????/*.safetensors")
    with suppress(FileNotFoundError):  # it was deleted meanwhile
        found = max(files, key=lambda path: (path.parent.name, path.stat().st_size), default=None)
        if found is not None:
            flip_byte(found)


def _lose_store(_: Fault) -> None:
    """Cut the connections of the store through which the ranks have met; rank 0 serves it."""
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as one:
            if one.getsockname()[1] == int(os.environ.get("MASTER_PORT", "0")):
                one.shutdown(socket.SHUT_RDWR)


def _poison(fault: Fault) -> None:
    """Give every token of this rank's rows another number: sequences that no text has."""
    tokens = fault["batch"].tokens
    kinds = int(tokens.max()) + 1
    tokens.mul_(31).add_(17).remainder_(kinds)


def _flip_weight(fault: Fault) -> None:
    """Flip the sign bit of the first weight of this rank."""
    next(fault["state"].model.parameters()).data.view(-1)[:1].neg_()


def _exhaust(_: Fault) -> None:
    """Ask for more memory than there is, of the GPU if the run is on one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    bytearray(1 << 60)


def _on_gpu(fault: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        raise UsageError(f"The fault {fault} needs a run on a GPU.")
    return torch


def _assert_on_device(_: Fault) -> None:
    torch = _on_gpu("device_assert")
    torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]
    torch.cuda.synchronize()


def _send(number: int) -> Callable[[Fault], None]:
    return lambda _: os.kill(os.getpid(), number)


KINDS: dict[str, Callable[[Fault], Any]] = {
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "terminate": _send(signal.SIGTERM),
    "segfault": lambda _: ctypes.string_at(0),
    "abort": lambda _: os.abort(),
    "raise": _raise,
    "sleep": _sleep,
    "hold_gil": lambda _: re.match(r"(a+)+$", "a" * 64 + "b"),
    "slow": lambda fault: time.sleep(fault.get("seconds") or 5.0),
    "out_of_memory": _exhaust,
    "device_assert": _assert_on_device,
    "hung_kernel": lambda _: _on_gpu("hung_kernel").cuda._sleep(10**13),
    "disk_full": _fail_to_write(errno.ENOSPC),
    "io_error": _fail_to_write(errno.EIO),
    "flip_file": _flip_file,
    "store_lost": _lose_store,
    "poison_batch": _poison,
    "weight_bit": _flip_weight,
}
"""resilience/slots.py adds flip_memory, whose file format is its own."""
