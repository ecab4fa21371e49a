"""Is packed data what it says it is? Every file is read once: size, crc32c, ids, borders, and what belongs to what.

Everything that is wrong is found in one go and named by file; nothing is mended.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError, UserError
from zero2all.common.files import MANIFEST_NAME, crc32c_of, read_json
from zero2all.common.manifest import FileCheck, file_checks, fingerprint, read_manifest, verify_files
from zero2all.common.memory import available_memory
from zero2all.common.records import SPLITS
from zero2all.packed.bestfit import best_fit_folder
from zero2all.packed.readers import ReaderProcesses, ReadersEndedError
from zero2all.packed.shard_format import (
    PACK_COMMAND,
    REPORT_NAME,
    PackedSplit,
    check_split_manifest,
    docs_name,
    gids_name,
    map_array,
    mask_name,
    packed_report,
    packed_sources,
    tokens_name,
)

READ_TOKENS = 4 << 20


def packed_bytes(packed: Path) -> int:
    """How much `verify_packed` has to read, as far as that can be told."""
    total = 0
    for name in packed_sources(packed):
        for split in SPLITS:
            try:
                files = read_json(packed / name / split / MANIFEST_NAME)["files"]
                total += sum(int(file["bytes"]) for file in files.values())
            except (FileNotFoundError, BadInputError, KeyError, TypeError, AttributeError, ValueError):
                continue
    return total


def verify_packed(
    packed: Path, tokenizer_fingerprint: str | None = None, on_bytes: Callable[[float], None] | None = None
) -> list[str]:
    """Everything that is wrong, a sentence each; empty when all is well."""
    problems: list[str] = []
    stated = str(packed_report(packed).get("tokenizer")) if packed_sources(packed) else None
    if stated is not None and tokenizer_fingerprint not in (None, stated):
        problems.append(
            f"{packed / REPORT_NAME}: the data was packed with tokenizer {stated[:8]}, but the workspace has "
            f"{str(tokenizer_fingerprint)[:8]}"
        )
    for name in packed_sources(packed):
        for split in SPLITS:
            folder = packed / name / split
            try:
                manifest = read_manifest(folder, "packed", PACK_COMMAND)
                check_split_manifest(folder, manifest)
            except BadInputError as error:
                problems.append(str(error))
                continue
            if stated is not None and manifest["tokenizer"] != stated:
                problems.append(
                    f"{folder / MANIFEST_NAME}: `tokenizer` is {manifest['tokenizer'][:8]}, but "
                    f"{packed / REPORT_NAME} says {stated[:8]}"
                )
            problems += _SplitCheck(folder, manifest, on_bytes or (lambda _: None)).problems()
    return problems


class _SplitCheck:
    def __init__(self, folder: Path, manifest: dict[str, Any], on_bytes: Callable[[float], None]) -> None:
        self.folder, self.manifest, self.on_bytes = folder, manifest, on_bytes
        self.found: list[str] = []

    def problems(self) -> list[str]:
        shards = range(self.manifest["shards"])
        expected = [name(shard) for name in self._kinds() for shard in shards]
        unlisted = [name for name in expected if name not in self.manifest["files"]]
        self.found += [f"{self.folder / MANIFEST_NAME}: `files` does not list {name}" for name in unlisted]
        sound = {name for name in self.manifest["files"] if self._has_its_bytes(name)}
        tokens = documents = 0
        for shard in shards:
            names = [name(shard) for name in self._kinds()]
            if not sound.issuperset(names):
                continue
            in_shard = int(self.manifest["files"][names[0]]["bytes"]) // np.dtype(self.manifest["dtype"]).itemsize
            documents += self._check_borders(shard, in_shard)
            tokens += in_shard
        if sound.issuperset(expected):
            for field, counted in (("tokens", tokens), ("documents", documents)):
                said = self.manifest.get(field)
                if said != counted:
                    self.found.append(f"{self.folder / MANIFEST_NAME}: `{field}` is {said}, the shards hold {counted}")
        self._check_indexes()
        return self.found

    def _kinds(self) -> list[Callable[[int], str]]:
        optional = [(mask_name, "loss_mask"), (gids_name, "gids")]
        return [tokens_name, docs_name, *(name for name, field in optional if self.manifest.get(field))]

    def _has_its_bytes(self, name: str) -> bool:
        """Whether a file is as it was written; the ids of token shards are looked at, too."""
        path, expected = self.folder / name, self.manifest["files"][name]
        if not path.is_file():
            self.found.append(f"{path} is missing")
            return False
        if path.stat().st_size != expected["bytes"]:
            self.found.append(f"{path} has {path.stat().st_size} bytes, its manifest says {expected['bytes']}")
            return False
        is_sound = crc32c_of(path, on_bytes=self.on_bytes) == expected["crc32c"]
        if not is_sound:
            self.found.append(f"{path} has changed since it was written (crc32c differs)")
        if name.startswith("tokens-"):
            self._check_ids(path)
        return is_sound

    def _check_ids(self, path: Path) -> None:
        vocab_size, ids = self.manifest["vocab_size"], map_array(path, self.manifest["dtype"])
        for start in range(0, len(ids), READ_TOKENS):  # just read, so they come from the page cache
            beyond = np.flatnonzero(ids[start : start + READ_TOKENS] >= vocab_size)
            if len(beyond):
                at = start + int(beyond[0])
                self.found.append(f"{path}: token {at:,} has the id {ids[at]}, but there are only {vocab_size} ids")
                return

    def _check_borders(self, shard: int, tokens: int) -> int:
        path = self.folder / docs_name(shard)
        starts = np.fromfile(path, "<u8").astype(np.int64)
        rising = len(starts) > 0 and starts[0] == 0 and bool((np.diff(starts) > 0).all()) and starts[-1] < tokens
        if not rising:
            self.found.append(f"{path}: document starts must rise from 0 and stay below {tokens}")
        if self.manifest.get("gids"):
            gids = self.folder / gids_name(shard)
            if gids.stat().st_size != 8 * len(starts):
                self.found.append(f"{gids} has {gids.stat().st_size // 8} gids for {len(starts)} documents")
        if self.manifest.get("loss_mask"):
            mask = self.folder / mask_name(shard)
            if mask.stat().st_size != -(-tokens // 8):
                self.found.append(
                    f"{mask} has {mask.stat().st_size} bytes, expected one bit for each of {tokens} tokens"
                )
        return len(starts)

    def _check_indexes(self) -> None:
        for path in sorted(self.folder.glob(f"best-fit-*/{MANIFEST_NAME}")):
            try:
                manifest = read_manifest(path.parent, "best_fit", f"{PACK_COMMAND} --best-fit")
            except BadInputError as error:
                self.found.append(str(error))
                continue
            self.found += verify_files(path.parent, manifest)
            facts = {"files": self.manifest["files"], "seq_len": manifest["seq_len"]}
            if manifest["inputs"] != fingerprint(facts):
                self.found.append(f"{path} does not belong to the token shards beside it")


# Checks the shards that a run reads against their manifests, once, while it trains.
#
# Nothing else would notice a damaged shard: its tokens are still tokens. Files are read slowly beside the run, 32 MB a
# second and process, in a process with the lowest priority (crc32c keeps Python's lock), or, where there is little to
# read, in a thread. Each rank of a run checks its share of the files.


BYTES_PER_SECOND = 32_000_000
CHUNK_BYTES = 1 << 18
IN_THREAD_BYTES = 16_000_000
"""Up to this much is not worth a process."""
CACHED_SHARE = 0.25
"""Files larger together than this share of the free memory are not left in the page cache, which others need."""


class ShardCheckResult:
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
) -> Iterator[ShardCheckResult]:
    """Check the files of `splits` while the block runs. `seq_lens` are those whose best-fit indexes are read.
    `on_damage` is called by the thread that finds a damaged file, before anybody else knows of it.

    Data at an address is left out: what is fetched from there whole is checked as it comes.
    """
    files = sorted(_files_of(splits, seq_lens), key=lambda check: str(check.path))[rank::ranks]
    total = sum(int(check.expected["bytes"]) for check in files)
    reading = _SlowReading(files, total > CACHED_SHARE * available_memory())
    processes = None if total <= IN_THREAD_BYTES else ReaderProcesses(reading, on_problem, niceness=19)
    check = ShardCheckResult()
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
    check: ShardCheckResult,
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
