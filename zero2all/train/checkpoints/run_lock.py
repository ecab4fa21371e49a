"""One writer per run, and what happens to the lock of one that died.

`<run>/lock` is locked with flock, which the kernel releases when its holder dies. flock does not work over every
network disk, so the content counts too: it names host, process and start of the holder, and the file's mtime is its
heartbeat (so that clocks of different machines are never compared):

- the holder lives on this host, or its heartbeat is fresh: refused (exit code 13);
- it is dead, and was on this host: taken over, with a note;
- it was on another host and its heartbeat is old: it may be dead or disconnected; the user must decide (`take_over`),
  except for runs of several machines, whose machine 0 may be replaced by another one: the lock has the id of their
  attempt, and the next attempt takes it once the heartbeat is old.

The lock is also a fence: everything that writes into the run checks first whether the lock is still held, which costs
one `stat` while nothing has changed. A process that was suspended while another took over the run writes nothing more
and ends with exit code 14.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from zero2all.common.errors import BadInputError, LostRunError, RunLockedError, UserError
from zero2all.train.checkpoints import exact_json

T = TypeVar("T")
LOCK_NAME = "lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
SAME_START_SECONDS = 2.0
"""The start of a process is known to a hundredth of a second, but the clock may be set in between."""


Fence = Callable[[], None]
"""Called before a write into a run; raises LostRunError when this process may no longer write."""


def no_fence() -> None:
    """For runs that no other process writes to: tools, tests."""


def behind(fence: Fence, work: Callable[[], T]) -> T:
    """Check the fence, then run `work` and return its result."""
    fence()
    return work()


class RunLock:
    """A lock that is held."""

    def __init__(self, path: Path, token: str, notes: list[str]) -> None:
        self.path, self.token = path, token
        self.notes = notes
        """Notes about taking it, for the log."""
        self._seen: tuple[int, ...] | None = None  # the file when it was last read and named this process
        self._is_lost = False

    def is_held(self) -> bool:
        """Whether this process still holds the run. Once lost, it stays lost."""
        if self._is_lost:
            return False
        try:
            facts = self.path.stat()
            seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
            if seen == self._seen:
                return True
            self._is_lost = _holder_in(self.path).get("token") != self.token
            self._seen = seen
        except FileNotFoundError:
            self._is_lost = True
        except OSError:  # an error of the disk does not mean that the run was taken over
            return True
        return not self._is_lost

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
    path = run / LOCK_NAME
    if path.exists() and not path.is_file():
        raise BadInputError(f"{path} is not a regular file, so the run cannot be locked. Remove it and start again.")
    notes: list[str] = []
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLockedError(_refusal(run, f"{_name(read_holder(path))} is running")) from None
        except OSError as error:  # a disk without locks: only the content of the file counts
            notes.append(
                f"the disk of {run} cannot lock files ({error.strerror or error}): a second start of this run is "
                f"noticed only by the heartbeat in {path.name}. Take care that it is started once"
            )
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise RunLockedError(_refusal(run, "it has just ended"))  # and has removed the file in between
        notes += _judge(run, read_holder(path), take_over, stale_seconds, attempt)
        lock = RunLock(path, secrets.token_hex(8), notes)
        _write_holder(path, {**this_process(), "token": lock.token, "attempt": attempt})
        ended = threading.Event()
        beating = threading.Thread(target=_beat, args=(lock, ended, heartbeat_seconds), name="run-lock", daemon=True)
        beating.start()
        try:
            _require_rename(run)
            yield lock
        finally:
            ended.set()
            beating.join()
            with contextlib.suppress(LostRunError, OSError):
                lock.check()
                path.write_bytes(b"")  # released properly: nothing to take over
                if is_new and list(run.iterdir()) == [path]:  # refused before anything was written
                    path.unlink()
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
    run: Path, holder: dict[str, Any], take_over: bool, stale_seconds: float, attempt: str | None = None
) -> list[str]:
    """Notes on taking the lock from `holder`; raises when it may not be taken."""
    if not holder:
        return []
    age = _heartbeat_age(run)
    if holder.get("host") == socket.gethostname():
        if holder.get("boot") == boot_id():
            if is_alive(holder):
                raise RunLockedError(_refusal(run, f"{_name(holder)} is running"))
        elif age < stale_seconds:  # this machine before a reboot, or another one with the same name
            raise RunLockedError(_refusal(run, f"{_name(holder)} was last alive {age:.0f} s ago"))
        return [f"took over the lock of {_name(holder)}, which has ended"]
    is_replaced = attempt is not None and holder.get("attempt") is not None
    if is_replaced:
        age = _wait_until_old(run, stale_seconds)
    if age < stale_seconds:
        raise RunLockedError(_refusal(run, f"{_name(holder)} was last alive {age:.0f} s ago"))
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


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"


def this_process() -> dict[str, Any]:
    """What a lock says of its holder."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def boot_id() -> str:
    """An id of this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(int(psutil.boot_time()))


def is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote the record still runs: its pid may have been reused."""
    try:
        process = psutil.Process(int(holder["pid"]))
        if process.status() == psutil.STATUS_ZOMBIE:  # killed, and its parent has not looked yet
            return False
        return abs(process.create_time() - float(holder["started"])) < SAME_START_SECONDS
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
    except psutil.AccessDenied:
        return True


def _heartbeat_age(run: Path) -> float:
    """Seconds since the holder's last heartbeat, by the clock of the disk."""
    probe = run / f"{LOCK_NAME}.partial-{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime - (run / LOCK_NAME).stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _wait_until_old(run: Path, stale_seconds: float) -> float:
    """Wait for the heartbeat of a holder that may be dead; returns its age. One that beats meanwhile is alive."""
    seen = (run / LOCK_NAME).stat().st_mtime_ns
    while (age := _heartbeat_age(run)) < stale_seconds and (run / LOCK_NAME).stat().st_mtime_ns == seen:
        time.sleep(min(1.0, stale_seconds / 10))
    return age


def read_holder(path: Path) -> dict[str, Any]:
    """The record in a lock file; empty when it was released or cannot be read."""
    try:
        return _holder_in(path)
    except OSError:
        return {}


def _holder_in(path: Path) -> dict[str, Any]:
    """The same, raising what the disk raises."""
    try:
        holder = exact_json.read(path)
    except UserError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _write_holder(path: Path, holder: dict[str, Any]) -> None:
    """In place, because the lock is on this file."""
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(exact_json.dump(holder))
        file.flush()
        os.fsync(file.fileno())


def _beat(lock: RunLock, ended: threading.Event, every_seconds: float) -> None:
    """Write heartbeats until the end, or until another process holds the lock."""
    while not ended.wait(every_seconds):
        try:
            lock.check()
            os.utime(lock.path)
        except LostRunError:
            return
        except OSError:  # an error of the disk; the next heartbeat tries again
            continue
