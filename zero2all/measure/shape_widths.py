"""`z2a perf shapes`: the widths of SwiGLU measured on this device, and the picture of tiles and waves.

Each product is timed as training runs it: at the micro-batch's number of tokens, with random values (zeros are faster),
and with a cache emptied before each call, because in a step other products have used it since. The time of emptying is
measured alone and subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.common.progress import say
from zero2all.config import RunConfig
from zero2all.estimate.machine import Machine
from zero2all.estimate.run.batch import own_batch
from zero2all.estimate.run.pictures import write_png
from zero2all.estimate.shapes import (
    IDEAL_RATIO,
    Product,
    Shape,
    WidthTime,
    best_width,
    filled,
    pass_efficiency,
    swiglu_products,
    width_time,
)
from zero2all.track.plot import COLORS, FAINT_INK, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
"""More than the caches hold: 50 MB on an H100, 126 MB on a B200."""
LEAST_SECONDS = 0.02
"""Of each product; the shortest that gives ten calls of a large one."""
CPU_TOKENS = 256
"""On a CPU a whole micro-batch would take minutes for each product."""
VALUE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def shape_of(config: RunConfig) -> Shape:
    """What the rules look at in a config."""
    batch, parallel = own_batch(config), config.parallel
    return Shape(
        model=config.model,
        samples=batch.samples,
        seq_len=batch.seq_len // parallel.context,
        tensor=parallel.tensor,
        stages=parallel.pipeline * parallel.chunks,
        copies_kv_heads=parallel.copy_kv_heads,
        value_bytes=VALUE_BYTES[config.train.precision],
    )


@dataclass(frozen=True)
class MeasuredWidths:
    """What a device needs for the products of each width."""

    device: str
    tokens: int  # of the micro-batch; on a CPU fewer
    rows: list[WidthTime]


def measure_shape(
    config: RunConfig, shape: Shape, widths: list[int], seconds: float, each: Callable[[MeasuredWidths], None]
) -> MeasuredWidths:
    """Time the six products of each width on the config's device, those nearest to 8/3 h first, until `seconds` are
    over; `each` gets what was found after every width."""
    import torch  # the rules and the picture need none of it

    from zero2all.measure.calibration.figures import operands
    from zero2all.measure.op_bench import seconds_of
    from zero2all.measure.step_timer import device_name
    from zero2all.parallel.device import pick_device
    from zero2all.train.state import DTYPES

    device, hidden, dtype = pick_device(config.parallel.device), shape.model.hidden_size, DTYPES[config.train.precision]
    tokens = shape.tokens if device.type == "cuda" else min(shape.tokens, CPU_TOKENS)
    ends = time.perf_counter() + seconds
    flush = torch.empty(FLUSH_BYTES[device.type], dtype=torch.uint8, device=device)
    alone = seconds_of(flush.zero_, device, LEAST_SECONDS)

    def seconds_of_product(one: Product) -> float:
        a, b = operands(one.kind, one.m, one.n, one.k, dtype, device)
        out = torch.empty(one.m, one.n, dtype=dtype, device=device)

        def call() -> None:
            flush.zero_()
            torch.mm(a, b, out=out)

        return max(seconds_of(call, device, LEAST_SECONDS) - alone, 1e-9)

    found = MeasuredWidths(device_name(device), tokens, [])
    order = sorted(widths, key=lambda width: abs(width - IDEAL_RATIO * hidden))
    for number, width in enumerate(order):
        if time.perf_counter() >= ends:
            say(f"perf shapes: {seconds:g} s are over; {len(order) - number} widths were not measured (--seconds)")
            break
        products = swiglu_products(tokens, hidden, width // shape.tensor)
        times = tuple(map(seconds_of_product, products))
        found.rows.append(width_time(width, shape.tensor, products, times, dtype.itemsize, is_measured=True))
        found.rows.sort(key=lambda row: row.width)
        each(found)
    return found


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw_shapes(shape: Shape, machine: Machine, rows: list[WidthTime], png: Path) -> str:
    """Write the picture; returns its path, or why there is none."""

    def draw(figure: Figure) -> None:
        _draw_staircase(figure.add_subplot(1, 3, 1), shape, machine, rows)
        _draw_rates(figure.add_subplot(1, 3, 2), rows, best_width(rows, shape.model.hidden_size))
        _draw_passes(figure.add_subplot(1, 3, 3), shape, machine)

    tiles = f"{machine.multiprocessors} SMs, tiles of 128 x 256 (efficiency: tile x wave)"
    return write_png(png, (14.0, 4.2), draw, f"{machine.name}, {tiles}, h = {shape.model.hidden_size:,}")


def _draw_staircase(axis: Axes, shape: Shape, machine: Machine, rows: list[WidthTime]) -> None:
    hidden, step = shape.model.hidden_size, 8 * shape.tensor

    def percent(width: int) -> float:
        return 100 * filled(shape.tokens, 2 * (width // shape.tensor), machine.multiprocessors)

    every = range(int(0.8 * IDEAL_RATIO * hidden) // step * step or step, int(1.2 * IDEAL_RATIO * hidden), step)
    axis.plot(list(every), [percent(width) for width in every], color=COLORS[0], linewidth=1.2)
    axis.plot([row.width for row in rows], [percent(row.width) for row in rows], "o", color=COLORS[1], markersize=4)
    axis.axvline(IDEAL_RATIO * hidden, color=FAINT_INK, linewidth=0.8, linestyle="--")
    axis.set_title(f"Gate and up, {shape.tokens:,} tokens: efficiency, %")
    axis.set_xlabel("width f (dashed: 8/3 h; dots: widths compared)")


def _draw_rates(axis: Axes, rows: list[WidthTime], chosen: WidthTime) -> None:
    for row in rows:
        color = COLORS[2] if row is chosen else COLORS[0] if row.is_aligned else COLORS[1]
        axis.plot([row.width], [row.tflops], "o", color=color, markersize=6)
    axis.annotate(
        f"{chosen.width}", (chosen.width, chosen.tflops), xytext=(4, 4), textcoords="offset points", color=INK
    )
    axis.margins(0.06, 0.25)
    how = "measured" if chosen.is_measured else "by arithmetic"
    axis.set_title(f"Six products of a SwiGLU, TFLOPS ({how})")
    axis.set_xlabel("width f (green: advised; orange: rows not aligned)")


def _draw_passes(axis: Axes, shape: Shape, machine: Machine) -> None:
    samples = range(1, max(16, 4 * shape.samples) + 1)
    values = [100 * pass_efficiency(shape, each, machine.multiprocessors) for each in samples]
    axis.step(list(samples), values, where="mid", color=COLORS[0], linewidth=1.2)
    axis.plot([shape.samples], [values[shape.samples - 1]], "o", color=COLORS[1], markersize=6)
    axis.set_title("Products of a block: efficiency, %")
    axis.set_xlabel(f"samples of {shape.seq_len:,} tokens in a micro-batch (dot: the config's)")
