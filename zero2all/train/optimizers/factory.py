"""From the masters of logical parameters and a config to an optimizer, and how each may be cut."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from zero2all.common.errors import UsageError
from zero2all.config.training import OptimConfig
from zero2all.model.config import PARAMETER_KINDS, ParameterKind
from zero2all.ops.implementation import compiler_problem, has_triton
from zero2all.parallel.buckets import Cut
from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.train.optimizers.adamw import AdamW
from zero2all.train.optimizers.base import Master, Optimizer, ParameterGroup, ParamState, decay_of
from zero2all.train.optimizers.muon import MUON_KINDS, Muon
from zero2all.train.optimizers.rounding import AdamW8bit, AdamWBf16

Implementation = Literal["auto", "eager", "fused", "compiled"]
"""eager: one operation after the other; fused: torch's kernel, AdamW only; compiled: torch.compile's kernel."""


def cut_of(optimizer_kind: str, parameter: LogicalParameter) -> Cut:
    """How a parameter may be cut for `optim.kind` so that no update needs another process. The Part of an owner, and
    the empty Parts of the others, have no group. (With a group, Muon also takes matrices cut by rows, and boxes of
    them, which tensor parallelism cuts.)"""
    is_matrix = len(parameter.shape) > 1
    if optimizer_kind == "muon" and parameter.kind == "expert":
        return "rows"  # a row is a whole expert
    if optimizer_kind == "muon" and parameter.kind == "matrix":
        return "whole"
    return "rows" if optimizer_kind == "adamw_8bit" and is_matrix else "values"


def build_optimizer(
    masters: Mapping[str, Master],
    config: OptimConfig,
    table: Mapping[str, LogicalParameter],
    implementation: Implementation = "auto",
    seed: int = 0,
    holders: dist.ProcessGroup | None = None,
) -> Optimizer:
    """The optimizer of `config`, its rate at `lr_max`; `table` has the logical parameters by name. `auto` takes torch's
    fused kernel for AdamW on float32, on a GPU our Triton kernels for Muon and compiled ones for adamw_8bit and
    adamw_bf16, and the eager formulas for the others. `seed` keys stochastic rounding. `holders`: processes that
    together hold a cut matrix."""
    groups = parameter_groups(masters, config, table)
    if config.kind == "muon":
        optimizer: Optimizer = _muon(groups, config, implementation, holders)
    else:
        optimizer = _build(groups, config, implementation, seed)
    optimizer.set_learning_rate(config.lr_max)
    return optimizer


def parameter_groups(
    masters: Mapping[str, Master], config: OptimConfig, table: Mapping[str, LogicalParameter]
) -> list[ParameterGroup]:
    """A group for each kind of parameter, with the decay of its kind."""
    params: dict[ParameterKind, list[ParamState]] = {kind: [] for kind in PARAMETER_KINDS}
    for name, master in masters.items():
        params[table[name].kind].append(ParamState(table[name], master))
    return [
        ParameterGroup(kind, members, decay_of(kind, config), config.lr_multipliers.get(kind, 1.0))
        for kind, members in params.items()
        if members
    ]


def _build(groups: list[ParameterGroup], config: OptimConfig, implementation: Implementation, seed: int) -> Optimizer:
    _check_precision(groups, config)
    compiled = implementation == "compiled" or (
        implementation == "auto" and config.kind in ("adamw_8bit", "adamw_bf16") and _can_compile(groups)
    )
    if implementation == "fused" and config.kind != "adamw":
        raise UsageError(f"There is no fused kernel for optim.kind = {config.kind}. Use auto, eager or compiled.")
    fused = implementation == "fused" or (implementation == "auto" and _all_float32(groups))
    if config.kind == "adamw":
        return AdamW(groups, config, fused, compiled)
    if config.kind == "adamw_8bit":
        return AdamW8bit(groups, config, seed, compiled)
    if config.kind == "adamw_bf16":
        return AdamWBf16(groups, config, seed, compiled)
    raise AssertionError(f"optim.kind {config.kind} has no optimizer here")


def _muon(
    groups: list[ParameterGroup], config: OptimConfig, how: Implementation, holders: dist.ProcessGroup | None
) -> Muon:
    """Muon for matrices, AdamW for the others; the embedding may have a beta2 of its own."""
    _check_precision(groups, config)
    if how == "compiled":
        raise UsageError("optim.kind = muon is not compiled: it has kernels of its own. Use auto, eager or fused.")
    fused = how == "fused" or (how == "auto" and _all_float32(groups))
    betas = {} if config.embedding_beta2 is None else {"embedding": config.embedding_beta2}
    rest = [
        AdamW([group], replace(config, beta2=betas.get(group.kind, config.beta2)), fused)
        for group in groups
        if group.kind not in MUON_KINDS
    ]
    kernels = how == "auto" and _all_float32(groups) and _can_compile(groups)
    matrices = [group for group in groups if group.kind in MUON_KINDS]
    return Muon(matrices, rest, config, holders, kernels)


def _can_compile(groups: list[ParameterGroup]) -> bool:
    """On a GPU, and with what Triton and torch.compile need there."""
    on_gpu = any(param.weight.is_cuda for group in groups for param in group.params)
    return on_gpu and has_triton() and compiler_problem() is None


def _all_float32(groups: list[ParameterGroup]) -> bool:
    """float64 takes the formula: the fused kernel reads its factor on gradients in float32."""
    return all(param.weight.dtype == torch.float32 for group in groups for param in group.params)


def _check_precision(groups: list[ParameterGroup], config: OptimConfig) -> None:
    """bfloat16 weights lose small updates unless the optimizer rounds for them."""
    if config.kind == "adamw_bf16":
        return
    for group in groups:
        for param in group.params:
            if param.weight.dtype not in (torch.float32, torch.float64):
                raise UsageError(
                    f"optim.kind = {config.kind} updates float32 weights, and {param.parameter.name} is "
                    f"{param.weight.dtype}. Keep float32 master weights, or use optim.kind = adamw_bf16."
                )
