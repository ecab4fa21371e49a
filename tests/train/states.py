"""What a state, a checkpoint and the folder of a run hold, for tests that compare two of them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from zero2all.track.metrics_file import Event
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.load import verified_checkpoint
from zero2all.train.state import TrainState


def copies(state: TrainState) -> dict[str, Tensor]:
    """Every tensor a checkpoint would hold, by name."""
    with state.tensors() as tensors:
        return {name: part.values.clone() for name, part in tensors.items()}


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """The same names, and under each the same bits."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def loaded_from(state: TrainState, tensors: Mapping[str, Tensor]) -> None:
    """Fill a state as a checkpoint would."""
    with state.tensors() as parts:
        for name, value in tensors.items():
            parts[name].values.copy_(value)


def steps_of(run: Path) -> list[int]:
    """The steps of the checkpoints of a run, newest first."""
    return [step_of(folder) for folder in list_checkpoints(run)]


def bits(run: Path, step: int) -> dict[str, bytes]:
    """Every weight, every moment, every counter of a checkpoint."""
    folder = run / f"checkpoints/step-{step:08d}"
    assert verified_checkpoint(folder).step == step
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def events(run: Path, *kinds: str) -> list[Event]:
    return [event for event in read_run(run).events if event.kind in kinds]


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
