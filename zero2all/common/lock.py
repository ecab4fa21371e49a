"""Locks: who writes a run, who reads a checkpoint, who builds in a folder.

The kernel releases an flock when its holder dies. flock does not work over every network disk, so a lock that several
machines must see (`hold`) is a file whose content counts too: it names host, boot, PID namespace, process and start of
the holder, and its mtime is the heartbeat (so that clocks of different machines are never compared). The number of a
process says something only inside its own PID namespace, and containers of one machine have different ones. So a holder

- from here (same boot, same namespace) is dead when its process is gone;
- from another namespace of this boot is dead when it had the flock, and now another process has it;
- from anywhere else is dead when its heartbeat is old;
- that left an empty file was killed before it wrote its record, which takes far less than EMPTY_SECONDS.
"""

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from zero2all.common import jsonio
from zero2all.common.errors import RunLockedError

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS, EMPTY_SECONDS = 60.0, 5.0
SAME_START_SECONDS = 2.0
"""The start of a process is known to a hundredth of a second, but the clock may be set in between."""
LARGEST_BYTES = 1 << 16
Holder = dict[str, Any]
"""What a lock says of its holder; empty when it was released or cannot be read."""


class TakenError(Exception):
    """Another process has the lock now. The holder is empty when it has just ended."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder


class Lock:
    """A lock that is held, until another process takes it over."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.token = path, token
        self.no_flock: str | None = None
        """Why the disk cannot lock files; None: it can."""
        self._seen: tuple[int, ...] | None = None  # the file when it was last read and named this process
        self._is_lost = False

    def is_held(self) -> bool:
        """Whether this process still holds it, which costs one `stat` while nothing has changed. Once lost, it stays
        lost."""
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
        except OSError:  # an error of the disk does not mean that it was taken over
            return True
        return not self._is_lost


L = TypeVar("L", bound=Lock)
Judge = Callable[[Holder, bool], None]
"""Raises when the lock may not be taken from this holder; the bool: whether this process has the flock."""


@contextmanager
def hold(
    path: Path,
    judge: Judge,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    keeps_file: Callable[[], bool] = lambda: False,
    kind: Callable[[Path, str], L] = Lock,  # type: ignore[assignment]
    **facts: Any,
) -> Iterator[L]:
    """Hold the lock in a file, as a `kind` of Lock; TakenError when another process holds it. Afterwards a file that is
    kept (`keeps_file`) is empty, others are removed."""
    flags, is_new = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, True
    try:
        handle = os.open(path, flags | os.O_EXCL, 0o666)
    except FileExistsError:
        handle, is_new = os.open(path, flags, 0o666), False
    with open(handle, "r+b") as file:
        problem = _flock(file.fileno())
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise TakenError({})  # it has been released and removed in between
        if problem == "":
            raise TakenError(read_holder(path))
        if not is_new:
            judge(read_holder(path), problem is None)
        lock = kind(path, secrets.token_hex(8))
        lock.no_flock = problem
        record = {**this_process(), "token": lock.token, "has_flock": problem is None, **facts}
        file.truncate(0)  # in place, because the flock is on this file
        file.write(jsonio.dumps_pretty(record))
        file.flush()
        os.fsync(file.fileno())
        ended = threading.Event()
        beating = threading.Thread(target=_beat, args=(lock, ended, heartbeat_seconds), name="z2a-lock", daemon=True)
        beating.start()
        try:
            yield lock
        finally:
            ended.set()
            beating.join()
            with suppress(OSError):
                if lock.is_held() and keeps_file():
                    file.truncate(0)  # released properly: nothing to take over
                elif lock.is_held():
                    path.unlink()


def _flock(handle: int) -> str | None:
    """Take the flock. None: taken; empty: another process has it; else why the disk cannot lock files."""
    import fcntl  # not on Windows

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return None


def _beat(lock: Lock, ended: threading.Event, every_seconds: float) -> None:
    """Write heartbeats until the end, or until another process holds the lock."""
    while not ended.wait(every_seconds):
        with suppress(OSError):  # an error of the disk; the next heartbeat tries again
            if not lock.is_held():
                return
            os.utime(lock.path)


def read_holder(path: Path) -> Holder:
    """The record in a lock file."""
    with suppress(OSError):
        return _holder_in(path)
    return {}


def _holder_in(path: Path) -> Holder:
    """The same, raising what the disk raises."""
    if path.exists() and not path.is_file():  # a fifo would never end
        return {}
    with open(path, "rb") as file, suppress(ValueError, RecursionError):
        holder = jsonio.loads(file.read(LARGEST_BYTES))
        return holder if isinstance(holder, dict) else {}
    return {}


def is_dead(path: Path, holder: Holder, has_flock: bool = False, stale_seconds: float = STALE_SECONDS) -> bool:
    """Whether the holder of a lock file has ended, as far as this process can know; see the module docstring."""
    if is_from_here(holder):
        return not _is_alive(holder)
    had_flock = has_flock and holder.get("has_flock") and holder.get("boot") == boot_id()
    is_empty = path.stat().st_size == 0  # no holder: it may also be that the disk failed to read it
    return had_flock or heartbeat_age(path) > (min(EMPTY_SECONDS, stale_seconds) if is_empty else stale_seconds)


def is_from_here(holder: Holder) -> bool:
    """Whether the number of its process means the same here."""
    own = this_process()
    return all(holder.get(name) == own[name] is not None for name in ("host", "boot", "pid_namespace"))


def this_process() -> Holder:
    """What a lock of this process would say of its holder."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def boot_id() -> str:
    """An id of this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(int(psutil.boot_time()))


def _pid_namespace() -> int | None:
    """Its number, 0 on a system that has none; None: not known, so that no process number can be judged."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None if sys.platform == "linux" else 0


def _is_alive(holder: Mapping[str, Any]) -> bool:
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


def heartbeat_age(path: Path) -> float:
    """Seconds since the holder's last heartbeat, by the clock of the disk."""
    probe = path.with_name(f"{path.name}.partial-{os.getpid()}-{threading.get_ident()}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def folder_lock(folder: Path, when_taken: str) -> Iterator[None]:
    """Keep every other process of this machine that asks for the same lock out of `folder`, with flock alone, so that
    it can never go stale; raises RunLockedError(`when_taken`)."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if _flock(handle) == "":
            raise RunLockedError(when_taken)
        yield
    finally:
        os.close(handle)
