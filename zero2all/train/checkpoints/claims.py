"""Claims: which checkpoints other processes are reading, one reader to a checkpoint.

`<run>/checkpoints/claims/step-00001000.json` is there while a process judges that checkpoint. Retention does not delete
a claimed checkpoint, and readers on several machines share the work, because only one can create the file. It names
host, process and start of the reader, and its mtime is the heartbeat, as with the lock of the run.

A claim is stale when its process is dead, or, on another host, when the heartbeat is old. A stale claim holds nothing:
retention ignores it, and the next reader takes it over. A reader that was suspended and lost its claim finds out from
`is_held` before it writes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zero2all.common.errors import RunLockedError
from zero2all.common.lock import folder_lock
from zero2all.train.checkpoints import exact_json
from zero2all.train.checkpoints.layout import FOLDER_NAME, checkpoint_folder, checkpoints_folder, step_of
from zero2all.train.checkpoints.run_lock import (
    HEARTBEAT_SECONDS,
    STALE_SECONDS,
    boot_id,
    is_alive,
    read_holder,
    this_process,
)

CLAIMS_FOLDER = "claims"
NEW_SUFFIX = ".new"


@dataclass(frozen=True)
class Claim:
    """A claim of this process."""

    path: Path
    token: str

    def is_held(self) -> bool:
        """Whether no other process has taken it over."""
        return read_holder(self.path).get("token") == self.token


@contextmanager
def claim_step(
    run: Path, step: int, stale_seconds: float = STALE_SECONDS, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> Iterator[Claim | None]:
    """Hold the claim on the checkpoint of a step; None when another process holds it."""
    path = _claim_path(run, step)
    path.parent.mkdir(exist_ok=True)
    claim = Claim(path, secrets.token_hex(8))
    if not _create(claim) and not (_remove_stale(path, stale_seconds) and _create(claim)):
        yield None
        return
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(claim, ended, heartbeat_seconds), name="claim", daemon=True)
    beating.start()
    try:
        yield claim
    finally:
        ended.set()
        beating.join()
        if claim.is_held():
            path.unlink(missing_ok=True)


def claimed_steps(run: Path, stale_seconds: float = STALE_SECONDS) -> set[int]:
    """The steps whose checkpoints are being read."""
    found = (checkpoints_folder(run) / CLAIMS_FOLDER).glob("*.json")
    paths = [path for path in found if FOLDER_NAME.fullmatch(path.stem)]
    return {step_of(path.with_suffix("")) for path in paths if not _is_stale(path, stale_seconds)}


def _claim_path(run: Path, step: int) -> Path:
    folder = checkpoint_folder(run, step)
    return folder.parent / CLAIMS_FOLDER / f"{folder.name}.json"


def _create(claim: Claim) -> bool:
    """Make the file; False when there is one. It is linked to its name, so that it is never seen empty: who made it
    could not be told from that, if its maker was killed. Disks without links get it with O_EXCL."""
    content = exact_json.dump({**this_process(), "token": claim.token})
    new = claim.path.with_name(f"{claim.token}{NEW_SUFFIX}")
    new.write_bytes(content)
    try:
        os.link(new, claim.path)
    except FileExistsError:
        return False
    except OSError:
        return _create_without_link(claim.path, content)
    finally:
        new.unlink()
    return True


def _create_without_link(path: Path, content: bytes) -> bool:
    try:
        with open(path, "xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def _remove_stale(path: Path, stale_seconds: float) -> bool:
    """Remove the claim when it is stale. Under a lock: between a look at the file and its removal another process could
    have done the same and made a new claim, which must stay."""
    try:
        with folder_lock(path.parent, "taken"):
            is_stale = _is_stale(path, stale_seconds)
            if is_stale:
                path.unlink(missing_ok=True)
            for new in path.parent.glob(f"*{NEW_SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):
                    if _heartbeat_age(new) > stale_seconds:  # its maker was killed while it made a claim
                        new.unlink()
            return is_stale
    except RunLockedError:  # another process is just taking one over
        return False


def _is_stale(path: Path, stale_seconds: float) -> bool:
    holder = read_holder(path)
    try:
        if holder.get("host") == socket.gethostname() and holder.get("boot") == boot_id():
            return not is_alive(holder)
        return _heartbeat_age(path) > stale_seconds  # another machine's, or one that cannot be read
    except FileNotFoundError:
        return True


def _heartbeat_age(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the disk."""
    probe = path.with_name(f"now-{os.getpid()}-{threading.get_ident()}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _beat(claim: Claim, ended: threading.Event, every_seconds: float) -> None:
    """Write heartbeats until the end, or until another process holds the claim."""
    while not ended.wait(every_seconds):
        with contextlib.suppress(OSError):  # an error of the disk; the next heartbeat tries again
            if not claim.is_held():
                return
            os.utime(claim.path)
