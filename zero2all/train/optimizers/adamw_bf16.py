"""AdamW with everything in bfloat16: weights, gradients and both moments, 8 bytes a parameter in all.

There is no float32 master and no copy for the forward pass: the weights themselves are bfloat16. The arithmetic of a
step is float32; what is stored is rounded stochastically (`rounding`). bfloat16 has 8 significant bits, so an update
smaller than about 1/500 of its weight would be lost to rounding every single time, and a mean square would stop
following once its change per step is that small. With random rounding both are right on average.

`kahan` keeps for each weight what its last rounding cut off, in 2 more bytes, and adds it back at the next step: the
weight then has about 16 significant bits, and no noise. The moments are rounded stochastically either way.

bytes a parameter   weight 2 + gradient 2 + mean 2 + mean square 2 = 8        with kahan + 2 = 10
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zero2all.parallel.parts import Part
from zero2all.train.optimizers.base import Formula, ParamState, replace, scaled
from zero2all.train.optimizers.rounding import RoundedAdamW, random_bits, to_bfloat16


class AdamWBf16(RoundedAdamW):
    """AdamW on bfloat16 parameters; a float32 parameter among them keeps its precision, with bfloat16 moments."""

    def initial_state(self, param: ParamState) -> dict[str, Part]:
        """Two moments and, for kahan, the rest of the weight."""
        names = ["exp_avg", "exp_avg_sq"]
        names += ["rest"] if self.config.bf16_rounding == "kahan" and param.weight.dtype == torch.bfloat16 else []
        return {name: param.part.like(torch.zeros_like(param.weight, dtype=torch.bfloat16)) for name in names}

    def rounded_step(self) -> Callable[..., None]:
        """See `bf16_step`."""
        return bf16_step


def bf16_step(
    formula: Formula,
    gradient: Tensor,
    weight: Tensor,
    state: list[Tensor],
    numbers: tuple[Tensor, ...],
    index: Tensor,
    key: Tensor,
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Widen, update by AdamW's formula, round and store."""
    mean, square, *kept = state
    rest = kept[0] if kept else None
    exact = weight.float() if rest is None else weight.float() + rest.float()
    exact, new_mean, new_square = formula(scaled(gradient, scale), exact, mean.float(), square.float(), *numbers)
    bits = random_bits(index, key, 0)
    replace(mean, to_bfloat16(new_mean, bits), skip)
    replace(square, to_bfloat16(new_square, bits >> 16), skip)
    if weight.dtype != torch.bfloat16:
        replace(weight, exact, skip)
    elif rest is None:
        replace(weight, to_bfloat16(exact, random_bits(index, key, 1)), skip)
    else:
        nearest = exact.to(torch.bfloat16)
        replace(weight, nearest, skip)
        replace(rest, (exact - nearest.float()).to(torch.bfloat16), skip)
