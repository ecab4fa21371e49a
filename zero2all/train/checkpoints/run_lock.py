"""One writer per run, and what happens to the lock of one that died.

`<run>/lock` is a lock of `common.lock`, which says when a holder is dead:

- one that lives, or whose heartbeat is fresh: refused (exit code 13);
- one that is dead, and was on this host: taken over, with a note;
- one on another host whose heartbeat is old: it may be dead or disconnected; the user must decide (`take_over`),
  except for runs of several machines, whose machine 0 may be replaced by another one: the lock has the id of their
  attempt, and the next attempt takes it once the heartbeat is old.

The lock is also a fence: everything that writes into the run checks first whether the lock is still held, which costs
one `stat` while nothing has changed. A process that was suspended while another took over the run writes nothing more
and ends with exit code 14.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from zero2all.common.errors import BadInputError, LostRunError, RunLockedError
from zero2all.common.lock import (
    HEARTBEAT_SECONDS,
    STALE_SECONDS,
    Holder,
    Lock,
    TakenError,
    boot_id,
    heartbeat_age,
    hold,
    is_dead,
    is_from_here,
    read_holder,
)

T = TypeVar("T")
LOCK_NAME = "lock"

Fence = Callable[[], None]
"""Called before a write into a run; raises LostRunError when this process may no longer write."""


def no_fence() -> None:
    """For runs that no other process writes to: tools, tests."""


def behind(fence: Fence, work: Callable[[], T]) -> T:
    """Check the fence, then run `work` and return its result."""
    fence()
    return work()


class RunLock(Lock):
    """The lock of a run, while it is held."""

    def __init__(self, path: Path, token: str, notes: Sequence[str] = ()) -> None:
        super().__init__(path, token)
        self.notes = list(notes)
        """Notes about taking it, for the log."""

    def check(self) -> None:
        """The fence: raises LostRunError when another process has taken over the lock or removed it."""
        if self.is_held():
            return
        name, holder = self.path.parent.name, read_holder(self.path)
        if holder:
            what = f"The run {name} was taken over by {_name(holder)}."
        else:
            what = f"The run {name} has lost its lock, so another process may have written to it."
        raise LostRunError(
            f"{what} This process ends and writes nothing more to the run. The run continues from its newest "
            f"checkpoint: leave it to the other process, or, if none is running, start the same command again."
        )


@contextmanager
def hold_run(
    run: Path,
    take_over: bool = False,
    stale_seconds: float = STALE_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    attempt: str | None = None,
) -> Iterator[RunLock]:
    """Hold a run's lock; raises RunLockedError, naming the holder, when another process holds it or may hold it.
    `attempt`: the id on which several machines agreed."""
    is_new = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    path, notes = run / LOCK_NAME, list[str]()
    if path.exists() and not path.is_file():
        raise BadInputError(f"{path} is not a regular file, so the run cannot be locked. Remove it and start again.")

    def judge(holder: Holder, has_flock: bool) -> None:
        notes.extend(_judge(run, holder, has_flock, take_over, stale_seconds, attempt))

    def keeps_file() -> bool:
        return not is_new or list(run.iterdir()) != [path]  # else it was refused before anything was written

    with ExitStack() as stack:
        if is_new:
            stack.callback(_remove_empty, run)
        try:
            lock = stack.enter_context(hold(path, judge, heartbeat_seconds, keeps_file, RunLock, attempt=attempt))
        except TakenError as taken:
            state = f"{_name(taken.holder)} is running" if taken.holder else "it has just ended"
            raise RunLockedError(_refusal(run, state)) from None
        lock.notes = notes
        if lock.no_flock is not None:
            lock.notes.append(
                f"the disk of {run} cannot lock files ({lock.no_flock}): a second start of this run is noticed only by "
                f"the heartbeat in {path.name}. Take care that it is started once"
            )
        _require_rename(run)
        yield lock


def _remove_empty(run: Path) -> None:
    with contextlib.suppress(OSError):
        run.rmdir()


def _require_rename(run: Path) -> None:
    """BadInputError on a disk that cannot rename a folder (object storage that is mounted, for example): a checkpoint
    becomes valid by that."""
    before, after = (run / f"folder.{word}-{os.getpid()}" for word in ("partial", "renamed"))
    try:
        before.mkdir()
        before.rename(after)
        after.rmdir()
    except OSError as error:
        with contextlib.suppress(OSError):
            before.rmdir()
        raise BadInputError(
            f"The disk of {run} cannot rename folders ({error.strerror or error}), so no checkpoint could be saved "
            f"there. Use a workspace on another disk; several machines need one that they share, such as NFS."
        ) from error


def _judge(
    run: Path, holder: Holder, has_flock: bool, take_over: bool, stale_seconds: float, attempt: str | None
) -> list[str]:
    """Notes on taking the lock from `holder`; raises when it may not be taken."""
    if not holder:
        return []
    path = run / LOCK_NAME
    is_here = holder.get("host") == socket.gethostname() or (has_flock and holder.get("boot") == boot_id())
    is_replaced = not is_here and attempt is not None and holder.get("attempt") is not None
    if is_replaced:
        _wait_until_old(path, stale_seconds)
    age = heartbeat_age(path)
    if not is_dead(path, holder, has_flock, stale_seconds):
        if is_from_here(holder):
            raise RunLockedError(_refusal(run, f"{_name(holder)} is running"))
        raise RunLockedError(_refusal(run, f"{_name(holder)} was last alive {age:.0f} s ago"))
    if is_here:
        return [f"took over the lock of {_name(holder)}, which has ended"]
    if is_replaced:
        return [f"took over the lock of {_name(holder)}, last alive {age:.0f} s ago: another machine is machine 0 now"]
    if not take_over:
        raise RunLockedError(
            f"The run {run.name} belongs to {_name(holder)}, which was last alive {age:.0f} s ago. This machine cannot "
            f"see whether it has ended or is only disconnected. If you are sure that it has ended, start again with "
            f"--take-over."
        )
    return [f"took over the lock of {_name(holder)}, last alive {age:.0f} s ago (--take-over)"]


def _refusal(run: Path, state: str) -> str:
    return (
        f"Another process writes the run {run.name}: {state}. Wait for it, stop it, or give this run another name with "
        f"--train.name."
    )


def _name(holder: Holder) -> str:
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"


def _wait_until_old(path: Path, stale_seconds: float) -> None:
    """Wait for the heartbeat of a holder that may be dead. One that beats meanwhile is alive."""
    seen = path.stat().st_mtime_ns
    while heartbeat_age(path) <= stale_seconds and path.stat().st_mtime_ns == seen:
        time.sleep(min(1.0, stale_seconds / 10))
