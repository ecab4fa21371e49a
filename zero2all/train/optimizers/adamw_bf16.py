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

import torch
from torch import Tensor

from zero2all.parallel.parts import TensorPart
from zero2all.train.optimizers.base import Formula, ParamState
from zero2all.train.optimizers.rounding import RoundedAdamW, random_bits, to_bfloat16


class AdamWBf16(RoundedAdamW):
    """AdamW on bfloat16 parameters; a float32 parameter among them keeps its precision, with bfloat16 moments."""

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
