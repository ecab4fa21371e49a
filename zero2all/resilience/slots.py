"""Files in a RAM file system that outlive a killed process: per run a folder, per process two buffers A and B.

A buffer is one file: a page with its state (WRITING or VALID), step and checksums, then the data, which is mapped into
memory, then a JSON text that describes it. A save marks the older buffer as WRITING, fills it, and marks it as VALID
at the very end, so a kill at any moment leaves the other one whole. Every byte of the file is covered by a crc32c, and
nothing of a file is used before all of them were checked.

Pages that are mapped are reserved when a file is made (`posix_fallocate`): a RAM file system that is full would
otherwise end the process with SIGBUS at a later write. The folders belong to one user, mode 0700, and links are not
followed.
"""

import fcntl
import json
import mmap
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from zero2all.common.checksum import crc32c, extended, joined
from zero2all.common.cores import usable_cores
from zero2all.common.errors import BadInputError
from zero2all.common.fault import KINDS, Fault, flip_byte
from zero2all.common.files import human_bytes, private_folder, write_atomic
from zero2all.common.memory import available_memory

RAM_FOLDER = Path("/dev/shm")
ID_FILE = "memory.json"
"""In the run's folder: the name of its folder in the RAM file system, and its own path. A run that is started over gets
another name, and so does a copy of a run: the memory of the first is not its own."""
OWNER_FILE, LOCK_FILE = "owner.json", "lock"
LABELS = ("a", "b")

PAGE = 4096
HEAD = struct.Struct("<8sIQQQII")
"""Magic, state, step, bytes of data, bytes of JSON, crc32c of the data, crc32c of the JSON; the page ends with its own
crc32c."""
MAGIC, WRITING, VALID = b"z2a-mem1", 1, 2
READ_BYTES = 4 << 20
"""Read or written at a time."""
THREADS = 8
LARGEST_SHARE = 0.8
"""Of the memory that is free: with more, training itself might not get enough."""
STALE_SECONDS = 24 * 3600.0
LOCK_SECONDS = 10.0
"""How long to wait for killed processes of the same run, which the kernel may still be cleaning up."""


class NoMemoryFolderError(Exception):
    """Why there are no checkpoints in memory; the message is for the user."""


@dataclass(frozen=True)
class WholeSlot:
    """A buffer whose header and JSON match their checksums; its data too, if that was asked for."""

    path: Path
    step: int
    data_bytes: int
    about: dict[str, Any]


class Slot:
    """One buffer of this process."""

    def __init__(self, path: Path, data_bytes: int, is_mapped: bool = True) -> None:
        """Open the file if it has this size, and leave its content; else make a new one. OSError when it is too big.
        One that is not mapped is written from other memory: to map 10 GB takes ten seconds, and to pin it blocks the
        GPU meanwhile."""
        self.path, self.data_bytes = path, data_bytes
        with suppress(BadInputError, OSError):
            if read_slot(path).data_bytes != data_bytes:
                path.unlink()
        flags, is_new = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, not path.exists()
        self._handle = os.open(path, flags | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o600)
        try:
            self._reserve(PAGE + (data_bytes if is_mapped else 0))
            if is_mapped:
                self.data = memoryview(mmap.mmap(self._handle, PAGE + data_bytes))[PAGE:]
        except OSError:
            os.close(self._handle)
            if is_new:
                path.unlink()
            raise

    def begin(self, step: int) -> None:
        """From here on the buffer is not valid."""
        os.pwrite(self._handle, _head(WRITING, step, self.data_bytes), 0)

    def finish(self, step: int, about: dict[str, Any], memory: Any = None) -> None:
        """The data is there: add what describes it, and make the buffer valid. `memory`: an array with the data of a
        buffer that is not mapped."""
        import numpy as np  # here and below: those who only remove files need none

        if memory is None:
            crc = crc32c(np.frombuffer(self.data, dtype=np.uint8), _threads())
        else:
            self._reserve(PAGE + self.data_bytes)
            crc = joined(self.data_bytes, lambda start, end: self._write(memory, start, end), _threads())
        text = json.dumps(about, separators=(",", ":")).encode()
        os.ftruncate(self._handle, PAGE + self.data_bytes + len(text))
        os.pwrite(self._handle, text, PAGE + self.data_bytes)
        os.pwrite(self._handle, _head(VALID, step, self.data_bytes, len(text), crc, google_crc32c.value(text)), 0)

    def _reserve(self, count: int) -> None:
        os.posix_fallocate(self._handle, 0, count)

    def _write(self, memory: Any, start: int, end: int) -> int:
        """Write a part of the data, in pieces that fit into the processor's cache; returns its crc32c."""
        crc = 0
        while start < end:
            piece = memory[start : min(start + READ_BYTES, end)]
            written = os.pwrite(self._handle, piece.data, PAGE + start)
            crc, start = extended(crc, piece[:written]), start + written
        return crc

    def close(self) -> None:
        """Close the file; it stays. The mapping goes with the last tensor that uses it."""
        os.close(self._handle)


def _head(state: int, step: int, data_bytes: int, about_bytes: int = 0, crc: int = 0, about_crc: int = 0) -> bytes:
    head = HEAD.pack(MAGIC, state, step, data_bytes, about_bytes, crc, about_crc).ljust(PAGE - 4, b"\0")
    return head + struct.pack("<I", google_crc32c.value(head))


def read_slot(path: Path, with_data: bool = False) -> WholeSlot:
    """What a buffer holds; BadInputError when it is being written or does not match its checksums. The bytes of the
    data are only checked `with_data`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise BadInputError(f"{path} cannot be read ({error})") from error
    try:
        return _read(handle, path, with_data)
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path} cannot be read ({error})") from error
    finally:
        os.close(handle)


def _read(handle: int, path: Path, with_data: bool) -> WholeSlot:
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
        raise BadInputError(f"{path} is not a regular file of this user")
    head = os.pread(handle, PAGE, 0)
    if len(head) < PAGE or struct.unpack("<I", head[-4:])[0] != google_crc32c.value(head[:-4]):
        raise BadInputError(f"{path}: its header is damaged")
    magic, state, step, data_bytes, about_bytes, crc, about_crc = HEAD.unpack_from(head)
    if magic != MAGIC or state != VALID:
        raise BadInputError(f"{path}: it was not finished")
    if facts.st_size != PAGE + data_bytes + about_bytes:
        raise BadInputError(f"{path}: it has another size than its header says")
    text = os.pread(handle, about_bytes, PAGE + data_bytes)
    if google_crc32c.value(text) != about_crc or (with_data and _data_crc(handle, data_bytes) != crc):
        raise BadInputError(f"{path} has changed since it was written (crc32c differs)")
    return WholeSlot(path, step, data_bytes, json.loads(text))


def _data_crc(handle: int, count: int) -> int:
    import numpy as np

    def piece_crc(start: int, end: int) -> int:
        buffer, crc = np.empty(READ_BYTES, dtype=np.uint8), 0
        while start < end and (got := os.preadv(handle, [buffer.data[: min(READ_BYTES, end - start)]], PAGE + start)):
            crc, start = extended(crc, buffer[:got]), start + got
        return crc

    return joined(count, piece_crc, _threads())


def _threads() -> int:
    """Threads for each of the run's processes on this machine."""
    return max(1, min(THREADS, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


# ---- folders ----


def slot_paths(folder: Path, rank: int) -> list[Path]:
    """The two buffers of a rank."""
    return [folder / f"{label}-{rank:05d}" for label in LABELS]


def ram_home(base: Path | None) -> Path:
    """The folder of this user in the RAM file system, made if it is not there; NoMemoryFolderError says why not."""
    home = (base or RAM_FOLDER) / f"zero2all-{os.getuid()}"
    if not home.parent.is_dir():
        raise NoMemoryFolderError(f"there is no folder {home.parent}")
    own_folder(home)
    return home


def own_folder(folder: Path) -> None:
    """A `private_folder`; NoMemoryFolderError says why not."""
    try:
        private_folder(folder)
    except OSError as error:
        raise NoMemoryFolderError(f"{folder} cannot be used ({error.strerror})") from error


def run_id(run: Path, create: bool = False) -> str | None:
    """The name of a run's folder in RAM, from the run's folder; without one, None or a new one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        said = json.loads((run / ID_FILE).read_bytes())
        found = str(said["id"])
        if len(found) == 16 and set(found) <= set("0123456789abcdef") and said["run"] == str(run.absolute()):
            return found
    if not create:
        return None
    made = secrets.token_hex(8)
    write_atomic(run / ID_FILE, json.dumps({"id": made, "run": str(run.absolute())}).encode())
    return made


def forget(run: Path) -> None:
    """Give up the memory checkpoints of a run on all machines, and the copies of them: without its name nobody finds
    its folders, which are swept later, and the next start takes another one."""
    (run / ID_FILE).unlink(missing_ok=True)


def make_run_folder(home: Path, name: str, run: Path) -> Path:
    """The folder of one run; `run` tells who it belongs to."""
    folder = home / name
    own_folder(folder)
    (folder / OWNER_FILE).write_text(json.dumps({"run": str(run.absolute())}))
    return folder


def lock_folder(folder: Path, is_first: bool) -> int:
    """Hold a folder until the handle is closed or the process ends: `is_first` before the other processes of the run on
    this machine. It waits a little for processes of an attempt before."""
    handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if is_first else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            fcntl.flock(handle, fcntl.LOCK_SH)
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise NoMemoryFolderError(f"another process uses {folder}") from None
            time.sleep(0.05)


def require_room(folder: Path, new_bytes: int) -> None:
    """NoMemoryFolderError when `new_bytes` more do not fit."""
    free, available = shutil.disk_usage(folder).free, available_memory()
    if new_bytes > free or new_bytes > LARGEST_SHARE * available:
        raise NoMemoryFolderError(
            f"{human_bytes(new_bytes)} are needed in {folder.parent}, {human_bytes(free)} are free there, and "
            f"{human_bytes(available)} of memory are free"
        )


def sweep_stale(home: Path, keep: str) -> list[str]:
    """Remove the folders of runs that nobody uses and that are a day old, were given up, or whose run is gone; returns
    their runs."""
    swept = []
    for folder in home.iterdir():
        if folder.name == keep or not folder.is_dir() or folder.is_symlink():
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            run = Path(json.loads((folder / OWNER_FILE).read_bytes())["run"])
            age = time.time() - max(path.stat().st_mtime for path in folder.iterdir())
            if (age > STALE_SECONDS or run_id(run) != folder.name) and not _is_in_use(folder):
                shutil.rmtree(folder)
                swept.append(str(run))
    return swept


def _is_in_use(folder: Path) -> bool:
    with open(folder / LOCK_FILE, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove(run: Path, base: Path | None = None) -> None:
    """Remove the memory checkpoints of a run on this machine, as at its normal end."""
    name = run_id(run)
    if name is not None:
        shutil.rmtree((base or RAM_FOLDER) / f"zero2all-{os.getuid()}" / name, ignore_errors=True)


def _flip_newest(fault: Fault) -> None:
    """A fault for drills: change a byte in the newest finished buffer of this rank, if it has one."""
    folder = Path(fault["base"]) / f"zero2all-{os.getuid()}" / (run_id(Path(fault["run"])) or "")
    own = {path.name for path in slot_paths(folder, int(os.environ.get("RANK", "0")))}
    found = max((one for one in whole_slots(folder) if one.path.name in own), key=lambda one: one.step, default=None)
    if found is not None:
        flip_byte(found.path, PAGE)


KINDS["flip_memory"] = _flip_newest


def whole_slots(folder: Path) -> Iterator[WholeSlot]:
    """All buffers in a folder whose header and JSON are whole. Another process may remove the folder meanwhile."""
    try:
        paths = sorted(folder.glob("[ab]-*"))
    except FileNotFoundError:
        return
    for path in paths:
        with suppress(BadInputError, FileNotFoundError):
            yield read_slot(path)
