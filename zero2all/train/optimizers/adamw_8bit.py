"""AdamW with both moments in 8 bits: about 2 bytes of state a parameter instead of 8.

Each row of a matrix is cut into blocks of 256 values; a block has one float32 scale (its largest magnitude) and one
byte per value. Codes are spread as squares, because most values of a block are far smaller than its largest:

    mean           m = scale (q / 127)^2 sign(q)             q in -127 .. 127
    mean square    v = scale (q / 255)^4                     q in 0 .. 255, so that sqrt(v) is spread like m

A value between two codes takes the upper one with the probability of its distance from the lower one (`rounding`), so
that on average nothing is lost; rounding to the nearest would freeze a slowly changing mean square. A mean square is
never coded 0 unless it is 0: a step divides by its root.

Blocks never cross rows, so a matrix that is cut between rows (`factory.cut_of`) has the same codes as a whole one.
Vectors (norms, biases) keep float32 moments. The arithmetic of a step is float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.parallel.parts import TensorPart
from zero2all.train.optimizers.adamw import AdamW
from zero2all.train.optimizers.base import Formula, ParamState, StepInputs
from zero2all.train.optimizers.rounding import RoundedAdamW, fraction, random_bits

BLOCK = 256
MEAN_CODES, SQUARE_CODES = 127, 255
MEAN_POWER, SQUARE_POWER = 2, 4


class AdamW8bit(RoundedAdamW):
    """AdamW whose moments of matrices are bytes with a scale per block."""

    def initial_state(self, param: ParamState) -> dict[str, TensorPart]:
        """Codes and scales of both moments of a matrix; float32 moments of a vector, where there is nothing to gain."""
        part, shape = param.part, param.parameter.shape
        if len(shape) < 2:
            return super().initial_state(param)
        assert part.has_whole_rows, (
            f"{param.parameter.name}: 8-bit moments have blocks within rows, and the layout cuts rows"
        )
        blocks = -(-shape[-1] // BLOCK)

        def codes(dtype: torch.dtype) -> TensorPart:
            return part.like(torch.zeros_like(part.values, dtype=dtype))

        def scales() -> TensorPart:
            values = torch.zeros(*part.values.shape[:-1], blocks, device=part.values.device)
            return part.by_row(values, (*shape[1:-1], blocks))

        return {
            "exp_avg_codes": codes(torch.int8),
            "exp_avg_scales": scales(),
            "exp_avg_sq_codes": codes(torch.uint8),
            "exp_avg_sq_scales": scales(),
        }

    def update_one(self, param: ParamState, numbers: tuple[Tensor, ...], inputs: StepInputs) -> None:
        """Matrices by way of their codes, the rest as AdamW does."""
        update = AdamW.update_one if "exp_avg" in param.state else RoundedAdamW.update_one
        update(self, param, numbers, inputs)

    @staticmethod
    def rounded_formula(adamw: Formula, gradient: Tensor, weight: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Decode, update by AdamW's formula and encode."""
        mean_codes, mean_scales, square_codes, square_scales, *numbers, index, key = others
        mean = decode(mean_codes, mean_scales, MEAN_CODES, MEAN_POWER)
        square = decode(square_codes, square_scales, SQUARE_CODES, SQUARE_POWER)
        weight, mean, square = adamw(gradient, weight, mean, square, *numbers)
        of_mean = encode(mean, MEAN_CODES, MEAN_POWER, fraction(random_bits(index, key, 0)))
        codes, scales = encode(square, SQUARE_CODES, SQUARE_POWER, fraction(random_bits(index, key, 1)))
        return weight, *of_mean, torch.where(square > 0, codes.clamp(min=1), codes), scales


def encode(values: Tensor, codes: int, power: int, chances: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (as float32, shape of `values`) and the scale of each block (..., blocks); `chances` are in [0, 1)."""
    magnitudes = values.abs().float()
    scales = _in_blocks(magnitudes).amax(dim=-1)  # (..., blocks)
    shares = magnitudes / _per_value(scales, values.shape[-1]).clamp(min=torch.finfo(torch.float32).tiny)
    lower = (_root(shares, power) * codes).floor().clamp(max=codes - 1)
    low, high = _raised(lower / codes, power), _raised((lower + 1) / codes, power)
    up = chances < (shares - low) / (high - low)
    return (lower + up) * values.sign(), scales


def decode(codes: Tensor, scales: Tensor, largest: int, power: int) -> Tensor:
    """The float32 values that codes and scales stand for."""
    shares = codes.float() / largest
    return shares.sign() * _raised(shares, power) * _per_value(scales, codes.shape[-1])


def _raised(values: Tensor, power: int) -> Tensor:
    """values^power for the powers in use, as products: pow is many times slower."""
    square = values * values
    return square * square if power == SQUARE_POWER else square


def _root(values: Tensor, power: int) -> Tensor:
    """The inverse of `_raised`."""
    root = values.sqrt()
    return root.sqrt() if power == SQUARE_POWER else root


def _in_blocks(values: Tensor) -> Tensor:
    """(..., C) -> (..., blocks, BLOCK), the last block filled up with zeros."""
    missing = -values.shape[-1] % BLOCK
    padded = F.pad(values, (0, missing)) if missing else values
    return padded.unflatten(-1, (-1, BLOCK))


def _per_value(scales: Tensor, width: int) -> Tensor:
    """(..., blocks) -> (..., width): each value's scale."""
    return scales.repeat_interleave(BLOCK, dim=-1)[..., :width]
