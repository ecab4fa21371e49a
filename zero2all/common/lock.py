"""A lock on a folder that the kernel gives back when its holder dies, so that it can never go stale."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero2all.common.errors import RunLockedError


@contextmanager
def folder_lock(folder: Path, when_taken: str) -> Iterator[None]:
    """Keep every other process that asks for the same lock out of `folder`; raises RunLockedError(`when_taken`)."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLockedError(when_taken) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)
