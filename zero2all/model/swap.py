"""Activations in host memory (`train.recompute: swap`): what blocks save for the backward pass goes there and back.

While a block computes, the one before it is copied to pinned host memory; in the backward pass the block that comes
next arrives. So the device holds what two blocks save, whatever their number. Nothing is computed twice; the price is
the copies, each way once, which are hidden as long as a block computes longer than its copy takes.

The last two blocks stay on the device: the backward pass begins with them. Whole storages are copied, each once, when
the block has ended: several saved tensors may be views of one. Weights stay, and so do tables and masks that all blocks
share. On a GPU the copies run in a stream of their own. A host buffer is used again as soon as its block is back, in
that stream, so the order of the stream keeps one copy from overwriting what another still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from zero2all.model.config import RESIDENT_BLOCKS
from zero2all.ops.host_memory import PinnedMemory


class Swap:
    """Calls the blocks of a model such that what they save is swapped (`Z2all.arrange`)."""

    def __init__(self) -> None:
        self.on_host: Callable[[Tensor], Tensor] = self._empty_on_host
        """Makes a host buffer for a flat tensor."""
        self._pinned = PinnedMemory()
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, blocks: Sequence[nn.Module]) -> Sequence[Callable[..., Any]]:
        """The blocks of one pass, to be called in this order."""
        if not torch.is_grad_enabled():
            return blocks
        saved: list[_Saved] = []
        return [
            partial(self._run, saved, block, number < len(blocks) - RESIDENT_BLOCKS)
            for number, block in enumerate(blocks)
        ]

    def _run(self, saved: list[_Saved], block: nn.Module, leaves: bool, x: Tensor, branch: Any, *shared: Any) -> Any:
        if len(saved) >= RESIDENT_BLOCKS:
            saved[-RESIDENT_BLOCKS].release()
        here = _Saved(self, block, shared, saved[-1] if saved else None)
        saved.append(here)
        with saved_tensors_hooks(here.pack, here.unpack):
            after = block(x, branch, *shared)
        if leaves:
            here.leave()
        else:
            here.slots.clear()  # only autograd holds them
        return after

    def out(self, flat: Tensor) -> Tensor:
        """A copy on the host; the caller is in the stream of the copies."""
        free = self._free.get((flat.numel(), flat.dtype))
        host = free.pop() if free else self.on_host(flat)
        return host.copy_(flat, non_blocking=True)

    def _empty_on_host(self, flat: Tensor) -> Tensor:
        if flat.device.type != "cuda":
            return torch.empty_like(flat, device="cpu")
        return self._pinned.buffer(flat.nbytes, flat.device).view(flat.dtype)

    def give(self, host: Tensor) -> None:
        """A host buffer that is not needed after what its stream has queued so far."""
        self._free.setdefault((host.numel(), host.dtype), []).append(host)

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of the copies, which waits for what the current one has queued; None on a CPU."""
        if device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream


class _Slot:
    """One storage, as a flat tensor."""

    def __init__(self, flat: Tensor) -> None:
        self.device: Tensor | None = flat
        self.host: Tensor | None = None


class _View(NamedTuple):
    """A saved tensor: where it is in a slot."""

    slot: _Slot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Saved:
    """What one block saved in one pass."""

    def __init__(self, swap: Swap, block: nn.Module, shared: Any, before: _Saved | None) -> None:
        self.slots: dict[int, _Slot] = {}
        self._swap, self._block, self._shared, self._before = swap, block, shared, before
        self._stays: set[int] | None = None
        self._copied: torch.cuda.Event | None = None
        self._begun = False

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Called by autograd for each tensor that it saves."""
        storage = tensor.untyped_storage()
        if self._stays is None:  # now, because ZeRO-3 gathers the weights only when the block runs
            stay = [*self._block.parameters(), *(leaf for leaf in tree_leaves(self._shared) if torch.is_tensor(leaf))]
            self._stays = {each.untyped_storage()._cdata for each in stay}
        if storage._cdata in self._stays or not storage.nbytes():
            return tensor
        slot = self.slots.get(storage._cdata)
        if slot is None:
            length = storage.nbytes() // tensor.element_size()
            slot = self.slots[storage._cdata] = _Slot(tensor.detach().as_strided((length,), (1,), 0))
        return _View(slot, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """Called by autograd when the backward pass needs it."""
        if isinstance(packed, Tensor):
            return packed
        if not self._begun:
            self._begun = True
            self.fetch()
            if self._copied is not None:
                torch.cuda.current_stream().wait_event(self._copied)
            if self._before is not None:
                self._before.fetch()
        assert packed.slot.device is not None, "the block was fetched"
        return packed.slot.device.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    @torch.no_grad()
    def leave(self) -> None:
        """The block has ended: begin to copy."""
        if not self.slots:
            return
        stream = self._swap.stream(next(iter(self.slots.values())).device.device)  # type: ignore[union-attr]
        with torch.cuda.stream(stream):
            for slot in self.slots.values():
                assert slot.device is not None, "nothing has left yet"
                slot.host = self._swap.out(slot.device)
        self._copied = None if stream is None else stream.record_event()

    def release(self) -> None:
        """Free the device's memory, which the current stream may use again when the copies are made."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        for slot in self.slots.values():
            slot.device = None

    @torch.no_grad()
    def fetch(self) -> None:
        """Begin to copy back, where the block has left; after that only autograd holds the tensors."""
        slots, self.slots = list(self.slots.values()), {}
        if not slots:
            return
        device = next(self._block.parameters()).device
        hosts = [slot.host for slot in slots if slot.host is not None]
        # Memory of the current stream, in which it will be freed; what that has queued may still use it.
        for slot, host in zip(slots, hosts, strict=True):
            slot.device, slot.host = torch.empty(host.shape, dtype=host.dtype, device=device), None
        stream = self._swap.stream(device)
        with torch.cuda.stream(stream):
            for slot, host in zip(slots, hosts, strict=True):
                assert slot.device is not None, "just made"
                slot.device.copy_(host, non_blocking=True)
                self._swap.give(host)
        self._copied = None if stream is None else stream.record_event()
