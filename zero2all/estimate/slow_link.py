"""Bytes and seconds of training over a slow link between groups, for every scheme, and what it costs in loss.

P values, G groups, H steps between two exchanges (`every`), b bytes of a compressed value. A group sends in one step:

    data parallel        2 (G - 1) / G x P b        ring all-reduce of the gradients in every step
    PowerSGD             2 (G - 1) / G x 4 r (n + m) for each n x m matrix, rank r, where that is less than half of it
    local SGD, DiLoCo    (G - 1) x P b / H          its payload to each other group
    streaming            the same, one fragment of the layers at a time
    sparse               (G - 1) x 4096-value chunks x (14 bits x kept + 4 bytes) / H

It receives as much. The link carries both directions at once. A payload is made tensor part by tensor part; int8 and
int4 have one float32 scale for each block of 1,024 values, the last block of a part may be shorter. Framing (headers,
checksums) is not counted.

Data parallel and blocking schemes wait for the link: hiding them behind the backward pass is not counted, because with
accumulation only the last pass could hide them. A streaming fragment has `tau` steps to arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["data_parallel", "powersgd", "local_sgd", "diloco", "streaming", "sparse"]
BLOCK_VALUES = 1024
"""Values that share one float32 scale in int8 and int4."""
CHUNK_VALUES = 4096
"""Values of which `sparse` keeps the largest few: their number has 12 bits."""
SCALE_BYTES = 4
POWERSGD_RANK = 4
KEPT = 82
"""Kept of each chunk: 2 %."""


def part_bytes(values: int, bits: int) -> int:
    """Payload of one tensor part in float32, bf16, int8 or int4."""
    scales = SCALE_BYTES * math.ceil(values / BLOCK_VALUES) if bits < 16 else 0
    return math.ceil(values * bits / 8) + scales


def sparse_part_bytes(values: int, kept: int = KEPT) -> int:
    """Payload of one tensor part: numbers (12 bits), codes (2 bits) and a scale for each chunk. A short last chunk
    keeps the same number, at most all it has."""
    whole, rest = divmod(values, CHUNK_VALUES)
    count = whole * kept + min(rest, kept)
    return math.ceil(count * 12 / 8) + math.ceil(count * 2 / 8) + SCALE_BYTES * (whole + (rest > 0))


def is_low_rank(shape: Sequence[int], rank: int = POWERSGD_RANK) -> bool:
    """Whether PowerSGD sends a tensor as two thin matrices: a matrix, of which they have less than half the values."""
    return len(shape) == 2 and 2 * rank * sum(shape) < math.prod(shape)


def powersgd_bytes(shape: Sequence[int], rank: int = POWERSGD_RANK) -> int:
    """What PowerSGD sums of one tensor: two thin float32 matrices, or all of it."""
    return 4 * (rank * sum(shape) if is_low_rank(shape, rank) else math.prod(shape))


def bytes_per_step(
    scheme: Scheme,
    parameters: Iterable[Sequence[int]],
    groups: int,
    every: int = 1,
    bits: int = 16,
    kept: int = KEPT,
    rank: int = POWERSGD_RANK,
) -> float:
    """Bytes that one group (or the rank whose parts have these shapes) sends in a step, on average over `every`."""
    payload = payload_bytes(scheme, parameters, bits, kept, rank)
    if scheme in ("data_parallel", "powersgd"):
        return 2 * (groups - 1) / groups * payload
    return (groups - 1) * payload / every


def payload_bytes(
    scheme: Scheme, parameters: Iterable[Sequence[int]], bits: int, kept: int = KEPT, rank: int = POWERSGD_RANK
) -> int:
    """What a group has to tell in one exchange of all its parts."""
    if scheme == "powersgd":
        return sum(powersgd_bytes(shape, rank) for shape in parameters)
    if scheme == "sparse":
        return sum(sparse_part_bytes(math.prod(shape), kept) for shape in parameters)
    return sum(part_bytes(math.prod(shape), bits) for shape in parameters)


@dataclass(frozen=True)
class LinkScheme:
    """One way to train over the link."""

    name: str
    scheme: Scheme
    every: int = 1
    bits: int = 16
    tau: int = 0
    """Steps that the exchange may take while training goes on."""


SCHEMES = (
    LinkScheme("data parallel, float32", "data_parallel", bits=32),
    LinkScheme("data parallel, bf16", "data_parallel"),
    LinkScheme("data parallel, PowerSGD", "powersgd", bits=32),
    LinkScheme("local SGD, bf16, H=30", "local_sgd", 30),
    *(
        LinkScheme(f"DiLoCo, {name}, H={every}", "diloco", every, bits)
        for every in (30, 100, 500)
        for name, bits in (("bf16", 16), ("int8", 8), ("int4", 4))
    ),
    LinkScheme("streaming, int4, H=30", "streaming", 30, 4, tau=1),
    LinkScheme("streaming, int4, H=100", "streaming", 100, 4, tau=1),
    LinkScheme("SparseLoCo, 2 %, H=30", "sparse", 30, 2),
)


@dataclass(frozen=True)
class LinkCost:
    """What a scheme costs on a link."""

    scheme: LinkScheme
    step_bytes: float  # sent by a group, mean over steps
    exchange_seconds: float  # of one exchange (the largest fragment with streaming)
    link_seconds: float  # that the link is busy, per step
    waited_seconds: float  # that training waits, per step
    efficiency: float  # compute / (compute + waited)
    loss_percent: float | None  # more loss than data parallel at equal tokens, as published
    loss_source: str

    @property
    def is_hidden(self) -> bool:
        """Whether training never waits for the link."""
        return self.waited_seconds == 0


def link_costs(
    fragments: Sequence[Sequence[Sequence[int]]],
    groups: int,
    bits_per_second: float,
    step_seconds: float,
    rank: int = POWERSGD_RANK,
) -> list[LinkCost]:
    """Every scheme on a link of this speed, with steps that compute for `step_seconds`; `fragments` are the shapes of
    the parameters by the fragment that streaming sends them in, `rank` is PowerSGD's."""
    shapes, found = [shape for part in fragments for shape in part], []
    parameters = sum(math.prod(shape) for shape in shapes)
    for one in SCHEMES:
        step_bytes = bytes_per_step(one.scheme, shapes, groups, one.every, one.bits, rank=rank)
        parts = fragments if one.scheme == "streaming" else [shapes]
        seconds = [
            8 * bytes_per_step(one.scheme, part, groups, 1, one.bits, rank=rank) / bits_per_second for part in parts
        ]
        waited = sum(max(0.0, each - one.tau * step_seconds) for each in seconds) / one.every
        loss, source = published_loss(one, parameters, groups)
        efficiency = step_seconds / (step_seconds + waited)
        busy = 8 * step_bytes / bits_per_second
        found.append(LinkCost(one, step_bytes, max(seconds), busy, waited, efficiency, loss, source))
    return found


GOOD_EFFICIENCY = 0.9
SMALL_MODEL = 300e6
"""Below this many parameters H=100 costs more than 1 % of loss: 30 is better."""


def recommended(costs: Sequence[LinkCost], parameters: float) -> LinkCost:
    """The first that reaches 90 %: data parallel, streaming (H=30 for small models), SparseLoCo; else the fastest of
    those whose loss somebody has measured."""
    streams = [30, 100] if parameters < SMALL_MODEL else [100]
    wanted = [("data_parallel", 1), *(("streaming", every) for every in streams), ("sparse", 30)]
    for scheme, every in wanted:
        for cost in costs:
            is_it = (cost.scheme.scheme, cost.scheme.every) == (scheme, every)
            if is_it and cost.efficiency >= GOOD_EFFICIENCY:
                return cost
    measured = [cost for cost in costs if cost.loss_source != UNKNOWN_LOSS]
    return max(measured, key=lambda cost: cost.efficiency)


DILOCO_LOSS: dict[float, dict[int, float]] = {
    35e6: {1: -0.1, 2: 0.7, 4: 2.0, 8: 3.9},
    90e6: {1: -0.1, 2: 0.5, 4: 1.5, 8: 3.1},
    180e6: {1: -0.2, 2: 0.3, 4: 1.1, 8: 2.3},
    335e6: {1: -0.3, 2: 0.1, 4: 0.9, 8: 2.0},
    550e6: {1: -0.3, 2: 0.2, 4: 0.7, 8: 1.7},
    1.3e9: {1: -0.4, 2: 0.2, 4: 0.5, 8: 1.3},
    2.4e9: {1: -0.4, 2: -0.1, 4: 0.3, 8: 1.1},
    4e9: {1: -0.2, 2: -0.2, 4: 0.2},
    10e9: {1: -0.2, 2: -0.2, 4: 0.3},
}
"""Percent more loss than data parallel by parameters and groups, H=30, 20 tokens a parameter (arXiv 2503.09799)."""
UNKNOWN_LOSS = "no published table has it"
STREAMING_LOSS = {35e6: {30: 0.6, 100: 1.4}, 1e9: {30: -0.4, 100: -0.4}}
"""Percent by parameters and H, two groups, 4 bits (arXiv 2501.18512)."""


def published_loss(one: LinkScheme, parameters: float, groups: int) -> tuple[float | None, str]:
    """Percent more loss at equal tokens in the published run nearest in size, and which run that is."""

    def nearest(sizes: Iterable[float]) -> float:
        return min(sizes, key=lambda size: abs(math.log(size / parameters)))

    if one.scheme == "data_parallel":
        return 0.0, ""
    if one.scheme == "streaming" and groups == 2:
        size = nearest(STREAMING_LOSS)
        return STREAMING_LOSS[size][one.every], f"arXiv 2501.18512, {size / 1e6:g}M, 2 groups"
    if one.scheme == "diloco" and one.every == 30 and one.bits == 16:
        size = nearest(size for size, row in DILOCO_LOSS.items() if groups in row) if groups in (1, 2, 4, 8) else 0
        if size:
            return DILOCO_LOSS[size][groups], f"arXiv 2503.09799, {size / 1e6:g}M, {groups} groups"
    if one.scheme == "sparse":
        return None, "no figure, but less than DiLoCo with 512M parameters (arXiv 2508.15706)"
    return None, UNKNOWN_LOSS
