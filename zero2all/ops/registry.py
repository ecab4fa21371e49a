"""Chooses, once and before the model is built, which implementation of each operator it uses.

Each operator's file lists its implementations by preference: the faster one first, an approximation last. `auto` takes
the first whose check passes. A named one that cannot run here is an error, or, without `strict`, falls back to `auto`
with the reason. What was asked, what was taken and why is returned as data, so that it can be printed, logged and saved
in the checkpoint.

Compilation is independent of this: `ops.compile` puts torch.compile around the blocks or the trunk, whichever
implementations are inside. One that it cannot trace (compile_safe is False) runs as it is, between two graph breaks;
under compilation `auto` therefore takes the first that can be traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

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
from zero2all.ops.attention import AttentionOp, PrepareDocuments
from zero2all.ops.config import OpsConfig
from zero2all.ops.cross_entropy import CrossEntropyOp
from zero2all.ops.embedding import EmbeddingOp
from zero2all.ops.experts import mixture_footprint
from zero2all.ops.footprint import Footprint
from zero2all.ops.implementation import Implementation, OpContext
from zero2all.ops.linear import FeedForwardOp, LinearOp
from zero2all.ops.linear_cross_entropy import LinearCrossEntropyOp
from zero2all.ops.optimizer import OptimizerOp
from zero2all.ops.rms_norm import RmsNormOp
from zero2all.ops.rope import RopeOp
from zero2all.ops.swiglu import SwigluOp

Chosen = TypeVar("Chosen", bound=Implementation[Any])

OPERATORS: dict[str, tuple[Implementation[Any], ...]] = {
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
"""Operators after the trunk, which torch.compile never sees."""
TAKEN_ON_A_GPU = {
    "attention": "sdpa_cudnn",
    "rope": "triton",
    "rms_norm": "triton",
    "swiglu": "triton",
    "linear": "fp32_wgrad",
    "embedding": "triton",
    "linear_cross_entropy": "triton",
    "cross_entropy": "triton",
    "optimizer": "triton",
}
"""What `auto` takes on a GPU with Triton, without FlashAttention 4 and QuACK; `varlen` is attention with documents."""


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

    attention: AttentionOp
    prepare_documents: PrepareDocuments
    rope: RopeOp
    rms_norm: RmsNormOp
    swiglu: SwigluOp
    linear: LinearOp
    feed_forward: FeedForwardOp
    embedding: EmbeddingOp
    linear_cross_entropy: LinearCrossEntropyOp
    cross_entropy: CrossEntropyOp
    optimizer: OptimizerOp
    compile: str
    choices: tuple[Choice, ...]

    @property
    def taken(self) -> dict[str, str]:
        """The name of the implementation of each operator."""
        return {choice.operator: choice.got for choice in self.choices}

    @property
    def footprints(self) -> dict[str, Footprint]:
        """What each operator needs in memory."""
        return footprints(self.taken)

    def notes(self) -> list[str]:
        """The choices as text: all on one line, then one line for each that is not what was asked."""
        taken = [f"{choice.operator}={choice.got}" for choice in self.choices]
        taken += [f"compile={self.compile}"] if self.compile != "none" else []
        return [f"ops: {', '.join(taken)}"] + [
            f"ops: {choice.operator}: {choice.got} instead of {choice.asked}: {choice.reason}"
            for choice in self.choices
            if choice.asked not in ("auto", choice.got)
        ]


def resolve(config: OpsConfig, where: str | OpContext) -> Ops:
    """The implementation of every operator for this device, or for all that is known of the context."""
    context = OpContext(where) if isinstance(where, str) else where
    choices: dict[str, Choice] = {}

    def choose(operator: str, implementations: tuple[Chosen, ...]) -> Chosen:
        inside = context.compiled and operator not in OUTSIDE_COMPILATION
        asked = getattr(config, operator)
        chosen, choices[operator] = _choose(operator, asked, implementations, context, config.strict, inside)
        if inside and not chosen.compile_safe:
            return dataclasses.replace(chosen, function=torch.compiler.disable(chosen.function))
        return chosen

    by_linear = choose("linear", linear.IMPLEMENTATIONS)
    context = dataclasses.replace(context, linear=by_linear.name)  # SwiGLU may be fused into it
    by_attention = choose("attention", attention.IMPLEMENTATIONS)
    by_swiglu = choose("swiglu", swiglu.IMPLEMENTATIONS)
    by_cross_entropy = choose("cross_entropy", cross_entropy.IMPLEMENTATIONS)
    by_head = choose("linear_cross_entropy", linear_cross_entropy.IMPLEMENTATIONS)
    feed_forward = linear.feed_forward(by_swiglu.name, by_swiglu.function, by_linear.name, by_linear.function)
    if context.compiled and linear.is_fused(by_swiglu.name, by_linear.name):
        feed_forward = torch.compiler.disable(feed_forward)
    head_and_loss = by_head.function
    if by_head.name == "off":
        head_and_loss = linear_cross_entropy.through_cross_entropy(by_cross_entropy.function)
    return Ops(
        attention=by_attention.function,
        prepare_documents=by_attention.prepare_documents,
        rope=choose("rope", rope.IMPLEMENTATIONS).function,
        rms_norm=choose("rms_norm", rms_norm.IMPLEMENTATIONS).function,
        swiglu=by_swiglu.function,
        linear=by_linear.function,
        feed_forward=feed_forward,
        embedding=choose("embedding", embedding.IMPLEMENTATIONS).function,
        linear_cross_entropy=head_and_loss,
        cross_entropy=by_cross_entropy.function,
        optimizer=choose("optimizer", optimizer.IMPLEMENTATIONS).function,
        compile=config.compile,
        choices=tuple(choices[operator] for operator in OPERATORS),
    )


def assume_gpu(config: OpsConfig, documents: bool) -> Ops:
    """The operators of a GPU with Triton that need not be here, to count with: they cannot be called."""
    taken = TAKEN_ON_A_GPU | ({"attention": "varlen"} if documents else {})
    asked = {name: getattr(config, name) for name in OPERATORS}
    choices = tuple(
        Choice(name, asked[name], taken[name] if asked[name] == "auto" else asked[name], "assumed: no GPU is here")
        for name in OPERATORS
    )
    return dataclasses.replace(resolve(OpsConfig(), "cpu"), compile=config.compile, choices=choices)


def with_deferrable_products(ops: Ops) -> Ops:
    """The same operators, with linear layers whose weight gradients can be left for later (pipelines need that)."""
    if ops.taken["linear"] != "plain":
        return ops
    by_steps = linear.feed_forward(ops.taken["swiglu"], ops.swiglu, "plain", linear.deferrable_linear)
    return dataclasses.replace(ops, linear=linear.deferrable_linear, feed_forward=by_steps)


def footprints(taken: Mapping[str, str]) -> dict[str, Footprint]:
    """What the implementations of these names need in memory, by operator; and `feed_forward` and `experts`."""
    chosen = {operator: _named(operator, name) for operator, name in taken.items()}
    found = {operator: implementation.footprint for operator, implementation in chosen.items()}
    if taken["linear_cross_entropy"] == "off":  # all logits go through cross_entropy
        found["linear_cross_entropy"] = found["cross_entropy"]
    feed_forward = linear.feed_forward_footprint(chosen["swiglu"], chosen["linear"])
    return found | {"feed_forward": feed_forward, "experts": mixture_footprint(feed_forward, found["swiglu"])}


def _named(operator: str, name: str) -> Implementation[Any]:
    return next(implementation for implementation in OPERATORS[operator] if implementation.name == name)


def _choose(
    operator: str,
    asked: str,
    implementations: tuple[Chosen, ...],
    context: OpContext,
    strict: bool,
    inside_compilation: bool = False,
) -> tuple[Chosen, Choice]:
    by_name = {implementation.name: implementation for implementation in implementations}
    if asked != "auto":
        problem = by_name[asked].check(context)
        if problem is None:
            return by_name[asked], Choice(operator, asked, asked, "as asked")
        if strict:
            others = [one.name for one in implementations if one.name != asked and one.check(context) is None]
            raise UsageError(
                f"ops.{operator} {asked} cannot run on this machine: {problem}. Choose another implementation "
                f"({', '.join(others)}), or set ops.strict to false to fall back."
            )
    # In order, and no further than needed: some checks run their kernels, which takes seconds.
    ordered = sorted(implementations, key=lambda one: inside_compilation and not one.compile_safe)
    taken = next((one for one in ordered if one.check(context) is None), None)
    if taken is None:
        raise UsageError(f"No implementation of {operator} runs on {context.device}.")
    if asked != "auto":
        reason = f"{asked} cannot run here ({problem})"
    elif inside_compilation and taken.compile_safe:
        reason = f"the first that runs on {context.device} and can be compiled"
    else:
        reason = f"the first that runs on {context.device}"
    return taken, Choice(operator, asked, taken.name, reason)
