"""How each operator is called: inputs with the shapes of a model, and the outputs.

Legend as in `zero2all.limits.floors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero2all.limits.floors import linear_shapes
from zero2all.model.config import ModelConfig
from zero2all.model.rope import rope_tables

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An operator on inputs of one size."""

    inputs: list[Tensor]  # Tensors with gradients
    call: Callable[[Function, list[Tensor]], tuple[Tensor, ...]]  # (implementation, inputs) -> outputs
    gathers_into_main: bool = False  # the last input is a weight whose gradient is summed in float32


def make_case(name: str, config: ModelConfig, B: int, T: int, device: torch.device) -> Case:  # noqa: N803
    """The case of an operator (`linear/…` names a matrix) on B samples of T tokens, in float32."""
    C, D, Hq, Hk = config.hidden_size, config.head_size, config.heads, config.kv_heads
    operator, _, part = name.partition("/")

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device) * std

    def targets() -> Tensor:
        return torch.randint(0, config.vocab_ids, (B * T,), device=device)

    match operator:
        case "rms_norm":
            inputs = [normal(B, T, C), normal(B, T, C), 1.0 + normal(C, std=0.1)]
            return Case(inputs, lambda function, given: tuple(function(*given, config.rms_norm_eps)))
        case "rope":
            cos, sin = rope_tables(config, T, device)

            def rope(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
                wide = torch.promote_types(given[0].dtype, torch.float32)
                return tuple(function(given[0], cos.to(wide), sin.to(wide), Hq, Hk))

            return Case([normal(B, T, Hq + 2 * Hk, D)], rope)
        case "swiglu":
            return Case([normal(B, T, 2 * config.intermediate_size)], lambda function, given: (function(*given),))
        case "attention":

            def attention(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
                # (B, H, T, D) views of (B, T, H, D), the layout of the projection
                return (function(*(each.transpose(1, 2) for each in given), 0.0, None),)

            return Case([normal(B, T, heads, D) for heads in (Hq, Hk, Hk)], attention)
        case "linear":
            rows, columns = linear_shapes(config)[part]
            inputs = [normal(B, T, columns), normal(rows, columns, std=config.init_std)]
            return Case(inputs, lambda function, given: (function(given[0], given[1], None),), gathers_into_main=True)
        case "embedding":
            # Zipf-distributed, as `zero2all.limits.floors.distinct_ids` assumes: in text, a few ids are much of it.
            ids = ((config.vocab_ids + 1.0) ** torch.rand((B, T), dtype=torch.float64, device=device)).long() - 1
            tokens = ids.clamp(max=config.vocab_ids - 1)
            inputs = [normal(config.vocab_rows, C, std=config.init_std)]
            return Case(inputs, lambda function, given: (function(tokens, given[0]),), gathers_into_main=True)
        case "cross_entropy":
            wanted = targets()
            return Case([normal(B * T, config.vocab_rows)], lambda function, given: (function(given[0], wanted),))
        case "linear_cross_entropy":
            wanted, shares = targets(), torch.full((B * T,), 1.0 / (B * T), device=device)

            def loss(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
                wide = torch.promote_types(given[0].dtype, torch.float32)
                return (function(*given, wanted, shares.to(wide), config.vocab_ids, 0.0)[0],)

            inputs = [normal(B * T, C), normal(config.vocab_rows, C, std=config.init_std)]
            return Case(inputs, loss, gathers_into_main=True)
    raise ValueError(f"there is no case for the operator {name!r}")
