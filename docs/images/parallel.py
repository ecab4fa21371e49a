"""Draws `parallel-tensor.png`: which part of every parameter each process holds, from the layout table.

python docs/images/parallel.py          needs matplotlib
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from zero2all.model.config import ModelConfig
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import held_table, layout_table

PICTURE = Path(__file__).with_name("parallel-tensor.png")
MODEL = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=64, layers=1, heads=8, kv_heads=4, max_seq_len=8)
SIZES = MeshSizes(tensor=4)
COLOURS = {"cut": "#2a7de1", "copied": "#e1a32a"}
GAP = 14


def main() -> None:
    """A row for each process, a rectangle for each parameter."""
    figure, rows = plt.subplots(SIZES.processes, 1, figsize=(11, 6.4), dpi=110)
    for rank, axes in enumerate(rows):
        draw(axes, rank)
    figure.suptitle("tensor: 4    blue: cut    yellow: a copy on every rank    grey: held by others", fontsize=11)
    figure.tight_layout()
    figure.savefig(PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def draw(axes: Axes, rank: int) -> None:
    """What one process holds: the outline is the whole parameter, rows downwards."""
    table = layout_table(MODEL)
    at = 0.0
    for one in held_table(table, {each.holder for each in table}, Mesh(SIZES, rank)):
        height, width = one.shape[0], one.shape[1] if len(one.shape) > 1 else 3
        box = one.held
        top, left = box.offsets[0], box.offsets[1] if len(one.shape) > 1 else 0
        held_height, held_width = box.lengths[0], box.lengths[1] if len(one.shape) > 1 else 3
        axes.add_patch(Rectangle((at, -height), width, height, facecolor="#eeeeee", edgecolor="#999999", linewidth=0.6))
        place = (at + left, -top - held_height)
        axes.add_patch(Rectangle(place, held_width, held_height, facecolor=COLOURS[one.spread]))
        if rank == 0:
            name = one.name.removeprefix("blocks.0.").removesuffix(".weight").rpartition(".")[2]
            axes.text(at + width / 2, 6, name.replace("_pairs", "").replace("_", "\n"), ha="center", fontsize=7)
        at += width + GAP
    axes.set_xlim(-6, at)
    axes.set_ylim(-132, 30 if rank == 0 else 4)
    axes.set_ylabel(f"rank {rank}", rotation=0, ha="right", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)


if __name__ == "__main__":
    main()
