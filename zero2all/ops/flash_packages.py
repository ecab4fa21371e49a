"""FlashAttention 3 and 4, packages of their own that torch does not bring.

Whether one of them works shows only when its kernels run: FlashAttention 4 compiles its kernels on first use, for which
compiler, driver and package have to fit together. So the probe lets it compute a small attention and compares that with
the formula, rather than let a run of days die in its first step. The seconds this takes are those of the compiling.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from zero2all.ops.implementation import Situation

FA3, FA4 = "flash_attn_interface", "flash_attn.cute"
GENERATIONS = {FA3: (9,), FA4: (9, 10)}
"""Major compute capabilities that a package has kernels for and that we trust it on."""
TRIAL_DEVICE, TRIAL_LENGTH = "cuda", 256
TRIAL_TOLERANCE = 2e-2
"""Largest relative error of a result or gradient; bfloat16 makes about 3e-3."""


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
    if importlib.util.find_spec(module.partition(".")[0]) is None or importlib.util.find_spec(module) is None:
        return f"the package {module} cannot be imported"
    generation = torch.cuda.get_device_capability()
    if generation[0] not in GENERATIONS[module]:
        wanted = " or ".join(f"{major}.x" for major in GENERATIONS[module])
        return f"it needs compute capability {wanted}, and this GPU's is {generation[0]}.{generation[1]}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    return failure_in_trial(
        module, situation.head_size or 64, situation.queries_per_key, situation.dtype, deterministic
    )


@cache
def failure_in_trial(
    module: str, head_size: int, queries_per_key: int, dtype: torch.dtype, deterministic: bool
) -> str | None:
    """What goes wrong when it computes a little attention, forward and backward; None: nothing does."""
    from zero2all.ops.attention import math_attention

    del deterministic  # other kernels, so another trial
    generator = torch.Generator(TRIAL_DEVICE).manual_seed(0)
    shapes = [(1, heads, TRIAL_LENGTH, head_size) for heads in (2 * queries_per_key, 2, 2, 2 * queries_per_key)]
    *inputs, direction = (torch.randn(shape, generator=generator, device=TRIAL_DEVICE).to(dtype) for shape in shapes)
    wanted = _with_gradients(partial(math_attention, dropout=0.0), inputs, direction, torch.float32)
    try:
        found = _with_gradients(partial(flash_attention_of, module), inputs, direction, dtype)
    except Exception as failure:
        first = next(iter(str(failure).splitlines()), "")
        return f"it failed when it was tried: {type(failure).__name__}: {first}"[:300].rstrip(".")
    errors = [(ours.float() - exact).norm() / exact.norm() for ours, exact in zip(found, wanted, strict=True)]
    error = float(torch.stack(errors).max())  # where one is not a number, so is the largest
    if not error <= TRIAL_TOLERANCE:
        return f"its results were wrong by {error:.1%} when it was tried"
    return None


def _with_gradients(function: Any, inputs: list[Tensor], direction: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [value.to(dtype, copy=True).requires_grad_() for value in inputs]
    with torch.enable_grad():
        mixed = function(*leaves)
        return [mixed.detach(), *torch.autograd.grad(mixed, leaves, direction.to(dtype))]
