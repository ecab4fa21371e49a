"""FlashAttention 3 and 4: packages that do not come with torch."""

from __future__ import annotations

import importlib
import warnings
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zero2all.ops import trial
from zero2all.ops.implementation import OpContext

FA3, FA4 = "flash_attn_interface", "flash_attn.cute"
GENERATIONS = {FA3: (9,), FA4: (9, 10)}
"""Major compute capabilities for which a package has kernels that we trust."""
TRIAL_LENGTH = 256


def flash_attention_of(module: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of (B, H, T, D) by the package with this module."""
    function = _function_of(module)
    mixed = function(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=True,
        # Otherwise the backward pass adds up in no fixed order.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    mixed = mixed[0] if isinstance(mixed, tuple) else mixed
    return mixed.transpose(1, 2)


@cache
def _function_of(module: str) -> Any:
    # FlashAttention 4 passes arguments that its compiler ignores with a warning, once per kernel.
    warnings.filterwarnings(
        "ignore", message=r"Argument \w+ \(position \d+\) cannot be converted", category=UserWarning
    )
    return importlib.import_module(module).flash_attn_func


def problem_of(module: str, context: OpContext) -> str | None:
    """Why the package cannot be used here; None: it can."""
    if not (trial.is_there(module.partition(".")[0]) and trial.is_there(module)):
        return f"the package {module} cannot be imported"
    generation = torch.cuda.get_device_capability()
    if generation[0] not in GENERATIONS[module]:
        wanted = " or ".join(f"{major}.x" for major in GENERATIONS[module])
        return f"it needs compute capability {wanted}, and this GPU's is {generation[0]}.{generation[1]}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    return problem_in_trial(module, context.head_size or 64, context.queries_per_key, context.dtype, deterministic)


@cache
def problem_in_trial(
    module: str, head_size: int, queries_per_key: int, dtype: torch.dtype, deterministic: bool
) -> str | None:
    """What goes wrong when it computes a small attention; None: nothing does."""
    del deterministic  # part of the key of the cache: it selects other kernels
    shapes = [(1, heads, TRIAL_LENGTH, head_size) for heads in (2 * queries_per_key, 2, 2)]
    return trial.problem_of(partial(flash_attention_of, module), _formula, shapes, dtype)


def _formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by plain matmuls."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
