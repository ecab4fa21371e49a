"""The `manifest.json` that ends every artifact folder.

Written last, it says that the folder is whole, which format version wrote it, what it was made from (`inputs`, a
fingerprint of everything that decides the content) and the size and crc32c of each file. A stage that finds a
manifest with the inputs it would use itself has nothing left to do; that is how every stage resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero2all import __version__
from zero2all.common.engine import EngineConfig, advance, open_engine
from zero2all.common.errors import BadInputError
from zero2all.common.files import MANIFEST_NAME, crc32c_of, is_inner_path, read_json, write_json
from zero2all.common.progress import progress

FORMATS = dict.fromkeys(("corpus", "taught", "tokenizer", "packed", "best_fit", "checkpoint", "raw", "reference"), 1)
"""The format number this version writes and reads, per kind of artifact. Raise it when the layout changes."""
ONE_PROCESS_BYTES = 4_000_000_000  # less than this is checked without worker processes


FIELDS: dict[str, dict[str, type]] = {
    "tokenizer": {"fingerprint": str, "vocab_size": int},
    "corpus": {"source": str, "number": int, "channel": str, "report": dict},
    "best_fit": {"seq_len": int, "rows": int, "pieces": int},
}
"""What a manifest has to say for others to read on; `packed.shard_format` checks that of packed data in more depth."""


def fingerprint(value: Any) -> str:
    """A short stable name for any JSON value: the first 16 hex digits of its sha256."""
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def write_manifest(
    folder: Path, kind: str, inputs: str, content: dict[str, Any], known: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Write the manifest that declares `folder` whole. `known`: size and crc32c of files that need not be read."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST_NAME:
            name = path.relative_to(folder).as_posix()
            facts = (known or {}).get(name)
            files[name] = facts or {"bytes": path.stat().st_size, "crc32c": crc32c_of(path)}
    write_json(
        folder / MANIFEST_NAME,
        {"kind": kind, "format": FORMATS[kind], "zero2all": __version__, "inputs": inputs, **content, "files": files},
    )


def read_manifest(folder: Path, kind: str, made_by: str) -> dict[str, Any]:
    """The manifest of a finished artifact; where it is absent or foreign, an error that names the command `made_by`."""
    path = folder / MANIFEST_NAME
    try:
        manifest: dict[str, Any] = read_json(path)
    except FileNotFoundError:
        raise BadInputError(
            f"There is no finished {kind} in {folder} (no {MANIFEST_NAME}). Run `{made_by}` first. If it was "
            "interrupted, run it again to continue."
        ) from None
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        found = manifest.get("kind") if isinstance(manifest, dict) else None
        raise BadInputError(
            f"{path} does not describe a {kind} (kind: {found}). Check the path, or delete {folder} and run "
            f"`{made_by}` again."
        )
    if manifest.get("format") != FORMATS[kind]:
        raise BadInputError(
            f"{folder} was written by zero2all {manifest.get('zero2all', '(unknown version)')} in {kind} format "
            f"{manifest.get('format')}; this is zero2all {__version__}, which reads format {FORMATS[kind]}. "
            f"Run `{made_by}` again to rebuild it, or use the version that wrote it."
        )
    odd = _oddity(manifest, FIELDS.get(kind, {}))
    if odd:
        raise BadInputError(f"{path} is damaged: {odd}. Delete {folder} and run `{made_by}` again.")
    return manifest


def is_count(value: object) -> bool:
    """A whole number from 0 to 2^62; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _oddity(manifest: dict[str, Any], fields: Mapping[str, type]) -> str | None:
    """What is wrong with the fields of a manifest, in words; None: nothing."""
    for name, kind in {"inputs": str, **fields}.items():
        value = manifest.get(name)
        if not is_count(value) if kind is int else not isinstance(value, kind):
            return f"its `{name}` is {str(value)[:80]!r}"
    files = manifest.get("files")
    if not isinstance(files, dict):
        return "it lists no files"
    for name, facts in files.items():
        if not is_inner_path(name):
            return f"it lists the file {name[:80]!r}"
        if not isinstance(facts, dict) or not is_count(facts.get("bytes")) or not isinstance(facts.get("crc32c"), str):
            return f"it does not give the size and crc32c of {name[:80]!r}"
    return None


def is_current(folder: Path, kind: str, inputs: str) -> bool:
    """Whether `folder` holds an artifact of this version made from these inputs; checks sizes, not bytes."""
    checks = checks_of_current(folder, kind, inputs)
    return checks is not None and all(
        check.path.is_file() and check.path.stat().st_size == check.expected["bytes"] for check in checks
    )


def checks_of_current(folder: Path, kind: str, inputs: str) -> list[FileCheck] | None:
    """The files of an artifact of this version made from exactly these inputs, to be checked; None if it is not."""
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except (FileNotFoundError, BadInputError):
        return None
    wanted = {"kind": kind, "format": FORMATS[kind], "inputs": inputs}
    if not isinstance(manifest, dict) or any(manifest.get(name) != value for name, value in wanted.items()):
        return None
    if _oddity(manifest, FIELDS.get(kind, {})) is not None:
        return None
    return file_checks(folder, manifest)


class FileCheck(NamedTuple):
    """A file and what its manifest says of it; a task for an engine."""

    path: Path
    expected: dict[str, Any]


def file_checks(folder: Path, manifest: dict[str, Any]) -> list[FileCheck]:
    """Every file of a folder, to be checked."""
    return [FileCheck(folder / name, expected) for name, expected in manifest.get("files", {}).items()]


def check_file(check: FileCheck) -> str | None:
    """What is wrong with a file, as a sentence; None when it is as it was written."""
    path, expected = check
    if not path.is_file():
        return f"{path} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{path} has {path.stat().st_size} bytes, its manifest says {expected['bytes']}"
    if crc32c_of(path, on_bytes=advance) != expected["crc32c"]:
        return f"{path} has changed since it was written (crc32c differs)"
    return None


def damaged_files(checks: Sequence[FileCheck], workers: int | None = None) -> Iterator[tuple[FileCheck, str]]:
    """The files of `checks` that are not as they were written, and what is wrong; large ones are read by `workers`."""
    total = sum(int(check.expected["bytes"]) for check in checks)
    if not checks:
        return
    config = EngineConfig("local", 1 if total < ONE_PROCESS_BYTES else workers)
    with open_engine(config) as engine, progress("check", total, "B") as bar:
        for position, problem in engine.run(check_file, checks, bar.advance):
            if problem is not None:
                yield checks[position], problem


def verify_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Everything that differs from the manifest, one sentence per file; empty when all is well."""
    return [problem for problem in map(check_file, file_checks(folder, manifest)) if problem]
