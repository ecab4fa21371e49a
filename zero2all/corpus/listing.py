"""Which files a source consists of, in reading order, and which are left out at sight."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from zero2all.common.errors import BadInputError
from zero2all.common.workspace import STAMP_NAME

# fmt: off
CODE_SUFFIXES = frozenset({
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".java", ".js", ".jsx", ".ts", ".tsx", ".go",
    ".rs", ".rb", ".php", ".cs", ".swift", ".kt", ".scala", ".lua", ".pl", ".sh", ".bash", ".sql", ".r", ".jl", ".hs",
    ".ml", ".vue", ".css", ".toml", ".yaml", ".yml", ".cmake", ".asm",
})
# fmt: on
WORKSPACE_FOLDERS = frozenset({"corpus", "taught", "tokenizer", "packed", "runs", "sft"})
UNREADABLE = "unreadable"


def require_readable(path: Path, source_name: str) -> None:
    """Stop with a clear message when a source path is not there or may not be read."""
    if not path.exists():
        raise BadInputError(
            f"Source {source_name}: {path} does not exist (looked from {Path.cwd()}). Check the spelling. "
            "Write a source as NAME=PATH or NAME=PATH:CHANNEL, where PATH is a file or a folder."
        )
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise BadInputError(f"Source {source_name}: you have no permission to read {path}. Change its permissions.")
    if not path.is_dir() and not path.is_file():
        raise BadInputError(f"Source {source_name}: {path} is neither a file nor a folder. Check the path.")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One raw file, with what tells a changed file from an unchanged one."""

    path: Path
    name: str
    """Path below the source folder, with forward slashes; the bare file name when the source is one file."""
    size_bytes: int
    mtime_ns: int
    url: str | None = None
    """Where the file is not on this machine: what fsspec opens, such as `s3://bucket/name`. `path` is then its name."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source, in reading order, and those left out at sight."""

    files: list[InputFile]
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> names."""

    @property
    def size_bytes(self) -> int:
        """What all files weigh on disk."""
        return sum(file.size_bytes for file in self.files)


def readable_name(name: str) -> str:
    """A file name that can be written as UTF-8, whatever bytes it has on disk."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def is_url(path: Path | str) -> bool:
    """Whether a source is to be opened by fsspec. A Path has lost one of the slashes, and is no URL."""
    return isinstance(path, str) and "://" in path


def open_input(file: InputFile) -> BinaryIO:
    """The file, unbuffered, for readers that take large pieces."""
    if file.url is None:
        return open(file.path, "rb", buffering=0)
    import fsspec

    return cast(BinaryIO, fsspec.open(file.url, "rb").open())


def list_files(path: Path | str, leave_out: Path | None = None) -> Listing:
    """All files of a source: the file itself, or every file below a folder, sorted by name.

    Hidden files and folders are left out, and so is everything our own stages wrote: the folder `leave_out` (the
    corpus being built), other workspaces, and the stage folders of the workspace `path` itself may be. A text with
    `://` in it names a file or folder of any file system fsspec knows.
    """
    if isinstance(path, str):
        if is_url(path):
            return _list_url(path)
        path = Path(path)
    if not path.is_dir():
        status = path.stat()
        return Listing([InputFile(path, readable_name(path.name), status.st_size, status.st_mtime_ns)])
    listing = Listing([])
    _list_folder(path, "", leave_out.resolve() if leave_out else None, listing)
    return listing


def _list_url(url: str) -> Listing:
    import fsspec

    files, root = fsspec.core.url_to_fs(url)
    found = files.find(root, detail=True)
    if not found:
        raise BadInputError(f"Nothing was found at {url}. Check the address and the access rights.")
    listing = Listing([])
    for path, info in sorted(found.items()):
        inner = path.removeprefix(root).lstrip("/")
        name = inner or path.rsplit("/", 1)[-1]
        if any(part.startswith(".") for part in name.split("/")):
            listing.skipped.setdefault("hidden", []).append(name)
            continue
        version = str(info.get("ETag") or info.get("mtime") or info.get("LastModified") or info.get("created") or "")
        stamp = int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest(), "big")
        listing.files.append(InputFile(Path(name), name, int(info["size"]), stamp, files.unstrip_protocol(path)))
    return listing


def _list_folder(folder: Path, prefix: str, leave_out: Path | None, listing: Listing) -> None:
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    in_workspace = any(entry.name == STAMP_NAME for entry in entries)

    def skip(reason: str, name: str) -> None:
        listing.skipped.setdefault(reason, []).append(name)

    if in_workspace and prefix:
        skip("workspace", prefix)
        return
    for entry in entries:
        name = prefix + readable_name(entry.name)
        if entry.name.startswith("."):
            skip("hidden", name)
        elif entry.is_dir(follow_symlinks=False):
            inner = folder / entry.name
            if (in_workspace and entry.name in WORKSPACE_FOLDERS) or inner.resolve() == leave_out:
                skip("workspace", f"{name}/")
                continue
            try:
                _list_folder(inner, f"{name}/", leave_out, listing)
            except PermissionError:
                skip(UNREADABLE, f"{name}/")
        elif not (in_workspace and entry.name == STAMP_NAME):
            try:
                status = entry.stat()
            except OSError:  # a link that leads nowhere
                skip(UNREADABLE, name)
                continue
            if entry.is_file():
                listing.files.append(InputFile(folder / entry.name, name, status.st_size, status.st_mtime_ns))
            else:  # a pipe, a socket, a device, or a link to a folder (not followed: it may lead in a circle)
                skip("not a file", name)
