"""What a machine can do: the profile that predictions of time are made from, measured or from data sheets.

A time that was measured is used as it is. Any other comes from physics:

    matrix product   the largest of arithmetic, memory and nothing less than a kernel's shortest time. Arithmetic: the
                     result is cut into tiles, each multiprocessor computes one at a time, so that time goes in waves:
                     waves x tile FLOPs / rate of a multiprocessor. A small tile reuses less and runs slower; of all
                     tiles the fastest is taken, as cuBLAS does. Where similar products were measured, their ratio to
                     this formula is applied.
    operator         bytes / bandwidth, and no less than a kernel's shortest time; below the smallest size that was
                     measured, at the rate of that one
    collective       latency x rounds + bytes sent / bandwidth of the link, in a ring or a double tree, whichever is
                     faster
    curve            measured (size, seconds), interpolated in logarithms, beyond its ends by the rate of the last point

`source` says whether numbers were measured or come from data sheets. Seconds, bytes and FLOP/s throughout; a link's
bytes/s are those of one GPU in one direction.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json_object, write_json
from zero2all.estimate.gpus import GPUS

Kind = Literal["forward", "dgrad", "wgrad"]
WIDTHS = {"bfloat16": 2, "float16": 2, "float8": 1, "float32": 4, "grouped": 2}
"""Bytes of a value; `grouped`: the products of all experts of a block in one call."""
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.65))
"""Rows and columns of the tiles of a result, and the rate they reach beside the largest: a tile of a x b does
a b / (a + b) multiply-adds per value that it reads."""
FILL_DEPTH = 64
"""Steps of the inner dimension that the start and the end of a tile cost: nothing is multiplied meanwhile."""
WRITE_RATE = 0.9
"""Share of the copy bandwidth that an operator without arithmetic reaches on large tensors."""
ATTENTION_RATE = {"forward": 0.68, "backward": 0.53}
"""Share of the rate of large products that fused attention reaches on long sequences with wide heads."""
ALIGNED, UNALIGNED_RATE = 8, 0.5
"""Rows of 16-bit values must be multiples of 16 bytes for wide loads; without, products run at about half the rate."""
DOUBT = {"data sheet": 0.12, "measured": 0.03}
IQR_OF_NORMAL = 1.35
NEIGHBOURS = 4
"""Measured products that a product which was not measured is compared with."""


@dataclass(frozen=True)
class Matmul:
    """One measured product: y (m, n) = x (m, k) w (k, n), or the product of this size in the backward pass."""

    m: int
    n: int
    k: int
    kind: Kind
    dtype: str  # bfloat16, float8 or float32
    seconds: float
    spread: float = 0.0  # interquartile range / median


@dataclass(frozen=True)
class AttentionTime:
    """Measured causal attention over `tokens` tokens in sequences of `seq_len`."""

    tokens: int
    seq_len: int
    heads: int
    kv_heads: int
    head_size: int
    forward: float  # seconds
    backward: float


@dataclass(frozen=True)
class TimeCurve:
    """Measured seconds against a size."""

    points: tuple[tuple[float, float], ...]  # (size, seconds), by size

    def seconds(self, size: float) -> float:
        """At any size: log-log between two points, the time of the first below them, the last rate above them."""
        sizes = [point[0] for point in self.points]
        at = bisect.bisect_left(sizes, size)
        if at == 0:
            return self.points[0][1]
        if at == len(sizes):
            return self.points[-1][1] * size / sizes[-1]
        (left, low), (right, high) = self.points[at - 1 : at + 1]
        share = math.log(size / left) / math.log(right / left)
        return low * (high / low) ** share


@dataclass(frozen=True)
class GpuLink:
    """What joins GPUs: NVLink inside a node, the network between nodes."""

    name: str
    ranks: int  # as many GPUs as it joins; 0: any number
    bytes_per_second: float  # of one GPU, in one direction, as collectives reach it
    latency: float  # seconds of one round


Way = Literal["forward", "backward"]
CLOCK_RANGE = (0.8, 1.15)
"""No mixture of work changes the clock by more."""


@dataclass(frozen=True)
class Machine:
    """A GPU with its links, or a cluster of them."""

    name: str  # device name, or a cluster's
    key: dict[str, str]  # what makes the profile stale when it changes; empty for built-in ones
    source: str  # "measured" or "data sheet"
    memory_bytes: float
    peak_flops: dict[str, float]  # by dtype
    stream_bytes_per_second: float  # of a copy: bytes read and written
    launch_seconds: float  # the shortest time of a kernel
    host_op_seconds: float  # of the host, to queue a small operator
    multiprocessors: int = 0  # 0: products have no waves (a CPU)
    matmul_rate: float = 0.87  # what the largest products reach of the peak
    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    operators: dict[str, TimeCurve] = field(
        default_factory=dict
    )  # "rms_norm", "rms_norm/backward", ...: bytes, seconds
    copy: dict[str, TimeCurve] = field(default_factory=dict)  # "h2d", "d2h"
    collectives: dict[str, TimeCurve] = field(default_factory=dict)  # "all-reduce/8/nvlink": bytes, seconds
    links: tuple[GpuLink, ...] = ()
    overhead: dict[str, float] = field(default_factory=dict)  # cuda_context, nccl, workspace: bytes
    hot_over_cold: float = 1.0  # rate under sustained load / rate of a short burst
    gpus_per_node: int = 1
    watts: float = 0.0
    price_per_hour: float | None = None  # of one GPU
    draw: dict[str, float] = field(default_factory=dict)  # of "matmul" and "attention", see `clock_factor`
    left: int = 0  # figures that the calibration had no time for

    @property
    def doubt(self) -> float:
        """Standard deviation of a computed time, as a share of it; no less than that of the figures themselves."""
        if self.source != "measured" or self.left:
            return DOUBT["data sheet"]
        spreads = sorted(one.spread for one in self.matmuls)
        return max(DOUBT["measured"], spreads[len(spreads) // 2] / IQR_OF_NORMAL if spreads else 0.0)

    def clock_factor(self, matmul: float, attention: float, device: float) -> float:
        """What arithmetic takes in a step beside what this profile says, if `matmul` and `attention` of the `device`
        seconds are such. A GPU at its power limit chooses the clock at which the mixture draws just that power, and
        power grows with the cube of the clock (the voltage follows it): products draw most, attention half of it,
        what waits for memory next to nothing."""
        if not self.draw or device <= 0:
            return 1.0
        drawn = (self.draw["matmul"] * matmul + self.draw["attention"] * attention) / device
        return min(max(drawn ** (1 / 3), CLOCK_RANGE[0]), CLOCK_RANGE[1])

    def matmul_seconds(self, m: float, n: float, k: float, kind: Kind = "forward", dtype: str = "bfloat16") -> float:
        """Seconds of a product with an (m, n) result and an inner dimension k."""
        measured, known = self._matmuls.setdefault((kind, dtype), ((), {}))
        if (m, n, k) not in known:  # a plan asks for the same product again and again
            known[m, n, k] = self.modelled_matmul_seconds(m, n, k, dtype) * _nearby_ratio(measured, (m, n, k))
        return known[m, n, k]

    def modelled_matmul_seconds(self, m: float, n: float, k: float, dtype: str = "bfloat16") -> float:
        """Seconds of the same product from tiles, waves and bytes alone."""
        if min(m, n, k) <= 0:
            return 0.0
        rate, width = self.rate_of(dtype), WIDTHS[dtype]
        if self.multiprocessors and (n % ALIGNED or k % ALIGNED):
            rate *= UNALIGNED_RATE
        memory = (width * (m * k + k * n) + max(2, width) * m * n) / self.stream_bytes_per_second
        return max(tiled_seconds(m, n, k, rate, self.multiprocessors), memory, self.launch_seconds)

    def peak_of(self, dtype: str) -> float:
        """FLOP/s of the data sheet."""
        if dtype == "grouped":
            dtype = "bfloat16" if "bfloat16" in self.peak_flops else "float32"
        if dtype not in self.peak_flops:
            raise UsageError(f"{self.name} has no peak for {dtype}; its profile knows {', '.join(self.peak_flops)}.")
        return self.peak_flops[dtype]

    def rate_of(self, dtype: str) -> float:
        """FLOP/s of the largest products, under sustained load."""
        return self.peak_of(dtype) * self.matmul_rate * self.hot_over_cold

    @functools.cached_property
    def _matmuls(self) -> dict[tuple[str, str], tuple[tuple[_Measured, ...], dict[tuple[float, float, float], float]]]:
        """Measured products by kind and dtype: with their ratio to the formula, and by their sizes."""
        groups: dict[tuple[str, str], list[Matmul]] = {}
        for one in self.matmuls:
            groups.setdefault((one.kind, one.dtype), []).append(one)
        return {
            name: (
                tuple(
                    ((one.m, one.n, one.k), one.seconds / self.modelled_matmul_seconds(one.m, one.n, one.k, one.dtype))
                    for one in group
                ),
                {(one.m, one.n, one.k): one.seconds for one in group},
            )
            for name, group in groups.items()
        }

    def attention_seconds(self, *sizes: float, backward: bool = False, dtype: str = "bfloat16") -> float:
        """Seconds of fused causal attention, by tokens, tokens of a sequence, heads, kv heads, width of a head."""
        name: Way = "backward" if backward else "forward"
        known = ((dataclasses.astuple(one)[:5], getattr(one, name)) for one in self.attention)
        found = tuple((one, seconds / self._modelled_attention(one, name, dtype)) for one, seconds in known)
        return self._modelled_attention(sizes, name, dtype) * _nearby_ratio(found, sizes)

    def _modelled_attention(self, sizes: tuple[float, ...], name: Way, dtype: str) -> float:
        tokens, seq_len, heads, _, head_size = sizes
        matmuls = 2 if name == "forward" else 5
        flops = matmuls * tokens * seq_len * heads * head_size
        # Heads of 64 reuse half of what heads of 128 do; short sequences have as many masked tiles as whole ones.
        dtype = dtype if dtype in self.peak_flops else "float32"
        rate = self.rate_of(dtype) * ATTENTION_RATE[name] * min(1.0, (head_size / 128) ** 0.4)
        diagonal = 1.0 + 128 / max(1.0, seq_len)
        moved = (4 if name == "forward" else 8) * tokens * heads * head_size * 2
        return max(flops * diagonal / rate, moved / self.stream_bytes_per_second, self.launch_seconds)

    def operator_seconds(self, name: str, size: float) -> float:
        """Seconds of one call of an operator that moves `size` bytes; backward has a name of its own:
        `rms_norm/backward`."""
        if name in self.operators:
            first_size, first = self.operators[name].points[0]
            if size < first_size:  # bandwidth limits it there too, until a kernel cannot be shorter
                return max(first * size / first_size, min(first, self.launch_seconds))
            return self.operators[name].seconds(size)
        return max(size / (WRITE_RATE * self.stream_bytes_per_second), self.launch_seconds)

    def copy_seconds(self, direction: str, size: float) -> float:
        """Seconds of a copy between host and device: h2d or d2h."""
        if direction not in self.copy:
            raise UsageError(f"The profile of {self.name} has no speed of copies ({direction}).")
        return self.copy[direction].seconds(size)

    def collective_seconds(self, kind: str, size: float, ranks: int, link: str | GpuLink) -> float:
        """Seconds of one collective over a whole tensor of `size` bytes, as in
        `zero2all.estimate.communication.Transfer`."""
        if ranks <= 1 or size <= 0:
            return 0.0
        found = self.link(link) if isinstance(link, str) else link
        measured = self.collectives.get(f"{kind}/{ranks}/{found.name}")
        if measured is not None:
            return measured.seconds(size)
        return link_seconds(kind, size, ranks, found.bytes_per_second, found.latency) + self.launch_seconds

    def link(self, name: str) -> GpuLink:
        """By its name."""
        for link in self.links:
            if link.name == name:
                return link
        known = ", ".join(link.name for link in self.links) or "none: it is one GPU"
        raise UsageError(f"{self.name} has no link {name}; its links: {known}.")

    def link_of(self, ranks: int, stride: int = 1) -> GpuLink:
        """What a group of processes talks over, whose numbers lie `stride` apart: the first link that joins them all.
        Between nodes each GPU has its own network card, so that a group with g processes in each node has g of them."""
        span = ranks * stride
        for link in self.links:
            if link.ranks == 0 or span <= link.ranks:
                inside = self.links[0]
                if link is inside or not inside.ranks:
                    return link
                together = max(1, inside.ranks // stride)
                rate = min(inside.bytes_per_second, together * link.bytes_per_second)
                return dataclasses.replace(link, bytes_per_second=rate)
        raise UsageError(f"{self.name} has no link between {span} processes; it joins at most {self.most_ranks}.")

    @property
    def most_ranks(self) -> int:
        """Processes that its links join."""
        return 1 << 20 if any(link.ranks == 0 for link in self.links) else max([1, *(x.ranks for x in self.links)])


_Measured = tuple[tuple[float, ...], float]
"""Sizes, and measured / modelled seconds."""


def tiled_seconds(m: float, n: float, k: float, rate: float, multiprocessors: int) -> float:
    """A product by its tiles and waves; `rate` is that of all multiprocessors on the largest tiles."""
    if not multiprocessors:
        return 2.0 * m * n * k / rate
    best = math.inf
    for rows, columns, share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        # A few tiles with a long inner dimension are cut along it too (split-k), which makes more of them.
        parts = max(1, min(int(multiprocessors // tiles), int(k // 1024))) if tiles < multiprocessors else 1
        waves: float = math.ceil(tiles * parts / multiprocessors)
        # The last wave of many does not wait for the first: blocks start as others end.
        waves = waves if waves <= 4 else max(tiles * parts / multiprocessors + 0.5, waves - 0.5)
        depth = k / parts + FILL_DEPTH * (1 if parts == 1 else 2)
        best = min(best, waves * 2.0 * rows * columns * depth * multiprocessors / (rate * share))
    return best


def link_seconds(kind: str, size: float, ranks: int, rate: float, latency: float) -> float:
    """Seconds of a collective in a ring; an all-reduce of a small tensor in a double tree."""
    if kind == "send":
        return latency + size / rate
    part = (ranks - 1) / ranks * size / rate
    if kind == "all-to-all":
        return latency + part
    rounds = 2 if kind == "all-reduce" else 1
    ring = rounds * ((ranks - 1) * latency + part)
    return min(ring, 2 * math.log2(ranks) * latency + 2 * size / rate) if kind == "all-reduce" else ring


def _nearby_ratio(measured: tuple[_Measured, ...], sizes: tuple[float, ...]) -> float:
    """Measured / modelled time of the products of the most similar sizes: their geometric mean, the near ones more."""
    if not measured:
        return 1.0
    distances = [
        (sum(math.log2(a / b) ** 2 for a, b in zip(sizes, known, strict=True)), ratio) for known, ratio in measured
    ]
    nearest = sorted(distances)[:NEIGHBOURS]
    if nearest[0][0] == 0:
        return nearest[0][1]
    weights = [1 / distance for distance, _ in nearest]
    logs = sum(weight * math.log(ratio) for weight, (_, ratio) in zip(weights, nearest, strict=True))
    return math.exp(logs / sum(weights))


def write_machine(path: Path, machine: Machine) -> None:
    """Keep a profile as JSON."""
    write_json(path, {one.name: _plain(getattr(machine, one.name)) for one in dataclasses.fields(Machine)})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [list(point) for point in value.points] if isinstance(value, TimeCurve) else dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def read_machine(path: Path) -> Machine:
    """A profile that was written before; BadInputError if the file is something else."""
    remedy = "Run `z2a perf calibrate` again."
    values = read_json_object(path, remedy)
    try:
        read: dict[str, Any] = dict(values)
        for name, kind in (("matmuls", Matmul), ("attention", AttentionTime), ("links", GpuLink)):
            read[name] = tuple(kind(**one) for one in values.get(name, ()))
        for name in ("operators", "copy", "collectives"):
            read[name] = {key: _curve(points) for key, points in values.get(name, {}).items()}
        return Machine(**read)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"{path} is not the profile of a machine: {error}.", remedy) from error


def _curve(points: Any) -> TimeCurve:
    found = tuple((float(size), float(seconds)) for size, seconds in points)
    if not found or any(size <= 0 or seconds <= 0 for size, seconds in found) or list(found) != sorted(found):
        raise ValueError("a curve needs points of (size, seconds) above 0, by size")
    return TimeCurve(found)


GB = 1e9
PCIE = {"gen4": 25 * GB, "gen5": 55 * GB}
"""Bytes/s of a copy between pinned host memory and the device; data sheets say 32 and 64."""


def _cluster(name: str, network: float, pcie: str, hot_over_cold: float) -> Machine:
    """A cluster of nodes with 8 GPUs that NVSwitch joins, and a network card for each GPU."""
    gpu, copy = GPUS[name], TimeCurve(((1e6, 1e6 / PCIE[pcie] + 1e-5), (1e9, 1e9 / PCIE[pcie])))
    peaks = {"bfloat16": gpu.peak_flops, "float16": gpu.peak_flops, "float32": gpu.float32_flops}
    return Machine(
        name=name,
        key={},
        source="data sheet",
        memory_bytes=gpu.torch_gib * 2**30,
        peak_flops=peaks | ({"float8": gpu.float8_flops} if gpu.float8_flops else {}),
        stream_bytes_per_second=0.88 * gpu.bandwidth,  # what a copy reaches
        launch_seconds=3e-6,
        host_op_seconds=5e-6,
        multiprocessors=gpu.units,
        matmul_rate=gpu.matmul_flops / gpu.peak_flops,
        copy={"h2d": copy, "d2h": copy},
        links=(GpuLink("nvlink", 8, 0.8 * gpu.link, 6e-6), GpuLink("network", 0, 0.9 * network, 2e-5)),
        overhead={"cuda_context": 0.5 * 2**30, "nccl": 0.5 * GB, "workspace": 64.0 * 2**20},
        hot_over_cold=hot_over_cold,
        gpus_per_node=8,
        watts=gpu.watts,
    )


CLUSTERS: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _cluster("a100-80g", 25 * GB, "gen4", 1.0),
        _cluster("h100", 50 * GB, "gen5", 0.9),  # 700 W do not carry the highest clock
        _cluster("h200", 50 * GB, "gen5", 0.9),
        _cluster("b200", 50 * GB, "gen5", 0.9),
    )
}
"""The figures of `zero2all.estimate.gpus` with a network (one direction, per GPU)."""


def named_cluster(name: str) -> Machine:
    """A cluster by its name; an unknown one gets no guess."""
    if name not in CLUSTERS:
        raise UsageError(
            f"There is no cluster {name}; known: {', '.join(CLUSTERS)}. "
            "For another machine run `z2a perf calibrate` on it and give the file with --profile."
        )
    return CLUSTERS[name]
