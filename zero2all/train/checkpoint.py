"""Checkpoints that are either whole or absent.

A checkpoint is a folder `checkpoints/step-00001000/` with the weights, the optimizer and the counters as safetensors
and JSON; nothing is ever unpickled. It is written under a temporary name, fsynced, given its manifest (size and
crc32c of every file) last, and renamed. A committed step is never written again. Loading takes the newest checkpoint
whose every byte matches its manifest; one that does not is set aside, and if none is left the run stops rather than
start over in silence.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.common.files import PARTIAL_MARK, human_bytes, read_json, require_free_space, staged_folder, write_json
from zero2all.common.manifest import read_manifest, verify_files, write_manifest
from zero2all.train.state import TrainState

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"
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
        path = self.folder / OPTIMIZER_FILE
        return _load_tensors(path) if path.exists() else {}

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
        save_file(_plain(model), partial / MODEL_FILE, metadata={"format": "pt"})
        if optimizer:
            save_file(_plain(optimizer), partial / OPTIMIZER_FILE)
        write_json(partial / STATE_FILE, counters)
        write_manifest(partial, "checkpoint", inputs, {"step": step, **details})
    return final


def list_checkpoints(run: Path) -> list[Path]:
    """Committed checkpoints, newest first."""
    folder = checkpoints_folder(run)
    return sorted((path for path in folder.glob("step-*") if PARTIAL_MARK not in path.name), reverse=True)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies, None when the run never committed one.

    Damaged ones are moved to `checkpoints/damaged/` and named; when nothing else is left, that is an error.
    """
    damaged = []
    for folder in list_checkpoints(run):
        try:
            return verified_checkpoint(folder)
        except BadInputError as error:
            place = checkpoints_folder(run) / QUARANTINE / folder.name
            place.parent.mkdir(exist_ok=True)
            if not place.exists():
                folder.rename(place)
            damaged.append(str(error))
            print(f"Set aside a damaged checkpoint: {error}", flush=True)
    if damaged or (checkpoints_folder(run) / QUARANTINE).exists():
        raise BadInputError(
            f"No checkpoint of {run} is whole: {'; '.join(damaged) or 'all of them were set aside before'}. "
            f"To start over, give --fresh; to keep what is there, use another train.name."
        )
    return None


def verified_checkpoint(folder: Path) -> Checkpoint:
    """Open one checkpoint after checking every byte of it."""
    manifest = read_manifest(folder, "checkpoint", "z2a train")
    problems = verify_files(folder, manifest)
    if problems:
        raise BadInputError("; ".join(problems))
    return Checkpoint(folder, manifest)


def prune_checkpoints(run: Path, keep_last: int, keep_every_steps: int) -> None:
    """Delete what retention does not keep: renamed first, so that a crash leaves no half-deleted checkpoint."""
    for folder in list_checkpoints(run)[keep_last:]:
        step = int(folder.name.removeprefix("step-"))
        if keep_every_steps and step % keep_every_steps == 0:
            continue
        doomed = folder.with_name(f"{folder.name}{PARTIAL_MARK}trash")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies with storage of their own, as safetensors wants them."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path} is no readable safetensors file: {error}") from error
    return tensors
