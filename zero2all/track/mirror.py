"""A local copy of the runs on another machine that keeps itself up to date over ssh.

    mirror = Mirror("ssh://me@gpu-box/home/me/work/runs", cache=Path("~/.cache/zero2all/mirror").expanduser())
    mirror.start()
    find_runs([mirror.folder])

Copied are the metrics files, `config.yaml` and `anneal.json`; never a checkpoint. One thread and one connection
per mirror ask for the list of files about twice a second and for the new bytes:

- A metrics file only grows, so only its end is fetched, with a few bytes that are already here: where these do not
  match, the file was replaced and is fetched anew beside the old one. All other files are replaced whole.
- The size of the local file says how far the copy has come, so a broken connection resumes there, after 1, 2, 4, …
  at most 30 seconds.
- Small files first, and no more per request than the link moves in half a second, so that the newest rows of all runs
  arrive while a long run is fetched.
- File names of the far side are not trusted: a path that is not exactly one of ours is counted in `problems`.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from zero2all.common.errors import BadInputError, RunLockedError
from zero2all.common.lock import folder_lock
from zero2all.track.listing import ANNEAL_FILE, CONFIG_FILE
from zero2all.track.ssh import MAX_REQUESTS, Address, FileRange, RangeRequest, SshConnection, SshError, parse_address
from zero2all.track.writer import FILE_NAME, METRICS_FOLDER

WHOLE_FILES = (CONFIG_FILE, ANNEAL_FILE)  # files of a run itself; an anneal changes where the run ends

POLL_SECONDS = 0.5
QUIET_POLL_SECONDS = 1.0
QUIET_AFTER_SECONDS = 60.0
GONE_AFTER_SECONDS = 10.0  # a file absent from the far list for this long is removed here

LISTING_BYTES_PER_SECOND = 128_000  # a list of many thousand files is asked for less often than its growing files are
OVERLAP_BYTES = 256
FIRST_BATCH_BYTES = 256_000
BATCH_BYTES = (64_000, 4_000_000)
BATCH_SECONDS = 0.5
BYTES_PER_SECOND = 16_000_000

MAX_FILES = 50_000
MAX_CONFIG_BYTES = 64_000_000  # a larger one is left out
MIN_FREE_BYTES = 500_000_000
MAX_SLOTS = 16
UNREADABLE = "files that cannot be read there"
UNKNOWN = "?"  # the identity of a file of which only the bytes are left from the last time


@dataclass(frozen=True)
class FarFile:
    """A file as the far side lists it."""

    name: str  # its path there, as requests name it: `./…`
    local: PurePosixPath  # its path below `Mirror.folder`
    size: int
    identity: str  # the inode; for files that do not grow, also the date

    @property
    def only_grows(self) -> bool:
        """A metrics file; the others are replaced as a whole."""
        return self.local.parts[1] == METRICS_FOLDER


class Mirror:
    """Keeps `folder` a copy of the runs at `url` from `start` to `stop`; `state` says how that goes."""

    def __init__(
        self,
        url: str,
        cache: Path,
        ssh: Sequence[str] | None = None,
        bytes_per_second: float = BYTES_PER_SECOND,
        retry_seconds: tuple[float, float] = (1.0, 30.0),
    ) -> None:
        """`ssh` None takes the words of Z2A_SSH or `ssh`; `retry_seconds` are the first and the longest pause."""
        self.url = url
        self.address = parse_address(url)
        self.state = "connecting"  # `connecting`, `live`, or `broken: ` and why; a broken one keeps trying
        self.problems: dict[str, int] = {}  # what the last list left out, and how many files each
        self.connections = 0
        self.received_bytes = 0

        self._ssh = ssh
        self._bytes_per_second = bytes_per_second
        self._retry_seconds = retry_seconds
        self._held = ExitStack()
        self._slot = _free_slot(cache, self.address, self._held)
        self.folder = self._slot / "runs"
        """Where the runs are on this machine: one folder per run, as find_runs expects."""
        self._incoming = self._slot / "incoming"
        self.folder.mkdir(exist_ok=True)
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir()

        self._stopping = threading.Event()
        self._synced = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: SshConnection | None = None
        self._guard = threading.Lock()

        self._far: dict[PurePosixPath, FarFile] = {}
        self._fetched: dict[PurePosixPath, tuple[str, int]] = dict.fromkeys(self._kept_files(), (UNKNOWN, -1))
        self._blocked: dict[PurePosixPath, FarFile] = {}
        self._replaced: set[PurePosixPath] = set()
        self._grew_at: dict[PurePosixPath, float] = {}
        self._missing_since: dict[PurePosixPath, float] = {}
        self._batch_bytes = float(FIRST_BATCH_BYTES)

    def start(self) -> None:
        """Connect and copy in the background."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"mirror-{self.address.host}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the connection. What was copied stays for the next time."""
        self._stopping.set()
        with self._guard:
            if self._connection is not None:
                self._connection.kill()
        if self._thread is not None:
            self._thread.join()
        self._held.close()

    def wait_synced(self, timeout_seconds: float) -> bool:
        """Wait until everything that was listed is here; False when that takes longer."""
        return self._synced.wait(timeout_seconds)

    def __enter__(self) -> Mirror:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _work(self) -> None:
        first, longest = self._retry_seconds
        pause = first
        while not self._stopping.is_set():
            try:
                self._converse()
            except (SshError, OSError) as error:
                why = str(error)
                if isinstance(error, OSError):
                    why = f"the disk of this machine failed: {error.strerror} ({error.filename})"
                self.state = self.state if self._stopping.is_set() else f"broken: {why}"
            if self._synced.is_set():  # it did work: begin with the short pauses again
                pause = first
                self._synced.clear()
            self._stopping.wait(pause * random.uniform(0.75, 1.25))  # not all viewers of a host in the same moment
            pause = min(2 * pause, longest)

    def _converse(self) -> None:
        self.connections += 1
        connection = SshConnection(self.address, self._ssh)
        with self._guard:
            self._connection = connection
            if self._stopping.is_set():
                connection.kill()
        try:
            is_one_run = connection.open() == "run"
            self._keep_up(connection, is_one_run)
        finally:
            self.received_bytes += connection.received_bytes
            connection.close()

    def _keep_up(self, connection: SshConnection, is_one_run: bool) -> None:
        """List and fetch until the connection breaks or the mirror is stopped."""
        list_at = changed_at = time.monotonic()
        is_first = True
        while not self._stopping.is_set():
            began = time.monotonic()
            if began >= list_at:
                lines = connection.listing(again=is_first)
                if lines is not None:
                    self._far = self._parse(lines, is_one_run)
                    changed_at = began
                listing_bytes = sum(len(line) for line in lines or ())
                list_at = began + max(4 * (time.monotonic() - began), listing_bytes / LISTING_BYTES_PER_SECOND)
                self._forget_gone(began)
                is_first = False
                jobs = self._jobs()
            else:
                jobs = self._hot_jobs(began)
            self.state = "live"
            while jobs and not self._stopping.is_set() and time.monotonic() - began < POLL_SECONDS:
                self._fetch(connection, jobs)
                jobs = self._jobs()
            if not jobs and not self._synced.is_set():
                self._synced.set()
            quiet = time.monotonic() - changed_at > QUIET_AFTER_SECONDS
            rest = began + (QUIET_POLL_SECONDS if quiet else POLL_SECONDS) - time.monotonic()
            if not jobs:
                self._stopping.wait(max(0.0, rest))

    def _parse(self, lines: list[bytes], is_one_run: bool) -> dict[PurePosixPath, FarFile]:
        """The files we want of those listed; the others are counted in `problems`."""
        far: dict[PurePosixPath, FarFile] = {}
        problems: dict[str, int] = {}
        own_name = self.address.name if is_safe_part(self.address.name) else "run"
        for line in lines:
            file = parse_line(line, own_name if is_one_run else None)
            why = None
            if file is None:
                why = "files that do not belong to a run"
            elif len(far) >= MAX_FILES:
                why = f"files beyond the first {MAX_FILES:,}"
            elif not file.only_grows and file.size > MAX_CONFIG_BYTES:
                why = f"configs larger than {MAX_CONFIG_BYTES // 1_000_000} MB"
            if file is None or why:
                problems[str(why)] = problems.get(str(why), 0) + 1
            else:
                far[file.local] = file
        self.problems = problems
        return far

    def _jobs(self) -> list[tuple[FarFile, RangeRequest]]:
        """The next requests: the smallest rests first, as much as the link moves in half a second."""
        rests = sorted(self._rests(), key=lambda rest: rest[1].size - rest[0])
        jobs: list[tuple[FarFile, RangeRequest]] = []
        room = int(self._batch_bytes)
        for have, file in rests[:MAX_REQUESTS]:
            limit = min(room, max(file.size - have, 1))
            jobs.append((file, self._request(file, have, limit)))
            room -= limit
            if room <= 0:
                break
        return jobs

    def _hot_jobs(self, now: float) -> list[tuple[FarFile, RangeRequest]]:
        """Files that grew lately, asked for whether the old list says they grew again or not."""
        hot = [local for local, grew_at in self._grew_at.items() if now - grew_at < QUIET_AFTER_SECONDS]
        hot = sorted(hot, key=lambda local: -self._grew_at[local])[:MAX_REQUESTS]
        files = [self._far[local] for local in hot if local in self._far and local not in self._replaced]
        limit = max(1, int(self._batch_bytes / MAX_REQUESTS))
        return [(file, self._request(file, _size(self.folder / file.local), limit)) for file in files]

    def _rests(self) -> Iterator[tuple[int, FarFile]]:
        """Bytes already here, for each file that is not as the far side lists it."""
        for local, file in self._far.items():
            if self._blocked.get(local) == file or self._fetched.get(local) == (file.identity, file.size):
                continue
            known = self._fetched.get(local, (UNKNOWN, 0))[0]
            if not file.only_grows or known not in (UNKNOWN, file.identity):
                self._replaced.add(local)
            yield _size(self._target(file)), file

    def _request(self, file: FarFile, have: int, limit: int) -> RangeRequest:
        overlap = 0 if file.local in self._replaced else min(OVERLAP_BYTES, have)
        return RangeRequest(file.name, have - overlap, limit + overlap)

    def _fetch(self, connection: SshConnection, jobs: list[tuple[FarFile, RangeRequest]]) -> None:
        if shutil.disk_usage(self._slot).free < MIN_FREE_BYTES:
            raise SshError(f"the disk of this machine has less than {MIN_FREE_BYTES // 1_000_000} MB free")
        began, before = time.monotonic(), connection.received_bytes
        answers = connection.ranges([request for _, request in jobs])
        for (file, request), found in zip(jobs, answers, strict=True):
            self._take(file, request, found)
        seconds, received = time.monotonic() - began, connection.received_bytes - before
        if received > self._batch_bytes / 2:  # a short answer says nothing about the link
            self._batch_bytes = min(max(BATCH_SECONDS * received / max(seconds, 1e-3), BATCH_BYTES[0]), BATCH_BYTES[1])
        self._stopping.wait(max(0.0, received / self._bytes_per_second - seconds))

    def _take(self, file: FarFile, request: RangeRequest, found: FileRange) -> None:
        """Put one answer where it belongs, and note how far the file is."""
        local = file.local
        if found.size < 0:
            self.problems[UNREADABLE] = self.problems.get(UNREADABLE, 0) + 1
            self._blocked[local] = file
            return
        file = self._far[local] = replace(file, size=found.size)  # the answer is younger than the list
        path = self._target(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = found.data
        if local in self._replaced:
            if request.offset != _size(path) or _size(path) > found.size:  # it changed once more on the way
                path.unlink(missing_ok=True)
                return
        else:
            overlap = _size(self.folder / local) - request.offset
            if data[:overlap] != self._tail(path, overlap):
                self._replaced.add(local)  # other bytes, or fewer: from the beginning, beside the old file
                return
            data = data[overlap:]
        have = self._append(path, data)
        if data:
            self._grew_at[local] = time.monotonic()
        if have >= found.size:
            if local in self._replaced:
                final = self.folder / local
                final.parent.mkdir(parents=True, exist_ok=True)
                path.replace(final)
                self._replaced.discard(local)
            self._fetched[local] = (file.identity, have)
        elif not data:
            self._blocked[local] = file  # no progress: wait until the list says something new

    def _append(self, path: Path, data: bytes) -> int:
        """Add to the end of a file here; returns its size. A link in its place is not followed."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(handle, "ab", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            return os.fstat(handle).st_size

    def _tail(self, path: Path, count: int) -> bytes:
        if count <= 0:
            return b""
        with open(path, "rb") as file:
            file.seek(-count, os.SEEK_END)
            return file.read(count)

    def _target(self, file: FarFile) -> Path:
        """Where a file is written: in its place, or in `incoming` until it replaces an older one."""
        if file.local not in self._replaced:
            return self.folder / file.local
        version = file.identity if file.only_grows else f"{file.identity} {file.size}"
        return self._incoming / hashlib.sha256(f"{version} {file.local}".encode()).hexdigest()

    def _forget_gone(self, now: float) -> None:
        """Remove the copies of files that are no longer there."""
        if len(self._far) >= MAX_FILES:
            return
        for local in [local for local in self._fetched if local not in self._far]:
            if now - self._missing_since.setdefault(local, now) < GONE_AFTER_SECONDS:
                continue
            (self.folder / local).unlink(missing_ok=True)
            for table in (self._fetched, self._missing_since, self._grew_at, self._blocked):
                table.pop(local, None)
            for parent in list((self.folder / local).parents)[: len(local.parts) - 1]:
                with suppress(OSError):  # not empty
                    parent.rmdir()
        for local in [local for local in self._missing_since if local in self._far]:
            del self._missing_since[local]

    def _kept_files(self) -> Iterator[PurePosixPath]:
        """What is here from the last time; whether it still fits is seen by its bytes."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                yield PurePosixPath(path.relative_to(self.folder).as_posix())


def parse_line(line: bytes, own_name: str | None) -> FarFile | None:
    """Read one line of `ls -lin`; None for other files. `own_name` is the run, when the folder is one run."""
    words = line.split(None, 9)
    if len(words) != 10 or not words[0].isdigit() or not words[5].isdigit() or len(words[5]) > 18:
        return None
    try:
        name = words[9].decode("utf-8")
    except UnicodeDecodeError:
        return None
    first, *parts = name.split("/")
    if own_name is not None:
        parts = [own_name, *parts]
    if first != "." or not all(is_safe_part(part) for part in parts) or not _is_wanted(parts):
        return None
    identity = words[0] if parts[1] == METRICS_FOLDER else b" ".join([words[0], *words[6:9]])
    return FarFile(name, PurePosixPath(*parts), int(words[5]), identity.decode("ascii", "replace"))


def is_safe_part(part: str) -> bool:
    """Whether this can be the name of one file or folder here, and nothing else."""
    is_plain = part.isprintable() and not any(mark in part for mark in "/\\")
    return is_plain and part not in ("", ".", "..") and len(part.encode()) <= 200


def _is_wanted(parts: list[str]) -> bool:
    if len(parts) == 2:
        return parts[1] in WHOLE_FILES
    return len(parts) == 3 and parts[1] == METRICS_FOLDER and FILE_NAME.fullmatch(parts[2]) is not None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _free_slot(cache: Path, address: Address, held: ExitStack) -> Path:
    """A folder for this address that no other living mirror writes to; the first one, unless it is taken."""
    key = f"{address.user}@{address.host}:{address.port}{address.path}"
    base = cache / f"{address.host.replace(':', '_').replace('%', '_')}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    for number in range(1, MAX_SLOTS + 1):
        slot = base / str(number)
        base.mkdir(parents=True, exist_ok=True, mode=0o700)  # a copy is as private as what it is a copy of
        slot.mkdir(exist_ok=True)
        try:
            held.enter_context(folder_lock(slot, "taken"))
        except RunLockedError:
            continue
        return slot
    raise BadInputError(
        f"{MAX_SLOTS} viewers of {address.host}:{address.path} are already open with the cache {cache}. Close some."
    )
