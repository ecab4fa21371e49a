"""(batch, seq, hidden) against (seq, batch, hidden): which order of the residual's axes trains faster?

    python benchmarks/layout.py                        z2all-1b's micro-batch, a minute on one GPU
    python benchmarks/layout.py --batch 2x2048x1       another one

Linear layers, norms and SwiGLU see rows, and do not know in which order the rows come. What differs is what rope and
attention are handed: in the first order the positions of one sequence and head lie heads x width apart, in the second
batch x heads x width. Each piece is timed alone, forward and backward, then one whole block of the model.
Legend: B batch, T positions, C width, Hq and Hk heads, D head width.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.machine import BILLION, environment, save_result
from zero2all.common.progress import say, show_log
from zero2all.config import RunConfig
from zero2all.measure.clock import seconds_of
from zero2all.model.config import ModelConfig
from zero2all.model.rope import rope_tables
from zero2all.ops.registry import Ops, resolve
from zero2all.parallel.device import pick_device
from zero2all.predict.batch import BatchShape, load_measured_config, own_batch, parse_batch
from zero2all.train.build import op_context
from zero2all.train.state import DTYPES

BATCH_FIRST, SEQUENCE_FIRST = "batch, seq, hidden", "seq, batch, hidden"
AGREE_WITHIN = 0.05
"""Relative difference of the two orders' outputs that rounding explains."""

Piece = Callable[[list[Tensor]], Tensor]


class Layout:
    """The pieces of a block with the residual in one order of axes."""

    def __init__(self, name: str, config: ModelConfig, ops: Ops, batch: BatchShape, device: torch.device) -> None:
        self.name, self.config, self.ops = name, config, ops
        self.B, self.T = batch.samples, batch.seq_len
        cos, sin = rope_tables(config, self.T, device)
        if name == SEQUENCE_FIRST:  # rows are (position, sample): every sample of a position has the same angle
            cos, sin = (table.repeat_interleave(self.B, dim=0).unsqueeze(0) for table in (cos, sin))
        self.cos, self.sin = cos, sin

    def residual(self, batch_first: Tensor) -> Tensor:
        """(B, T, …) in this order, contiguous."""
        return batch_first if self.name == BATCH_FIRST else batch_first.transpose(0, 1).contiguous()

    def norm(self, given: list[Tensor]) -> Tensor:
        """Add and norm; the sum of both results, so that both have gradients."""
        x, branch, weight = given
        normed, total = self.ops.rms_norm(x, branch, weight, self.config.rms_norm_eps)
        return normed + total

    def linear(self, given: list[Tensor]) -> Tensor:
        """The qkv projection."""
        y: Tensor = self.ops.linear(given[0], given[1], None)
        return y

    def feed_forward(self, given: list[Tensor]) -> Tensor:
        """Gate, up, SwiGLU, down."""
        y: Tensor = self.ops.feed_forward(given[0], (given[1], None), (given[2], None))
        return y

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projection's output -> query, key and value as (B, H, T, D) views, the first two turned."""
        config = self.config
        if self.name == BATCH_FIRST:
            rows = qkv.view(self.B, self.T, -1, config.head_size)
            query, key, value = self.ops.rope(rows, self.cos, self.sin, config.heads, config.kv_heads)
            return query, key, value
        rows = qkv.view(1, self.T * self.B, -1, config.head_size)
        turned = self.ops.rope(rows, self.cos, self.sin, config.heads, config.kv_heads)  # (1, H, T * B, D)
        query, key, value = (each[0].unflatten(1, (self.T, self.B)).permute(2, 0, 1, 3) for each in turned)
        return query, key, value

    def rope(self, given: list[Tensor]) -> Tensor:
        """Rotary positions alone, reduced so that every head has a gradient."""
        # A copy, because rope may overwrite what it is given; it costs the same in both orders.
        return torch.cat([each.flatten() for each in self.heads(given[0].clone())])

    def attention(self, given: list[Tensor]) -> Tensor:
        """Attention on heads with this order's strides, to the rows that the output projection reads."""
        query, key, value = (self._strided(each) for each in given)
        return self._rows(self.ops.attention(query, key, value, 0.0, None))

    def _strided(self, rows: Tensor) -> Tensor:
        """(B, T, H, D) or (T, B, H, D) -> a (B, H, T, D) view."""
        return rows.transpose(1, 2) if self.name == BATCH_FIRST else rows.permute(1, 2, 0, 3)

    def _rows(self, mixed: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, C) or (T, B, C)."""
        order = (0, 2, 1, 3) if self.name == BATCH_FIRST else (2, 0, 1, 3)
        return mixed.permute(*order).flatten(2)

    def block(self, given: list[Tensor]) -> Tensor:
        """A whole block: residual, branch, two norms, four matrices."""
        x, branch, first, second, qkv, out, gate_up, down = given
        normed, x = self.ops.rms_norm(x, branch, first, self.config.rms_norm_eps)
        query, key, value = self.heads(self.ops.linear(normed, qkv, None))
        mixed = self._rows(self.ops.attention(query, key, value, 0.0, None))
        normed, x = self.ops.rms_norm(x, self.ops.linear(mixed, out, None), second, self.config.rms_norm_eps)
        y: Tensor = x + self.ops.feed_forward(normed, (gate_up, None), (down, None))
        return y


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=BILLION, help="a preset or the path of a YAML file")
    parser.add_argument("--batch", default=None, help="SAMPLESxSEQUENCExANY (default: the config's own micro-batch)")
    parser.add_argument("--seconds", type=float, default=1.0, help="least seconds per figure (default 1)")
    parser.add_argument("--no-save", action="store_true", help="leave benchmarks/results alone")
    arguments = parser.parse_args()
    config, _ = load_measured_config(arguments.config, [])
    batch = own_batch(config) if arguments.batch is None else parse_batch(arguments.batch)
    found = compare(config, batch, arguments.seconds)
    print(f"{'piece':<14} {BATCH_FIRST + ' ms':>24} {SEQUENCE_FIRST + ' ms':>24} {'second / first':>15}")
    for name, (first, second) in found.items():
        print(f"{name:<14} {1e3 * first:24.3f} {1e3 * second:24.3f} {second / first:15.3f}")
    if not arguments.no_save:
        pieces = {name: {BATCH_FIRST: first, SEQUENCE_FIRST: second} for name, (first, second) in found.items()}
        save_result("layout", {"batch": str(batch), "environment": environment(), "seconds": pieces})


def compare(config: RunConfig, batch: BatchShape, least_seconds: float) -> dict[str, tuple[float, float]]:
    """Piece -> seconds of forward and backward in either order."""
    device, dtype = pick_device(config.parallel.device), DTYPES[config.train.precision]
    ops = resolve(config.ops, op_context(config, device.type, dtype))
    for note in ops.notes():
        say(note)
    orders = [Layout(name, config.model, ops, batch, device) for name in (BATCH_FIRST, SEQUENCE_FIRST)]
    check_agreement(orders, device, dtype)
    found: dict[str, tuple[float, float]] = {}
    for piece in ("norm", "linear", "feed_forward", "rope", "attention", "block"):
        say(f"layout: {piece}")
        # A/B/A: the first order again after the second, so that a slowing card favours neither.
        first, second, again = (
            seconds_of(forward_and_backward(order, piece, device, dtype), device, least_seconds)
            for order in (orders[0], orders[1], orders[0])
        )
        found[piece] = ((first + again) / 2, second)
    return found


def forward_and_backward(order: Layout, piece: str, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """A call that does both on inputs made for it."""
    inputs = [value.requires_grad_() for value in piece_inputs(order, piece, device, dtype)]
    function: Piece = getattr(order, piece)
    direction = torch.randn_like(function(inputs))

    def call() -> None:
        torch.autograd.grad(function(inputs), inputs, direction)

    return call


def piece_inputs(order: Layout, piece: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Inputs of a piece; the same values in either order."""
    config = order.config
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * std).to(dtype)

    B, T, C, F, D = order.B, order.T, config.hidden_size, config.intermediate_size, config.head_size
    wide = (config.heads + 2 * config.kv_heads) * D

    def residual() -> Tensor:
        return order.residual(normal(B, T, C))

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, std=config.matrix_std)

    def gain() -> Tensor:
        return torch.ones(C, dtype=dtype, device=device)

    if piece == "norm":
        return [residual(), residual(), gain()]
    if piece == "linear":
        return [residual(), matrix(wide, C)]
    if piece == "feed_forward":
        return [residual(), matrix(2 * F, C), matrix(C, F)]
    if piece == "rope":
        return [order.residual(normal(B, T, wide))]
    if piece == "attention":
        return [order.residual(normal(B, T, heads, D)) for heads in (config.heads, config.kv_heads, config.kv_heads)]
    matrices = [matrix(wide, C), matrix(C, config.heads * D), matrix(2 * F, C), matrix(C, F)]
    return [residual(), residual(), gain(), gain(), *matrices]


def check_agreement(orders: list[Layout], device: torch.device, dtype: torch.dtype) -> None:
    """Rope and attention must say the same in both orders, else the comparison is of two different things."""
    with torch.no_grad():
        turned = [order.heads(piece_inputs(order, "rope", device, dtype)[0]) for order in orders]
        mixed = [order.attention(piece_inputs(order, "attention", device, dtype)) for order in orders]
    pairs = [*zip(*turned, strict=True), (mixed[0], mixed[1].transpose(0, 1))]
    for first, second in pairs:
        difference = float((first.float() - second.float()).norm() / first.float().norm())
        assert difference < AGREE_WITHIN, f"the two orders differ by {difference:.3g}"


if __name__ == "__main__":
    show_log()
    main()
