"""FlashAttention 3 and 4, packages of their own that torch does not bring."""

from __future__ import annotations

import importlib
import warnings
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from zero2all.ops import trial
from zero2all.ops.implementation import Situation

FA3, FA4 = "flash_attn_interface", "flash_attn.cute"
GENERATIONS = {FA3: (9,), FA4: (9, 10)}
"""Major compute capabilities that a package has kernels for and that we trust it on."""
TRIAL_LENGTH = 256


def flash_attention_of(module: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of (B, H, T, D), of the package whose module is named."""
    function = _function_of(module)
    mixed = function(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=True,
        # Its backward adds up in whichever order comes, unless it is told not to.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    mixed = mixed[0] if isinstance(mixed, tuple) else mixed
    return mixed.transpose(1, 2)


@cache
def _function_of(module: str) -> Any:
    # FlashAttention 4 tells its compiler more than that wants to know, once for each kernel.
    warnings.filterwarnings(
        "ignore", message=r"Argument \w+ \(position \d+\) cannot be converted", category=UserWarning
    )
    return importlib.import_module(module).flash_attn_func


def problem_of(module: str, situation: Situation) -> str | None:
    """Why the package cannot be used here, if so."""
    if not (trial.is_there(module.partition(".")[0]) and trial.is_there(module)):
        return f"the package {module} cannot be imported"
    generation = torch.cuda.get_device_capability()
    if generation[0] not in GENERATIONS[module]:
        wanted = " or ".join(f"{major}.x" for major in GENERATIONS[module])
        return f"it needs compute capability {wanted}, and this GPU's is {generation[0]}.{generation[1]}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    return problem_in_trial(
        module, situation.head_size or 64, situation.queries_per_key, situation.dtype, deterministic
    )


@cache
def problem_in_trial(
    module: str, head_size: int, queries_per_key: int, dtype: torch.dtype, deterministic: bool
) -> str | None:
    """What goes wrong when it computes a little attention; None: nothing does."""
    from zero2all.ops.attention import math_attention

    del deterministic  # other kernels, so another trial
    shapes = [(1, heads, TRIAL_LENGTH, head_size) for heads in (2 * queries_per_key, 2, 2)]
    return trial.problem_of(partial(flash_attention_of, module), partial(math_attention, dropout=0.0), shapes, dtype)
