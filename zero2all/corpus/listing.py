"""Which files a source consists of, in reading order, and which are left out at sight."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from zero2all.common.errors import BadInputError
from zero2all.common.workspace import STAMP_NAME

# fmt: off
CODE_SUFFIXES = frozenset({
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".java", ".js", ".jsx", ".ts", ".tsx", ".go",
    ".rs", ".rb", ".php", ".cs", ".swift", ".kt", ".scala", ".lua", ".pl", ".sh", ".bash", ".sql", ".r", ".jl", ".hs",
    ".ml", ".vue", ".css", ".html", ".toml", ".yaml", ".yml", ".cmake", ".asm",
})
# fmt: on
WORKSPACE_FOLDERS = frozenset({"corpus", "tokenizer", "packed", "runs"})
UNREADABLE = "unreadable"


def require_readable(path: Path, source_name: str) -> None:
    """Stop with a clear message when a source path is not there or may not be read."""
    if not path.exists():
        raise BadInputError(
            f"Source {source_name}: {path} does not exist (looked from {Path.cwd()}). Check the spelling; a source "
            f"is given as NAME=PATH or NAME=PATH:CHANNEL, where PATH is a file or a folder."
        )
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise BadInputError(f"Source {source_name}: {path} may not be read by this user. Change its permissions.")
    if not path.is_dir() and not path.is_file():
        raise BadInputError(f"Source {source_name}: {path} is neither a file nor a folder.")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One raw file, with what tells a changed file from an unchanged one."""

    path: Path
    name: str
    """Path below the source folder, with forward slashes; the bare file name when the source is one file."""
    size_bytes: int
    mtime_ns: int

    @property
    def is_code(self) -> bool:
        """True for program text by its name."""
        return self.path.suffix.lower() in CODE_SUFFIXES


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


def list_files(path: Path, leave_out: Path | None = None) -> Listing:
    """All files of a source: the file itself, or every file below a folder, sorted by name.

    Hidden files and folders are left out, and so is everything our own stages wrote: the folder `leave_out` (the
    corpus being built), other workspaces, and the stage folders of the workspace `path` itself may be.
    """
    if not path.is_dir():
        status = path.stat()
        return Listing([InputFile(path, path.name, status.st_size, status.st_mtime_ns)])
    listing = Listing([])
    _list_folder(path, "", leave_out.resolve() if leave_out else None, listing)
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
        name = prefix + entry.name
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
