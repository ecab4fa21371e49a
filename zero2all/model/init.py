"""The weights a model begins with: none while it is made, then numbers drawn from the seed.

Each parameter is drawn by itself from the seed and its name, so that a seed means the same model under every layout,
and in whatever order parameters are drawn.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zero2all.model.config import ModelConfig, ParameterKind

INTO_RESIDUAL = ("attention.out.weight", "feed_forward.down.weight", "shared.down.weight", "experts.down")
"""How the names of projections into the residual end."""
QK_NORMS = ("attention.q_norm.weight", "attention.k_norm.weight")


def initial_values(name: str, shape: tuple[int, ...], kind: ParameterKind, config: ModelConfig, seed: int) -> Tensor:
    """The weights of a parameter before training, float32 on the CPU: normal matrices, zero biases, norms of 1;
    projections into the residual start smaller in deeper models, or at 0."""
    values = torch.empty(shape)
    if kind == "norm":
        return values.fill_(config.init_qk_gain if name.endswith(QK_NORMS) else 1.0)
    is_into_residual = name.endswith(INTO_RESIDUAL)
    if kind == "bias" or (is_into_residual and config.init_residual == "zero"):
        return values.zero_()
    std = config.matrix_std / math.sqrt(2 * config.layers) if is_into_residual else config.matrix_std
    if kind in ("embedding", "head"):
        std = config.head_std if kind == "head" else config.init_embedding_std or std
    values.normal_(0.0, std, generator=generator_of(seed, name))
    if kind in ("embedding", "head"):
        values[config.vocab_ids :] = 0.0  # padding
    return values


def generator_of(seed: int, name: str) -> torch.Generator:
    """What draws the values of one parameter."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


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
