"""Which sizes of a model a GPU computes fast, and why: six rules, tiles and waves.

The six rules are those of Anthony et al. 2024 (The Case for Co-Designing Model Architectures with Hardware). All but
the fifth follow from how a matrix product runs: its result is cut into tiles, which the multiprocessors compute in
waves (`zero2all.estimate.floors`), and values are read 128 bytes at a time. A wave of few tiles takes as long as a full
one, so time over a size is a staircase.

Legend: b samples, s tokens of a sequence, h hidden width, f inner width, a heads, t tensor ranks, p pipeline stages.
"""

import math
from dataclasses import dataclass

from zero2all.estimate.floors import linear_shapes, tiling
from zero2all.estimate.machine import Machine
from zero2all.model.config import ModelConfig

TILE = (128, 256)
"""Rows and columns of the tile that large products use on A100 and newer (or columns and rows)."""
LINE_BYTES = 128
"""What a multiprocessor reads at once; and 64 values of bfloat16, the depth of a step of a tile."""
ALIGNED_BYTES = 16
"""Rows that start at other multiples cannot be loaded as a block: such products take several times as long."""
FULL_ENOUGH = 0.9
"""Least tile x wave efficiency that rule 2 accepts."""


def filled(m: int, n: int, multiprocessors: int) -> float:
    """Tile x wave efficiency of an (m, n) result, with the tile upright or lying, whichever fits better."""
    both = (tiling(m, n, multiprocessors, *tile) for tile in (TILE, TILE[::-1]))
    return max(one.tile_efficiency * one.wave_efficiency for one in both)


@dataclass(frozen=True)
class SizingRule:
    """One sizing rule."""

    number: int
    rule: str
    why: str


RULES = (
    SizingRule(
        1,
        "The vocabulary is a multiple of 64 t; of 128 t on Hopper and newer.",
        "The head is the largest product. With 64,321 columns instead of 64,320 it was five to seven times slower on "
        "an H200, because rows that do not start at multiples of 16 bytes cannot be loaded as blocks.",
    ),
    SizingRule(
        2,
        "The micro-batch b is as large as memory allows, and b s fills whole waves.",
        "b s is a side of every result. More tokens make more blocks, so that the idle rest of the last wave is a "
        "smaller share; and they read each weight once for more work.",
    ),
    SizingRule(
        3,
        "b s, the head width h / a, h / t and f / t are multiples of 64 values of 16 bits (128 bytes).",
        "A tile is a multiple of that in each direction, also along the sum; what is left over is computed and thrown "
        "away. More than 64 brings nothing.",
    ),
    SizingRule(
        4,
        "Heads and kv heads are multiples of t, and b a / t is whole.",
        "Each rank attends with whole heads. Where they cannot be divided, a run does not start, or copies kv heads.",
    ),
    SizingRule(
        5,
        "t is as small as possible.",
        "Tensor ranks exchange activations in every layer and cut every product into smaller ones. A product still "
        "takes longer than its exchange while t is below f x bytes/s of the link / FLOP/s.",
    ),
    SizingRule(
        6, "The layers are a multiple of the pipeline stages p.", "All stages wait for the one with the most layers."
    ),
)


@dataclass(frozen=True)
class Shape:
    """What the rules look at: a model and how a micro-batch of it is spread."""

    model: ModelConfig
    samples: int
    seq_len: int
    tensor: int = 1
    stages: int = 1  # of all pipeline ranks together: ranks x chunks
    copies_kv_heads: bool = False
    value_bytes: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.samples * self.seq_len

    @property
    def multiple(self) -> int:
        """Values in 128 bytes."""
        return LINE_BYTES // self.value_bytes


@dataclass(frozen=True)
class ShapeFinding:
    """One size against one rule."""

    rule: int
    what: str  # the size, as the config names it
    value: str
    is_kept: bool
    says: str  # what keeps or breaks the rule
    nearest: str = ""  # the nearest value that keeps it; empty where it is kept


def check_shape(shape: Shape, machine: Machine) -> list[ShapeFinding]:
    """Every size against its rule, in the order of the rules."""
    return [
        _vocabulary(shape, machine),
        _micro_batch(shape, machine),
        *_widths(shape),
        *_heads(shape),
        _tensor_ranks(shape, machine),
        _layers(shape),
    ]


def _vocabulary(shape: Shape, machine: Machine) -> ShapeFinding:
    model, ranks = shape.model, shape.tensor
    is_hopper = "float8" in machine.peak_flops  # Hopper was the first to multiply 8-bit floats
    multiple = (128 if is_hopper else 64) * ranks
    rows = model.vocab_rows
    says = f"{rows:,} rows (padded) = {rows / multiple:g} x {multiple}"
    nearest = math.ceil(model.vocab_ids / multiple) * multiple
    return _finding(1, "model.vocab_size", f"{model.vocab_ids:,}", rows % multiple == 0, says, f"{nearest:,}")


def pass_efficiency(shape: Shape, samples: int, multiprocessors: int) -> float:
    """Tile x wave efficiency of the forward products of a block, each weighted by its arithmetic."""
    done = needed = 0.0
    for name, (rows, columns) in linear_shapes(shape.model).items():
        if shape.model.moe.experts and name in ("gate_up", "down"):
            continue  # how many rows an expert gets changes with every pass
        is_split_along_rows = name in ("qkv", "gate_up")  # the other two are split along what is summed over
        rows, columns = (rows // shape.tensor, columns) if is_split_along_rows else (rows, columns // shape.tensor)
        work = float(samples * shape.seq_len) * rows * columns
        needed += work
        done += work / filled(samples * shape.seq_len, max(1, rows), multiprocessors)
    return needed / done


def _micro_batch(shape: Shape, machine: Machine) -> ShapeFinding:
    value, what = f"{shape.samples} x {shape.seq_len:,}", "train.micro_batch_samples"
    if not machine.multiprocessors:
        return ShapeFinding(2, what, value, True, "a CPU has no waves")
    efficiency = pass_efficiency(shape, shape.samples, machine.multiprocessors)
    says = f"{100 * efficiency:.1f} % of the waves of a block's products are filled ({machine.multiprocessors} SMs)"
    others = sorted(range(1, 8 * shape.samples + 1), key=lambda each: (abs(each - shape.samples), -each))
    full = (each for each in others if pass_efficiency(shape, each, machine.multiprocessors) >= FULL_ENOUGH)
    nearest = next(full, None)
    words = f"{nearest}" if nearest else f"none up to {8 * shape.samples}: the matrices are too small for this GPU"
    return _finding(2, what, value, efficiency >= FULL_ENOUGH, says, words)


def _widths(shape: Shape) -> list[ShapeFinding]:
    model, ranks, multiple = shape.model, shape.tensor, shape.multiple
    sizes = [
        ("data.seq_len", shape.seq_len, shape.tokens, 1, "b s"),
        ("model.head_dim", model.head_size, model.head_size, 1, "h / a"),
        ("model.hidden_size", model.hidden_size, model.hidden_size, ranks, "h / t"),
    ]
    if model.expert_layers < model.layers:
        sizes.append(("model.intermediate_size", model.intermediate_size, model.intermediate_size, ranks, "f / t"))
    if model.moe.experts:
        sizes.append(("model.moe.expert_size", model.moe.expert_size, model.moe.expert_size, 1, "f (expert)"))
    found = []
    for what, value, size, parts, symbol in sizes:
        part = size / parts
        says = f"{symbol} = {part:g} = {part / multiple:g} x {multiple}"
        if part * shape.value_bytes % ALIGNED_BYTES:
            says = f"{symbol} = {part:g}: rows do not start at multiples of {ALIGNED_BYTES} bytes"
        nearest = max(1, round(value / (multiple * parts))) * multiple * parts
        found.append(_finding(3, what, f"{value:,}", part % multiple == 0, says, f"{nearest:,}"))
    return found


def _heads(shape: Shape) -> list[ShapeFinding]:
    heads, kv, ranks = shape.model.heads, shape.model.kv_heads, shape.tensor
    nearest = f"parallel.tensor {nearest_divisor(math.gcd(heads, kv), ranks)}"
    is_copied = shape.copies_kv_heads and ranks % kv == 0
    says = f"{ranks // kv} ranks have a copy of each kv head" if is_copied and ranks > kv else f"{kv / ranks:g} a rank"
    return [
        _finding(4, "model.heads", f"{heads}", heads % ranks == 0, f"{heads / ranks:g} a rank", nearest),
        _finding(4, "model.kv_heads", f"{kv}", kv % ranks == 0 or is_copied, says, nearest),
    ]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, the smaller of two."""
    divisors = (each for each in range(1, number + 1) if number % each == 0)
    return min(divisors, key=lambda each: (abs(each - wanted), each))


def _tensor_ranks(shape: Shape, machine: Machine) -> ShapeFinding:
    ranks, what = shape.tensor, "parallel.tensor"
    if ranks == 1:
        return ShapeFinding(5, what, "1", True, "no activations are exchanged")
    if not machine.links:
        return ShapeFinding(5, what, f"{ranks}", False, f"{machine.name} has no link between GPUs", "1")
    inner = shape.model.moe.expert_size if shape.model.moe.experts else shape.model.intermediate_size
    link = machine.links[0]
    most = inner * link.bytes_per_second / machine.rate_of("bfloat16")
    says = (
        f"below {most:.1f} = {inner} x {link.bytes_per_second / 1e9:.0f} GB/s / "
        f"{machine.rate_of('bfloat16') / 1e12:.0f} TFLOPS, and {machine.gpus_per_node} GPUs in a node"
    )
    is_kept = ranks < most and ranks <= machine.gpus_per_node
    fits = [each for each in (1, 2, 4, 8, 16) if each < most and each <= machine.gpus_per_node]
    return _finding(5, what, f"{ranks}", is_kept, says, f"{max(fits, default=1)}")


def _layers(shape: Shape) -> ShapeFinding:
    layers, stages = shape.model.layers, shape.stages
    nearest = max(1, round(layers / stages)) * stages
    says = f"{layers / stages:g} a stage" + ("" if stages == 1 else f", {stages} stages")
    return _finding(6, "model.layers", f"{layers}", layers % stages == 0, says, f"{nearest}")


def _finding(rule: int, what: str, value: str, is_kept: bool, says: str, nearest: str) -> ShapeFinding:
    return ShapeFinding(rule, what, value, is_kept, says, "" if is_kept else nearest)
