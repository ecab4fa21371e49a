"""The role of each parameter: it decides which decay, whose rate is multiplied, and which matrices Muon updates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zero2all.config.training import OptimConfig
from zero2all.model.config import ModelConfig, ParameterKind

DECAYING: tuple[ParameterKind, ...] = ("matrix",)
TABLES: tuple[ParameterKind, ...] = ("embedding", "head")


@dataclass(frozen=True)
class Role:
    """A parameter's kind and, where one tensor holds several matrices, their rows."""

    kind: ParameterKind
    splits: tuple[int, ...] = ()
    """Rows of each matrix that is stored in this one, one after the other; empty where it is one matrix."""
    alternating: int = 1  # how many matrices take the rows of this one in turn


def decay_of(kind: ParameterKind, config: OptimConfig) -> float:
    """Matrices decay, embedding and head by option, norms and biases never."""
    decaying = DECAYING + (TABLES if config.decay_embeddings else ())
    return config.weight_decay if kind in decaying else 0.0


def model_roles(config: ModelConfig, names: Iterable[str]) -> dict[str, Role]:
    """The role of every parameter of a Z2all model, by name."""
    query, shared = config.heads * config.head_size, config.kv_heads * config.head_size
    several = {
        "attention.qkv.weight": Role("matrix", splits=(query, shared, shared)),
        "feed_forward.gate_up_pairs.weight": Role("matrix", alternating=2),
    }
    roles = {}
    for name in names:
        if name.endswith("norm.weight"):
            roles[name] = Role("norm")
        elif name.endswith("bias"):
            roles[name] = Role("bias")
        elif name == "embedding.weight":
            roles[name] = Role("embedding")
        elif name == "head.weight":
            roles[name] = Role("head")
        else:
            inside_block = ".".join(name.split(".")[-3:])
            roles[name] = several.get(inside_block, Role("matrix"))
    return roles
