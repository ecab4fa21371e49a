"""Whether a checkpoint is complete, intact and ours: checked before any of it is used.

First what is cheap: regular files with the right names and sizes, a manifest with a valid seal, an index whose pieces
fill their tensors, file headers that agree with the index. Nothing is allocated for a tensor, nothing is
executed, no name from a file becomes a path. Then the bytes: the crc32c of every file, in pieces.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.manifest import is_count
from zero2all.train.checkpoints import documents
from zero2all.train.checkpoints.index import Index, parse_index, pieces_by_file
from zero2all.train.checkpoints.layout import INDEX_NAME, STATE_NAME, step_of
from zero2all.train.checkpoints.manifest import read_manifest
from zero2all.train.checkpoints.tensor_file import Header, file_crc32c, read_header


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, checked in form but not yet byte by byte."""

    folder: Path
    manifest: dict[str, Any]
    index: Index
    headers: dict[str, Header]
    document: dict[str, Any]

    @property
    def files(self) -> list[str]:
        """Every file except the manifest."""
        return list(self.manifest["files"])


def read_contents(folder: Path) -> Contents:
    """Check the form of a checkpoint; BadInputError says what is wrong with it."""
    try:
        return _read_contents(folder)
    except OSError as error:
        raise BadInputError(f"{folder} cannot be read ({error})") from error


def check_bytes(contents: Contents, names: Iterable[str]) -> None:
    """Compare the bytes of these files with the manifest."""
    for name in names:
        path = contents.folder / name
        try:
            crc = file_crc32c(path)
        except OSError as error:
            raise BadInputError(f"{path} cannot be read ({error})") from error
        if crc != contents.manifest["files"][name]["crc32c"]:
            raise BadInputError(f"{path} has changed since it was written (crc32c differs)")


def _read_contents(folder: Path) -> Contents:
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise BadInputError(f"{folder} is no plain folder")
    manifest = read_manifest(folder)
    if manifest["step"] != step_of(folder):
        raise BadInputError(f"{folder} holds step {manifest['step']}: it was renamed after it was written")
    for name, facts in manifest["files"].items():
        _check_file(folder / name, facts["bytes"])
    texts = {}
    for name in (INDEX_NAME, STATE_NAME):
        texts[name] = documents.read_limited(folder / name)
    index = parse_index(documents.parse(texts[INDEX_NAME], str(folder / INDEX_NAME)), str(folder / INDEX_NAME))
    document = documents.parse(texts[STATE_NAME], str(folder / STATE_NAME))
    _check_state(folder / STATE_NAME, document, manifest["step"])
    return Contents(folder, manifest, index, _check_headers(folder, manifest, index), document)


def _check_state(path: Path, document: Any, step: int) -> None:
    """Check the fields that a resumed run needs; the guards check their own."""
    if not isinstance(document, dict):
        raise BadInputError(f"{path} is no JSON object")
    for name, value in document.items():
        known = {
            "step": value == step and is_count(value),
            "tokens": is_count(value),
            "guards": value is None or isinstance(value, dict),
            "stage": value is None or isinstance(value, str),
        }
        if not known.get(name, True):
            raise BadInputError(f"{path}: its `{name}` is {str(value)[:80]!r}, which no run of ours would save there")


def _check_file(path: Path, expected_bytes: int) -> None:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        raise BadInputError(f"{path} is missing") from None
    if not stat.S_ISREG(facts.st_mode):
        raise BadInputError(f"{path} is no plain file (a link, a device or a folder)")
    if facts.st_size != expected_bytes:
        raise BadInputError(f"{path} has {facts.st_size} bytes, its manifest says {expected_bytes}")


def _check_headers(folder: Path, manifest: dict[str, Any], index: Index) -> dict[str, Header]:
    """Every file of tensors holds exactly the pieces that the index puts there."""
    listed = set(manifest["files"]) - {INDEX_NAME, STATE_NAME}
    expected = pieces_by_file(index)
    if listed != set(expected):
        raise BadInputError(f"{folder}: index and manifest differ about {', '.join(sorted(listed ^ set(expected)))}")
    headers = {}
    for name in sorted(listed):
        headers[name] = read_header(folder / name)
        found = {key: (info.dtype, info.shape) for key, info in headers[name].infos.items()}
        wrong = sorted(key for key in found.keys() | expected[name].keys() if found.get(key) != expected[name].get(key))
        if wrong:
            raise BadInputError(
                f"{folder / name}: its header and the index differ about {wrong[0][:80]!r} "
                f"({found.get(wrong[0], 'absent')} instead of {expected[name].get(wrong[0], 'nothing')})"
            )
    return headers
