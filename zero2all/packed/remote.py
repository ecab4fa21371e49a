"""Packed data in object storage, read through a bounded local cache.

    packed = packed_root(workspace.packed, config.data)      # a folder, also where data.packed is s3://bucket/packed
    open_split(packed, "en", "train")                        # as for a local folder

Reports and manifests are fetched when the data is opened; document indexes, gids and best-fit indexes when they are
first touched, and they stay. Token shards and masks are fetched in blocks of 256 KB as samples touch them; blocks take
at most `cache_bytes`, the least recently used go first. Files appear by renaming and are named by the crc32c of what
they belong to: a killed process leaves no half, processes share them, and data packed anew has other names.

    packed-cache/
        <address>/              stands for `packed/`: report.json, manifests, remote.json
        files/<crc32c>-<bytes>  files fetched whole
        blocks/<crc32c>-<bytes>/000012
        blocks/total            bytes of all blocks; its lock is held while blocks come and go

fsspec's own caches have no size limit, no lock between processes, and check no bytes. A shuffled run touches blocks at
random: give the cache as much disk as there is, and set several `data.readers`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import (
    MANIFEST_NAME,
    PARTIAL_MARK,
    as_written,
    crc32c_of,
    is_inner_path,
    read_json,
    write_atomic,
    write_json,
)
from zero2all.common.manifest import fingerprint
from zero2all.common.records import SPLITS, report_sources
from zero2all.packed.config import DataConfig

CACHE_NAME = "packed-cache"
REMOTE_NAME = "remote.json"
REPORT_NAME = "report.json"
BLOCK_BYTES = 1 << 18
LEAST_BLOCKS = 16
KEPT_SHARE = 0.9
"""How full the cache may be after blocks were removed: finding the oldest takes a pass over all of them."""
TRIES = 4
FIRST_WAIT_SECONDS = 0.2
UPLOAD = "Copy the packed folder there again."


def packed_root(own: Path, config: DataConfig) -> Path:
    """The folder to read from: that of the workspace, another one, or one that stands for an address."""
    if config.packed is None:
        return own
    if "://" not in config.packed:
        return Path(config.packed)
    cache = Path(config.cache) if config.cache else own.parent / CACHE_NAME
    return open_address(config.packed, cache, config.cache_bytes)


def open_address(url: str, cache: Path, cache_bytes: int, block_bytes: int = BLOCK_BYTES) -> Path:
    """Fetch what is needed to open the packed data at `url`; returns the folder that stands for it."""
    if cache_bytes < LEAST_BLOCKS * block_bytes:
        raise UsageError(
            f"data.cache_bytes is {cache_bytes:,}, which is too small: expected room for {LEAST_BLOCKS} "
            f"blocks of {block_bytes:,} bytes."
        )
    url = url.rstrip("/")
    storage = _Storage(url)
    folder = cache.absolute() / fingerprint(url)
    report = storage.read(
        REPORT_NAME, f"There is no finished packed data at {url} (no {REPORT_NAME}). Check the address. {UPLOAD}"
    )
    with as_written(f"{url}/{REPORT_NAME}", UPLOAD):
        sources = report_sources(jsonio.loads_strict(report), f"{url}/{REPORT_NAME}", UPLOAD)
    for inner in (f"{source}/{split}" for source in sources for split in SPLITS):
        sizes = storage.sizes(inner)
        if not all(map(is_inner_path, sizes)):
            raise BadInputError(f"{url}/{inner} lists names that point outside of it. {UPLOAD}")
        for name in sizes:
            if name == MANIFEST_NAME or name.endswith(f"/{MANIFEST_NAME}"):
                write_atomic(folder / inner / name, storage.read(f"{inner}/{name}"))
        if MANIFEST_NAME in sizes:
            _require_files(f"{url}/{inner}", read_json(folder / inner / MANIFEST_NAME), sizes)
    facts = {"url": url, "cache": str(cache.absolute()), "cache_bytes": cache_bytes, "block_bytes": block_bytes}
    write_json(folder / REMOTE_NAME, facts)
    write_atomic(folder / REPORT_NAME, report)
    return folder


def _require_files(where: str, manifest: Any, sizes: dict[str, int]) -> None:
    """Every file that training reads must be there with its size."""
    with as_written(f"{where}/{MANIFEST_NAME}", UPLOAD):
        for name, facts in manifest["files"].items():
            if sizes.get(name) != facts["bytes"] and not name.startswith("gids-"):
                if name not in sizes:
                    raise BadInputError(f"The packed file {where}/{name} is missing. {UPLOAD}")
                raise BadInputError(
                    f"The packed file {where}/{name} has {sizes[name]} bytes, expected {facts['bytes']}. {UPLOAD}"
                )


def remote_of(packed: Path) -> Remote | None:
    """What is behind a folder that stands for an address; None for any other."""
    try:
        facts = read_json(packed / REMOTE_NAME)
    except FileNotFoundError:
        return None
    cache = BlockCache(Path(facts["cache"]), facts["cache_bytes"])
    return Remote(packed, _Storage(facts["url"]), cache, facts["block_bytes"])


@dataclass(frozen=True)
class Remote:
    """Packed data at an address."""

    folder: Path
    storage: _Storage
    cache: BlockCache
    block_bytes: int

    def whole(self, path: Path, facts: dict[str, Any]) -> Path:
        """A copy of a file, fetched if need be, its bytes checked."""
        local = self.cache.folder / "files" / _key(facts)
        if local.is_file():
            return local
        with locked(local.parent / "lock"):  # readers that want the same file wait for the one that fetches it
            if not local.is_file():
                fetched, where = local.with_name(f"{local.name}{PARTIAL_MARK}fetched"), self.name(path)
                write_atomic(fetched, self.storage.read(where))
                if crc32c_of(fetched) != facts["crc32c"]:
                    raise BadInputError(
                        f"{self.storage.url}/{where} is damaged: it has changed since it was written (crc32c "
                        f"differs). {UPLOAD}"
                    )
                fetched.replace(local)
        return local

    def bring(self, folder: Path, files: dict[str, dict[str, Any]]) -> None:
        """Lay the files of a small folder (a best-fit index) where they would lie."""
        for name, facts in files.items():
            if not (folder / name).exists() or (folder / name).stat().st_size != facts["bytes"]:
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(self.whole(folder / name, facts))

    def name(self, path: Path) -> str:
        """What a file is called at the address."""
        return path.relative_to(self.folder).as_posix()


def _key(facts: dict[str, Any]) -> str:
    return f"{facts['crc32c']}-{facts['bytes']}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a file for this thread alone, among all threads of all processes; yields its handle."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


class BlockArray:
    """Slices like those of an array, of a file that is fetched in blocks."""

    def __init__(self, remote: Remote, path: Path, facts: dict[str, Any], dtype: np.dtype) -> None:
        self.dtype, self._remote, self._name = dtype, remote, remote.name(path)
        self._key, self._bytes = _key(facts), int(facts["bytes"])

    def __len__(self) -> int:
        return self._bytes // self.dtype.itemsize

    def __getitem__(self, wanted: slice) -> np.ndarray:
        start, end, step = wanted.indices(len(self))
        assert step == 1, "tokens that follow one another"
        first, last = start * self.dtype.itemsize, max(start, end) * self.dtype.itemsize
        cache, size = self._remote.cache, self._remote.block_bytes
        parts = []
        for number in range(first // size, -(-last // size)):
            begin, finish = number * size, min((number + 1) * size, self._bytes)
            inner = slice(max(first - begin, 0), min(last, finish) - begin)
            data = cache.read(self._key, number, inner.start, inner.stop)
            if data is None:
                block = self._remote.storage.read(self._name, start=begin, end=finish)
                cache.put(self._key, number, block)
                data = block[inner]
            parts.append(data)
        return np.frombuffer(b"".join(parts), dtype=self.dtype)


class BlockCache:
    """Blocks on disk, at most `limit_bytes` of them, shared by every process that opens the folder."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._blocks = folder / "blocks"
        self._blocks.mkdir(parents=True, exist_ok=True)

    def read(self, key: str, number: int, start: int, end: int) -> bytes | None:
        """Bytes of a block; None when it is not here."""
        try:
            with open(self._path(key, number), "rb", buffering=0) as file:
                data = os.pread(file.fileno(), end - start, start)
                os.utime(file.fileno())  # the least recently used go first
        except FileNotFoundError:
            return None
        return data

    def put(self, key: str, number: int, data: bytes) -> None:
        """Keep a block; others go if there is no room."""
        path = self._path(key, number)
        with locked(self._blocks / "total") as total_file:
            if path.exists():
                return
            total = int(os.pread(total_file, 32, 0) or b"0") + len(data)
            if total > self.limit_bytes:
                total = self._make_room(len(data)) + len(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}{PARTIAL_MARK}{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(path)
            os.pwrite(total_file, b"%-32d" % total, 0)

    def _make_room(self, needed: int) -> int:
        """Remove the oldest blocks; returns the bytes of those that stay."""
        found = []
        for path in self._blocks.glob("*/*"):
            if PARTIAL_MARK in path.name:  # of a killed process: only the holder of the lock writes
                path.unlink()
            else:
                facts = path.stat()
                found.append((facts.st_mtime_ns, path, facts.st_size))
        total = sum(size for *_, size in found)
        for _, path, size in sorted(found):
            if total + needed <= KEPT_SHARE * self.limit_bytes:
                break
            path.unlink()
            total -= size
        return total

    def _path(self, key: str, number: int) -> Path:
        return self._blocks / key / f"{number:06d}"


class _Storage:
    """Reads of one address, repeated when the network fails."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"The address {url} cannot be opened: {error}. Addresses need fsspec and a package for their "
                "kind, such as s3fs for s3://."
            ) from error

    def read(self, name: str, missing: str | None = None, start: int | None = None, end: int | None = None) -> bytes:
        """A file, or some bytes of it."""

        def once() -> bytes:
            data: bytes = self._files.cat_file(f"{self._root}/{name}", start=start, end=end)
            if start is not None and end is not None and len(data) != end - start:
                raise OSError(f"got {len(data)} bytes of {end - start}")
            return data

        return self._repeated(once, f"{self.url}/{name}", missing)

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file of a folder and of the folders in it, by name."""

        def once() -> dict[str, int]:
            self._files.invalidate_cache()
            root = f"{self._root}/{folder}"
            start = len(self._files._strip_protocol(root)) + 1
            return {path[start:]: int(facts["size"]) for path, facts in self._files.find(root, detail=True).items()}

        return self._repeated(once, f"{self.url}/{folder}", None)

    def _repeated(self, once: Callable[[], Any], what: str, missing: str | None) -> Any:
        for attempt in range(TRIES):
            try:
                return once()
            except FileNotFoundError as error:
                raise BadInputError(missing or f"{what} is missing. Check the address. {UPLOAD}") from error
            except Exception as error:  # whatever the package behind an address may raise
                if attempt == TRIES - 1:
                    raise BadInputError(
                        f"{what} cannot be read after {TRIES} tries ({type(error).__name__}: {error}). Check "
                        "the network, the address and the access rights."
                    ) from error
                time.sleep(FIRST_WAIT_SECONDS * 4**attempt)
        raise AssertionError("unreachable: the last try raises")
