"""Chooses, once and in the open, which implementation of each operator a model uses.

Each operator's file lists its implementations, best first. `auto` takes the first whose probe passes; a named one
that cannot run here falls back to `auto` with the reason said, or, under `strict`, is an error. What was asked, what
was taken and why is returned as data, so that it can be printed, logged and kept in the checkpoint.

Compilation is another axis: `ops.compile` puts torch.compile around the blocks or the trunk, whatever computes the
operators inside. An implementation it cannot look into (compile_safe is False) stays as it is, with a break in the
graph on either side; under compilation `auto` therefore takes the first that it can look into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zero2all.common.errors import UsageError
from zero2all.ops import (
    attention,
    cross_entropy,
    embedding,
    linear,
    linear_cross_entropy,
    optimizer,
    rms_norm,
    rope,
    swiglu,
)
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import Implementation, Situation

OPERATORS: dict[str, tuple[Implementation, ...]] = {
    "attention": attention.IMPLEMENTATIONS,
    "rope": rope.IMPLEMENTATIONS,
    "rms_norm": rms_norm.IMPLEMENTATIONS,
    "swiglu": swiglu.IMPLEMENTATIONS,
    "linear": linear.IMPLEMENTATIONS,
    "embedding": embedding.IMPLEMENTATIONS,
    "linear_cross_entropy": linear_cross_entropy.IMPLEMENTATIONS,
    "cross_entropy": cross_entropy.IMPLEMENTATIONS,
    "optimizer": optimizer.IMPLEMENTATIONS,
}
OUTSIDE_COMPILATION = ("linear_cross_entropy", "cross_entropy", "optimizer")
"""Operators that stand behind the trunk."""


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
    embedding: Callable[..., Any]
    linear_cross_entropy: Callable[..., Any]
    cross_entropy: Callable[..., Any]
    optimizer: Callable[..., Any]
    compile: str
    choices: tuple[Choice, ...]

    @property
    def taken(self) -> dict[str, str]:
        """The name of the implementation of each operator."""
        return {choice.operator: choice.got for choice in self.choices}

    def notes(self) -> list[str]:
        """The choices for a person: all on one line, then one line for each that is not what was asked."""
        lines = [f"ops: {', '.join(f'{choice.operator}={choice.got}' for choice in self.choices)}"]
        if self.compile != "none":
            lines[0] += f", compile={self.compile}"
        return lines + [
            f"ops: {choice.operator}: asked {choice.asked}, got {choice.got}: {choice.reason}"
            for choice in self.choices
            if choice.asked not in ("auto", choice.got)
        ]


def resolve(config: OpsConfig, where: str | Situation) -> Ops:
    """The implementation of every operator for this device, or for all that is known of the situation."""
    situation = Situation(where) if isinstance(where, str) else where
    functions: dict[str, Callable[..., Any]] = {}
    by_operator: dict[str, Choice] = {}
    for operator in sorted(OPERATORS, key=lambda name: name != "linear"):  # first what others are fused into
        inside = situation.compiled and operator not in OUTSIDE_COMPILATION
        implementation, choice = _choose(
            operator, getattr(config, operator), OPERATORS[operator], situation, config.strict, inside
        )
        opaque = inside and not implementation.compile_safe
        function = implementation.function
        functions[operator] = torch.compiler.disable(function) if opaque else function
        by_operator[operator] = choice
        if operator == "linear":
            situation = dataclasses.replace(situation, linear=choice.got)
    choices = [by_operator[operator] for operator in OPERATORS]
    taken = {choice.operator: choice.got for choice in choices}
    feed_forward = linear.feed_forward(taken["swiglu"], functions["swiglu"], taken["linear"], functions["linear"])
    opaque = situation.compiled and linear.is_fused(taken["swiglu"], taken["linear"])
    functions["feed_forward"] = torch.compiler.disable(feed_forward) if opaque else feed_forward
    if taken["linear_cross_entropy"] == "off":
        functions["linear_cross_entropy"] = linear_cross_entropy.through_cross_entropy(functions["cross_entropy"])
    return Ops(**functions, compile=config.compile, choices=tuple(choices))


def _choose(
    operator: str,
    asked: str,
    implementations: tuple[Implementation, ...],
    situation: Situation,
    strict: bool,
    inside_compilation: bool = False,
) -> tuple[Implementation, Choice]:
    by_name = {implementation.name: implementation for implementation in implementations}
    obstacle = ""
    if asked != "auto":
        problem = by_name[asked].probe(situation)
        if problem is None:
            return by_name[asked], Choice(operator, asked, asked, "as asked")
        if strict:
            raise UsageError(
                f"ops.{operator} = {asked} cannot run on this machine: {problem}. "
                f"Choose another implementation ({', '.join(by_name)}), or set ops.strict to false to fall back."
            )
        obstacle = f"{asked} cannot run here ({problem}); "
    # In order, and no further than needed: some probes try their kernels out, which takes seconds.
    ordered = sorted(implementations, key=lambda one: inside_compilation and not one.compile_safe)
    taken = next((one for one in ordered if one.probe(situation) is None), None)
    if taken is None:
        raise UsageError(f"No implementation of {operator} runs on {situation.device}.")
    compiled = " and can be compiled" if inside_compilation and taken.compile_safe else ""
    return taken, Choice(operator, asked, taken.name, f"{obstacle}first that runs on {situation.device}{compiled}")
