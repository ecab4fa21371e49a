"""`fused`, `memory` and `step`: what training costs, in bytes and in milliseconds."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from canvas import MARGIN, SMALL, WIDTH, Canvas, Theme
from example import Example
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero2all.config import load_config
from zero2all.estimate.floors import operator_work
from zero2all.estimate.memory import GIB, MemoryEstimate, MemorySettings, estimate_memory
from zero2all.measure.operators import make_case
from zero2all.model.config import parameter_counts
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import OPERATORS, footprints, resolve

LARGE_MODEL = str(Path(__file__).parents[2] / "benchmarks" / "z2all-1b-adamw.yaml")
"""What was measured on an H200."""
TOKENS = 256
BF16_BYTES = 2


# ---- fused -----------------------------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """What one operation of torch reads from memory and writes to it, in bytes per token."""

    operation: str
    read: float
    written: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.read + self.written


class TrafficCounter(TorchDispatchMode):
    """Notes the tensors that go into and come out of every operation that touches memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Traffic] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        moved = Traffic(str(func).split(".")[1], _bytes_of((args, kwargs)) / TOKENS, _bytes_of(result) / TOKENS)
        if not func.is_view and moved.total:
            self.seen.append(moved)
        return result


def _bytes_of(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def fused(_: Example, theme: Theme) -> Canvas:
    """The operations of RMSNorm with what each moves, beside one kernel; the same sums for three operators."""
    seen, least = _eager_traffic("rms_norm"), _least_traffic("rms_norm")
    model, eager = load_config(LARGE_MODEL).model, sum(map(_total, seen))
    canvas = Canvas(
        theme,
        450,
        f"One kernel instead of {len(seen)}: a fused RMSNorm moves {eager / least:.1f} times fewer bytes",
        f"Memory traffic per token of a model {model.hidden_size:,} wide, in bfloat16. The arithmetic is the same.",
    )
    scale, left = 11.0, MARGIN + 96.0
    y = 92.0
    canvas.text(MARGIN, y, f"One operation at a time: {_kilobytes(eager)}", weight="bold")
    for number, each in enumerate(seen):
        _draw_traffic(canvas, each, left, y + 28 + number * 24, scale)
    y += 28 + len(seen) * 24 + 16
    canvas.text(MARGIN, y, f"One fused kernel: {_kilobytes(least)}", weight="bold")
    _draw_traffic(canvas, Traffic("rms_norm", least / 2, least / 2), left, y + 28, scale)
    x = canvas.text(MARGIN + 96, y + 56, "read from memory", size=SMALL, colour=theme.blue) + 16
    canvas.text(x, y + 56, "written to memory", size=SMALL, colour=theme.orange)
    _draw_sums(canvas, 430, 92)
    return canvas


NAMES = {"_to_copy": "convert", "pow": "square", "rsqrt": "1 / root", "mul": "multiply", "rms_norm": "all of it"}


def _draw_traffic(canvas: Canvas, moved: Traffic, x: float, y: float, scale: float) -> None:
    """A bar: what is read, then what is written."""
    theme = canvas.theme
    name = NAMES.get(moved.operation, moved.operation)
    canvas.text(x - 8, y, name, size=SMALL, colour=theme.faint, align="right")
    canvas.box(x, y - 8, max(1.0, moved.read / 1024 * scale), 16, theme.blue, round_by=0)
    x += max(1.0, moved.read / 1024 * scale)
    canvas.box(x, y - 8, max(1.0, moved.written / 1024 * scale), 16, theme.orange, round_by=0)
    canvas.text(x + moved.written / 1024 * scale + 6, y, _kilobytes(moved.total), size=SMALL, colour=theme.faint)


def _draw_sums(canvas: Canvas, x: float, y: float) -> None:
    """Eager and fused, for every operator that memory limits."""
    theme, width = canvas.theme, WIDTH - MARGIN - x
    canvas.text(x, y, "Three operators, forward pass", weight="bold")
    names = {"rms_norm": "RMSNorm", "rope": "RoPE", "swiglu": "SwiGLU"}
    most = max(sum(map(_total, _eager_traffic(name))) for name in names)
    for number, (name, shown) in enumerate(names.items()):
        at = y + 32 + number * 88
        eager, least = sum(map(_total, _eager_traffic(name))), _least_traffic(name)
        canvas.text(x, at, shown)
        canvas.text(WIDTH - MARGIN, at, f"{eager / least:.1f} × fewer bytes", colour=theme.green, align="right")
        for line, (value, colour) in enumerate(((eager, theme.faint), (least, theme.green))):
            size = width * value / most
            bar = at + 14 + line * 26
            canvas.box(x, bar, size, 20, colour, round_by=2)
            label = f"{('eager', 'fused')[line]} {_kilobytes(value)}"
            if size > 90:
                canvas.text(x + 6, bar + 10, label, size=SMALL, colour=theme.on_colour)
            else:
                canvas.text(x + size + 6, bar + 10, label, size=SMALL, colour=theme.faint)


@cache
def _eager_traffic(name: str) -> list[Traffic]:
    """Run an operator's plain implementation, and count."""
    case = make_case(name, load_config(LARGE_MODEL).model, 1, TOKENS, torch.device("cpu"))
    eager = next(one for one in OPERATORS[name] if one.name == "eager").function
    inputs = [given.bfloat16() for given in case.inputs]
    with torch.no_grad(), TrafficCounter() as counter:
        case.call(eager, inputs)
    return counter.seen


def _least_traffic(name: str) -> float:
    """Bytes per token that any implementation must move, and a fused kernel does."""
    return operator_work(load_config(LARGE_MODEL).model, TOKENS, TOKENS, BF16_BYTES)[name].forward_bytes / TOKENS


def _total(moved: Traffic) -> float:
    return moved.total


def _kilobytes(count: float) -> str:
    return f"{count / 1024:.0f} KiB" if count >= 512 else f"{count:.0f} bytes"


# ---- memory ----------------------------------------------------------------------------------------------------------

ON_A_GPU = {
    "attention": "sdpa_cudnn",
    "rope": "triton",
    "rms_norm": "triton",
    "swiglu": "triton",
    "linear": "fp32_wgrad",
    "linear_cross_entropy": "triton",
    "optimizer": "triton",
    "embedding": "triton",
}
"""What `ops: auto` takes on an H200."""
PART_NAMES = {"optimizer": "optimizer moments", "masters": "masters"}


def memory(example: Example, theme: Theme) -> Canvas:
    """Stacked bars of the estimate, for one model in four settings; and for the quickstart."""
    model, small = load_config(LARGE_MODEL).model, example.config
    usual = MemorySettings(2048, 16, footprints(ON_A_GPU))
    runs = {
        "16 rows of 2,048 tokens (measured on an H200: 53.7 GiB)": usual,
        "4 rows": dataclasses.replace(usual, micro_batch_samples=4),
        "16 rows, recompute: full": dataclasses.replace(usual, recompute="full"),
        "16 rows, 8 GPUs, zero: 2": dataclasses.replace(usual, zero=2, shard=8),
    }
    estimates = {name: estimate_memory(model, settings) for name, settings in runs.items()}
    canvas = Canvas(
        theme,
        430,
        "Where the memory goes: state is fixed, activations grow with the batch",
        f"{parameter_counts(model)['total'] / 1e9:.2f} B parameters in bfloat16 with AdamW, estimated by the planner.",
    )
    widest = max(estimate.total for estimate in estimates.values())
    for number, (name, estimate) in enumerate(estimates.items()):
        _draw_memory(canvas, name, estimate, widest, 84 + number * 56)
    own = MemorySettings(
        small.data.seq_len,
        small.samples_per_step if small.train.micro_batch_samples == "auto" else small.train.micro_batch_samples,
        resolve(OpsConfig(), "cpu").footprints,
        precision=small.train.precision,
    )
    y = 84 + len(runs) * 56 + 12
    canvas.line([(MARGIN, y - 8), (WIDTH - MARGIN, y - 8)])
    estimate = estimate_memory(small.model, own)
    name = f"the quickstart: {parameter_counts(small.model)['total'] / 1e6:.2f} M parameters in float32, on a CPU"
    _draw_memory(canvas, name, estimate, estimate.total * 1.12, y + 4)
    _draw_legend(canvas, y + 66)
    return canvas


def _part_colours(theme: Theme) -> dict[str, str]:
    return {
        "weights": theme.blue,
        "masters": theme.blend(theme.blue, 0.55),
        "gradients": theme.green,
        "optimizer": theme.purple,
        "activations": theme.orange,
        "working space": theme.blend(theme.orange, 0.5),
        "buckets": theme.blend(theme.green, 0.5),
    }


def _draw_memory(canvas: Canvas, name: str, estimate: MemoryEstimate, widest: float, y: float) -> None:
    """One bar, to the scale in which `widest` bytes fill the page."""
    theme, colours = canvas.theme, _part_colours(canvas.theme)
    room = WIDTH - 2 * MARGIN - 66
    canvas.text(MARGIN, y, name, size=SMALL + 0.5)
    x, is_large = float(MARGIN), estimate.total > GIB
    for part in estimate.parts:
        width = room * part.bytes / widest
        label = f"{part.bytes / (GIB if is_large else 2**20):.1f}"
        ink = theme.ink if part.name in ("masters", "working space", "buckets") else theme.on_colour
        label = label if width > 22 else ""
        canvas.box(x, y + 11, width, 26, colours[part.name], label, size=SMALL, round_by=0, text_colour=ink)
        x += width
    total = f"{estimate.total / GIB:.1f} GiB" if is_large else f"{estimate.total / 2**20:.0f} MiB"
    canvas.text(x + 8, y + 24, total, weight="bold")


def _draw_legend(canvas: Canvas, y: float) -> None:
    theme, x = canvas.theme, float(MARGIN)
    for name, colour in _part_colours(theme).items():
        shown = PART_NAMES.get(name, name)
        if x + canvas.text_width(shown, SMALL) + 40 > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 20
        canvas.box(x, y - 6, 12, 12, colour, round_by=2)
        x = canvas.text(x + 17, y, shown, size=SMALL, colour=theme.faint) + 18


# ---- step ------------------------------------------------------------------------------------------------------------

PARTS = {
    "data_wait": "wait for the next rows; a reader thread prepares them two steps ahead",
    "collate": "rows to tensors",
    "forward": "embedding and blocks; activations are kept",
    "loss": "logits and cross-entropy, a part of the rows at a time, with the gradients of the head",
    "backward": "gradients of all blocks, last block first",
    "reduce": "sum over all processes (here: one), and the norm of the gradient",
    "optimizer": "check loss and norm, clip, then AdamW on all parameters at once",
    "other": "between two steps: metrics, checkpoints, guards",
}


def step(example: Example, theme: Theme) -> Canvas:
    """The parts of a step on a line of time, as the run measured them."""
    seconds = _fast_steps(example)
    whole = sum(seconds.values())
    computing = sum(seconds[name] for name in ("forward", "loss", "backward")) / whole
    tokens = example.config.train.tokens_per_step
    canvas = Canvas(
        theme,
        430,
        f"Forward, loss and backward take {computing:.0%} of a step",
        f"{tokens:,} tokens in {1000 * whole:.0f} ms on a CPU: mean of the fastest tenth of the quickstart's steps.",
    )
    colours = _step_colours(theme)
    x, room = float(MARGIN), WIDTH - 2 * MARGIN
    for name, value in seconds.items():
        width = room * value / whole
        label = f"{name} {value / whole:.0%}" if width > 70 else ""
        canvas.box(x, 76, width, 48, colours[name], label, round_by=0, weight="bold")
        x += width
    canvas.text(MARGIN, 138, "0", size=SMALL, colour=theme.faint)
    canvas.text(WIDTH - MARGIN, 138, f"{1000 * whole:.0f} ms", size=SMALL, colour=theme.faint, align="right")
    for number, (name, value) in enumerate(seconds.items()):
        y = 174 + number * 31
        canvas.box(MARGIN, y - 7, 14, 14, colours[name], round_by=2)
        canvas.text(MARGIN + 24, y, name, weight="bold")
        canvas.text(MARGIN + 176, y, _milliseconds(value), align="right")
        canvas.text(
            MARGIN + 192,
            y,
            canvas.shortened(PARTS[name], WIDTH - 2 * MARGIN - 192, SMALL),
            size=SMALL,
            colour=theme.faint,
        )
    return canvas


def _fast_steps(example: Example) -> dict[str, float]:
    """Seconds by part, of the steps that were disturbed least by other programs."""
    whole = example.metrics.series("time/step").value
    fast = np.argsort(whole)[: max(1, len(whole) // 10)]
    return {name: float(example.metrics.series(f"time/{name}").value[fast].mean()) for name in PARTS}


def _step_colours(theme: Theme) -> dict[str, str]:
    small = theme.blend(theme.faint, 0.6)
    named = {"forward": theme.blue, "loss": theme.green, "backward": theme.orange, "optimizer": theme.purple}
    return {name: named.get(name, small) for name in PARTS}


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 0.1 else f"{value:.2f} ms"
