"""Names and paths of the files and folders of a run's checkpoints.

<run>/checkpoints/
  step-00001000/                    a committed checkpoint; nothing in it is ever changed
    manifest.json                   written last: size and crc32c of every other file, sealed
    index.json                      which tensor lies in which file, in which boxes
    state.json                      the counters, as the trainer gave them
    model-00000-00000.safetensors   group of tensors, rank that wrote it, part
  step-00001500.partial-4711-2/     being written, or left by a killed save: never read
  latest.json                       a hint: the step that was committed last
  pins.json                         steps that retention never deletes
  proven.json                       up to this step, those saved in doubt are good after all
  claims/step-00001000.json         who is reading that checkpoint now
  damaged/, withdrawn/              set aside, each with its reason in a text file
"""

import re
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UserError
from zero2all.common.files import PARTIAL_MARK, write_atomic

INDEX_NAME, STATE_NAME = "index.json", "state.json"
LATEST_NAME, PINS_NAME, PROVEN_NAME = "latest.json", "pins.json", "proven.json"
LAST_SAVED_NAME = "last_saved.json"
"""In the folder of the run: the same as the hint, where it outlives the folder of the checkpoints."""
DAMAGED, WITHDRAWN = "damaged", "withdrawn"

FOLDER_NAME = re.compile(r"step-([0-9]{8,18})")
TENSOR_FILE_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}-[0-9]{5,8}-[0-9]{5,8}\.safetensors")
GROUP_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
LARGEST_JSON = 256 << 20
"""Bytes. No JSON file of a checkpoint is larger: an index of a million boxes is about 150 MB."""


def checkpoints_folder(run: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run / "checkpoints"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of one step is, or would be."""
    return checkpoints_folder(run) / f"step-{step:08d}"


def partial_folder(run: Path, step: int, attempt: str) -> Path:
    """Where one attempt at a save is written before it is committed."""
    final = checkpoint_folder(run, step)
    return final.with_name(f"{final.name}{PARTIAL_MARK}{attempt}")


def tensor_file_name(group: str, rank: int, part: int) -> str:
    """The file for one part of what one rank writes of a group of tensors."""
    return f"{group}-{rank:05d}-{part:05d}.safetensors"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = FOLDER_NAME.fullmatch(folder.name)
    if match is None:
        raise BadInputError(f"{folder} is not a checkpoint folder. Expected a name such as step-00001000.")
    return int(match[1])


def list_checkpoints(run: Path) -> list[Path]:
    """Committed checkpoints, newest first; they are not checked."""
    try:
        found = [path for path in checkpoints_folder(run).iterdir() if FOLDER_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=step_of, reverse=True)


def require_checkpoint(run: Path, step: int | None) -> None:
    """Raise when a run has no checkpoint, or none of this step."""
    steps = sorted(step_of(folder) for folder in list_checkpoints(run))
    if step is not None and step not in steps:
        raise BadInputError(f"The run {run.name} has no checkpoint at step {step}; it has {steps or 'none'}.")
    if not steps:
        raise BadInputError(f"The run {run.name} has no checkpoint yet. Let `z2a train` reach its first one.")


def split_name(name: str) -> tuple[str, str]:
    """'model/blocks.0.weight' -> ('model', 'blocks.0.weight')."""
    group, _, rest = name.partition("/")
    return group, rest


def is_tensor_name(name: object) -> bool:
    """Whether a name may be in an index: a group, a slash, and a name that cannot be taken for a path."""
    if not isinstance(name, str) or not 3 <= len(name) <= 1000 or not name.isprintable() or "\\" in name:
        return False
    group, rest = split_name(name)
    return bool(GROUP_NAME.fullmatch(group)) and all(part not in ("", ".", "..") for part in rest.split("/"))


def note_latest(run: Path, step: int | None) -> None:
    """Write the step that was committed last. Without the file nothing is known; with it, a run that has no checkpoint
    has lost one. None removes the hint."""
    for path in (run / LAST_SAVED_NAME, checkpoints_folder(run) / LATEST_NAME):
        if step is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, jsonio.dumps_exact({"step": step}))


def latest_noted(run: Path) -> int | None:
    """The step of the hint; None when there is none or it cannot be read."""
    found = noted_step(checkpoints_folder(run) / LATEST_NAME)
    return noted_step(run / LAST_SAVED_NAME) if found is None else found


def noted_step(path: Path) -> int | None:
    """The step in a small file; None when there is none or it cannot be read."""
    try:
        return int(read_exact(path)["step"])
    except (OSError, UserError, TypeError, ValueError, KeyError):
        return None


def read_limited(path: Path) -> bytes:
    """The bytes of a JSON file, after a check of its size."""
    if path.exists() and not path.is_file():
        raise BadInputError(f"{path} is not a regular file.")  # a fifo would never end
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise BadInputError(f"{path} has {size} bytes; no JSON file of a checkpoint has more than {LARGEST_JSON}.")
    return path.read_bytes()


def read_exact(path: Path) -> Any:
    """The value of a JSON file."""
    return jsonio.loads_exact(read_limited(path), str(path))
