"""Weights in 8 bits: every row of a matrix as whole numbers from -127 to 127 and one scale.

    scale = max |row| / 127        values = round(row / scale), half to even        row ~ scale * values

Only the matrices of the blocks and the head are stored so. What a token passes through once (embedding, norms, biases)
stays as it is, and so do routers, which choose, and experts, whose matrices one kernel multiplies together. The
arithmetic is that of the activations: float32, or bfloat16 summed in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero2all.infer.weights import LayerWeights, Weights
from zero2all.model.moe import MixtureOfExperts
from zero2all.model.z2all import Block, Z2all

MOST_ROWS_AT_ONCE = 4
"""Up to as many rows, torch's kernel for the CPU is faster than widening the weights for a plain product."""
WIDENED_VALUES = 16 << 20
"""Weights that are widened at a time."""
CHUNK_VALUES = 1 << 20
"""Weights that are rounded at a time: few enough to stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A matrix in 8 bits."""

    values: Tensor  # int8 (rows, columns)
    scales: Tensor  # float32 (rows,)

    def project(self, x: Tensor, bias: Tensor | None, /) -> Tensor:
        """x W^T + bias for rows x (N, columns), in the dtype of x."""
        if x.device.type == "cpu":
            return self._project_on_cpu(x.float(), bias).to(x.dtype)
        y = (self._product(x) * self.scales).to(x.dtype)
        return y if bias is None else y + bias

    def _project_on_cpu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) <= MOST_ROWS_AT_ONCE and _has_cpu_kernel():
            y: Tensor = torch._weight_int8pack_mm(x.contiguous(), self.values, self.scales)
        else:
            y = self._product(x).mul_(self.scales)
        return y if bias is None else y.add_(bias)

    def _product(self, x: Tensor) -> Tensor:
        """x values^T: whole numbers up to 127 are exact in every dtype of x."""
        pieces = self.values.split(max(1, WIDENED_VALUES // self.values.shape[1]))
        products = [F.linear(x, piece.to(x.dtype)) for piece in pieces]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that it stands for."""
        return (self.values * self.scales.unsqueeze(1)).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.values)


def int8_weight(matrix: Tensor) -> Int8Weight:
    """A matrix (rows, columns) rounded to 8 bits, on its device."""
    values = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    at_once = max(1, CHUNK_VALUES // matrix.shape[1]) if matrix.device.type == "cpu" else len(matrix)
    for first in range(0, len(matrix), at_once):
        rows = matrix[first : first + at_once].float()
        scale = rows.abs().amax(dim=1) / 127
        scale = torch.where(scale > 0, scale, 1.0)  # of zeros, any
        scales[first : first + at_once] = scale
        values[first : first + at_once] = (rows / scale.unsqueeze(1)).round_()
    return Int8Weight(values, scales)


def quantise(weights: Weights) -> Weights:
    """The same model with its matrices in 8 bits."""

    def narrow(holder: LayerWeights | Weights, *names: str) -> dict[str, Any]:
        kept = {name: getattr(holder, name) for name in names}
        return {name: int8_weight(each) if isinstance(each, Tensor) else each for name, each in kept.items()}

    layers = [
        dataclasses.replace(layer, **narrow(layer, "qkv", "out", "gate_up_pairs", "down")) for layer in weights.layers
    ]
    return dataclasses.replace(weights, layers=layers, **narrow(weights, "head"))


def drop_matrices(model: Z2all) -> None:
    """Free the memory of the matrices that `quantise` has made copies of. The model cannot compute afterwards; the
    embedding stays, which the engine reads."""
    holders: list[nn.Module] = [] if model.head is None else [model.head]
    for block in model.blocks:
        assert isinstance(block, Block)
        holders += [block.attention.qkv, block.attention.out]
        if not isinstance(block.feed_forward, MixtureOfExperts):
            holders += [block.feed_forward.gate_up_pairs, block.feed_forward.down]
    for holder in holders:
        old = holder.get_parameter("weight")
        holder.weight = nn.Parameter(old.new_empty(0, old.shape[1]), requires_grad=False)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@functools.cache
def _has_cpu_kernel() -> bool:
    """Whether torch's product of float32 rows with int8 weights runs here, and is right."""
    x, values = torch.arange(-32.0, 32.0).view(2, 32), torch.arange(-128, 128).view(8, 32).to(torch.int8)
    scales = torch.arange(1.0, 9.0) / 8
    try:
        found = torch._weight_int8pack_mm(x, values, scales)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(found, x @ values.float().t() * scales)
