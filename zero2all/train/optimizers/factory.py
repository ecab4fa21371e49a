"""From named parameters and a config to an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.config.training import OptimConfig
from zero2all.model.config import PARAMETER_KINDS, ParameterKind
from zero2all.train.optimizers.adafactor import Adafactor
from zero2all.train.optimizers.adamw import AdamW
from zero2all.train.optimizers.adamw_8bit import AdamW8bit
from zero2all.train.optimizers.adamw_bf16 import AdamWBf16
from zero2all.train.optimizers.base import Optimizer, ParameterGroup, ParamState
from zero2all.train.optimizers.momentum import SGD, Lion
from zero2all.train.optimizers.muon import Muon
from zero2all.train.optimizers.roles import Role, decay_of

Implementation = Literal["auto", "eager", "fused", "compiled"]
"""eager: one operation after the other; fused: torch's kernel, AdamW only; compiled: torch.compile's kernel."""


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    config: OptimConfig,
    roles: Mapping[str, Role],
    implementation: Implementation = "auto",
    seed: int = 0,
) -> Optimizer:
    """The optimizer of `config`, its rate at `lr_max`. `auto` takes torch's fused kernel for AdamW on float32 and the
    eager formulas for the others. `seed` keys stochastic rounding."""
    groups = parameter_groups(named_parameters, config, roles)
    optimizer = _build(groups, config, implementation, seed)
    optimizer.set_learning_rate(config.lr_max)
    return optimizer


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]], config: OptimConfig, roles: Mapping[str, Role]
) -> list[ParameterGroup]:
    """A group for each kind of parameter: matrices decay, embedding and head by option, norms and biases never."""
    params: dict[ParameterKind, list[ParamState]] = {kind: [] for kind in PARAMETER_KINDS}
    for index, (name, parameter) in enumerate(named_parameters):
        params[roles[name].kind].append(ParamState(index, name, parameter, roles[name]))
    return [
        ParameterGroup(kind, members, decay_of(kind, config), config.lr_multipliers.get(kind, 1.0))
        for kind, members in params.items()
        if members
    ]


def _build(groups: list[ParameterGroup], config: OptimConfig, implementation: Implementation, seed: int) -> Optimizer:
    _check_precision(groups, config)
    compiled = implementation == "compiled"
    if implementation == "fused" and config.kind not in ("adamw", "muon"):
        raise UsageError(f"There is no fused kernel for optim.kind = {config.kind}. Use auto, eager or compiled.")
    fused = implementation == "fused" or (implementation == "auto" and _all_float32(groups))
    if config.kind == "adamw":
        return AdamW(groups, config, fused, compiled)
    if config.kind == "adamw_8bit":
        return AdamW8bit(groups, config, seed, compiled)
    if config.kind == "adamw_bf16":
        return AdamWBf16(groups, config, seed, compiled)
    if config.kind == "lion":
        return Lion(groups, config, compiled)
    if config.kind == "sgd":
        return SGD(groups, config, compiled)
    if config.kind == "adafactor":
        return Adafactor(groups, config)
    matrices = [group for group in groups if group.kind == "matrix"]
    others = [group for group in groups if group.kind != "matrix"]
    return Muon(matrices, AdamW(others, config, fused, compiled), config)


def _all_float32(groups: list[ParameterGroup]) -> bool:
    """float64 takes the formula: the fused kernel reads its factor on gradients in float32."""
    return all(param.parameter.dtype == torch.float32 for group in groups for param in group.params)


def _check_precision(groups: list[ParameterGroup], config: OptimConfig) -> None:
    """bfloat16 weights lose small updates unless the optimizer rounds for them."""
    if config.kind == "adamw_bf16":
        return
    for group in groups:
        for param in group.params:
            if param.parameter.dtype not in (torch.float32, torch.float64):
                raise UsageError(
                    f"optim.kind = {config.kind} updates float32 weights, and {param.name} is {param.parameter.dtype}. "
                    f"Keep float32 master weights, or use optim.kind = adamw_bf16."
                )
