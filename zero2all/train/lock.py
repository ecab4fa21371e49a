"""One writer per run: a lock the kernel releases when its holder dies, so that it can never go stale."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero2all.common import jsonio
from zero2all.common.errors import RunLockedError

LOCK_NAME = "lock"


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold `<run>/lock`; raises RunLockedError, naming the holder, when another process has it."""
    run.mkdir(parents=True, exist_ok=True)
    with open(run / LOCK_NAME, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunLockedError(
                f"The run {run.name} is being written by another process ({file.read().decode().strip()}). Wait for "
                f"it, stop it, or give this run another name with --train.name."
            ) from None
        file.truncate(0)
        file.write(jsonio.dumps_line({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield
