"""How the flat buffers of a model are laid out and cut: places of parameters, buckets, and who owns which range.

Parameters of one kind are neighbours, because they share a learning rate and a weight decay. A bucket is a range of
parameters of one kind and one spread, whose gradients are sent at once. Each of the processes that ZeRO cuts it among
owns one range of it:
an equal share of its values, or, where the optimizer needs more than single values, whole rows or whole parameters.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from zero2all.model.config import ParameterKind
from zero2all.parallel.mesh import Spread
from zero2all.parallel.parameter_table import LogicalParameter

ALIGNMENT = 128
"""Parameters begin at multiples of this many values, so that every kernel can load them in wide words."""

Cut = Literal["values", "rows", "whole"]
"""Where a parameter may be cut: anywhere, between rows, or nowhere (each parameter then has one owner)."""
CutOf = Callable[[LogicalParameter], Cut]


@dataclass(frozen=True)
class Bucket:
    """A range of the flat buffers; it holds parameters of one kind and spread."""

    kind: ParameterKind
    spread: Spread
    span: slice
    holders: tuple[str, ...]  # the tensors of the model in it, in order
    borders: tuple[int, ...]  # owner r has borders[r] to borders[r + 1]

    def owned_by(self, rank: int) -> slice:
        """The range of one process."""
        return slice(self.borders[rank], self.borders[rank + 1])


@dataclass(frozen=True)
class FlatPlan:
    """The layout of the flat buffers."""

    length: int
    places: dict[str, slice]  # of each tensor of the model
    buckets: tuple[Bucket, ...]  # in the order of the buffers
    backward_order: tuple[int, ...]
    """Indices of buckets in the order in which a backward pass completes them, from the end of the model to its
    beginning; a bucket is complete with the first of its tensors. A forward pass needs them the other way round."""


def plan_buffers(
    table: Sequence[LogicalParameter],
    shards: int = 1,
    bucket_values: int | None = None,
    cut_of: CutOf = lambda _parameter: "values",
    expert_shards: int = 1,
) -> FlatPlan:
    """Lay out the parameters of a table for `shards` owners, those of experts for `expert_shards`, in buckets of
    `bucket_values`; None: one per kind and spread."""
    owners_of = {"cut": shards, "copied": shards, "expert": expert_shards}
    places: dict[str, slice] = {}
    spans: list[tuple[slice, list[LogicalParameter]]] = []
    length = 0
    for alike in dict.fromkeys((one.kind, one.spread) for one in table):
        waiting: list[LogicalParameter] = []
        start = length
        members = [one for one in table if (one.kind, one.spread) == alike]
        for number, one in enumerate(members):
            waiting.append(one)
            is_last = number + 1 == len(members)
            if not is_last and members[number + 1].holder == one.holder:
                continue
            places[one.holder] = slice(length, length + one.start + one.numel)
            length += _rounded(one.start + one.numel, ALIGNMENT)
            if is_last or (bucket_values is not None and length - start >= bucket_values):
                if cut_of(one) == "values":
                    length = start + _rounded(length - start, ALIGNMENT * owners_of[one.spread])
                spans.append((slice(start, length), waiting))
                waiting, start = [], length
    owners: list[tuple[int, ...]] = [()] * len(spans)
    for count, spreads in ((shards, ("cut", "copied")), (expert_shards, ("expert",))):
        these = [at for at, (_, members) in enumerate(spans) if members[0].spread in spreads]
        for at, borders in zip(these, _owners([spans[at] for at in these], places, count, cut_of), strict=True):
            owners[at] = borders
    buckets = tuple(
        Bucket(members[0].kind, members[0].spread, span, tuple(dict.fromkeys(one.holder for one in members)), borders)
        for (span, members), borders in zip(spans, owners, strict=True)
    )
    depth = {one.holder: number for number, one in enumerate(table)}
    order = sorted(range(len(buckets)), key=lambda at: -min(depth[name] for name in buckets[at].holders))
    return FlatPlan(length, places, buckets, tuple(order))


def _owners(
    spans: Sequence[tuple[slice, list[LogicalParameter]]], places: dict[str, slice], shards: int, cut_of: CutOf
) -> list[tuple[int, ...]]:
    """The borders of every bucket. Those with the largest parameters come first, so that the small ones can make up for
    what could not be cut evenly."""
    found: dict[int, tuple[int, ...]] = {}
    loads = [0] * shards  # values that each process owns so far
    for at in sorted(range(len(spans)), key=lambda at: -max(one.numel for one in spans[at][1])):
        span, members = spans[at]
        found[at] = _borders(members, places, span, loads, cut_of(members[0]))
        loads = [load + stop - first for load, (first, stop) in zip(loads, pairwise(found[at]), strict=True)]
    return [found[at] for at in range(len(spans))]


def _borders(
    parameters: Sequence[LogicalParameter], places: dict[str, slice], span: slice, loads: Sequence[int], cut: Cut
) -> tuple[int, ...]:
    """The borders between owners: equal shares; or the allowed positions nearest to shares that give most to those who
    own least so far."""
    shards, length = len(loads), span.stop - span.start
    if cut == "values" or shards == 1:
        return tuple(span.start + length * rank // shards for rank in range(shards + 1))
    lacking = [max(0.0, (sum(loads) + length) / shards - load) for load in loads]
    shares = [span.start + length * sum(lacking[:rank]) / sum(lacking) for rank in range(shards + 1)]
    allowed: list[int] = []
    for one in parameters:
        begin = places[one.holder].start + one.start
        row = one.numel // max(1, one.held.lengths[0]) if cut == "rows" else one.numel
        allowed += range(begin, begin + one.numel, max(1, row))
    allowed.append(span.stop)
    inner = []
    for share in shares[1:-1]:
        at = bisect_left(allowed, share)
        inner.append(min(allowed[max(0, at - 1) : at + 1], key=lambda position: abs(position - share)))
    return (span.start, *inner, span.stop)


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
