"""Weights in host memory that come to the device block by block (`parallel.offload: weights`).

Weights, masters, gradients and optimizer states are on the host. The device has the embedding, the head, norms and
biases, and two slots for the matrices of blocks: while one block computes, the next one comes. A block is fetched when
its first norm is called: in the forward pass, and again in the backward pass, which must therefore compute it again
(`train.recompute`), because what autograd had saved of a weight would be overwritten in its slot.

The gradients of a bucket are in a buffer on the device only until the backward pass has completed them. Then they go to
the host and are added there, in every pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor, nn

from zero2all.common.errors import UsageError
from zero2all.model.recompute import RecomputedBlock
from zero2all.model.z2all import Z2all
from zero2all.parallel.reduce import GradientReducer
from zero2all.train.offload import PIECE_VALUES, SLOTS
from zero2all.train.weights import FlatWeights, squared_norm

BLOCK_SLOTS = 2
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the current one."""


def check_streaming(model: Z2all) -> None:
    """UsageError where a pass of the model would read a slot after another block has come to it."""
    assert all(isinstance(block, RecomputedBlock) for block in model.blocks), "see zero2all.parallel.check"
    if model.ops.footprints["linear"].weight_copy_bytes:
        raise UsageError(
            f"parallel.offload = weights needs ops.linear = fp32_wgrad or plain (now {model.ops.taken['linear']}): "
            f"float8 copies keep addresses of weights, which change here. Or set parallel.offload to optimizer."
        )


class StreamedWeights(FlatWeights):
    """`FlatWeights` whose buffers are all on the host."""

    def _allocate(self, device: torch.device, wide: torch.dtype) -> None:
        assert self.host_zeros is not None, "streamed weights are on the host"
        assert self.zero == 0, "streamed weights are whole"
        length = self.plan.length
        self.weights = self.host_zeros("weights", length, self.dtype)
        if device.type == "cuda":
            _pin(self, self.weights)
        self.masters = self.weights
        if self.dtype != wide:
            self.masters = self.host_zeros("masters", length, wide)
        self.gradients = self.host_zeros("gradients", length, wide)
        self._added = HostGradients(self.gradients, self.own_at, device)
        self._tables_on_device = {
            number: torch.zeros(bucket.span.stop - bucket.span.start, dtype=self.dtype, device=device)
            for number, bucket in enumerate(self.plan.buckets)
            if bucket.kind != "matrix"
        }
        self._bucket_of = {name: at for at, bucket in enumerate(self.plan.buckets) for name in bucket.holders}
        self._span_of_block: dict[str, slice] = {}
        for name, place in self.plan.places.items():
            if self._bucket_of[name] not in self._tables_on_device:
                span = self._span_of_block.get(_block_of(name), place)
                here = slice(min(span.start, place.start), max(span.stop, place.stop))
                self._span_of_block[_block_of(name)] = here
        longest = max(span.stop - span.start for span in self._span_of_block.values())
        self._slots = [torch.zeros(longest, dtype=self.dtype, device=device) for _ in range(BLOCK_SLOTS)]

    def _make_reducer(self, overlaps: bool, in_bfloat16: bool) -> GradientReducer:  # noqa: ARG002
        return GradientReducer(
            self.plan, self.mesh, 0, self.gradients, self.own_at, sorted(self._tables), overlaps,
            take=self._added.add, device=self.device,
        )  # fmt: skip

    def _on_device(self, name: str) -> Tensor:
        place, number = self.plan.places[name], self._bucket_of[name]
        if number in self._tables_on_device:
            first = self.plan.buckets[number].span.start
            return self._tables_on_device[number][place.start - first : place.stop - first]
        first = self._span_of_block[_block_of(name)].start
        return self._slots[0][place.start - first : place.stop - first]

    def _wait_before_use(self, model: Z2all) -> None:
        super()._wait_before_use(model)
        blocks, needed = [], []
        for block, span in self._span_of_block.items():
            names = [name for name in self._parameters if _block_of(name) == block and self._is_streamed(name)]
            blocks.append((span, {self._parameters[name]: self.plan.places[name] for name in names}))
            needed.append(sorted({self._bucket_of[name] for name in names}))
        self.stream = BlockStream(self.weights, blocks, self._slots, lambda number: self.wait(needed[number]))
        for number, block in enumerate(self._span_of_block):
            first = model.get_submodule(f"{block}.attention_norm")
            first.register_forward_pre_hook(lambda _module, _inputs, number=number: self.stream.use(number))

    def _is_streamed(self, name: str) -> bool:
        return self._bucket_of[name] not in self._tables_on_device

    def _returned(self, number: int) -> None:
        if number in self._tables_on_device:
            here = self.weights.data[self.plan.buckets[number].span]
            self._tables_on_device[number].data.copy_(here, non_blocking=True)

    def start_all_gather(self) -> None:
        """The weights on the host have changed: bring those that stay on the device, and forget the others."""
        super().start_all_gather()
        for number in self._tables_on_device:
            self._returned(number)
        self.stream.forget()

    def start_host_to_device(self) -> None:
        """The weights on the host begin to change."""
        super().start_host_to_device()
        self.stream.forget()

    def wait(self, buckets: Sequence[int] | None = None) -> None:
        """Wait until the weights of these buckets are updated; of all: also until nothing is read from the host."""
        super().wait(buckets)
        if buckets is None:
            self.stream.wait()

    def squared_norm_share(self) -> Tensor:
        """As `FlatWeights`, on the host."""
        self._added.finish()
        return (squared_norm(self.gradients) / self.mesh.loss.size).to(self.device)

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self._added.finish()
        super().zero_gradients()


def _block_of(name: str) -> str:
    """blocks.3.attention.out.weight -> blocks.3"""
    return ".".join(name.split(".")[:2])


class BlockStream:
    """Brings the matrices of blocks to slots on the device, the next block while one computes."""

    def __init__(
        self,
        host: Tensor,
        blocks: Sequence[tuple[slice, Mapping[nn.Parameter, slice]]],
        slots: Sequence[Tensor],
        before_load: Callable[[int], None],
    ) -> None:
        """`blocks`: of each its range in `host`, and its parameters with theirs. `before_load`: called before a block
        is read from the host."""
        self._host, self._blocks, self._slots, self._before_load = host, blocks, slots, before_load
        self._device = slots[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._held: list[int | None] = [None] * len(slots)
        self._last, self._last_slot = 0, 0

    def use(self, number: int) -> None:
        """A block is about to compute: its weights are in a slot when the current stream gets there. Then fetch the one
        that follows: the next in a forward pass, the one before in a backward pass."""
        if number not in self._held:
            self._load(number)
        slot = self._held.index(number)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        span, parameters = self._blocks[number]
        for parameter, place in parameters.items():
            here = self._slots[slot][place.start - span.start : place.stop - span.start]
            parameter.data = here.view(parameter.shape)
        is_forward = number > self._last or number == 0 == self._last
        self._last, self._last_slot = number, slot
        following = number + 1 if is_forward else number - 1
        if 0 <= following < len(self._blocks) and following not in self._held:
            self._load(following)

    def _load(self, number: int) -> None:
        """Bring a block to the slot that was not used last; what has been queued so far may still read that slot."""
        self._before_load(number)
        slot = (self._last_slot + 1) % len(self._slots)
        span = self._blocks[number][0]
        source, target = self._host[span], self._slots[slot][: span.stop - span.start]
        self._held[slot] = number
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def forget(self) -> None:
        """The weights on the host change: what the slots hold is old."""
        self._held = [None] * len(self._slots)

    def wait(self) -> None:
        """The current stream waits until nothing is read from the host any more."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class HostGradients:
    """Adds gradients that come from the device to those on the host, in a thread of its own."""

    def __init__(self, gradients: Tensor, places: Sequence[slice], device: torch.device) -> None:
        self._gradients, self._places = gradients, places
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        values = min(PIECE_VALUES, gradients.numel()) if self._stream is not None else 0
        self._slots = [torch.empty(values, dtype=gradients.dtype, pin_memory=values > 0) for _ in range(SLOTS)]
        self._adding: list[Future[None] | None] = [None] * SLOTS
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="gradients")
        self._next = 0

    def add(self, number: int, values: Tensor) -> None:
        """Add what a pass has computed for a bucket; the current stream has computed it."""
        target = self._gradients[self._places[number]]
        if self._stream is None:
            target.add_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        values.record_stream(self._stream)
        for first in range(0, values.numel(), PIECE_VALUES):
            piece = values[first : first + PIECE_VALUES]
            at, self._next = self._next, (self._next + 1) % SLOTS
            self._wait(at)
            slot = self._slots[at][: piece.numel()]
            with torch.cuda.stream(self._stream):
                slot.copy_(piece, non_blocking=True)
                came = torch.cuda.Event()
                came.record(self._stream)
            self._adding[at] = self._worker.submit(_add, target[first : first + PIECE_VALUES], slot, came)

    def finish(self) -> None:
        """Wait until everything is added."""
        for at in range(SLOTS):
            self._wait(at)

    def _wait(self, at: int) -> None:
        adding, self._adding[at] = self._adding[at], None
        if adding is not None:
            adding.result()


def _add(target: Tensor, slot: Tensor, came: torch.cuda.Event) -> None:
    came.synchronize()
    target.add_(slot)


def _pin(owner: object, buffer: Tensor) -> None:
    """Lock the pages of a buffer in place while its owner lives: copies from it are faster then, and do not wait."""
    if int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, PORTABLE)) == 0:
        weakref.finalize(owner, torch.cuda.cudart().cudaHostUnregister, buffer.data_ptr())
        return
    with suppress(RuntimeError):  # the next kernel would report the refused call
        torch.zeros(1, device="cuda")
