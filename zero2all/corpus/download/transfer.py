"""Files from a hub to this disk, over several connections, resumable at any byte.

A file is fetched in ranges of 256 MiB, so that one large file uses all connections. Each range is appended to a file of
its own, `<key>-<start>.part`, whose size says how much has arrived; when all are whole, they are joined in the first.
The key covers name and checksum: bytes of two revisions never mix. A file gets its name once its checksum is right.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero2all.common.files import fsync_folder, human_bytes
from zero2all.common.progress import Bar
from zero2all.corpus.download.hub import Hub, HubFile, InterruptedTransferError, MissingFileError, StoppedError

RANGE_BYTES = 256 << 20
"""Large enough to stay below the rate limit of a hub, small enough to share a file among connections."""
PART_SUFFIX = ".part"
STOP_SECONDS = 2.0
"""How long a stopped download waits for its connections."""


class NoRangesError(Exception):
    """The server sent a whole file instead of one of its ranges."""


@dataclass(slots=True, eq=False)
class ByteRange:
    """A range of a file, fetched from its start to its end into a file of its own."""

    path: Path
    start: int
    end: int
    position: int
    """Where the next byte belongs."""


class Transfer:
    """One file on its way, and what earlier processes have fetched of it."""

    def __init__(self, file: HubFile, folder: Path, range_bytes: int) -> None:
        self.file, self._folder = file, folder
        self._key = hashlib.sha256(f"{file.digest} {file.name}".encode()).hexdigest()[:32]
        self.first = folder / f"{self._key}-0{PART_SUFFIX}"
        arrived = _size_of(self.first)
        if range_bytes < arrived < file.size_bytes:  # a process ended while it joined ranges: keep the whole ones
            arrived = arrived // range_bytes * range_bytes
            os.truncate(self.first, arrived)
        first_end = min(max(range_bytes, arrived), file.size_bytes)
        self.ranges = [ByteRange(self.first, 0, first_end, min(arrived, first_end))]
        for start in range(first_end, file.size_bytes, range_bytes):
            path, end = folder / f"{self._key}-{start}{PART_SUFFIX}", min(start + range_bytes, file.size_bytes)
            self.ranges.append(ByteRange(path, start, end, min(start + _size_of(path), end)))
        self.ranges_left = len(self.ranges)
        self.checksum_failures = 0

    @property
    def bytes_done(self) -> int:
        """How much of the file is here."""
        return sum(each.position - each.start for each in self.ranges)

    def join(self) -> None:
        """Append all other ranges to the first."""
        with open(self.first, "ab") as whole:
            for each in self.ranges[1:]:
                with open(each.path, "rb") as part:
                    shutil.copyfileobj(part, whole, 4 << 20)
                whole.flush()
                each.path.unlink()

    def discard(self) -> None:
        """Forget every byte."""
        for path in self._folder.glob(f"{self._key}-*{PART_SUFFIX}"):
            path.unlink()
        for each in self.ranges:
            each.position = each.start
        self.ranges_left = len(self.ranges)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Fleet:
    """Several connections that fetch the ranges of all files in order, and check each file when it is whole."""

    def __init__(
        self,
        hub: Hub,
        commit: str,
        target: Path,
        transfers: Sequence[Transfer],
        on_whole: Callable[[HubFile], None],
        bar: Bar,
    ) -> None:
        self.hub, self.commit, self.target, self.on_whole, self.bar = hub, commit, target, on_whole, bar
        self.failures: dict[str, str] = {}
        """Name -> why this file could not be downloaded; the others are fetched all the same."""
        self.bytes_fetched = 0
        self._stop = hub.patience.stop
        self._lock = threading.Lock()
        self._transfers = transfers
        self._queue = deque((transfer, wanted) for transfer in transfers for wanted in transfer.ranges)
        self._error: BaseException | None = None

    def run(self, connections: int) -> None:
        """Fetch everything; raises the first error that concerns more than one file."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(connections, len(self._queue)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._stop.set()  # a connection looks at it with its next bytes; a silent one is not waited for
            deadline = time.monotonic() + STOP_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        for transfer in self._transfers:
            if transfer.file.name in self.failures:
                transfer.discard()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._fetch(*job)
        except StoppedError:
            pass
        except BaseException as error:  # raised again by `run`
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _next(self) -> tuple[Transfer, ByteRange] | None:
        with self._lock:
            while self._queue:
                transfer, wanted = self._queue.popleft()
                if transfer.file.name not in self.failures:
                    return transfer, wanted
        return None

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_fetched += size
            self.bar.advance(size)

    def _fetch(self, transfer: Transfer, wanted: ByteRange) -> None:
        """Fetch the rest of a range, through any number of lost connections; the last range also checks the file."""
        try:
            self.hub.patience.repeat(
                transfer.file.name, lambda: self._request(transfer, wanted), progress=lambda: wanted.position
            )
        except MissingFileError as error:
            self._give_up(transfer, f"the hub lists it but does not have it ({error})")
            return
        with self._lock:
            transfer.ranges_left -= 1
            is_whole = not transfer.ranges_left
        if is_whole:
            self._settle(transfer)

    def _request(self, transfer: Transfer, wanted: ByteRange) -> None:
        """One request: everything of the range that is missing, as far as it comes."""
        name, size = transfer.file.name, transfer.file.size_bytes
        with open(wanted.path, "ab", buffering=0) as part:
            if wanted.position == wanted.end:
                return
            is_all = wanted.position == 0 and wanted.end == size
            byte_range = None if is_all else f"bytes={wanted.position}-{wanted.end - 1}"
            with self.hub.open(self.commit, name, byte_range) as answer:
                if byte_range and answer.status_code != 206:
                    problem = f"{name}: {self.hub.endpoint} cannot send parts of a file (no Range)"
                    if len(transfer.ranges) > 1:
                        raise NoRangesError(problem)
                    self.hub.patience.announce(
                        f"{problem}, so it is downloaded again from its start ({human_bytes(wanted.position)} lost)"
                    )
                    self._count(-wanted.position)
                    wanted.position = 0
                    part.truncate(0)
                elif byte_range:
                    sent = answer.headers.get("content-range", "")
                    if not re.fullmatch(rf"bytes {wanted.position}-.*/({size}|\*)", sent):
                        raise InterruptedTransferError(f"asked for {byte_range} of {size:,} and was sent {sent!r}")
                for chunk in answer.iter_raw():
                    if self._stop.is_set():
                        raise StoppedError
                    rest = memoryview(chunk)[: wanted.end - wanted.position]
                    while rest:
                        written = part.write(rest)
                        wanted.position += written
                        self._count(written)
                        rest = rest[written:]
                    if wanted.position == wanted.end:
                        return
        raise InterruptedTransferError(f"the answer ended at byte {wanted.position:,} of {wanted.end:,}")

    def _settle(self, transfer: Transfer) -> None:
        """Give a whole file its name if its checksum is right; else fetch it once more, but not twice."""
        file = transfer.file
        transfer.join()
        found = digest_of(transfer.first, file.algorithm, self._stop)
        if found == file.digest:
            final = self.target / file.name
            final.parent.mkdir(parents=True, exist_ok=True)
            with open(transfer.first, "rb") as part:
                os.fsync(part.fileno())
            transfer.first.replace(final)
            fsync_folder(final.parent)
            with self._lock:
                self.on_whole(file)
            return
        transfer.checksum_failures += 1
        if transfer.checksum_failures > 1:
            both = f"{file.algorithm} {found[:12]}…, expected {file.digest[:12]}…"
            self._give_up(transfer, f"it arrived twice with a wrong checksum ({both})")
            return
        announce = self.hub.patience.announce
        announce(f"{file.name}: wrong checksum ({file.algorithm}); the file is downloaded once more from its start")
        self._count(-file.size_bytes)
        transfer.discard()
        with self._lock:
            self._queue.extendleft((transfer, wanted) for wanted in reversed(transfer.ranges))

    def _give_up(self, transfer: Transfer, reason: str) -> None:
        with self._lock:
            self.failures.setdefault(transfer.file.name, reason)


def digest_of(path: Path, algorithm: str, stop: threading.Event | None = None) -> str:
    """The checksum of a file as a hub states it: `sha256` of the content, or `git_sha1` of git's blob."""
    # git hashes a file as `blob <size>`, a zero byte, and the content
    digest = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while block := file.read(4 << 20):
            if stop is not None and stop.is_set():
                raise StoppedError
            digest.update(block)
    return digest.hexdigest()
