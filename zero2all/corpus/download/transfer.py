"""Files from a hub to this disk, over several connections, in the middle of which anything may end.

huggingface_hub would do this too, but not what is promised here: `hf_hub_download` (read in version 2.4) writes to a
temporary file with a random name, so that what a killed process had fetched is fetched again from its start, and it
compares sizes, not checksums.

A file is cut into pieces of 256 MiB, so that one large file uses all connections as well as many small ones do. The
pieces are written into one `<key>.part` at their places; beside it, `<key>.done` says how many bytes of each piece have
arrived, written after the bytes themselves. A killed process therefore loses nothing, and a machine that lost its power
at worst has bytes wrong that the checksum then finds. The key covers name and checksum: bytes of one revision are never
continued with those of another.

The checksum is taken over the finished part as it lies on the disk, which costs one reading of it: 1.1 GB/s for
sha256 on one Neoverse-N1 core. Only then does the file get its name.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.files import fsync_folder, human_bytes
from zero2all.common.progress import Bar
from zero2all.corpus.download.hub import Announce, Hub, HubFile, InterruptedTransferError, MissingFileError

PIECE_BYTES = 256 << 20
"""Large enough that asking for pieces does not run into the rate limit of a hub, small enough to share a file."""
PART_SUFFIX, DONE_SUFFIX = ".part", ".done"
COUNTER = struct.Struct("<Q")
POLL_SECONDS = 0.1
LAST_WORDS_SECONDS = 2.0


class StoppedError(Exception):
    """Another connection met an error, or the person interrupted; not an error of its own."""


@dataclass(slots=True, eq=False)
class Piece:
    """A stretch of a file, fetched from its start to its end."""

    start: int
    end: int
    done: int = 0
    """Bytes of it that are on the disk."""
    is_void: bool = False
    """The file is now fetched in another way; whoever is at this piece leaves it."""

    @property
    def position(self) -> int:
        """Where the next byte belongs."""
        return self.start + self.done

    @property
    def left(self) -> int:
        """Bytes still to come."""
        return self.end - self.position


class Transfer:
    """One file on its way: what has arrived of it, in the two files that outlive this process."""

    def __init__(self, file: HubFile, folder: Path, piece_bytes: int = PIECE_BYTES) -> None:
        key = hashlib.sha256(f"{file.digest} {file.name}".encode()).hexdigest()[:32]
        self.file, self.piece_bytes = file, piece_bytes
        self.part, self.done = folder / f"{key}{PART_SUFFIX}", folder / f"{key}{DONE_SUFFIX}"
        self.lock = threading.Lock()
        self.has_ranges = True
        """False once the server has sent a whole file where a piece was asked for."""
        self.checksum_failures = 0
        self._is_prepared = self._is_claimed = False
        self.pieces = self._pieces()
        for piece, count in zip(self.pieces, self._arrived(), strict=True):
            piece.done = min(count, piece.end - piece.start)

    @property
    def bytes_done(self) -> int:
        """How much of the file is here."""
        return sum(piece.done for piece in self.pieces)

    def prepare(self) -> None:
        """Make the two files, unless an earlier process left some that can be continued."""
        with self.lock:
            if not self._is_prepared and not self.bytes_done:
                self._start_afresh()
            self._is_prepared = True

    def restart(self) -> None:
        """Forget every byte."""
        with self.lock:
            self.pieces = self._pieces()
            self._start_afresh()
            self._is_claimed = False

    def abandon(self) -> None:
        """Call everybody off."""
        with self.lock:
            for piece in self.pieces:
                piece.is_void = True

    def claim_whole(self) -> bool:
        """Whether every byte is here, and the caller is the first to hear of it."""
        with self.lock:
            if self._is_claimed or any(piece.left or piece.is_void for piece in self.pieces):
                return False
            self._is_claimed = True
            return True

    def become_one_stream(self, piece: Piece) -> int | None:
        """Let `piece` be the whole file, from its start. Returns how many bytes that throws away.

        None: another connection was faster, and this one has nothing left to do here.
        """
        with self.lock:
            if piece.is_void:
                return None
            thrown_away = self.bytes_done
            for other in self.pieces:
                other.is_void = other is not piece
            piece.start, piece.end, piece.done = 0, self.file.size_bytes, 0
            self.pieces, self.has_ranges = [piece], False
            self._start_afresh()
            return thrown_away

    def write(self, piece: Piece, chunk: bytes, part: int, done: int) -> int:
        """Put bytes in their place, then count them; returns how many were of use."""
        with self.lock:
            if piece.is_void:
                return 0
            rest = memoryview(chunk)[: piece.left]
            size = len(rest)
            position = piece.position
            while rest:
                written = os.pwrite(part, rest, position)
                rest, position = rest[written:], position + written
            piece.done += size
            if self.has_ranges:  # without them the next process has to start again anyway
                os.pwrite(done, COUNTER.pack(piece.done), COUNTER.size * (1 + self.pieces.index(piece)))
            return size

    def discard(self) -> None:
        """Remove both files."""
        self.part.unlink(missing_ok=True)
        self.done.unlink(missing_ok=True)

    def _pieces(self) -> list[Piece]:
        size = self.file.size_bytes
        step = self.piece_bytes if self.has_ranges else max(size, 1)
        return [Piece(start, min(start + step, size)) for start in range(0, max(size, 1), step)]

    def _arrived(self) -> list[int]:
        """The counts an earlier process left; zeros when there are none, or for pieces of another size."""
        nothing = [0] * len(self.pieces)
        try:
            saved = self.done.read_bytes()
            part_bytes = self.part.stat().st_size
        except FileNotFoundError:
            return nothing
        if part_bytes != self.file.size_bytes or len(saved) != COUNTER.size * (1 + len(nothing)):
            return nothing
        piece_bytes, *counts = (count for (count,) in COUNTER.iter_unpack(saved))
        return counts if piece_bytes == self.piece_bytes else nothing

    def _start_afresh(self) -> None:
        # Emptied, not replaced: other connections may be about to open them.
        with open(self.part, "wb") as part:
            part.truncate(self.file.size_bytes)  # sparse: takes no room until it is written
        self.done.write_bytes(COUNTER.pack(self.piece_bytes) + bytes(COUNTER.size * len(self._pieces())))


class Fleet:
    """Several connections that fetch the pieces of all files, in order, and settle each file when it is whole."""

    def __init__(
        self, hub: Hub, commit: str, target: Path, transfers: Sequence[Transfer], on_whole: Callable[[HubFile], None]
    ) -> None:
        self.hub, self.commit, self.target, self.on_whole = hub, commit, target, on_whole
        self.announce: Announce = hub.patience.announce
        self.failures: dict[str, str] = {}
        """Name -> why this file could not be had; the others are fetched all the same."""
        self.interruptions = 0
        """How often a connection was lost and taken up again."""
        self.bytes_fetched = 0
        self._bytes_shown = 0
        self._stop = hub.patience.stop
        self._lock = threading.Lock()
        self._transfers = transfers
        self._queue = deque((transfer, piece) for transfer in transfers for piece in transfer.pieces)
        self._error: BaseException | None = None

    def run(self, connections: int, bar: Bar) -> None:
        """Fetch everything; raises the first error that concerns more than one file."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(connections, len(self._queue)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(POLL_SECONDS)
                    self._show(bar)
        finally:
            self._stop.set()  # after an interrupt: a connection notices at its next bytes, and a silent one is left
            deadline = time.monotonic() + LAST_WORDS_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        self._show(bar)
        for transfer in self._transfers:
            if transfer.file.name in self.failures:
                transfer.discard()
        if self._error is not None:
            raise self._error

    def _show(self, bar: Bar) -> None:
        with self._lock:
            news, self._bytes_shown = self.bytes_fetched - self._bytes_shown, self.bytes_fetched
        if news:
            bar.advance(news)

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_fetched += size

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                transfer, piece = job
                if self._fetch(transfer, piece):
                    self._settle(transfer)
        except StoppedError:
            pass
        except BaseException as error:  # raised again by `run`, in the thread that can tell the person
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _next(self) -> tuple[Transfer, Piece] | None:
        with self._lock:
            while self._queue:
                transfer, piece = self._queue.popleft()
                if not piece.is_void:
                    return transfer, piece
        return None

    def _fetch(self, transfer: Transfer, piece: Piece) -> bool:
        """Fetch the rest of a piece, through any number of lost connections; True when it was the file's last."""
        transfer.prepare()
        failures = 0
        while piece.left and not piece.is_void:
            self.hub.patience.wait_turn()
            self._check_stop()
            before = piece.done
            try:
                self._request(transfer, piece)
            except MissingFileError as error:
                self._give_up(transfer, f"is listed by the hub, which does not have it ({error})")
                return False
            except InterruptedTransferError as error:
                # Each connection that brought something counts as the first failure: a line that breaks every minute
                # still ends. Not so where a break throws away what came before.
                failures = 1 if transfer.has_ranges and piece.done > before else failures + 1
                with self._lock:
                    self.interruptions += 1
                self.hub.patience.wait_out(error, failures, transfer.file.name)
        return transfer.claim_whole()

    def _request(self, transfer: Transfer, piece: Piece) -> None:
        """One request: everything of the piece that is missing, as far as it comes."""
        size = transfer.file.size_bytes
        if not transfer.has_ranges:
            self._count(-piece.done)
            piece.done = 0
        wants_all = piece.position == 0 and piece.end == size
        byte_range = None if wants_all else f"bytes={piece.position}-{piece.end - 1}"
        with self.hub.open(self.commit, transfer.file.name, byte_range) as answer:
            if byte_range and answer.status_code != 206:
                thrown_away = transfer.become_one_stream(piece)
                if thrown_away is None:
                    return
                self._count(-thrown_away)
                self.announce(
                    f"{transfer.file.name}: {self.hub.endpoint} cannot send parts of a file (no Range), so it is "
                    f"fetched from its start, over one connection ({human_bytes(thrown_away)} thrown away)"
                )
            elif byte_range:
                _require_range(answer.headers.get("content-range", ""), piece.position, size)
            with open(transfer.part, "r+b", buffering=0) as part, open(transfer.done, "r+b", buffering=0) as done:
                for chunk in answer.iter_raw():
                    self._check_stop()
                    self._count(transfer.write(piece, chunk, part.fileno(), done.fileno()))
                    if not piece.left or piece.is_void:
                        return
        raise InterruptedTransferError(f"the answer ended at byte {piece.position:,} of {piece.end:,}")

    def _settle(self, transfer: Transfer) -> None:
        """Give a whole file its name, when its checksum is right; else fetch it once more, but not twice."""
        file = transfer.file
        found = digest_of(transfer.part, file.algorithm, self._check_stop)
        if found == file.digest:
            place_whole(transfer.part, self.target / file.name)
            transfer.discard()
            with self._lock:
                self.on_whole(file)
            return
        transfer.checksum_failures += 1
        if transfer.checksum_failures > 1:
            self._give_up(
                transfer,
                f"arrived twice with a wrong checksum ({file.algorithm} {found[:12]}…, expected {file.digest[:12]}…)",
            )
            return
        self.announce(f"{file.name}: wrong checksum ({file.algorithm}); the file is fetched once more, from its start")
        self._count(-file.size_bytes)
        transfer.restart()
        with self._lock:
            self._queue.extendleft((transfer, piece) for piece in reversed(transfer.pieces))

    def _give_up(self, transfer: Transfer, reason: str) -> None:
        transfer.abandon()
        with self._lock:
            self.failures.setdefault(transfer.file.name, reason)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise StoppedError


def _require_range(content_range: str, position: int, size: int) -> None:
    """Refuse a part of the file that is not the one that was asked for."""
    if not content_range.startswith(f"bytes {position}-") or content_range.rpartition("/")[2] not in (str(size), "*"):
        raise InterruptedTransferError(f"asked for byte {position:,} of {size:,} and was sent {content_range!r}")


def digest_of(path: Path, algorithm: str, check_stop: Callable[[], None] = lambda: None) -> str:
    """The checksum of a file as a hub states it: `sha256` of the content, or `git_sha1` of git's blob."""
    # git hashes a file as `blob <size>`, a zero byte, and the content
    digest: Any = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while block := file.read(4 << 20):
            check_stop()
            digest.update(block)
    return str(digest.hexdigest())


def place_whole(part: Path, final: Path) -> None:
    """Flush a finished part to the disk and give it its name."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    part.replace(final)
    fsync_folder(final.parent)
