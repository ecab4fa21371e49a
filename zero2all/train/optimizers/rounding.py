"""AdamW in few bits a parameter: stochastic rounding whose random bits are a function of (seed, update, parameter,
place) only.

A value between two representable ones goes up with the probability of its distance from the lower one, so that the mean
of many roundings is the value itself, and small updates add up where rounding to the nearest would lose each of them.
The random bits are a hash, computed where the values are: no state to save, no host in between, and the same bits on
every device and for every cut of a parameter.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import EllipsisType

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.parallel.parts import TensorPart
from zero2all.train.optimizers.adamw import AdamW
from zero2all.train.optimizers.base import Formula, ParameterGroup, ParamState, StepInputs, row_chunks


class RoundedAdamW(AdamW):
    """AdamW whose state, or weights, are stored in few bits and rounded stochastically."""

    rounded_formula: Formula
    """(AdamW's formula, scaled gradient, weight, *moments, *numbers, place of each value in the whole, key): widen,
    update by the formula and round -> new weight and moments."""

    def __init__(
        self, groups: Sequence[ParameterGroup], config: OptimConfig, seed: int, compiled: bool = False
    ) -> None:
        self.seed = seed
        super().__init__(groups, config, compiled=compiled)
        # One object: a new one is compiled again.
        self.rounded = partial(_at_places, partial(type(self).rounded_formula, self.formula))

    def update_one(self, param: ParamState, numbers: tuple[Tensor, ...], inputs: StepInputs) -> None:
        """Update one parameter and its moments."""
        gradient = param.gradient
        if gradient is None or not gradient.numel():
            return
        key = rounding_key(self.seed, param.parameter.name, inputs.count)
        for rows in row_chunks(param.weight):
            targets = [param.weight[rows], *(param.moment(name)[rows] for name in param.state)]
            rounding = (places_of(param.part, rows), key)
            self.apply(self.rounded, gradient[rows], targets, (*numbers, *rounding), inputs.scale, inputs.skip)


def places_of(part: TensorPart, rows: slice | EllipsisType) -> Tensor:
    """The place of each value of some rows (of a range of values: some values) in the whole flattened tensor; only that
    of the first where the others follow it, because a compiled formula counts faster than it reads."""
    if isinstance(rows, slice):
        before = rows.start * part.values[0].numel()
        part = replace(part, values=part.values[rows], start=part.start + before)
    return torch.tensor(part.start, dtype=torch.int32) if part.lengths == part.shape else part.index()


def _at_places(formula: Formula, gradient: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """A formula with the place of each value."""
    *others, places, key = others  # type: ignore[assignment]
    if places.dim() == 0:
        count = torch.arange(gradient.numel(), dtype=torch.int32, device=gradient.device)
        places = places + count.view(gradient.shape)
    return formula(gradient, *others, places, key)


def rounding_key(seed: int, parameter_name: str, count: Tensor) -> Tensor:
    """A 32-bit key for one parameter in one update; `count` stays on its device."""
    digest = hashlib.blake2b(f"{seed}/{parameter_name}".encode(), digest_size=4).digest()
    return _mix(count.to(torch.int32) ^ int.from_bytes(digest, "little", signed=True))


def random_bits(index: Tensor, key: Tensor, stream: int) -> Tensor:
    """32 random bits (int32) for each place in `index`; another `stream` gives independent ones."""
    return _mix(index ^ _mix(key + stream))


def _mix(bits: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every bit depends on every other (multiply, shift, xor)."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975
    return bits ^ ((bits >> 16) & 0xFFFF)


def fraction(bits: Tensor) -> Tensor:
    """Random bits as numbers from 0 up to but not including 1."""
    return (bits & 0xFFFFFF).float() / 2**24


def to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """float32 values rounded up or down to bfloat16: 16 random bits added to the lower half of a float32 carry into the
    upper half, a bfloat16, with exactly the wanted probability."""
    rounded = (values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000
    return rounded.view(torch.float32).to(torch.bfloat16)


class AdamWBf16(RoundedAdamW):
    """AdamW with everything in bfloat16: weights, gradients and both moments, 8 bytes a parameter in all. A float32
    parameter among them keeps its precision, with bfloat16 moments.

    There is no float32 master and no copy for the forward pass: the weights themselves are bfloat16. The arithmetic of
    a step is float32; what is stored is rounded stochastically. bfloat16 has 8 significant bits, so an update smaller
    than about 1/500 of its weight would be lost to rounding every single time, and a mean square would stop following
    once its change per step is that small. With random rounding both are right on average.

    `kahan` keeps for each weight what its last rounding cut off, in 2 more bytes, and adds it back at the next step:
    the weight then has about 16 significant bits, and no noise. The moments are rounded stochastically either way.

    bytes a parameter   weight 2 + gradient 2 + mean 2 + mean square 2 = 8        with kahan + 2 = 10
    """

    def initial_state(self, param: ParamState) -> dict[str, TensorPart]:
        """Two moments and, for kahan, the rest of the weight."""
        names = ["exp_avg", "exp_avg_sq"]
        names += ["rest"] if self.config.bf16_rounding == "kahan" and param.weight.dtype == torch.bfloat16 else []
        return {name: param.part.like(torch.zeros_like(param.weight, dtype=torch.bfloat16)) for name in names}

    @staticmethod
    def rounded_formula(
        adamw: Formula, gradient: Tensor, weight: Tensor, mean: Tensor, square: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        """Widen, update by AdamW's formula and round."""
        *rest, lr, kept, correction1, correction2, index, key = others  # `rest` is empty without kahan
        exact = weight.float() + rest[0].float() if rest else weight.float()
        exact, mean, square = adamw(gradient, exact, mean.float(), square.float(), lr, kept, correction1, correction2)
        bits = random_bits(index, key, 0)
        moments = to_bfloat16(mean, bits), to_bfloat16(square, bits >> 16)
        if weight.dtype != torch.bfloat16:
            return exact, *moments
        if not rest:
            return to_bfloat16(exact, random_bits(index, key, 1)), *moments
        nearest = exact.to(torch.bfloat16)
        return nearest, *moments, (exact - nearest.float()).to(torch.bfloat16)


BLOCK = 256
MEAN_CODES, SQUARE_CODES = 127, 255
MEAN_POWER, SQUARE_POWER = 2, 4


class AdamW8bit(RoundedAdamW):
    """AdamW whose moments of matrices are in 8 bits: about 2 bytes of state a parameter instead of 8.

    Each row of a matrix is cut into blocks of 256 values; a block has one float32 scale (its largest magnitude) and one
    byte per value. Codes are spread as squares, because most values of a block are far smaller than its largest:

        mean           m = scale (q / 127)^2 sign(q)             q in -127 .. 127
        mean square    v = scale (q / 255)^4                     q in 0 .. 255, so that sqrt(v) is spread like m

    A value between two codes takes the upper one with the probability of its distance from the lower one, so that on
    average nothing is lost; rounding to the nearest would freeze a slowly changing mean square. A mean square is never
    coded 0 unless it is 0: a step divides by its root.

    Blocks never cross rows, so a matrix that is cut between rows (`factory.cut_of`) has the same codes as a whole one.
    Vectors (norms, biases) keep float32 moments. The arithmetic of a step is float32.
    """

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
