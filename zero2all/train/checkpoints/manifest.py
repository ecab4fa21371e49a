"""The manifest, written last: the files of a checkpoint, and a seal over its own bytes.

It holds the size and crc32c of every file, and its last line is the sha256 of all the bytes before that line. So every
byte of a checkpoint is covered: those of the other files by the manifest, those of the manifest by its seal. The seal
finds damage; it is not a signature, and anybody can write another checkpoint.
"""

import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from zero2all import __version__
from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import MANIFEST_NAME
from zero2all.common.manifest import fingerprint, is_count
from zero2all.train.checkpoints import layout

FORMAT = 4
"""Raise it when the layout changes. Format 1 held whole tensors, written by one process; in format 2 the rows of all
gates came before those of all ups; format 3 held q, k and v in one tensor."""

OWN_FIELDS = ("kind", "format", "zero2all", "step", "world_size", "files", "seal")
NOT_GOOD = "not_good"
"""A detail: why a rollback must not use an intact checkpoint. Absent in good ones."""
HELD_OUT = "held_out"
"""A detail: the held-out loss of this state (`train.validate`), where it was validated when it was saved."""
Step = int | Literal["best"] | None
"""How a command names a checkpoint: by its step, the one with the lowest held-out loss, or (None) the newest."""
SEAL = re.compile(rb',\n "seal": "([0-9a-f]{64})"\n}\n')
SEAL_BYTES = len(b',\n "seal": ""\n}\n') + 64
CRC = re.compile(r"[0-9a-f]{8}")


class OtherVersionError(BadInputError):
    """An intact checkpoint of another version of zero2all: neither damaged nor usable."""


def manifest_bytes(step: int, world_size: int, files: dict[str, dict[str, Any]], details: dict[str, Any]) -> bytes:
    """The sealed text of a manifest; `details` are kept beside our own fields."""
    taken = [name for name in OWN_FIELDS if name in details]
    if taken:
        raise ValueError(f"details of a checkpoint may not be called {', '.join(taken)}")
    own = {"kind": "checkpoint", "format": FORMAT, "zero2all": __version__, "step": step, "world_size": world_size}
    text = jsonio.dumps_exact({**own, **details, "files": dict(sorted(files.items()))})
    body = text.removesuffix(b"\n}\n")
    return body + f',\n "seal": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint after checking its seal and its form; no other file is read."""
    path = folder / MANIFEST_NAME
    if path.is_symlink() or not path.is_file():
        raise BadInputError(f"{path} is missing" if not path.exists() else f"{path} is not a regular file")
    data = layout.read_limited(path)
    body, seal = data[:-SEAL_BYTES], SEAL.fullmatch(data[-SEAL_BYTES:])
    if seal is None or hashlib.sha256(body).hexdigest().encode() != seal[1]:
        _stop_at_format_1(path, data)
        raise BadInputError(f"{path} has changed since it was written (its checksum differs)")
    manifest = jsonio.loads_exact(data, str(path))
    if not isinstance(manifest, dict) or manifest.get("kind") != "checkpoint":
        raise BadInputError(f"{path} does not describe a checkpoint")
    if manifest.get("format") != FORMAT:
        raise _other_version(path, manifest)
    _check_form(path, manifest)
    return manifest


def best_step(run: Path) -> int | None:
    """The checkpoint with the lowest held-out loss, of those that were validated when they were saved, on as many
    tokens as the newest of these; None where there is none. Those that cannot be read are left out."""
    found: list[tuple[float, int, float]] = []
    for folder in layout.list_checkpoints(run):  # newest first
        with suppress(BadInputError, OSError, KeyError, TypeError, ValueError):
            scores = read_manifest(folder)[HELD_OUT]
            found.append((float(scores["loss"]), layout.step_of(folder), float(scores["tokens"])))
    return min((each for each in found if each[2] == found[0][2]), default=(0.0, None))[1]


def chosen_step(run: Path, step: Step) -> int | None:
    """The step that a command names: a number as it is, `best` as `best_step`."""
    if step != "best":
        return step
    found = best_step(run)
    if found is None:
        raise BadInputError(
            f"No checkpoint of the run {run.name} was validated when it was saved, so none is known to be the best. "
            f"Give --step a number, or leave it out to take the newest."
        )
    return found


def _check_form(path: Path, manifest: dict[str, Any]) -> None:
    files = manifest.get("files")
    if not is_count(manifest.get("step")) or not is_count(manifest.get("world_size")) or not isinstance(files, dict):
        raise BadInputError(f"{path} lacks its step, its world size or its files")
    for name, facts in files.items():
        if name not in (layout.INDEX_NAME, layout.STATE_NAME) and not layout.TENSOR_FILE_NAME.fullmatch(name):
            raise BadInputError(f"{path} lists the file {name!r}, which is not a file of a checkpoint")
        if (
            not isinstance(facts, dict)
            or not is_count(facts.get("bytes"))
            or not CRC.fullmatch(str(facts.get("crc32c")))
        ):
            raise BadInputError(f"{path} has no valid size and checksum of {name}")
    missing = {layout.INDEX_NAME, layout.STATE_NAME} - set(files)
    if missing:
        raise BadInputError(f"{path} does not list {', '.join(sorted(missing))}")


def _stop_at_format_1(path: Path, data: bytes) -> None:
    """Format 1 had another seal; an intact one must not be taken for damaged."""
    try:
        manifest = jsonio.loads_exact(data, str(path))
    except BadInputError:
        return
    if isinstance(manifest, dict) and manifest.get("kind") == "checkpoint":
        content = {name: value for name, value in manifest.items() if name != "digest"}
        if manifest.get("digest") == fingerprint(content):
            raise _other_version(path, manifest)


def _other_version(path: Path, manifest: dict[str, Any]) -> OtherVersionError:
    theirs, number = manifest.get("zero2all", "of unknown version"), manifest.get("format")
    if isinstance(number, int) and number < FORMAT:
        remedy = (
            "To keep its weights, run `z2a export` with the version that wrote it, then `z2a import` here: this makes "
            "a run at step 0 with these weights and without the optimizer's state. Or finish the run with that "
            "version, or start over with --fresh, which deletes it."
        )
    else:
        remedy = "Use the version that wrote it or a newer one, or start over with --fresh, which deletes the run."
    return OtherVersionError(
        f"{path.parent} was written by zero2all {theirs} in checkpoint format {number}. This is zero2all "
        f"{__version__}, which reads format {FORMAT}. Nothing was changed. {remedy}"
    )
