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

    inputs: list[Tensor]
    """Tensors with gradients."""
    call: Callable[[Function, list[Tensor]], tuple[Tensor, ...]]
    """(implementation, inputs) -> its differentiable outputs."""
    gathers_into_main: bool = False
    """Whether the last input is a weight whose gradient is summed in float32, as in training."""


def make_case(name: str, config: ModelConfig, samples: int, seq_len: int, device: torch.device) -> Case:
    """The case of an operator (`linear/…` names a matrix) on samples x seq_len tokens, in float32."""
    operator, _, part = name.partition("/")
    return _CASES[operator](part, config, (samples, seq_len), device)


def _normal(device: torch.device, *shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=device) * std


def _rms_norm(_: str, config: ModelConfig, batch: tuple[int, int], device: torch.device) -> Case:
    B, T = batch
    C, eps = config.hidden_size, config.rms_norm_eps
    inputs = [_normal(device, B, T, C), _normal(device, B, T, C), 1.0 + _normal(device, C, std=0.1)]
    return Case(inputs, lambda function, given: tuple(function(*given, eps)))


def _rope(_: str, config: ModelConfig, batch: tuple[int, int], device: torch.device) -> Case:
    B, T = batch
    Hq, Hk = config.heads, config.kv_heads
    cos, sin = rope_tables(config, T, device)

    def call(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
        wide = torch.promote_types(given[0].dtype, torch.float32)
        return tuple(function(given[0], cos.to(wide), sin.to(wide), Hq, Hk))

    return Case([_normal(device, B, T, Hq + 2 * Hk, config.head_size)], call)


def _swiglu(_: str, config: ModelConfig, batch: tuple[int, int], device: torch.device) -> Case:
    B, T = batch
    inputs = [_normal(device, B, T, 2 * config.intermediate_size)]
    return Case(inputs, lambda function, given: (function(*given),))


def _attention(_: str, config: ModelConfig, batch: tuple[int, int], device: torch.device) -> Case:
    B, T = batch
    heads = (config.heads, config.kv_heads, config.kv_heads)
    inputs = [_normal(device, B, T, each, config.head_size) for each in heads]

    def call(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
        # (B, H, T, D) views of (B, T, H, D), the layout of the projection
        return (function(*(each.transpose(1, 2) for each in given), 0.0, None),)

    return Case(inputs, call)


def _linear(part: str, config: ModelConfig, batch: tuple[int, int], device: torch.device) -> Case:
    B, T = batch
    rows, columns = linear_shapes(config)[part]
    inputs = [_normal(device, B, T, columns), _normal(device, rows, columns, std=config.init_std)]
    return Case(inputs, lambda function, given: (function(given[0], given[1], None),), gathers_into_main=True)


def _embedding(_: str, config: ModelConfig, batch: tuple[int, int], device: torch.device) -> Case:
    # Zipf-distributed, as `zero2all.limits.floors.distinct_ids` assumes: in text, a few ids are much of it.
    ids = ((config.vocab_ids + 1.0) ** torch.rand(batch, dtype=torch.float64, device=device)).long() - 1
    tokens = ids.clamp(max=config.vocab_ids - 1)
    inputs = [_normal(device, config.vocab_rows, config.hidden_size, std=config.init_std)]
    return Case(inputs, lambda function, given: (function(tokens, given[0]),), gathers_into_main=True)


def _targets(config: ModelConfig, count: int, device: torch.device) -> Tensor:
    return torch.randint(0, config.vocab_ids, (count,), device=device)


def _cross_entropy(_: str, config: ModelConfig, batch: tuple[int, int], device: torch.device) -> Case:
    B, T = batch
    targets = _targets(config, B * T, device)
    inputs = [_normal(device, B * T, config.vocab_rows)]
    return Case(inputs, lambda function, given: (function(given[0], targets),))


def _linear_cross_entropy(_: str, config: ModelConfig, batch: tuple[int, int], device: torch.device) -> Case:
    B, T = batch
    targets, shares = _targets(config, B * T, device), torch.full((B * T,), 1.0 / (B * T), device=device)
    inputs = [
        _normal(device, B * T, config.hidden_size),
        _normal(device, config.vocab_rows, config.hidden_size, std=config.init_std),
    ]

    def call(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
        wide = torch.promote_types(given[0].dtype, torch.float32)
        total, _ = function(*given, targets, shares.to(wide), config.vocab_ids, 0.0)
        return (total,)

    return Case(inputs, call, gathers_into_main=True)


_CASES: dict[str, Callable[[str, ModelConfig, tuple[int, int], torch.device], Case]] = {
    "attention": _attention,
    "rope": _rope,
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "linear": _linear,
    "embedding": _embedding,
    "linear_cross_entropy": _linear_cross_entropy,
    "cross_entropy": _cross_entropy,
}
