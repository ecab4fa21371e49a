"""float32 where bfloat16 is too narrow, and hand-written autograd functions under autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def widened(x: Tensor) -> Tensor:
    """`x` in float32, or as it is where it is wider: float64 models stay float64 throughout."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_to(device: str) -> torch.dtype | None:
    """The dtype of autocast on this kind of device; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def for_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where it is on, as torch's own matmuls cast them."""
    first = next(tensor for tensor in tensors if tensor is not None)
    dtype = autocast_to(first.device.type)
    if dtype is None:
        return tensors
    return tuple(tensor if tensor is None else tensor.to(dtype) for tensor in tensors)


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run an autograd function's forward or backward with autocast off, which would silently cast the matmuls of a
    hand-written backward inside an autocast region."""

    @wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        on = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
        if not on:
            return function(*args, **kwargs)
        for device in on:
            torch.set_autocast_enabled(device, False)
        try:
            return function(*args, **kwargs)
        finally:
            for device in on:
                torch.set_autocast_enabled(device, True)

    return plain
