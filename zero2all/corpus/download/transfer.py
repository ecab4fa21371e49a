"""Files from a hub to this disk, several at a time, each over one connection and resumable at any byte.

What has arrived of a file lies in `<key>.part`, whose size says how much that is. The key covers name and checksum:
bytes of two revisions never mix. A file gets its name once its checksum is right.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from zero2all.common.files import fsync_folder, human_bytes
from zero2all.common.progress import Bar
from zero2all.corpus.download.hub import DownloadStoppedError, Hub, HubFile, InterruptedTransferError, MissingFileError

PART_SUFFIX = ".part"
STOP_SECONDS = 2.0
"""How long a stopped download waits for its connections."""


class FileTransfer:
    """One file on its way, and what earlier processes have fetched of it."""

    def __init__(self, file: HubFile, folder: Path) -> None:
        self.file = file
        key = hashlib.sha256(f"{file.digest} {file.name}".encode()).hexdigest()[:32]
        self.path = folder / f"{key}{PART_SUFFIX}"
        self.position = min(self.path.stat().st_size, file.size_bytes) if self.path.exists() else 0
        """How much of the file is here, and where the next byte belongs."""
        self.checksum_failures = 0

    def discard(self) -> None:
        """Forget every byte."""
        self.path.unlink(missing_ok=True)
        self.position = 0


class Fleet:
    """Several connections that fetch the files in order, and check each when it is whole."""

    def __init__(
        self,
        hub: Hub,
        commit: str,
        target: Path,
        transfers: Sequence[FileTransfer],
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
        self._queue = deque(transfers)
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
            while (transfer := self._next()) is not None:
                self._fetch(transfer)
        except DownloadStoppedError:
            pass
        except BaseException as error:  # raised again by `run`
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _next(self) -> FileTransfer | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_fetched += size
            self.bar.advance(size)

    def _fetch(self, transfer: FileTransfer) -> None:
        """Fetch the rest of a file, through any number of lost connections, and check it."""
        try:
            self.hub.patience.repeat(
                transfer.file.name, lambda: self._request(transfer), progress=lambda: transfer.position
            )
        except MissingFileError as error:
            self._give_up(transfer, f"the hub lists it but does not have it ({error})")
            return
        self._settle(transfer)

    def _request(self, transfer: FileTransfer) -> None:
        """One request: everything of the file that is missing, as far as it comes."""
        name, size, start = transfer.file.name, transfer.file.size_bytes, transfer.position
        with open(transfer.path, "ab", buffering=0) as part:
            if start == size:
                return
            byte_range = f"bytes={start}-{size - 1}" if start else None
            with self.hub.open(self.commit, name, byte_range) as answer:
                if byte_range and answer.status_code != 206:
                    self.hub.patience.announce(
                        f"{name}: {self.hub.endpoint} cannot send parts of a file (no Range), so it is downloaded "
                        f"again from its start ({human_bytes(start)} lost)"
                    )
                    self._count(-start)
                    transfer.position = 0
                    part.truncate(0)
                elif byte_range:
                    sent = answer.headers.get("content-range", "")
                    if not re.fullmatch(rf"bytes {start}-.*/({size}|\*)", sent):
                        raise InterruptedTransferError(f"asked for {byte_range} of {size:,} and was sent {sent!r}")
                for chunk in answer.iter_raw():
                    if self._stop.is_set():
                        raise DownloadStoppedError
                    rest = memoryview(chunk)[: size - transfer.position]
                    while rest:
                        written = part.write(rest)
                        transfer.position += written
                        self._count(written)
                        rest = rest[written:]
                    if transfer.position == size:
                        return
        raise InterruptedTransferError(f"the answer ended at byte {transfer.position:,} of {size:,}")

    def _settle(self, transfer: FileTransfer) -> None:
        """Give a whole file its name if its checksum is right; else fetch it once more, but not twice."""
        file = transfer.file
        found = digest_of(transfer.path, file.algorithm, self._stop)
        if found == file.digest:
            final = self.target / file.name
            final.parent.mkdir(parents=True, exist_ok=True)
            with open(transfer.path, "rb") as part:
                os.fsync(part.fileno())
            transfer.path.replace(final)
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
            self._queue.appendleft(transfer)

    def _give_up(self, transfer: FileTransfer, reason: str) -> None:
        with self._lock:
            self.failures.setdefault(transfer.file.name, reason)


def digest_of(path: Path, algorithm: str, stop: threading.Event | None = None) -> str:
    """The checksum of a file as a hub states it: `sha256` of the content, or `git_sha1` of git's blob."""
    # git hashes a file as `blob <size>`, a zero byte, and the content
    digest = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while block := file.read(4 << 20):
            if stop is not None and stop.is_set():
                raise DownloadStoppedError
            digest.update(block)
    return digest.hexdigest()
