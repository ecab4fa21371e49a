"""Models whose weights come later, from a checkpoint or drawn when it is known who holds what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made in this block have shapes only (the meta device), and no time is spent on initial values."""
    with torch.device("meta"), _NoDrawing():
        yield


class _NoDrawing(TorchFunctionMode):
    """Leaves out the initial values of torch's own layers. Most of torch's functions on the meta device, those that
    draw among them, import its compiler first, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
