"""Chooses, once and in the open, which implementation of each operator a model uses.

Each operator's file lists its implementations, best first. `auto` takes the first whose probe passes; a named one
that cannot run here falls back to `auto` with the reason said, or, under `strict`, is an error. What was asked, what
was taken and why is returned as data, so that it can be printed, logged and kept in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.ops import attention, cross_entropy, linear, linear_cross_entropy, optimizer, rms_norm, rope, swiglu
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import Implementation

OPERATORS: dict[str, tuple[Implementation, ...]] = {
    "attention": attention.IMPLEMENTATIONS,
    "rope": rope.IMPLEMENTATIONS,
    "rms_norm": rms_norm.IMPLEMENTATIONS,
    "swiglu": swiglu.IMPLEMENTATIONS,
    "linear": linear.IMPLEMENTATIONS,
    "linear_cross_entropy": linear_cross_entropy.IMPLEMENTATIONS,
    "cross_entropy": cross_entropy.IMPLEMENTATIONS,
    "optimizer": optimizer.IMPLEMENTATIONS,
}


@dataclass(frozen=True)
class Choice:
    """What was asked for an operator, what was taken, and why."""

    operator: str
    asked: str
    got: str
    reason: str


@dataclass(frozen=True)
class Ops:
    """The resolved operators, as plain functions: nothing is decided inside the model's forward."""

    attention: Callable[..., Any]
    rope: Callable[..., Any]
    rms_norm: Callable[..., Any]
    swiglu: Callable[..., Any]
    linear: Callable[..., Any]
    feed_forward: Callable[..., Any]
    linear_cross_entropy: Callable[..., Any]
    cross_entropy: Callable[..., Any]
    optimizer: Callable[..., Any]
    choices: tuple[Choice, ...]


def resolve(config: OpsConfig, device: str) -> Ops:
    """The implementation of every operator for this device."""
    functions: dict[str, Callable[..., Any]] = {}
    choices = []
    for operator, implementations in OPERATORS.items():
        implementation, choice = _choose(operator, getattr(config, operator), implementations, device, config.strict)
        functions[operator] = implementation.function
        choices.append(choice)
    taken = {choice.operator: choice.got for choice in choices}
    functions["feed_forward"] = linear.feed_forward(
        taken["swiglu"], functions["swiglu"], taken["linear"], functions["linear"]
    )
    if taken["linear_cross_entropy"] == "off":
        functions["linear_cross_entropy"] = linear_cross_entropy.plain_linear_cross_entropy(functions["cross_entropy"])
    return Ops(**functions, choices=tuple(choices))


def _choose(
    operator: str, asked: str, implementations: tuple[Implementation, ...], device: str, strict: bool
) -> tuple[Implementation, Choice]:
    by_name = {implementation.name: implementation for implementation in implementations}
    obstacle = ""
    if asked != "auto":
        problem = by_name[asked].probe(device)
        if problem is None:
            return by_name[asked], Choice(operator, asked, asked, "as asked")
        if strict:
            raise UsageError(
                f"ops.{operator} = {asked} cannot run on this machine: {problem}. "
                f"Choose another implementation ({', '.join(by_name)}), or set ops.strict to false to fall back."
            )
        obstacle = f"{asked} cannot run here ({problem}); "
    for implementation in implementations:
        if implementation.probe(device) is None:
            return implementation, Choice(
                operator, asked, implementation.name, f"{obstacle}first that runs on {device}"
            )
    raise UsageError(f"No implementation of {operator} runs on {device}.")
