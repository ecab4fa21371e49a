"""Gradients are summed over the processes bucket by bucket, while the backward pass computes the next ones.

The sinks of the weights (`zero2all.ops.gradient_sink`) say when a gradient has been added. A bucket whose gradients are
all there is sent at once; the buckets go in one fixed order on all processes, from the last block to the first, the
order in which a backward pass completes them. Only the last pass of a step sends anything.

    ZeRO-0   all-reduce of the bucket over all processes that computed a part of it
    ZeRO-1   reduce-scatter over the `shard` axis: each process gets the sum of its own range; then, with copies, an
             all-reduce of that range over them
    ZeRO-2   the same in every pass: the bucket's buffer exists only while its gradients are computed and sent, and the
             sums of the own ranges are added up over the passes

Which processes these are depends on how the parameters of the bucket are spread (`Mesh.sums`). With
`parallel.compress: bf16` a copy of the bucket in bfloat16 is summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.ops.gradient_sink import GradientSink
from zero2all.parallel.buckets import Bucket, FlatPlan
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.mesh import Axis, Mesh, wait_for

MOST_IN_FLIGHT = 2
"""ZeRO-2: buckets that may be on their way before the backward pass waits for the first of them."""


@dataclass
class _Sending:
    """A bucket on its way."""

    bucket: Bucket
    works: list[dist.Work]
    values: Tensor  # the bucket's buffer
    own: Tensor  # where the sum of the own range belongs
    sent: Tensor  # where it arrives: the same, or that range of a copy in bfloat16
    done: torch.cuda.Event | None = None  # on a GPU: the end of all that is queued for it


@dataclass
class _PendingBucket:
    """What a bucket still waits for in this pass."""

    missing: set[str] = field(default_factory=set)
    is_sent: bool = False


class GradientReducer:
    """Sends the gradients of one model."""

    def __init__(
        self, plan: FlatPlan, mesh: Mesh, parallel: ParallelConfig, gradients: Tensor, own_ranges: Sequence[slice]
    ) -> None:
        """`gradients`: the flat buffer of all gradients, or for ZeRO-2 that of the own ranges, which lie in it at
        `own_ranges`. One process sends nothing."""
        self._plan, self._mesh, self._gradients, self._own_ranges = plan, mesh, gradients, own_ranges
        zero = parallel.zero if mesh.shard.size > 1 else 0
        self._borrows, self._overlaps = zero == 2, parallel.overlap
        self._tied = set() if "head.weight" in plan.places else {"embedding.weight"}
        """Tensors that several operators use, so that no single signal completes them."""
        self._in_bfloat16 = parallel.compress == "bf16"
        self._scatters, self._device = zero > 0, gradients.device
        self._order = plan.backward_order
        self._bucket_of = {name: at for at, bucket in enumerate(plan.buckets) for name in bucket.holders}
        self._waiting = [_PendingBucket() for _ in plan.buckets]
        self._borrowed: dict[int, Tensor] = {}
        self._sending: list[_Sending] = []
        self._next, self._sends = 0, False
        communicates = self._device.type == "cuda" and mesh.world.size > 1
        self._stream = torch.cuda.Stream(self._device) if communicates else None

    def sink(self, name: str, shape: torch.Size) -> GradientSink:
        """The sink of one tensor of the model."""
        return _BucketSink(self, name, shape)

    def buffer(self, name: str) -> Tensor:
        """Where the gradient of a tensor is added in this pass, flat."""
        place = self._plan.places[name]
        at = self._bucket_of[name]
        if not self._borrows:
            return self._gradients[place]
        span = self._plan.buckets[at].span
        if at not in self._borrowed:
            length = span.stop - span.start
            self._borrowed[at] = torch.zeros(length, dtype=self._gradients.dtype, device=self._device)
        return self._borrowed[at][place.start - span.start : place.stop - span.start]

    def begin_pass(self, is_last: bool) -> None:
        """Before a backward pass."""
        self._sends = is_last or self._borrows
        self._next = 0
        for waiting, bucket in zip(self._waiting, self._plan.buckets, strict=True):
            waiting.missing, waiting.is_sent = set(bucket.holders), False

    def mark_ready(self, name: str) -> None:
        """The gradient of a tensor was added in this pass."""
        if not self._sends:
            return
        waiting = self._waiting[self._bucket_of[name]]
        if waiting.is_sent:
            raise RuntimeError(f"the gradient of {name} changed after it was sent to the other processes")
        if name not in self._tied:
            waiting.missing.discard(name)
        while self._overlaps and self._next < len(self._order) and not self._waiting[self._order[self._next]].missing:
            self._send_next()

    def end_pass(self) -> None:
        """After a backward pass: send what is left, and wait for all of it (on a GPU: its stream does)."""
        while self._sends and self._next < len(self._order):
            self._send_next()
        while self._sending:
            self._receive()
        self._borrowed.clear()
        self._sends = False

    def reset(self) -> None:
        """Drop the gradients of a pass that was not ended."""
        self._borrowed.clear()

    def _send_next(self) -> None:
        at = self._order[self._next]
        self._next += 1
        bucket = self._plan.buckets[at]
        self._waiting[at].is_sent = True
        if self._borrows:
            values = self._borrowed.pop(at, None)
            if values is None:  # no gradient in this pass
                length = bucket.span.stop - bucket.span.start
                values = torch.zeros(length, dtype=self._gradients.dtype, device=self._device)
            while len(self._sending) >= MOST_IN_FLIGHT:
                self._receive()
        else:
            values = self._gradients[bucket.span]
        first = bucket.span.start
        axes = self._mesh.sums(bucket.spread)
        range_in_bucket = bucket.owned_by(axes.scatter.rank if self._scatters else 0)
        own = slice(range_in_bucket.start - first, range_in_bucket.stop - first)
        works: list[dist.Work] = []
        sent = values.to(torch.bfloat16) if self._in_bfloat16 else values
        sending = _Sending(bucket, works, values, values[own], sent[own])
        if self._scatters and axes.scatter.size > 1:
            works += reduce_scatter(sent, [border - first for border in bucket.borders], axes.scatter)
        elif not self._scatters and axes.all.size > 1:
            works.append(dist.all_reduce(sent, group=axes.all.group, async_op=True))
        self._sending.append(sending)
        if self._stream is not None:
            self._chain_on_stream(self._sending[-1])
        elif not works:
            self._receive()

    def _chain_on_stream(self, sending: _Sending) -> None:
        """On a GPU: what follows a reduce-scatter is queued behind it, on a stream of its own, so that the backward
        pass does not wait."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._finish(sending)
            sending.done = torch.cuda.Event()
            sending.done.record(self._stream)
        sending.values.record_stream(self._stream)
        sending.works = []

    def _finish(self, sending: _Sending) -> None:
        wait_for(sending.works)
        if self._scatters:
            self._mesh.sums(sending.bucket.spread).rest.sum(sending.sent)
        if self._in_bfloat16:
            sending.own.copy_(sending.sent)
        if self._borrows:
            self._gradients[self._own_ranges[self._plan.buckets.index(sending.bucket)]].add_(sending.own)

    def _receive(self) -> None:
        """Wait for the oldest bucket that is on its way."""
        sending = self._sending.pop(0)
        if sending.done is None:
            self._finish(sending)
        else:
            torch.cuda.current_stream(self._device).wait_event(sending.done)


class _BucketSink(GradientSink):
    """A sink whose buffer may exist only during a pass."""

    def __init__(self, reducer: GradientReducer, name: str, shape: torch.Size) -> None:
        self._reducer, self._name, self._shape = reducer, name, shape

    @property
    def buffer(self) -> Tensor:
        """Where to add, in the shape of the weight."""
        return self._reducer.buffer(self._name).view(self._shape)

    def mark_ready(self) -> None:
        """Tell the reducer."""
        self._reducer.mark_ready(self._name)


# torch 2.13 has renamed them.
scatter_sum_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _is_even(borders: Sequence[int]) -> bool:
    """Whether all processes own ranges of the same length, as the collectives for one tensor need it."""
    return len({stop - start for start, stop in pairwise(borders)}) == 1


def reduce_scatter(values: Tensor, borders: Sequence[int], axis: Axis) -> list[dist.Work]:
    """Sum `values` over the processes of an axis; each gets the sum of its range, in place. What it then holds of the
    other ranges is undefined."""
    own = values[borders[axis.rank] : borders[axis.rank + 1]]
    if _is_even(borders):
        return [scatter_sum_into(own, values, group=axis.group, async_op=True)]
    return [
        dist.reduce(values[start:stop], group_dst=rank, group=axis.group, async_op=True)
        for rank, (start, stop) in enumerate(pairwise(borders))
        if stop > start
    ]


def all_gather(values: Tensor, borders: Sequence[int], axis: Axis) -> list[dist.Work]:
    """Each process sends its range to the others, in place."""
    own = values[borders[axis.rank] : borders[axis.rank + 1]]
    if _is_even(borders):
        return [gather_into(values, own, group=axis.group, async_op=True)]
    return [
        dist.broadcast(values[start:stop], group_src=rank, group=axis.group, async_op=True)
        for rank, (start, stop) in enumerate(pairwise(borders))
        if stop > start
    ]
