"""Writing files so that a reader sees either the whole thing or nothing.

A file is written beside its final place, fsynced and renamed; a folder is filled under a temporary name, gets its
`manifest.json` last, and is then renamed. A crash at any moment leaves at most a `*.partial-*` leftover, which no
stage ever reads and the next run of the stage removes.
"""

import errno
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, DiskError, exceeded_limit, is_disk_full

MANIFEST_NAME = "manifest.json"
PARTIAL_MARK = ".partial-"
CRC32C_POLYNOMIAL = 0x82F63B78
LARGEST_JSON_BYTES = 1 << 30


def package_text(package: str, name: str) -> str:
    """A text file that lies beside the modules of one of our packages."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


@contextmanager
def atomic_file(path: Path, check: Callable[[], None] | None = None) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends well; `check` is called right before, and may raise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}{PARTIAL_MARK}{os.getpid()}")
    try:
        with open(partial, "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_atomic(path: Path, data: bytes, check: Callable[[], None] | None = None) -> None:
    """Replace `path` by `data`, or leave it exactly as it was; `check` is called right before, and may raise."""
    with atomic_file(path, check) as file:
        file.write(data)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a second name of a file that does not change, or a copy where that cannot be; atomically."""
    partial = target.with_name(f"{target.name}{PARTIAL_MARK}{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    fsync_folder(target.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by indented JSON, atomically."""
    write_atomic(path, jsonio.dumps_pretty(value))


def read_json(path: Path, remedy: str = "Delete it and run its stage again.") -> Any:
    """Read a JSON file that decides something: no name twice in an object, no number beyond use, a plain file."""
    try:
        return jsonio.loads_strict(read_regular(path, LARGEST_JSON_BYTES))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be read as JSON ({error}). {remedy}") from error


def read_json_object(path: Path, remedy: str = "Delete it and run its stage again.") -> dict[str, Any]:
    """The same where the value has to be an object."""
    value = read_json(path, remedy)
    if not isinstance(value, dict):
        raise BadInputError(f"{path} holds a {type(value).__name__}; expected a JSON object. {remedy}")
    return value


@contextmanager
def as_written(what: object, remedy: str) -> Iterator[None]:
    """While values are taken out of `what`, a file or folder: one that is built otherwise than ours is bad input."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInputError(
            f"{what} does not have the form that this version of zero2all writes ({reason}). {remedy}"
        ) from error


def is_inner_path(name: object) -> bool:
    """Whether a name from a file, with forward slashes, can only lead to something below the folder it stands for."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    return not name.startswith("/") and ".." not in name.split("/")


def read_regular(path: Path, largest_bytes: int) -> bytes:
    """The bytes of a plain file, links followed. Anything else (a fifo would never end) and too many are an OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a fifo does not wait for its writer
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if facts.st_size > largest_bytes:
            raise OSError(errno.EOVERFLOW, f"it has {facts.st_size:,} bytes; the limit is {largest_bytes:,}", str(path))
        return file.read(largest_bytes)


def private_folder(folder: Path) -> None:
    """Make a folder for this user alone (mode 0700), or check that an existing one is: in /tmp and the like others may
    have put something else there. OSError when it is a link, is open to others, or cannot be made."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "it is not a folder of this user alone (mode 0700)", str(folder))


@contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `final` when the block ends without an error.

    A crash between the two renames that replace an older `final` leaves none, never a mixed one.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep_partials(final)
    partial = final.with_name(f"{final.name}{PARTIAL_MARK}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        fsync_tree(partial)
        put_in_place(partial, final)
        fsync_folder(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sweep_partials(final: Path) -> None:
    """Remove what killed attempts at writing `final` left behind; what a living process is writing stays."""
    if not final.parent.is_dir():
        return
    mark = f"{final.name}{PARTIAL_MARK}"
    for leftover in final.parent.iterdir():
        if not leftover.name.startswith(mark) or _is_at_work(leftover.name.removeprefix(mark)):
            continue
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a folder that is whole to `final`; an older one is set aside first and then removed."""
    if not final.exists():
        partial.rename(final)
        return
    old = final.with_name(f"{final.name}{PARTIAL_MARK}old-{os.getpid()}")
    final.rename(old)
    try:
        partial.rename(final)
    except BaseException:
        old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)  # the new one stands; what is left of the old is swept next time


def _is_at_work(mark: str) -> bool:
    """Whether the process that a leftover's name ends with is another one, and alive."""
    number = mark.removeprefix("old-")
    if not number.isdigit() or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's, so it is alive
    return True


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(root: Path) -> None:
    """Flush every file below `root`, then every folder."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            with open(Path(folder) / name, "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(Path(folder))


def crc32c_of(path: Path, start: int = 0, end: int | None = None, on_bytes: Callable[[int], None] | None = None) -> str:
    """The crc32c of a file, or of some of its bytes, as 8 hex digits; read in 4 MB pieces."""
    import google_crc32c  # here, because only stages that write or verify artifacts need it

    crc = 0
    left = math.inf if end is None else end - start
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (piece := file.read(int(min(4 << 20, left)))):
            crc = google_crc32c.extend(crc, piece)
            left -= len(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return f"{crc:08x}"


def joined_crc32c(parts: Iterable[tuple[str, int]]) -> str:
    """The crc32c of joined parts, from the crc32c and length of each: n more bytes multiply the crc by x^(8n)."""
    crc = 0
    for part, length in parts:
        power, square = 1 << 31, 1 << 23  # x^0 and x^8; the highest bit is the lowest power
        while length:
            if length & 1:
                power = _crc32c_product(power, square)
            square = _crc32c_product(square, square)
            length >>= 1
        crc = _crc32c_product(power, crc) ^ int(part, 16)
    return f"{crc:08x}"


def _crc32c_product(first: int, second: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (CRC32C_POLYNOMIAL if second & 1 else 0)
    return product


LONGEST_NAME = 200  # bytes of a name: file systems take 255, and a file is first written under a longer one


def require_writable(path: Path, flag: str, is_folder: bool = False) -> None:
    """Stop before the work begins when its result cannot be put at `path`, the value of `flag`."""
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise BadInputError(f"{flag} {path}: the name is longer than {LONGEST_NAME} bytes. Choose a shorter one.")
    if path.exists() and is_folder and not path.is_dir():
        raise BadInputError(f"{flag} {path} is not a folder. Choose another path.")
    if path.exists() and not is_folder and not path.is_file():
        raise BadInputError(f"{flag} {path} is not a regular file. Choose another path.")
    folder = path if is_folder else path.parent
    while not folder.exists():
        if folder.is_symlink():
            raise BadInputError(f"{flag} {path}: {folder} is a broken link. Choose another path.")
        folder = folder.parent
    if not folder.is_dir():
        raise BadInputError(
            f"{flag} {path}: {folder} is a file, so nothing can be written below it. Choose another path."
        )
    try:  # to make a file that nobody sees: rights alone say too little about /proc, /sys or a read-only disk
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if is_disk_full(error) or exceeded_limit(error):
            raise
        raise BadInputError(
            f"{flag} {path}: {folder} cannot be written to ({error.strerror}). Choose another path, or change "
            "its permissions."
        ) from error


def require_free_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Stop before the work begins when the disk cannot hold its result."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise DiskError(
            f"Not enough disk space for {purpose}: it needs about {human_bytes(needed_bytes)} under {folder}, "
            f"and {human_bytes(free_bytes)} are free. Free some space, or choose another disk with --work."
        )


def folder_bytes(folder: Path) -> int:
    """What the files in a folder take together."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KB'; powers of 1000, as disks are sold."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < (1000 if unit == "B" else 999.95) or unit == "TB":  # 999,999 B are 1.0 MB, not 1000.0 KB
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: the loop returns at TB")
