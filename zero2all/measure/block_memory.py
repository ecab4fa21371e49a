"""What each block of a model allocates and keeps, without a profiler.

    with block_memory(model) as found:
        total, _ = model.loss(tokens, targets)
        total.backward()

prints a line for each block when the `with` ends, and leaves no hook behind. On a GPU the figures are the allocator's.
On a CPU, which has none to ask, every tensor that an operator makes is followed until it is freed; what a library
allocates inside an operator is not seen there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero2all.common.language import columns, padded
from zero2all.common.language import translate as t

MIB = float(1 << 20)


@dataclass
class BlockMemory:
    """Bytes of one block, above what was allocated when it began; of several passes the last."""

    name: str
    forward_peak: int = 0
    """The most during the forward pass."""
    forward_kept: int = 0
    """Still there after it: the result, and what the backward pass needs."""
    backward_peak: int = 0
    backward_kept: int = 0
    """Below 0 where the backward pass frees more than the gradients it leaves."""


@contextmanager
def block_memory(model: nn.Module, show: Callable[[str], Any] | None = print) -> Iterator[list[BlockMemory]]:
    """Watch the children of `model` (of a list of blocks: each block), as they are called; `show` gets the lines of the
    table at the end, None prints nothing."""
    device = next(model.parameters()).device
    meter: _Cuda | _Tensors = _Cuda(device) if device.type == "cuda" else _Tensors()
    handles = []
    rows: list[BlockMemory] = []
    for name, module in _parts(model):
        handles += _hooks(module, name, rows, meter)
    try:
        with meter:
            yield rows
    finally:
        for handle in handles:
            handle.remove()
    if show is not None:
        for line in lines_of(rows):
            show(line)


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}", block) for number, block in child.named_children())
        else:
            yield name, child


def _hooks(module: nn.Module, name: str, rows: list[BlockMemory], meter: _Cuda | _Tensors) -> list[Any]:
    row, marks = BlockMemory(name), list[int]()

    def begin(*_: Any) -> None:
        marks.append(meter.begin())

    def end_forward(*_: Any) -> None:
        row.forward_peak, row.forward_kept = meter.since(marks.pop())
        if row not in rows:
            rows.append(row)

    def end_backward(*_: Any) -> None:
        row.backward_peak, row.backward_kept = meter.since(marks.pop())

    return [
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(end_forward),
        module.register_full_backward_pre_hook(begin),
        module.register_full_backward_hook(end_backward),
    ]


def lines_of(rows: list[BlockMemory]) -> list[str]:
    """The table."""
    lines = [["MiB", t("forward, peak"), t("kept"), t("backward, peak"), t("kept")]]
    lines += [[row.name, *(f"{value / MIB:,.2f}" for value in astuple(row)[1:])] for row in rows]
    width = max(columns(name) for name, *_ in lines)
    return [padded(name, width) + "".join(f"  {cell:>14}" for cell in cells) for name, *cells in lines]


class _Cuda:
    """The allocator's own figures. Its peak is reset at every beginning."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def since(self, before: int) -> tuple[int, int]:
        """Peak and present bytes above those at the beginning."""
        return (
            torch.cuda.max_memory_allocated(self._device) - before,
            torch.cuda.memory_allocated(self._device) - before,
        )


class _Tensors(TorchDispatchMode):
    """The bytes of all tensors made since the beginning that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self._bytes = self._peak = 0

    def begin(self) -> int:
        self._peak = self._bytes
        return self._bytes

    def since(self, before: int) -> tuple[int, int]:
        """Peak and present bytes above those at the beginning."""
        return self._peak - before, self._bytes - before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._alive and storage._cdata not in given:
                    self._alive[storage._cdata] = storage.nbytes()
                    self._bytes += storage.nbytes()
                    self._peak = max(self._peak, self._bytes)
                    weakref.finalize(storage, self._free, storage._cdata).atexit = False
        return result

    def _free(self, storage: int) -> None:
        self._bytes -= self._alive.pop(storage, 0)
