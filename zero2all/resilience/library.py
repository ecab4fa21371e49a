"""Checkpoints in memory for any PyTorch loop, and for Hugging Face's Trainer.

    memory = MemoryCheckpoint("runs/mine")
    found = memory.load()                              # (step, state), or None
    ...
    memory.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    ...
    memory.remove()                                    # at the end of training

A state is dicts, lists and tuples of tensors, arrays, numbers, texts and None, as `state_dict` gives them. `save`
copies it and returns; checksums follow in a thread. The files hold no pickle. Every rank saves its own state; with
torch.distributed all of them call `save` and `load` at the same points, and load the same step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.common.peers import Peers
from zero2all.resilience.slots import (
    PAGE,
    Slot,
    lock_folder,
    make_run_folder,
    ram_home,
    read_slot,
    remove,
    require_room,
    run_id,
    slot_paths,
    sweep_stale,
)

ALIGNMENT = 64


class MemoryCheckpoint:
    """See the module docstring."""

    def __init__(self, run: str | Path, folder: str | Path | None = None) -> None:
        """`run` is the folder of the run, on a disk that all ranks share; `folder` the RAM file system (None:
        /dev/shm)."""
        self._run, self._base = Path(run), None if folder is None else Path(folder)
        self._rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        self._peers = Peers(dist.new_group(backend="gloo") if dist.is_initialized() else None)
        is_local_first = int(os.environ.get("LOCAL_RANK", str(self._rank))) == 0
        if self._rank == 0:
            self._run.mkdir(parents=True, exist_ok=True)
            run_id(self._run, create=True)
        self._peers.gather(None)
        name = run_id(self._run)
        if name is None:
            raise BadInputError(f"{self._run} is not on a disk that all ranks share.")
        home = ram_home(self._base)
        for is_first in (True, False):
            if is_local_first is is_first:
                self._folder = make_run_folder(home, name, self._run) if is_first else home / name
                self._lock = lock_folder(self._folder, is_first)
            self._peers.gather(None)
        if is_local_first:
            sweep_stale(home, name)
        self._slots: dict[Path, Slot] = {}
        self._thread: threading.Thread | None = None

    def save(self, step: int, state: Any) -> bool:
        """Copy a state to memory; False when the save before is not finished yet, and nothing was done."""
        is_busy = self._thread is not None and self._thread.is_alive()
        said = self._peers.gather([is_busy, list(self._steps().values())])
        if any(busy for busy, _ in said):
            return False
        common = max(set.intersection(*(set(steps) for _, steps in said)), default=-1)
        path = next(path for path in slot_paths(self._folder, self._rank) if self._steps().get(path, -2) != common)
        tensors: list[Tensor] = []
        tree = _flatten(state, tensors, "state")
        places, size = [], 0
        for tensor in tensors:
            places.append(size)
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        slot = self._slot(path, max(size, PAGE))
        slot.begin(step)
        data = torch.frombuffer(slot.data, dtype=torch.uint8)
        for tensor, place in zip(tensors, places, strict=True):
            _view(data, place, tensor.dtype, tensor.shape).copy_(tensor.detach())
        kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        about = {"tree": tree, "tensors": [[*kind, place] for kind, place in zip(kinds, places, strict=True)]}
        self._thread = threading.Thread(target=slot.finish, args=(step, about), name="memory-save", daemon=True)
        self._thread.start()
        return True

    def load(self) -> tuple[int, Any] | None:
        """The newest step that is whole on all ranks, and its state; None when there is none. Every byte is checked."""
        own = {}
        for path in slot_paths(self._folder, self._rank):
            with suppress(BadInputError):
                own[read_slot(path, with_data=True).step] = path
        step = max(set.intersection(*map(set, self._peers.gather(list(own)))), default=None)
        if step is None:
            return None
        found = read_slot(own[step])
        tensors = []
        with open(own[step], "rb") as file:
            for kind, shape, place in found.about["tensors"]:
                # Memory of its own: torch.set_rng_state crashes with a view into a larger tensor.
                tensors.append(torch.empty(shape, dtype=getattr(torch, kind)))
                file.seek(PAGE + place)
                file.readinto(tensors[-1].view(-1).view(torch.uint8).numpy().data)
        return step, _rebuilt(found.about["tree"], tensors)

    def wait(self) -> None:
        """Wait until the last save is finished."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Let go of the files; they stay."""
        self.wait()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        os.close(self._lock)

    def remove(self) -> None:
        """Training has ended: remove the files."""
        self.close()
        self._peers.gather(None)
        remove(self._run, self._base)

    def _steps(self) -> dict[Path, int]:
        found = {}
        for path in slot_paths(self._folder, self._rank):
            with suppress(BadInputError):
                found[path] = read_slot(path).step
        return found

    def _slot(self, path: Path, size: int) -> Slot:
        slot = self._slots.pop(path, None)
        if slot is None or slot.data_bytes != size:
            if slot is not None:
                slot.close()
            there = path.stat().st_size if path.exists() else 0
            require_room(self._folder, max(0, size - there))
            slot = Slot(path, size)
        self._slots[path] = slot
        return slot


def _view(data: Tensor, place: int, dtype: torch.dtype, shape: Any) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return data[place : place + count].view(dtype).view(torch.Size(shape))


def _flatten(value: Any, tensors: list[Tensor], where: str) -> Any:
    """A state as JSON, its tensors in a list."""
    if isinstance(value, Tensor | np.ndarray):
        tensors.append(value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value)))
        return {"tensor" if isinstance(value, Tensor) else "array": len(tensors) - 1}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[_flatten(k, tensors, where), _flatten(v, tensors, f"{where}.{k}")] for k, v in pairs]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(each, tensors, f"{where}.{at}") for at, each in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}; a state holds tensors, arrays, numbers, texts, dicts, lists")


def _rebuilt(tree: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "dict":
        return {_rebuilt(key, tensors): _rebuilt(each, tensors) for key, each in value}
    return (list if kind == "list" else tuple)(_rebuilt(each, tensors) for each in value)


# ---- Hugging Face's Trainer ----


def memory_callback(memory: MemoryCheckpoint, every_steps: int) -> Any:
    """A callback that saves model, optimizer, schedule, random state and position to memory."""
    from transformers import TrainerCallback

    class MemoryCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:  # noqa: ARG002
            if state.global_step % every_steps:
                return
            memory.save(
                state.global_step,
                {
                    "model": parts["model"].state_dict(),
                    "optimizer": parts["optimizer"].state_dict(),
                    "scheduler": parts["lr_scheduler"].state_dict(),
                    "rng": _random_state(),
                    "trainer": json.dumps(dataclasses.asdict(state)),
                },
            )

    return MemoryCallback()


def memory_folder(memory: MemoryCheckpoint, folder: str | Path) -> str | None:
    """Write what is in memory as a checkpoint of the Trainer, for `trainer.train(resume_from_checkpoint=…)`; None when
    there is nothing. One process: a Trainer that shards its state saves it in other files."""
    from safetensors.torch import save_file

    found = memory.load()
    if found is None:
        return None
    step, state = found
    target = Path(folder) / f"checkpoint-{step}"
    target.mkdir(parents=True, exist_ok=True)
    save_file({name: each.clone() for name, each in state["model"].items()}, target / "model.safetensors")
    torch.save(state["optimizer"], target / "optimizer.pt")
    torch.save(state["scheduler"], target / "scheduler.pt")
    torch.save(state["rng"], target / "rng_state.pth")
    (target / "trainer_state.json").write_text(state["trainer"])
    return str(target)


def _random_state() -> dict[str, Any]:
    """As the Trainer saves it."""
    kept: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    return kept | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
