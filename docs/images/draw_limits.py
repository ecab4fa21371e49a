"""`phases`, `roofline` and `goodput`: three limits that are easier seen than read, from the functions of estimate/."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from canvas import MARGIN, SMALL, WIDTH, Canvas, Theme, font_families
from draw_costs import LARGE_MODEL, ON_A_GPU
from example import Example
from matplotlib.axes import Axes

from zero2all.config import load_config
from zero2all.estimate.floors import linear_shapes, matmul_bytes, matmul_flops, tiling
from zero2all.estimate.gpus import GPUS, named_card
from zero2all.estimate.memory import GIB, MemoryEstimate, MemorySettings, estimate_memory
from zero2all.estimate.run_calculators import daly_interval
from zero2all.estimate.run_calculators import goodput as share_kept
from zero2all.ops.registry import TAKEN_ON_A_GPU, footprints

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "ops_bench.json"
GPU = "h200"

# ---- phases ----------------------------------------------------------------------------------------------------------

STATES = ("weights", "masters", "gradients", "optimizer")
WIDEST_GIB = 86.0


def phases(_: Example, theme: Theme) -> Canvas:
    """Every phase of a step as a stacked bar against two cards, without and with recomputation."""
    model = load_config(LARGE_MODEL).model
    usual = MemorySettings(
        2048, 16, footprints({**TAKEN_ON_A_GPU, **ON_A_GPU}), workspace_bytes=named_card(GPU).workspace_bytes
    )
    plain = estimate_memory(model, usual)
    again = estimate_memory(model, dataclasses.replace(usual, recompute="full"))
    canvas = Canvas(
        theme,
        508,
        "Peak = what is there all the time + the worst phase",
        "1.26 B parameters, 16 x 2,048 tokens a pass, bfloat16 with AdamW, one GPU. Computed: `z2a perf memory`.",
    )
    left, scale = MARGIN + 142.0, (WIDTH - 2 * MARGIN - 142.0) / WIDEST_GIB
    for card, name in (("a100-40g", "A100, 40 GB"), ("h100", "H100, 80 GB")):
        x = left + scale * named_card(card).memory_bytes / GIB
        canvas.line([(x, 84), (x, 468)], colour=theme.red)
        canvas.text(x - 4, 76, name, size=SMALL, colour=theme.red, align="center")
    _draw_phases(canvas, "recompute: none", plain, left, 96, scale)
    _draw_phases(canvas, "recompute: full", again, left, 286, scale)
    x = float(MARGIN)
    for name, colour in _phase_colours(theme).items():
        canvas.box(x, 482, 12, 12, colour, round_by=2)
        x = canvas.text(x + 17, 488, name, size=SMALL, colour=theme.faint) + 16
    return canvas


def _phase_colours(theme: Theme) -> dict[str, str]:
    return {
        "weights": theme.blue,
        "masters": theme.blend(theme.blue, 0.55),
        "gradients": theme.green,
        "optimizer": theme.purple,
        "saved for backward": theme.orange,
        "working space": theme.blend(theme.orange, 0.5),
    }


def _draw_phases(canvas: Canvas, name: str, estimate: MemoryEstimate, left: float, y: float, scale: float) -> None:
    colours = _phase_colours(canvas.theme)
    states = {part.name: part.bytes for part in estimate.parts if part.name in STATES}
    canvas.text(MARGIN, y + 6, name, weight="bold")
    for number, phase in enumerate(estimate.phases):
        at, x = y + 24 + number * 22, left
        canvas.text(left - 8, at + 8, phase.name, size=SMALL, colour=canvas.theme.faint, align="right")
        for part, size in {**states, "saved for backward": phase.saved, "working space": phase.working}.items():
            width = scale * size / GIB
            canvas.box(x, at, width, 16, colours[part], round_by=0)
            x += width
        is_worst = phase == estimate.worst
        total = f"{(estimate.persistent + phase.bytes) / GIB:.1f} GiB"
        canvas.text(x + 6, at + 8, total, size=SMALL, weight="bold" if is_worst else "normal")


# ---- roofline --------------------------------------------------------------------------------------------------------

TOKENS = (1, 16, 128, 512, 2048)
STAIR_ROWS, STAIR_MOST = 2048, 14000


def roofline(_: Example, theme: Theme) -> Canvas:
    """The ceiling of an H200 with one weight at several numbers of tokens, and the staircase of waves."""
    gpu = GPUS[GPU]
    canvas = Canvas(
        theme,
        440,
        "More tokens for each weight read, and whole waves",
        f"NVIDIA H200: {gpu.peak_flops / 1e12:.0f} TFLOP/s and {gpu.bandwidth / 1e12:.1f} TB/s by its data sheet.",
    )
    first = canvas.chart(76, 96, 292, 272)
    _draw_ceiling(canvas, first)
    canvas.text(76, 78, "Roofline: TFLOP/s over FLOP per byte", weight="bold")
    second = canvas.chart(418, 96, WIDTH - MARGIN - 418 - 24, 272)
    _draw_stairs(canvas, second)
    canvas.text(418, 78, "Tiles and waves over columns of the result", weight="bold")
    outputs, inputs = linear_shapes(load_config(LARGE_MODEL).model)["gate_up"]
    canvas.text(
        MARGIN,
        404,
        f"Left: blue, the gate and up matrix ({inputs:,} x {outputs:,}) at 1 to 2,048 tokens, computed; orange, the "
        "four linear layers at 32,768",
        size=SMALL,
        colour=theme.faint,
    )
    canvas.text(
        MARGIN,
        422,
        f"tokens, forward and backward, measured. Right: {STAIR_ROWS:,} rows, tiles of 128 x 256, {gpu.units} SMs; "
        "computed.",
        size=SMALL,
        colour=theme.faint,
    )
    return canvas


def _draw_ceiling(canvas: Canvas, axes: Axes) -> None:
    theme, gpu = canvas.theme, GPUS[GPU]
    x = np.logspace(-0.5, 4, 200)
    axes.loglog(x, np.minimum(x * gpu.bandwidth, gpu.peak_flops) / 1e12, color=theme.ink, linewidth=2)
    axes.axvline(gpu.ridge, color=theme.faint, linewidth=1, linestyle=":")
    canvas.label(axes, gpu.ridge * 0.85, 2.2, f"ridge {gpu.ridge:.0f}", ha="right")
    shapes = linear_shapes(load_config(LARGE_MODEL).model)
    outputs, inputs = shapes["gate_up"]
    for tokens in TOKENS:
        at = matmul_flops(tokens, outputs, inputs) / matmul_bytes(tokens, outputs, inputs)
        rate = min(at * gpu.bandwidth, gpu.peak_flops) / 1e12
        axes.plot([at], [rate], "o", color=theme.blue, markersize=6)
        is_flat = at > gpu.ridge
        place = (at, 1.45 * rate) if is_flat else (1.4 * at, 0.85 * rate)
        canvas.label(axes, *place, f"{tokens:,}", ha="right" if tokens == TOKENS[-2] else "left")
    for row in json.loads(MEASURED.read_text())["rows"]:
        name = row["operator"].removeprefix("linear/")
        if row["taken_by_auto"] and name in shapes:
            outputs, inputs = shapes[name]
            at = matmul_flops(32768, outputs, inputs) / matmul_bytes(32768, outputs, inputs)
            axes.plot([at], [row["rate"] / 1e12], "s", color=theme.orange, markersize=5)
    axes.set(ylim=(1, 2500))


def _draw_stairs(canvas: Canvas, axes: Axes) -> None:
    theme, units = canvas.theme, GPUS[GPU].units
    widths = np.arange(64, STAIR_MOST, 16)
    found = [tiling(STAIR_ROWS, int(width), units) for width in widths]
    axes.plot(widths, [one.waves for one in found], color=theme.ink, linewidth=2)
    filled = [100 * one.wave_efficiency * one.tile_efficiency for one in found]
    twin = axes.twinx()
    twin.plot(widths, filled, color=theme.blue, linewidth=1.4)
    twin.spines[["top", "right", "left", "bottom"]].set_visible(False)
    twin.tick_params(colors=theme.blue, labelsize=SMALL, length=3, labelfontfamily=font_families())
    twin.set(ylim=(0, 118))
    axes.set(ylim=(0, max(one.waves for one in found) * 1.18))
    canvas.label(axes, 500, max(one.waves for one in found) * 1.12, "waves (left)", colour=theme.ink)
    canvas.label(twin, STAIR_MOST * 0.98, 10, "% of the work that counts (right)", colour=theme.blue, ha="right")


# ---- goodput ---------------------------------------------------------------------------------------------------------

LLAMA_MTBF = 54 * 86400 / 419


def goodput(_: Example, theme: Theme) -> Canvas:
    """The share of time that is kept over the time between two checkpoints, with Daly's interval marked."""
    cases = (
        ("a failure every 5 days; save 40 s, restart 15 min", 5 * 86400.0, 40.0, 900.0, theme.green),
        ("every 3.1 h (16,384 GPUs); save 2 s, restart 5 min", LLAMA_MTBF, 2.0, 300.0, theme.blue),
        ("every 3.1 h; save 60 s, restart 10 min", LLAMA_MTBF, 60.0, 600.0, theme.orange),
    )
    canvas = Canvas(
        theme,
        400,
        "Save too often and saving costs; too rarely and failures cost",
        "Goodput, % of the time that becomes progress, over the training between two checkpoints.",
    )
    axes = canvas.chart(76, 82, WIDTH - MARGIN - 92, 232)
    intervals = np.logspace(np.log10(20), np.log10(12 * 3600), 240)
    y = 346.0
    for number, (name, mtbf, save, restart, colour) in enumerate(cases):
        kept = [100 * share_kept(float(one), save, restart, mtbf) for one in intervals]
        axes.semilogx(intervals / 60, kept, color=colour, linewidth=2.4)
        best = daly_interval(save, mtbf)
        top = 100 * share_kept(best, save, restart, mtbf)
        axes.plot([best / 60], [top], "o", color=colour, markersize=8)
        canvas.box(MARGIN, y - 6 + 18 * number, 12, 12, colour, round_by=2)
        words = f"{name}: best every {best / 60:.1f} min, {top:.1f} %"
        canvas.text(MARGIN + 18, y + 18 * number, words, size=SMALL, colour=theme.faint)
    axes.set(ylim=(20, 101))
    ticks = {0.5: "30 s", 1: "1 min", 5: "5 min", 20: "20 min", 60: "1 h", 240: "4 h", 720: "12 h"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    return canvas
