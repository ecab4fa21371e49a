"""Checks the shards that a run reads against their manifests, once, while it trains.

Nothing else would notice a damaged shard: its tokens are still tokens. Files are read slowly beside the run, 32 MB a
second and process, in a process with the lowest priority (crc32c keeps Python's lock), or, where there is little to
read, in a thread. Each rank of a run checks its share of the files.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero2all.common.errors import UserError
from zero2all.common.files import MANIFEST_NAME, read_json
from zero2all.common.manifest import FileCheck, file_checks
from zero2all.common.memory import available_memory
from zero2all.packed.bestfit import best_fit_folder
from zero2all.packed.readers import ReaderProcesses, ReadersEndedError
from zero2all.packed.shard_format import PackedSplit

BYTES_PER_SECOND = 32_000_000
CHUNK_BYTES = 1 << 18
IN_THREAD_BYTES = 16_000_000
"""Up to this much is not worth a process."""
CACHED_SHARE = 0.25
"""Files larger together than this share of the free memory are not left in the page cache, which others need."""


class ShardCheck:
    """What the check has found so far."""

    damage: str | None = None
    """The first damaged file, as a sentence."""
    finished = False
    """Whether all files of this rank have been read."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        """Set when there is nothing more to find: finished, or given up."""


@contextmanager
def checking_shards(
    splits: Sequence[PackedSplit],
    seq_lens: Sequence[int],
    on_problem: Callable[[str], None],
    rank: int = 0,
    ranks: int = 1,
    on_damage: Callable[[str], None] = lambda _damage: None,
) -> Iterator[ShardCheck]:
    """Check the files of `splits` while the block runs. `seq_lens` are those whose best-fit indexes are read.
    `on_damage` is called by the thread that finds a damaged file, before anybody else knows of it.

    Data at an address is left out: what is fetched from there whole is checked as it comes.
    """
    files = sorted(_files_of(splits, seq_lens), key=lambda check: str(check.path))[rank::ranks]
    total = sum(int(check.expected["bytes"]) for check in files)
    reading = _SlowReading(files, total > CACHED_SHARE * available_memory())
    processes = None if total <= IN_THREAD_BYTES else ReaderProcesses(reading, on_problem, niceness=19)
    check = ShardCheck()
    thread = threading.Thread(
        target=_check_all,
        args=(check, processes or reading, len(files), on_problem, on_damage),
        name="z2a-check",
        daemon=True,
    )
    thread.start()
    try:
        yield check
    finally:
        reading.stopped = True
        if processes is not None:
            processes.close()
        thread.join()


def _check_all(
    check: ShardCheck,
    read: Callable[[int], Any],
    files: int,
    on_problem: Callable[[str], None],
    on_damage: Callable[[str], None],
) -> None:
    try:
        for number in range(files):
            problem = read(number)
            if problem is not None:
                on_damage(problem)
                check.damage = problem
                return
        check.finished = True
    except UserError as error:  # the check cannot be made, which is no reason to stop the run
        on_problem(f"the check of the shards stopped: {error}")
    except ReadersEndedError:  # with the run
        return
    finally:
        check.ended.set()


def _files_of(splits: Sequence[PackedSplit], seq_lens: Sequence[int]) -> Iterator[FileCheck]:
    for split in splits:
        if split.remote is None:
            checks = file_checks(split.folder, split.manifest)
            yield from (check for check in checks if not check.path.name.startswith("gids-"))
            for folder in (best_fit_folder(split, seq_len) for seq_len in seq_lens):
                if (folder / MANIFEST_NAME).is_file():
                    yield from file_checks(folder, read_json(folder / MANIFEST_NAME))


class _SlowReading:
    """Reads a file in small chunks with pauses between them; returns what is wrong with it."""

    def __init__(self, files: Sequence[FileCheck], drop_cache: bool) -> None:
        self._files, self._drop_cache = list(files), drop_cache and hasattr(os, "posix_fadvise")
        self.stopped = False

    def __call__(self, number: int) -> str | None:
        path, expected = self._files[number]
        try:
            crc, size = self._read(path)
        except OSError as error:
            problem = f"{path} cannot be read ({error.strerror})"
            if error.errno in (errno.EMFILE, errno.ENFILE):  # that says nothing about the file
                raise UserError(problem) from error
            return problem
        if (f"{crc:08x}", size) == (expected["crc32c"], expected["bytes"]):
            return None
        return f"{path} has changed since it was written (crc32c differs)"

    def _read(self, path: Path) -> tuple[int, int]:
        import google_crc32c

        crc = size = 0
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                if self.stopped:
                    raise ReadersEndedError("the check was ended")
                crc = google_crc32c.extend(crc, chunk)
                if self._drop_cache:  # what the trainer has mapped stays
                    os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
                size += len(chunk)
                time.sleep(len(chunk) / BYTES_PER_SECOND)
        return crc, size
