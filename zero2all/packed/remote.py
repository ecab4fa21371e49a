"""Packed data that lies in object storage, read through a bounded local cache.

    packed = packed_root(workspace.packed, config.data)      # a folder, also where data.packed is s3://bucket/packed
    open_split(packed, "en", "train")                        # as ever

What is small is fetched when the data is opened (reports, manifests, the sizes of all files) or when it is first
touched (document indexes, gids, best-fit indexes), and stays. Token shards and masks are fetched in blocks of 256 KB as
samples touch them; blocks take at most `cache_bytes`, the least recently used go first. Blocks are files that appear by
renaming, named by the crc32c of the shard they belong to: a killed process leaves no half, several processes share
them, and data that was packed anew has other names.

    packed-cache/
        <address>/              stands for `packed/`: report.json, manifests, remote.json, sizes.json
        files/<crc32c>-<bytes>  files fetched whole
        blocks/<crc32c>-<bytes>/000012
        blocks/total            bytes of all blocks; its lock is held while blocks come and go

A shuffled run touches blocks at random, so what comes over the network is about (256 KB / sample) times what is read
until the cache holds most of the data: give it as much disk as there is, and several `data.readers`.
Only this module needs fsspec, and only for an address.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import MANIFEST_NAME, PARTIAL_MARK, is_inner_path, read_json, write_atomic, write_json
from zero2all.common.manifest import fingerprint
from zero2all.common.records import SPLITS, report_sources
from zero2all.packed.config import DataConfig

CACHE_NAME = "packed-cache"
REMOTE_NAME = "remote.json"
SIZES_NAME = "sizes.json"
REPORT_NAME = "report.json"
BLOCK_BYTES = 1 << 18
LEAST_BLOCKS = 16
KEPT_SHARE = 0.9
"""How full the cache may be after blocks were removed: looking for the oldest costs a pass over all of them."""
TRIES = 4
FIRST_WAIT_SECONDS = 0.2


def is_address(packed: str) -> bool:
    """Whether this is something for fsspec and not a folder."""
    return "://" in packed


def packed_root(own: Path, config: DataConfig) -> Path:
    """The folder to read from: that of the workspace, another one, or one that stands for an address."""
    if config.packed is None:
        return own
    if not is_address(config.packed):
        return Path(config.packed)
    cache = Path(config.cache) if config.cache else own.parent / CACHE_NAME
    return open_address(config.packed, cache, config.cache_bytes)


def open_address(url: str, cache: Path, cache_bytes: int, block_bytes: int = BLOCK_BYTES) -> Path:
    """Fetch what is needed to open the packed data at `url`; returns the folder that stands for it."""
    if cache_bytes < LEAST_BLOCKS * block_bytes:
        raise UsageError(
            f"data.cache_bytes is {cache_bytes:,}, too little: expected room for {LEAST_BLOCKS} blocks of "
            f"{block_bytes:,} bytes."
        )
    url = url.rstrip("/")
    storage = _Storage(url)
    folder = cache.absolute() / fingerprint(url)
    folder.mkdir(parents=True, exist_ok=True)
    report = storage.read(REPORT_NAME, f"There is no finished packed data at {url} (no {REPORT_NAME})")
    try:
        listed = jsonio.loads_strict(report)
    except ValueError as error:
        raise BadInputError(f"{url}/{REPORT_NAME} cannot be read as JSON ({error}). Upload it again.") from error
    for source in report_sources(listed, f"{url}/{REPORT_NAME}", "Upload the packed data again."):
        for split in SPLITS:
            inner = f"{source}/{split}"
            sizes = storage.sizes(inner)
            if not all(map(is_inner_path, sizes)):
                raise BadInputError(f"{url}/{inner} lists names that lead out of it. Upload the packed data again.")
            if MANIFEST_NAME not in sizes:
                continue
            write_json(folder / inner / SIZES_NAME, sizes)
            for name in sizes:
                if name == MANIFEST_NAME or name.endswith(f"/{MANIFEST_NAME}"):
                    write_atomic(folder / inner / name, storage.read(f"{inner}/{name}"))
    facts = {"url": url, "cache": str(cache.absolute()), "cache_bytes": cache_bytes, "block_bytes": block_bytes}
    write_json(folder / REMOTE_NAME, facts)
    write_atomic(folder / REPORT_NAME, report)
    return folder


def remote_of(packed: Path) -> Remote | None:
    """What is behind a folder that stands for an address; None for any other."""
    try:
        facts = (packed / REMOTE_NAME).read_bytes()
    except OSError:
        return None
    return _remote(str(packed), facts)


@lru_cache(maxsize=8)
def _remote(packed: str, facts: bytes) -> Remote:
    values = json.loads(facts)
    cache = BlockCache(Path(values["cache"]), values["cache_bytes"])
    return Remote(Path(packed), values["url"], cache, values["block_bytes"])


@dataclass(frozen=True)
class Remote:
    """Packed data at an address."""

    folder: Path
    url: str
    cache: BlockCache
    block_bytes: int

    def size(self, path: str) -> int | None:
        """Bytes of a file, named by where it would lie; None when there is none."""
        source, split, name = path[len(str(self.folder)) + 1 :].split("/", 2)
        sizes = self.folder / source / split / SIZES_NAME
        return _sizes(sizes, sizes.stat().st_mtime_ns).get(name)

    def whole(self, path: Path, facts: dict[str, Any]) -> Path:
        """A copy of a file, fetched if need be, its bytes checked."""
        local = self.cache.folder / "files" / f"{facts['crc32c']}-{facts['bytes']}"
        if local.is_file():
            return local
        with locked(local.parent / "lock"):  # readers that want the same file wait for the one that fetches it
            if not local.is_file():
                data = _Storage(self.url).read(self._name(path))
                if f"{_crc32c(data):08x}" != facts["crc32c"]:
                    raise BadInputError(
                        f"{self.url}/{self._name(path)} is damaged: its bytes have changed since it was written "
                        f"(crc32c differs). Copy it there again from where it was packed."
                    )
                write_atomic(local, data)
        return local

    def bring(self, folder: Path, files: dict[str, dict[str, Any]]) -> None:
        """Lay the files of a small folder (a best-fit index) where they would lie."""
        for name, facts in files.items():
            if not (folder / name).exists() or (folder / name).stat().st_size != facts["bytes"]:
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(self.whole(folder / name, facts))

    def blocks(self, path: Path, facts: dict[str, Any], dtype: np.dtype) -> BlockArray:
        """A file whose bytes are fetched as they are touched."""
        name, storage = self._name(path), _Storage(self.url)

        def fetch(start: int, end: int) -> bytes:
            return storage.read(name, start=start, end=end)

        key = f"{facts['crc32c']}-{facts['bytes']}"
        return BlockArray(self.cache, key, int(facts["bytes"]), self.block_bytes, dtype, fetch)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def _crc32c(data: bytes) -> int:
    import google_crc32c

    return int(google_crc32c.value(data))


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


@lru_cache(maxsize=1024)
def _sizes(path: Path, _: int) -> dict[str, int]:
    sizes: dict[str, int] = read_json(path)
    return sizes


class BlockArray:
    """Slices like those of an array, of a file that is fetched in blocks."""

    def __init__(
        self,
        cache: BlockCache,
        key: str,
        size_bytes: int,
        block_bytes: int,
        dtype: np.dtype,
        fetch: Callable[[int, int], bytes],
    ) -> None:
        self.dtype, self._cache, self._key, self._fetch = dtype, cache, key, fetch
        self._bytes, self._block_bytes = size_bytes, block_bytes

    def __len__(self) -> int:
        return self._bytes // self.dtype.itemsize

    def __getitem__(self, wanted: slice) -> np.ndarray:
        start, end, step = wanted.indices(len(self))
        assert step == 1, "a stretch of tokens"
        first, last = start * self.dtype.itemsize, max(start, end) * self.dtype.itemsize
        pieces = []
        for number in range(first // self._block_bytes, -(-last // self._block_bytes)):
            begin = number * self._block_bytes
            finish = min(begin + self._block_bytes, self._bytes)
            data = self._cache.read(self._key, number, max(first - begin, 0), min(last, finish) - begin)
            if data is None:
                block = self._fetch(begin, finish)
                self._cache.put(self._key, number, block)
                data = block[max(first - begin, 0) : min(last, finish) - begin]
            pieces.append(data)
        return np.frombuffer(b"".join(pieces), dtype=self.dtype)


class BlockCache:
    """Blocks on disk, at most `limit_bytes` of them, shared by every process that opens the folder."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._blocks = folder / "blocks"
        self._blocks.mkdir(parents=True, exist_ok=True)

    def read(self, key: str, number: int, start: int, end: int) -> bytes | None:
        """Bytes of a block; None when it is not here."""
        path = self._path(key, number)
        try:
            with open(path, "rb", buffering=0) as file:
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
        """Remove the oldest blocks; returns the bytes of those that stay, counted anew."""
        found = []
        for folder in self._blocks.iterdir():
            if folder.is_dir():
                for entry in os.scandir(folder):
                    facts = entry.stat()
                    if PARTIAL_MARK in entry.name:  # of a process that was killed: whoever writes holds the lock
                        os.unlink(entry.path)  # noqa: PTH108 - entry.path is a string
                    else:
                        found.append((facts.st_mtime_ns, entry.path, facts.st_size))
        total = sum(size for *_, size in found)
        for _, path, size in sorted(found):
            if total + needed <= KEPT_SHARE * self.limit_bytes:
                break
            os.unlink(path)  # noqa: PTH108
            total -= size
        return total

    def _path(self, key: str, number: int) -> Path:
        return self._blocks / key / f"{number:06d}"


class _Storage:
    """Reads of one address, tried again when the network fails."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            import fsspec
        except ImportError as error:
            raise UsageError(
                f"Reading packed data from {url} needs fsspec, which is not installed: pip install fsspec, and the "
                f"package of the address, such as s3fs for s3://."
            ) from error
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"The address {url} cannot be opened: {error}") from error

    def read(self, name: str, missing: str | None = None, start: int | None = None, end: int | None = None) -> bytes:
        """A file, or some bytes of it."""

        def once() -> bytes:
            data: bytes = self._files.cat_file(f"{self._root}/{name}", start=start, end=end)
            if start is not None and end is not None and len(data) != end - start:
                raise OSError(f"got {len(data)} bytes of {end - start}")
            return data

        return self._tried(once, f"{self.url}/{name}", missing)

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file of a folder and of the folders in it, by name."""

        def once() -> dict[str, int]:
            root = f"{self._root}/{folder}"
            found = self._files.find(root, detail=True)
            start = len(self._files._strip_protocol(root)) + 1
            return {path[start:]: int(facts["size"]) for path, facts in sorted(found.items())}

        self._files.invalidate_cache()
        return self._tried(once, f"{self.url}/{folder}", None)

    def _tried(self, once: Callable[[], Any], what: str, missing: str | None) -> Any:
        wait = FIRST_WAIT_SECONDS
        for attempt in range(TRIES):
            try:
                return once()
            except FileNotFoundError as error:
                raise BadInputError(
                    f"{missing or f'{what} is missing'}. Check the address, or copy the packed folder there again."
                ) from error
            except Exception as error:  # whatever the package behind an address may raise
                if attempt == TRIES - 1:
                    raise BadInputError(
                        f"{what} cannot be read, tried {TRIES} times ({type(error).__name__}: {error}). Check the "
                        f"network, the address and the access rights."
                    ) from error
                time.sleep(wait)
                wait *= 4
        raise AssertionError("unreachable: the last try raises")
