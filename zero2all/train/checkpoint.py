"""Checkpoints that are either whole or absent.

A checkpoint is a folder `checkpoints/step-00001000/` with the weights, the optimizer and the counters as safetensors
and JSON; nothing is ever unpickled. It is written under a temporary name, fsynced, given its manifest (size and
crc32c of every file, and a digest of itself) last, and renamed. A committed step is never written again. Loading
takes the newest checkpoint whose every byte matches its manifest; the trainer sets one that does not aside, and if
none is left the run stops rather than start over in silence.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, DiskError, is_disk_full
from zero2all.common.files import (
    MANIFEST_NAME,
    PARTIAL_MARK,
    human_bytes,
    read_json,
    require_free_space,
    staged_folder,
    write_json,
)
from zero2all.common.manifest import fingerprint, read_manifest, verify_files, write_manifest
from zero2all.train.state import TrainState

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"
FOLDER_NAME = re.compile(r"step-(\d{8,})")
QUARANTINE = "damaged"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Updates made before it was saved."""
        return int(self.manifest["step"])

    def model_tensors(self) -> dict[str, Tensor]:
        """The weights by name."""
        return _load_tensors(self.folder / MODEL_FILE)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's moments; empty for imported weights."""
        return _load_tensors(self.folder / OPTIMIZER_FILE) if OPTIMIZER_FILE in self.manifest["files"] else {}

    def counters(self) -> dict[str, Any]:
        """Step, tokens and the like."""
        counters: dict[str, Any] = read_json(self.folder / STATE_FILE)
        return counters


def checkpoints_folder(run: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run / "checkpoints"


def save_checkpoint(run: Path, state: TrainState, inputs: str, details: dict[str, Any]) -> Path:
    """Commit the state; `inputs` fingerprints the config, `details` (data, environment, …) are kept with it."""
    return write_checkpoint(
        run, state.step, state.model_tensors(), state.optimizer_tensors(), state.counters(), inputs, details
    )


def write_checkpoint(
    run: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    counters: dict[str, Any],
    inputs: str,
    details: dict[str, Any],
) -> Path:
    """Commit tensors and counters as one checkpoint."""
    final = checkpoints_folder(run) / f"step-{step:08d}"
    if final.exists():
        return final
    size = sum(value.numel() * value.element_size() for value in (*model.values(), *optimizer.values()))
    require_free_space(run, size + (4 << 20), f"a checkpoint ({human_bytes(size)})")
    with staged_folder(final) as partial:
        _save_tensors(model, partial / MODEL_FILE)
        if optimizer:
            _save_tensors(optimizer, partial / OPTIMIZER_FILE)
        write_json(partial / STATE_FILE, counters)
        write_manifest(partial, "checkpoint", inputs, {"step": step, **details})
        _seal(partial / MANIFEST_NAME)
    return final


def list_checkpoints(run: Path) -> list[Path]:
    """Committed checkpoints, newest first."""
    folders = checkpoints_folder(run).glob("step-*")
    return sorted((path for path in folders if FOLDER_NAME.fullmatch(path.name)), key=_step_of, reverse=True)


def newest_checkpoint(run: Path, set_aside: bool = False) -> Checkpoint | None:
    """The newest checkpoint that verifies, None when the run never committed one.

    Damaged ones are named and left out; when nothing else is there, that is an error. With `set_aside`, which only
    the holder of the run's lock may ask for, they are moved to `checkpoints/damaged/`.
    """
    damaged = []
    for folder in list_checkpoints(run):
        try:
            return verified_checkpoint(folder)
        except BadInputError as error:
            damaged.append(str(error))
            if set_aside:
                _set_aside(folder)
            print(f"{'Set aside' if set_aside else 'Left out'} a damaged checkpoint: {error}", flush=True)
    if damaged or (checkpoints_folder(run) / QUARANTINE).exists():
        raise BadInputError(
            f"No checkpoint of {run} is whole: {'; '.join(damaged) or 'all of them were set aside before'}. "
            f"To start over, give --fresh; to keep what is there, use another train.name."
        )
    return None


def verified_checkpoint(folder: Path) -> Checkpoint:
    """Open one checkpoint after checking every byte of it."""
    manifest = read_manifest(folder, "checkpoint", "z2a train")
    _check_seal(folder / MANIFEST_NAME, manifest)
    files = set(manifest["files"])
    if not {MODEL_FILE, STATE_FILE} <= files <= {MODEL_FILE, OPTIMIZER_FILE, STATE_FILE}:
        raise BadInputError(f"{folder} is no checkpoint of ours: it lists the files {', '.join(sorted(files))}.")
    if manifest["step"] != _step_of(folder):
        raise BadInputError(f"{folder} holds step {manifest['step']}: it was renamed after it was written.")
    problems = verify_files(folder, manifest)
    if problems:
        raise BadInputError("; ".join(problems))
    return Checkpoint(folder, manifest)


def prune_checkpoints(run: Path, keep_last: int, keep_every_steps: int) -> None:
    """Delete what retention does not keep."""
    for folder in list_checkpoints(run)[keep_last:]:
        if not (keep_every_steps and _step_of(folder) % keep_every_steps == 0):
            discard_folder(folder)


def sweep_checkpoints(run: Path) -> None:
    """Remove what killed saves and deletions left behind; only for the holder of the run's lock."""
    for leftover in checkpoints_folder(run).glob(f"*{PARTIAL_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def discard_folder(folder: Path) -> None:
    """Delete a folder: renamed first, so that a crash leaves no half of it under its name."""
    doomed = folder.with_name(f"{folder.name}{PARTIAL_MARK}trash")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _step_of(folder: Path) -> int:
    match = FOLDER_NAME.fullmatch(folder.name)
    if match is None:
        raise BadInputError(f"{folder} is no checkpoint folder; expected a name such as step-00001000.")
    return int(match[1])


def _set_aside(folder: Path) -> None:
    """Move a damaged checkpoint out of the way, beside earlier ones of the same step."""
    quarantine = folder.parent / QUARANTINE
    quarantine.mkdir(exist_ok=True)
    place, number = quarantine / folder.name, 1
    while place.exists():
        number += 1
        place = quarantine / f"{folder.name}-{number}"
    folder.rename(place)


def _seal(path: Path) -> None:
    """Give a manifest the digest of its own content; it names the crc of every other file."""
    manifest = read_json(path)
    write_json(path, {**manifest, "digest": fingerprint(manifest)})


def _check_seal(path: Path, manifest: dict[str, Any]) -> None:
    """Every byte counts: the content must match its digest, and the bytes must be how we would write it."""
    content = {name: value for name, value in manifest.items() if name != "digest"}
    if manifest.get("digest") != fingerprint(content) or path.read_bytes() != jsonio.dumps_pretty(manifest):
        raise BadInputError(f"{path} has changed since it was written (its digest differs)")


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write contiguous CPU copies with storage of their own, as safetensors wants them."""
    plain = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if not is_disk_full(error):
            raise
        raise DiskError(
            f"The disk refused {path.name} of a checkpoint ({error}). Nothing half-written was kept; free some space "
            f"and run the same command again to continue from the checkpoint before."
        ) from error


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path} is no readable safetensors file: {error}") from error
    return tensors
