"""The weights of a model as the optimizer sees them: float32 masters, their gradients, and what the forward pass reads.

An update of a thousandth of a weight would vanish in the rounding of bfloat16 or float16, so the optimizer works on
float32 masters and writes the low-precision weights from them. Gradients are summed in float32 too. In a float32 (or
float64) model the masters are the weights themselves. A bfloat16 weight is the upper half of its master, so an
optimizer that can join both needs only the missing 16 bits (`zero2all.ops.split_master`).

`FlatWeights`: every process computes with all weights. Masters, weights and gradients are one flat buffer each, laid
out by `zero2all.parallel.buckets`. With ZeRO-1 and 2 a process keeps masters (and ZeRO-2: gradients) only of the ranges
it owns, in buffers that hold these one after the other; the weights of the others are gathered after each update, while
the next forward pass already runs. With offload the masters are on the host, and the new weights come from there
(`zero2all.train.offload`), also while the next forward pass runs.

`ShardedWeights`: every process has a part of each weight (FSDP2, ZeRO-3), in float32; the low-precision weights of a
block are gathered while it computes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2all.model.z2all import Z2all
from zero2all.ops.gradient_sink import GradientSink, take_from_autograd
from zero2all.ops.implementation import has_triton
from zero2all.ops.split_master import join, split
from zero2all.parallel.buckets import CutOf, plan_buffers
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.mesh import Axis, Mesh, Spread, wait_for
from zero2all.parallel.parameter_table import LogicalParameter, held_table, layout_table, trained_table
from zero2all.parallel.parts import TensorPart
from zero2all.parallel.reduce import GradientReducer, all_gather
from zero2all.parallel.shards import part_of, set_gradient_sync
from zero2all.parallel.tensor import sum_copied_heads
from zero2all.train.offload import HostBucket, HostPipeline
from zero2all.train.optimizers.base import Master

CHUNK_VALUES = 1 << 25
"""Values that are joined or split at once."""
NORM_ROW = 128
"""Values whose squares are summed in float32 on the CPU. On ARM bfloat16 is added one value after the other."""
OF_BLOCK = ("matrix", "expert")
"""Kinds of parameters that a block waits for by itself; the others are few, and are waited for at once."""


@dataclass(frozen=True)
class MasterLayout:
    """How the masters of an optimizer lie in memory."""

    kind: Literal["wide", "split", "none"] = "wide"
    """wide: masters of 32 bits or more. split: only the 16 bits that bfloat16 weights lack. none: the optimizer rounds
    for itself (adamw_bf16) and works on the low-precision weights and gradients."""
    cut_of: CutOf = lambda _parameter: "values"
    """How parameters may be cut between the processes of the shard axis."""


class FlatWeights:
    """Takes over the parameters of `model`: their storage becomes a view of flat buffers on `device`. Parameters on the
    meta device have no values yet: load or draw them through `masters_between_steps`."""

    def __init__(
        self,
        model: Z2all,
        dtype: torch.dtype,
        layout: MasterLayout | None = None,
        *,
        device: torch.device | None = None,
        mesh: Mesh | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """`parallel` says what the processes share, how gradients are sent, and whether masters are on the host."""
        self.mesh, parallel, layout = mesh or Mesh(), parallel or ParallelConfig(), layout or MasterLayout()
        self.zero = parallel.zero if self.mesh.shard.size > 1 else 0
        self.offloads = parallel.offload != "none"
        named = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.device = device = device or next(iter(named.values())).device
        self.dtype, wide = dtype, dtype if layout.kind == "none" else torch.promote_types(dtype, torch.float32)
        self.split_masters = layout.kind == "split"
        assert dtype == torch.bfloat16 or not self.split_masters, "only a bfloat16 is one half of a float32"
        _keep_frozen(model, dtype, device)
        self.table = held_table(trained_table(model.config, model.lora), named, self.mesh)
        bucket_values = None
        if self.mesh.world.size > 1 or self.offloads:
            bucket_values = max(1, int(parallel.bucket_mb * 1e6) // wide.itemsize)
        owners = [self.mesh.sums(spread).scatter.size if self.zero else 1 for spread in ("cut", "expert")]
        self.plan = plan_buffers(self.table, owners[0], bucket_values, layout.cut_of, owners[1])
        self.own = [
            bucket.owned_by(self.mesh.sums(bucket.spread).scatter.rank if self.zero else 0)
            for bucket in self.plan.buckets
        ]
        """Of each bucket the range that this process updates."""
        self.own_at = _one_after_the_other(self.own)
        """The same ranges in buffers that hold nothing else."""
        self.own_length = self.own_at[-1].stop
        self._is_last = True
        self._allocate(device, wide)
        self.pipeline = self._make_pipeline() if self.offloads else None
        self.reducer: GradientReducer | None = None
        if self.mesh.loss.size * self.mesh.tensor.size > 1:
            self.reducer = GradientReducer(self.plan, self.mesh, parallel, self.gradients, self.own_at)
        self._returning: list[int] = []
        """Buckets whose new weights come from the host, in the order of the forward pass."""
        self._arriving: dict[int, list[dist.Work]] = {}
        self._parameters = {name: self._take(model, name, parameter) for name, parameter in named.items()}
        if self._gathers or self.pipeline is not None:
            self._wait_before_use(model)

    def _allocate(self, device: torch.device, wide: torch.dtype) -> None:
        length, own_length = self.plan.length, self.own_length
        self.weights = torch.zeros(length, dtype=self.dtype, device=device)
        self.masters = self.weights
        """Of the own ranges; the weights themselves where they are precise enough."""
        master_dtype = torch.int16 if self.split_masters else wide
        if self.offloads:
            self.masters = torch.zeros(own_length, dtype=master_dtype)
        elif self.split_masters or self.dtype != wide:
            self.masters = torch.zeros(own_length, dtype=master_dtype, device=device)
        self.gradients = torch.zeros(own_length if self.zero == 2 else length, dtype=wide, device=device)
        """Of all weights; with ZeRO-2 of the own ranges."""

    def _make_pipeline(self) -> HostPipeline:
        gradients = dict(self.flat_ranges(self.gradients))
        # `.data` has a version of its own: autograd must not take weights that arrive for a later block as a change of
        # those that an earlier one has used.
        buckets = []
        for number, (own, at) in enumerate(zip(self.own, self.own_at, strict=True)):
            held = self.gradients[at if self.zero == 2 else self.plan.buckets[number].span]
            buckets.append(HostBucket(at, self.weights.data[own], gradients[number].data, held.data))
        return HostPipeline(buckets, self._forward_order)

    @property
    def _forward_order(self) -> tuple[int, ...]:
        """The buckets in the order in which a forward pass needs them."""
        return self.plan.backward_order[::-1]

    @property
    def _gathers(self) -> bool:
        """Whether other processes update some of the weights."""
        return self.own_length < self.plan.length

    @torch.no_grad()
    def _take(self, model: Z2all, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter as a view of the buffers; a new one where it was on the meta device."""
        place, shape, reducer = self.plan.places[name], parameter.shape, self.reducer
        if parameter.is_meta:
            # .data: a version of its own, or a change of one weight would look like a change of all.
            parameter = nn.Parameter(self.weights[place].view(shape).data)
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module).register_parameter(leaf, parameter)
        else:
            self._write_whole(place, parameter.detach().reshape(-1).to(self.weights.device))
            parameter.data = self.weights[place].view(shape)
        if self.masters is self.weights and self.zero < 2 and self.pipeline is None:
            parameter.grad = self.gradients[place].view(shape)  # autograd adds to it in place
            if reducer is not None:
                parameter.register_post_accumulate_grad_hook(lambda _parameter: reducer.mark_ready(name))
            return parameter
        parameter.gradient_sink = self._sink(name, shape)  # type: ignore[attr-defined]
        take_from_autograd(parameter)
        return parameter

    def _sink(self, name: str, shape: torch.Size) -> GradientSink:
        if self.reducer is not None:
            return self.reducer.sink(name, shape)
        return GradientSink(self.gradients[self.plan.places[name]].view(shape))

    def _write_whole(self, place: slice, values: Tensor) -> None:
        """All values of a tensor: its weights, and the masters of the own range."""
        self.weights[place] = values
        if self.masters is self.weights:
            return
        for own, at in zip(self.own, self.own_at, strict=True):
            start, stop = max(own.start, place.start), min(own.stop, place.stop)
            if start < stop:
                here = slice(at.start + start - own.start, at.start + stop - own.start)
                self._write(slice(start, stop), here, values[start - place.start : stop - place.start])

    def _write(self, at: slice, own: slice, values: Tensor) -> None:
        """Masters and weights of a range from new values of the masters; `own`: its place among the own ranges."""
        if self.split_masters:
            self.weights[at], self.masters[own] = split(values.float())
            return
        if self.masters is not self.weights:
            self.masters[own] = values
        self.weights[at] = values

    # ---- what optimizers and checkpoints see ----

    def flat_ranges(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The own range of every bucket in a buffer of all values or of the own ranges."""
        ranges = self.own if flat.numel() == self.plan.length else self.own_at
        for number, at in enumerate(ranges):
            yield number, flat[at]

    def parts(self, flat: Tensor) -> dict[str, TensorPart]:
        """A buffer of all values, or of the own ranges, as parts by logical name; those of other owners are empty."""
        ranges = dict(self.flat_ranges(flat))
        bucket_of = {name: number for number, bucket in enumerate(self.plan.buckets) for name in bucket.holders}
        found = {}
        for one in self.table:
            number = bucket_of[one.holder]
            first = self.plan.places[one.holder].start + one.start
            own = self.own[number]
            start = min(max(own.start, first), first + one.numel)
            stop = max(start, min(own.stop, first + one.numel))
            values = ranges[number][start - own.start : stop - own.start] if stop > start else flat[:0]
            found[one.name] = TensorPart.of_range(values, one.shape, start - first, None, one.held)
        return found

    def parameter_slices(self, bucket: int) -> tuple[slice, ...]:
        """The slice of each parameter in the own range of a bucket."""
        own, found = self.own[bucket], []
        for name in self.plan.buckets[bucket].holders:
            place = self.plan.places[name]
            start, stop = max(own.start, place.start), min(own.stop, place.stop)
            if start < stop:
                found.append(slice(start - own.start, stop - own.start))
        return tuple(found)

    def masters_by_name(self) -> dict[str, Master]:
        """The masters with their gradients, for an optimizer that takes them one by one; live."""
        assert not self.split_masters, "there are no whole masters"
        gradients = self.parts(self.gradients)
        return {
            name: Master(part, lambda values=gradients[name].values: values)  # type: ignore[misc]
            for name, part in self.parts(self.masters).items()
        }

    @contextmanager
    def masters_between_steps(self) -> Iterator[dict[str, TensorPart]]:
        """The masters by name, to read or to write, between two steps; split ones lie in `gradients`."""
        self.wait()
        if self.pipeline is not None:
            self.pipeline.finish()
        if not self.split_masters:
            yield self.parts(self.masters)
            return
        with torch.no_grad():
            for at, own, gradient in self._chunks():
                gradient.copy_(join(self.weights[at], self.masters[own]))
            try:
                yield self.parts(self.gradients)
            finally:
                for at, own, gradient in self._chunks():
                    self._write(at, own, gradient)
                self.zero_gradients()

    def _chunks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """The own ranges in chunks, so that joining split masters takes little extra memory: the place among the
        weights, the place among the own ranges, and the gradients there."""
        for number, gradients in self.flat_ranges(self.gradients):
            for first in range(0, gradients.numel(), CHUNK_VALUES):
                chunk = gradients[first : first + CHUNK_VALUES]
                begins = (self.own[number].start + first, self.own_at[number].start + first)
                yield *(slice(begin, begin + chunk.numel()) for begin in begins), chunk  # type: ignore[misc]

    def master_samples(self, most: int) -> dict[str, Tensor]:
        """At most about `most` values of each master, evenly spread over the part in this process; at any time."""
        self.wait()
        if self.pipeline is not None:
            self.pipeline.finish()
        weights, masters = self.parts(self.weights), self.parts(self.masters)
        samples = {}
        for name, part in masters.items():
            every = slice(None, None, _stride(part.values.numel(), most))
            values = part.values.reshape(-1)[every].to(self.device)
            if self.split_masters:
                values = join(weights[name].values.reshape(-1)[every].contiguous(), values)
            samples[name] = values
        return samples

    # ---- the moments of a step ----

    @property
    def communicates(self) -> bool:
        """Whether the last pass of a step sends gradients to other processes."""
        return self.reducer is not None

    def begin_pass(self, is_last: bool) -> None:
        """Before the forward and backward pass of a micro-batch; gradients are summed over the processes in the last
        one of a step (ZeRO-2: in each)."""
        self._is_last = is_last
        if self.reducer is not None:
            self.reducer.begin_pass(is_last)

    def end_pass(self) -> None:
        """After it."""
        if self.reducer is not None:
            self.reducer.end_pass()
        copies = most_copies(self.table)
        if self._is_last and copies > 1:
            sum_copied_heads(self._gradients_of_copied_heads(), copies, self.mesh.tensor)

    def _gradients_of_copied_heads(self) -> list[Tensor]:
        parts = self.parts(self.gradients)
        return [parts[one.name].values for one in self.table if one.copies > 1]

    def squared_norm_share(self) -> Tensor:
        """This process's share of the square of the gradient's L2 norm, float64; the shares of all processes add up to
        it."""
        copies = {bucket.spread: self.copies_axis(bucket.spread).size for bucket in self.plan.buckets}
        if self.zero < 2 and self.own_length == self.plan.length and len(set(copies.values())) == 1:
            return _sum_of_squares(self.gradients) / next(iter(copies.values()))
        shares = [
            _sum_of_squares(part) / copies[self.plan.buckets[number].spread]
            for number, part in self.flat_ranges(self.gradients)
        ]
        heads = most_copies(self.table)
        if heads > 1:
            too_often = (1.0 - 1.0 / heads) / copies["cut"]
            shares += [-too_often * _sum_of_squares(values) for values in self._gradients_of_copied_heads()]
        return torch.stack(shares).sum()

    def copies_axis(self, spread: Spread) -> Axis:
        """The processes that hold the same masters, and the same gradients after they have been summed."""
        axes = self.mesh.sums(spread)
        return axes.rest if self.zero else axes.all

    def publish_masters(self) -> None:
        """The masters have changed: write the low-precision weights, and gather those of other owners."""
        if self.masters is not self.weights and not self.split_masters:
            for at, own in zip(self.own, self.own_at, strict=True):
                self.weights[at] = self.masters[own]
        self.start_all_gather()

    def start_all_gather(self) -> None:
        """The own ranges of the weights have changed: gather the others, and invalidate caches made from the weights
        (float8 copies)."""
        self.wait()
        if self._gathers:
            for number in self._forward_order:
                self._gather(number)
        torch.autograd.graph.increment_version(list(self._parameters.values()))

    def _gather(self, number: int) -> None:
        bucket = self.plan.buckets[number]
        borders = [border - bucket.span.start for border in bucket.borders]
        axis = self.mesh.sums(bucket.spread).scatter
        if axis.size > 1:
            self._arriving[number] = all_gather(self.weights.data[bucket.span], borders, axis)

    def start_host_to_device(self) -> None:
        """New weights of the own ranges begin to come from the host."""
        self._returning = list(self._forward_order)
        torch.autograd.graph.increment_version(list(self._parameters.values()))

    def _receive_from_host(self, buckets: Sequence[int] | None) -> None:
        """Wait until the own ranges of these buckets, or of all, have come from the host, and gather the others. All
        processes gather in the same order and at the same moments, whatever has arrived by then."""
        assert self.pipeline is not None, "nothing comes from the host"
        wanted = [at for at, number in enumerate(self._returning) if buckets is None or number in buckets]
        for _ in range(max(wanted, default=-1) + 1):
            number = self._returning.pop(0)
            self.pipeline.wait(number)
            if self._gathers:
                self._gather(number)

    def wait(self, buckets: Sequence[int] | None = None) -> None:
        """Wait until the weights of these buckets, or of all, have arrived (on a GPU: its stream does)."""
        if self._returning:
            self._receive_from_host(buckets)
        for number in list(self._arriving) if buckets is None else buckets:
            wait_for(self._arriving.pop(number, ()))

    def _wait_before_use(self, model: Z2all) -> None:
        """Before a block computes, wait for its weights. A compiled model waits for all of them at its beginning."""
        of_block: dict[str, set[int]] = {}
        for number, bucket in enumerate(self.plan.buckets):
            for name in bucket.holders:
                block = ".".join(name.split(".")[:2]) if name.startswith("blocks.") and bucket.kind in OF_BLOCK else ""
                of_block.setdefault("norm" if name == "head.weight" else block, set()).add(number)
        if model.ops.compile != "none":
            of_block = {"": set(range(len(self.plan.buckets)))}
        for name, numbers in of_block.items():
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda _module, _args, needed=tuple(numbers): self.wait(needed))

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        if self.pipeline is not None:
            self.pipeline.finish()
        self.gradients.zero_()
        if self.reducer is not None:
            self.reducer.reset()


class ShardedWeights:
    """The parameters of a model that `parallel.data.shard_model` has sharded."""

    def __init__(self, model: Z2all, dtype: torch.dtype, mesh: Mesh) -> None:
        self.dtype, self.mesh, self._model = dtype, mesh, model
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.table: list[LogicalParameter] = held_table(trained_table(model.config, model.lora), self._parameters, mesh)
        self._copied = [self._parameters[one.holder] for one in self.table if one.spread == "copied"]
        self._is_last = True

    def masters_by_name(self) -> dict[str, Master]:
        """The masters with their gradients, for an optimizer that takes them one by one; live."""
        return {
            one.name: Master(part, lambda one=one: self._gradient(one))  # type: ignore[misc]
            for one, part in self._parts()
        }

    def _gradient(self, one: LogicalParameter) -> Tensor | None:
        gradient = self._parameters[one.holder].grad
        return None if gradient is None else part_of(gradient, one).values

    def _parts(self) -> Iterator[tuple[LogicalParameter, TensorPart]]:
        for one in self.table:
            yield one, part_of(self._parameters[one.holder], one)

    @contextmanager
    def masters_between_steps(self) -> Iterator[dict[str, TensorPart]]:
        """The masters by name, to read or to write, between two steps."""
        yield {one.name: part for one, part in self._parts()}

    def master_samples(self, most: int) -> dict[str, Tensor]:
        """At most about `most` values of each master, evenly spread over the part in this process; at any time."""
        flat = {one.name: part.values.detach().reshape(-1) for one, part in self._parts()}
        return {name: values[:: _stride(values.numel(), most)] for name, values in flat.items()}

    def copies_axis(self, _spread: Spread) -> Axis:
        """The processes that hold the same masters."""
        return self.mesh.copies

    communicates = True

    def begin_pass(self, is_last: bool) -> None:
        """FSDP sums the gradients in the backward pass of the last micro-batch."""
        self._is_last = is_last
        set_gradient_sync(self._model, is_last)

    def end_pass(self) -> None:
        """FSDP has waited for its sums; what every tensor rank has a copy of is also summed over these."""
        for parameter in self._copied if self._is_last else ():
            if parameter.grad is not None:
                self.mesh.tensor.sum(parameter.grad.to_local())  # type: ignore[attr-defined]
        if self._is_last:
            sum_copied_heads(self._gradients_of_copied_heads(), most_copies(self.table), self.mesh.tensor)

    def _gradients_of_copied_heads(self) -> list[Tensor]:
        found = [self._gradient(one) for one in self.table if one.copies > 1]
        return [values for values in found if values is not None]

    def squared_norm_share(self) -> Tensor:
        """This process's share of the square of the gradient's L2 norm, float64; the shares of all processes add up to
        it."""
        copied = set(self._copied)
        squares = [
            squared_norm(parameter.grad.to_local())  # type: ignore[attr-defined]
            / (self.mesh.tensor.size if parameter in copied else 1)
            for parameter in self._parameters.values()
            if parameter.grad is not None
        ]
        too_often = 1.0 - 1.0 / most_copies(self.table)
        squares += [-too_often * _sum_of_squares(values) for values in self._gradients_of_copied_heads()]
        return torch.stack(squares).sum() / self.mesh.copies.size

    def publish_masters(self) -> None:
        """Nothing to do: FSDP gathers the weights in every pass."""

    def wait(self) -> None:
        """Nothing to do: FSDP waits for the weights it gathers."""

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        for parameter in self._parameters.values():
            parameter.grad = None


Weights = FlatWeights | ShardedWeights


def _keep_frozen(model: Z2all, dtype: torch.dtype, device: torch.device) -> None:
    """Give the weights that are not trained memory of their own, without masters and gradients."""
    for module in model.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            if not one.requires_grad:
                values = torch.empty_like(one, dtype=dtype, device=device) if one.is_meta else one.to(device, dtype)
                module.register_parameter(name, nn.Parameter(values, requires_grad=False))


def frozen_parts(model: Z2all, mesh: Mesh) -> dict[str, TensorPart]:
    """The weights that are not trained, by logical name; live."""
    frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
    return {one.name: part_of(frozen[one.holder], one) for one in held_table(layout_table(model.config), frozen, mesh)}


def most_copies(table: Sequence[LogicalParameter]) -> int:
    """How many tensor ranks have a copy of each kv head."""
    return max(one.copies for one in table)


def _sum_of_squares(values: Tensor) -> Tensor:
    """float64."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    if values.is_cuda and values.dtype == torch.float32 and has_triton():
        from zero2all.ops.kernels.adamw import sum_of_squares

        return sum_of_squares(values)
    return squared_norm(values)


def squared_norm(values: Tensor) -> Tensor:
    """The square of the L2 norm, float64, by torch's reduction. On the CPU that adds all values in a few float32 sums,
    which lose the small squares of a long tensor (10 million values: 7e-4), so there it runs over short rows."""
    wide = torch.promote_types(values.dtype, torch.float32)
    if values.is_cuda:
        return torch.linalg.vector_norm(values, dtype=wide).double().square()
    flat = values.reshape(-1)
    whole = flat.numel() - flat.numel() % NORM_ROW
    rows, rest = flat[:whole].view(-1, NORM_ROW), flat[whole:]
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide).double(), torch.linalg.vector_norm(rest, dtype=wide)
    return norms[0].square().sum() + norms[1].double().square()


def _one_after_the_other(ranges: Sequence[slice]) -> list[slice]:
    """Ranges of the same lengths, without gaps."""
    found, at = [], 0
    for each in ranges:
        found.append(slice(at, at + each.stop - each.start))
        at = found[-1].stop
    return found


def _stride(count: int, most: int) -> int:
    return max(1, count // most)
