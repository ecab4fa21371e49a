"""The weights of a model as the engine reads them: tensors by layer, without modules around them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero2all.common.errors import UsageError
from zero2all.infer import WeightKind
from zero2all.model.config import ModelConfig
from zero2all.model.moe import MixtureOfExperts
from zero2all.model.z2all import Block, Z2all
from zero2all.ops.implementation import has_triton
from zero2all.ops.registry import Ops
from zero2all.ops.rope import QkNorm
from zero2all.parallel.tensor import local_config


class StoredWeight(Protocol):
    """A matrix that is kept in another form than a tensor, and multiplies by itself."""

    def project(self, x: Tensor, bias: Tensor | None, /) -> Tensor:
        """x W^T + bias for rows x (N, in)."""

    def __len__(self) -> int:
        """Rows of the matrix."""


Weight = Tensor | StoredWeight


@dataclass(frozen=True)
class LayerWeights:
    """One block. It has either a feed-forward part (gate_up_pairs, down) or experts."""

    attention_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    out: Weight
    out_bias: Tensor | None
    feed_forward_norm: Tensor
    qk_norm: QkNorm | None = None
    gate_up_pairs: Weight | None = None
    gate_up_bias: Tensor | None = None
    down: Weight | None = None
    down_bias: Tensor | None = None
    experts: MixtureOfExperts | None = None


@dataclass(frozen=True)
class Weights:
    """A whole model."""

    config: ModelConfig
    ops: Ops
    embedding: Tensor  # (V, C)
    layers: list[LayerWeights]
    norm: Tensor
    head: Weight  # (vocab_ids, C): without padding rows
    cos: Tensor  # (max_seq_len, D / 2)
    sin: Tensor


def weights_of(model: Z2all, tensor_ranks: int = 1) -> Weights:
    """The tensors of `model`, or of what one rank has of it; nothing is copied but an embedding with a norm."""
    layers = [_layer(block) for block in model.blocks if isinstance(block, Block)]
    config = model.config
    none = layers[0].attention_norm.new_empty(0, config.hidden_size)  # of a pipeline stage that is not the first, last
    embedding = model.embedding_rows().detach() if hasattr(model, "embedding") else none
    norm = model.norm.weight.detach() if hasattr(model, "norm") else none
    head = none if norm is none else model.head_weight.detach()[: config.vocab_ids]
    config = dataclasses.replace(local_config(config, tensor_ranks), layers=len(layers))
    return Weights(config, model.ops, embedding, layers, norm, head, model.cos, model.sin)


def matrices_of(weights: Weights) -> list[Weight | None]:
    """Those that tokens are multiplied with, but for experts."""
    layers = [each for layer in weights.layers for each in (layer.qkv, layer.out, layer.gate_up_pairs, layer.down)]
    return [*layers, weights.head]


def _layer(block: Block) -> LayerWeights:
    attention, feed_forward = block.attention, block.feed_forward
    norm = attention.qk_norm
    inner: dict[str, Tensor | MixtureOfExperts | None]
    if isinstance(feed_forward, MixtureOfExperts):
        inner = {"experts": feed_forward}
    else:
        inner = {
            "gate_up_pairs": feed_forward.gate_up_pairs.weight.detach(),
            "gate_up_bias": _detached(feed_forward.gate_up_pairs.bias),
            "down": feed_forward.down.weight.detach(),
            "down_bias": _detached(feed_forward.down.bias),
        }
    return LayerWeights(
        attention_norm=block.attention_norm.weight.detach(),
        qkv=attention.qkv.weight.detach(),
        qkv_bias=_detached(attention.qkv.bias),
        out=attention.out.weight.detach(),
        out_bias=_detached(attention.out.bias),
        feed_forward_norm=block.feed_forward_norm.weight.detach(),
        qk_norm=norm and QkNorm(norm.query.detach(), norm.key.detach(), norm.eps),
        **inner,  # type: ignore[arg-type]
    )


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def project(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x W^T + bias for rows x (N, in)."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.project(x, bias)


LEAST_PACKED = 1 << 18
"""Values of a matrix that is packed: for a smaller one oneDNN's call takes longer than it saves."""


MOST_PACKED, KERNEL_BYTES = 128, 570_000
"""Rows up to which the packed copy is read; and what a compiled kernel takes. oneDNN compiles one for every shape of a
matrix and number of rows, and never gives it back: prompts of many lengths took half a GB. So rows are filled up."""


class PackedWeight:
    """A weight for the CPU, with a second copy in the order that oneDNN reads: for 2 to 32 rows that takes 40 to 70 %
    of the time. One row alone is faster with the plain one."""

    def __init__(self, plain: Tensor) -> None:
        self.plain = plain
        self.packed = torch.ops.mkldnn._reorder_linear_weight(plain, 8)

    def project(self, x: Tensor, bias: Tensor | None, /) -> Tensor:
        """See `StoredWeight`."""
        rows = len(x)
        if rows == 1 or rows > MOST_PACKED:
            return F.linear(x, self.plain, bias)
        filled = F.pad(x, (0, 0, 0, -rows % (4 if rows <= 32 else 16)))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(filled, self.packed, bias, "none", [], "")
        return y[:rows]

    def __len__(self) -> int:
        return len(self.plain)


def packed_for_cpu(weights: Weights, free_bytes: int) -> Weights:
    """The same with packed copies, where torch has oneDNN and there is memory for them; else as it was."""
    tensors = [each for each in matrices_of(weights) if isinstance(each, Tensor)]
    has_packing = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    is_wide = all(each.dtype == torch.float32 for each in tensors)
    if not tensors or not is_wide or not has_packing or 2 * sum(each.nbytes for each in tensors) > free_bytes:
        return weights

    def packed(holder: LayerWeights | Weights, *names: str) -> dict[str, Any]:
        kept = {name: getattr(holder, name) for name in names}
        is_worth_it = {name: isinstance(each, Tensor) and each.numel() >= LEAST_PACKED for name, each in kept.items()}
        return {name: PackedWeight(each) if is_worth_it[name] else each for name, each in kept.items()}

    layers = [
        dataclasses.replace(layer, **packed(layer, "qkv", "out", "gate_up_pairs", "down")) for layer in weights.layers
    ]
    return dataclasses.replace(weights, layers=layers, **packed(weights, "head"))


# Weights in 8 bits: every row of a matrix as whole numbers from -127 to 127 and one scale.
#
#     scale = max |row| / 127        values = round(row / scale), half to even        row ~ scale * values
#
# Only the matrices of the blocks and the head are stored so. What a token passes through once (embedding, norms,
# biases) stays as it is, and so do routers, which choose, and experts, whose matrices one kernel multiplies together.
# The arithmetic is that of the activations: float32, or bfloat16 summed in float32.


MOST_ROWS_AT_ONCE = 4
"""Up to as many rows, torch's kernel for the CPU is faster than widening the weights for a plain product."""
WIDENED_VALUES = 16 << 20
"""Weights that are widened at a time."""
CHUNK_VALUES = 1 << 20
"""Weights that are rounded at a time: few enough to stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class _Rounded:
    values: Tensor
    scales: Tensor
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return self.rows


class Int8Weight(_Rounded):
    """A matrix in 8 bits: values int8 (rows, columns), scales float32 (rows,)."""

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
    return Int8Weight(values, scales, *matrix.shape)


# Weights in 4 bits: numbers from -8 to 7, and a scale for each group of columns of a row.
#
# `ops.kernels.decode_int4` says why they are stored as they are: for 8 rows and 128 columns, for each row, 4 x 8 words
# of 16 bits. Column 32 i + 8 t + n is in word (t, 2 i + n % 2), bits 4 (n // 2) to 4 (n // 2) + 3, plus 8. Rows and
# columns are filled up with zeros. Gains of norms are multiplied into the matrices behind them before they are rounded.

GROUP = 64
"""Columns with one scale."""
SHRINKS = (8 / 7, 1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales that are tried for a group, times the one that makes its largest value -8. 8 / 7 cuts nothing off."""
MOST_MULTIPLIED = 256
"""Rows of input up to which our kernels multiply; for more, widening the matrix first takes less time."""


class Int4Weight(_Rounded):
    """A matrix in 4 bits: values int16 (rows / 8, columns / 128, 8, 4, 8); scales bfloat16 (rows / 8, columns / 128, 8,
    groups), 16 times what the numbers are multiplied by, with 6 significant bits."""

    def project(self, x: Tensor, bias: Tensor | None, /) -> Tensor:
        """x W^T + bias for rows x (N, columns), in the dtype of x."""
        if not x.is_cuda or x.dtype != torch.bfloat16 or len(x) > MOST_MULTIPLIED or not has_triton():
            return F.linear(x, self.widened(x.dtype), bias)
        from zero2all.ops.kernels.decode_int4 import MOST_FEW, few_rows, many_rows

        y = x.new_empty(len(x), self.rows)
        (few_rows if len(x) <= MOST_FEW else many_rows)(x.contiguous(), self.values, self.scales, y)
        return y if bias is None else y + bias

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that it stands for."""
        places = torch.arange(0, 16, 4, dtype=torch.int16, device=self.values.device)
        numbers = ((self.values.unsqueeze(-1) >> places) & 15).to(torch.bfloat16) - 8  # b c g t (i e) k
        scales = self.scales.repeat_interleave(8 // self.scales.shape[3], dim=3)[:, :, :, None, :, None] / 16
        wide = (numbers * scales).unflatten(4, (4, 2))  # rounded once: 1 / 16 is exact
        wide = wide.permute(0, 2, 1, 4, 3, 6, 5).reshape(8 * len(wide), -1)
        return wide[: self.rows, : self.columns].to(dtype)


class CpuInt4Weight(_Rounded):
    """The same as torch's kernel for the CPU reads it: values as torch packs them; scales bfloat16 (groups of a row,
    rows, 2), with what is added. It multiplies in bfloat16, summed in float32."""

    def project(self, x: Tensor, bias: Tensor | None, /) -> Tensor:
        """See `StoredWeight`."""
        width = 2 * self.values.shape[1]
        low = F.pad(x, (0, width - self.columns)).to(torch.bfloat16).contiguous()
        group = width // len(self.scales)
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(low, self.values, group, self.scales)
        y = y[:, : self.rows].to(x.dtype)
        return y if bias is None else y + bias


def int4_weight(matrix: Tensor, group: int = GROUP) -> Int4Weight | CpuInt4Weight:
    """A matrix (rows, columns) rounded to 4 bits in groups of 32, 64 or 128 columns, on its device."""
    rows, columns = matrix.shape
    found = []
    at_once = 16 * max(1, CHUNK_VALUES // (16 * columns)) if matrix.device.type == "cpu" else rows
    for piece in matrix.split(at_once):
        padded = F.pad(piece.float(), (0, -columns % 128, 0, -len(piece) % 16))
        found.append(_rounded(padded.unflatten(1, (-1, group))))
    numbers, scales = (torch.cat(each) for each in zip(*found, strict=True))  # (rows, groups, group), (rows, groups)
    if matrix.device.type == "cpu" and _has_int4_cpu_kernel():
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.flatten(1).int(), 1)
        with_zero = torch.stack((scales / 16, torch.zeros_like(scales)), dim=-1).transpose(0, 1).contiguous()
        return CpuInt4Weight(packed, with_zero, rows, columns)
    chunks = numbers.shape[1] * group // 128
    words = numbers.view(-1, 8, chunks, 4, 4, 2, 2, 2).permute(0, 2, 1, 4, 3, 7, 5, 6).reshape(-1, chunks, 8, 4, 8, 4)
    values = words[..., 0] | words[..., 1] << 4 | words[..., 2] << 8 | words[..., 3] << 12
    by_chunk = scales.view(-1, 8, chunks, 128 // group).transpose(1, 2).contiguous()
    return Int4Weight(values, by_chunk, rows, columns)


def _rounded(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Groups (rows, groups, columns) -> numbers from 0 to 15 in int16, and 16 times the scales; of the scales that are
    tried, those with the least square error."""
    ends = wide.gather(-1, wide.abs().argmax(dim=-1, keepdim=True)) / -8
    numbers, scales, least = torch.empty_like(wide), torch.empty_like(ends), torch.full_like(ends, torch.inf)
    for shrink in SHRINKS:
        bits = (ends * (16 * shrink)).to(torch.bfloat16).view(torch.int16)
        scale = ((bits + 2) & ~3).view(torch.bfloat16).float()  # its last two bits are 0
        scale = torch.where(scale == 0, 1.0, scale)  # of zeros, any
        number = (wide * (16 / scale)).round_().clamp_(-8, 7)
        error = (number * (scale / 16) - wide).square_().sum(dim=-1, keepdim=True)
        is_better = error < least
        numbers, scales = torch.where(is_better, number, numbers), torch.where(is_better, scale, scales)
        least = torch.minimum(error, least)
    return (numbers + 8).to(torch.int16), scales.squeeze(-1).to(torch.bfloat16)


def quantise(weights: Weights, kind: WeightKind) -> Weights:
    """The same model with its matrices in 8 or 4 bits; the head always in 8: in 4 it loses as much as all others."""

    def stored(matrix: Weight | None, gain: Tensor | None = None) -> Any:
        if not isinstance(matrix, Tensor):
            return matrix
        if kind == "int8":
            return int8_weight(matrix)
        return int4_weight(matrix if gain is None else matrix.float() * gain.float())

    def narrow(layer: LayerWeights) -> LayerWeights:
        norms = {"attention_norm": layer.qkv, "feed_forward_norm": layer.gate_up_pairs}
        gains = {name: getattr(layer, name) for name, matrix in norms.items() if kind == "int4" and matrix is not None}
        found: dict[str, Any] = {name: torch.ones_like(gain) for name, gain in gains.items()}
        found["qkv"] = stored(layer.qkv, gains.get("attention_norm"))
        found["gate_up_pairs"] = stored(layer.gate_up_pairs, gains.get("feed_forward_norm"))
        return dataclasses.replace(layer, **found, out=stored(layer.out), down=stored(layer.down))

    head = int8_weight(weights.head) if isinstance(weights.head, Tensor) else weights.head
    layers = [narrow(layer) for layer in weights.layers]
    _check_products(layers[0].qkv)
    return dataclasses.replace(weights, layers=layers, head=head)


def _check_products(weight: Weight) -> None:
    """UsageError where the kernels for 4 bits, with their own machine code, multiply wrongly on this GPU."""
    if isinstance(weight, Int4Weight) and weight.values.is_cuda:
        for rows in (1, 32):
            x = torch.randn(rows, weight.columns, device=weight.values.device).to(torch.bfloat16)
            expected = F.linear(x.float(), weight.widened())
            if not (weight.project(x, None).float() - expected).norm() < 0.02 * expected.norm():
                name = torch.cuda.get_device_name(weight.values.device)
                raise UsageError(f"4-bit weights give wrong products on {name}. Use --weights int8 or plain.")


def bits_per_weight(weights: Weights) -> float:
    """Mean bits of the weights that are kept in 8 or 4 bits, with their scales and what fills a matrix up."""
    stored: list[Any] = [each for each in matrices_of(weights) if isinstance(each, _Rounded)]
    return 8 * sum(each.nbytes for each in stored) / max(1, sum(each.rows * each.columns for each in stored))


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


@functools.cache
def _has_int4_cpu_kernel() -> bool:
    """The same of bfloat16 rows with weights in 4 bits; with plain instructions it would be slow."""
    x, numbers = torch.arange(-64.0, 64.0).view(2, 64).bfloat16(), torch.arange(1024).view(16, 64) % 16
    scales = torch.tensor([0.5, 0.0]).expand(1, 16, 2).bfloat16().contiguous()
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, scales)
    except (AttributeError, RuntimeError):
        return False
    is_right = torch.equal(found, (x.float() @ (numbers.float() - 8).t() / 2).bfloat16())
    return is_right and torch.backends.cpu.get_cpu_capability().startswith("AVX")
