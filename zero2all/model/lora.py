"""Low-rank adapters (LoRA): y = W x + scale B (A x), where W is frozen and only A and B are trained.

The sum is one of activations. W + scale B A is formed once, in float32, when a trained model is used (`merge`): in
bfloat16 most of B A would be lost in the rounding of W. q, k and v lie in one matrix of ours, and the rows of gate and
up take turns; each of the seven has an A and a B of its own all the same, as in peft (`zero2all.model.peft`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero2all.model.config import LORA_TARGETS, LoraConfig, LoraTarget, ModelConfig
from zero2all.model.init import generator_of, without_weights
from zero2all.model.moe import routers
from zero2all.model.z2all import Attention, Linear, Z2all
from zero2all.ops.linear import LinearOp, fp32_wgrad_linear


class Place(NamedTuple):
    """Where a target of a block lies."""

    holder: str
    """The layer that computes it."""
    weight: str
    """Its logical parameter."""
    rows: slice = slice(None)
    """Of that parameter."""


PLACES: dict[LoraTarget, Place] = {
    "q_proj": Place("attention.qkv", "attention.q"),
    "k_proj": Place("attention.qkv", "attention.k"),
    "v_proj": Place("attention.qkv", "attention.v"),
    "o_proj": Place("attention.out", "attention.out"),
    "gate_proj": Place("feed_forward.gate_up_pairs", "feed_forward.gate_up_pairs", slice(0, None, 2)),
    "up_proj": Place("feed_forward.gate_up_pairs", "feed_forward.gate_up_pairs", slice(1, None, 2)),
    "down_proj": Place("feed_forward.down", "feed_forward.down"),
}


class Adapter(nn.Module):
    """A (r, inputs) and B (outputs, r)."""

    def __init__(self, outputs: int, inputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=dtype))
        self.b = nn.Parameter(torch.empty(outputs, rank, dtype=dtype))


class Adapters(nn.ModuleDict):
    """Those of one matrix, by target."""

    def __init__(self, outputs: Mapping[LoraTarget, int], scale: float, linear: LinearOp) -> None:
        """`outputs`: of all targets in the matrix, in the order of its rows, also of those without an adapter."""
        super().__init__()
        self.outputs, self.scale, self.linear = outputs, scale, linear

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> what is added to W x, (..., rows of W)."""
        parts = []
        for name, outputs in self.outputs.items():
            if name in self:
                adapter = self[name]
                assert isinstance(adapter, Adapter)
                narrow = self.linear(x, adapter.a, None) * self.scale  # (..., r)
                parts.append(self.linear(narrow, adapter.b, None))
            else:
                parts.append(x.new_zeros(*x.shape[:-1], outputs))
        if "gate_proj" in self.outputs:
            return torch.stack(parts, dim=-1).flatten(-2)
        return torch.cat(parts, dim=-1)


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> Iterator[tuple[int, LoraTarget, str, tuple[int, int]]]:
    """(layer, target, name of the adapter, (outputs, inputs) of its matrix), in the order of the model's parameters."""
    query, shared = config.heads * config.head_size, config.kv_heads * config.head_size
    rows = {"q_proj": query, "k_proj": shared, "v_proj": shared, "o_proj": config.hidden_size}
    rows |= dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size) | {"down_proj": config.hidden_size}
    columns = {"o_proj": query, "down_proj": config.intermediate_size}
    for layer in range(config.layers):
        for name in lora.targets_of(config):
            shape = (rows[name], columns.get(name, config.hidden_size))
            yield layer, name, f"blocks.{layer}.{PLACES[name].holder}.lora.{name}", shape


def initial_adapters(config: ModelConfig, lora: LoraConfig, seed: int) -> dict[str, Tensor]:
    """As peft begins: A uniform in +-1/sqrt(inputs), each drawn from the seed and its name; B zero, so that the model
    is that without adapters."""
    found = {}
    for _, _, name, (outputs, inputs) in adapter_shapes(config, lora):
        assert lora.rank is not None
        limit = 1 / math.sqrt(inputs)
        found[f"{name}.a"] = torch.empty(lora.rank, inputs).uniform_(-limit, limit, generator=generator_of(seed, name))
        found[f"{name}.b"] = torch.zeros(outputs, lora.rank)
    return found


@torch.no_grad()
def merge(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], config: ModelConfig, lora: LoraConfig) -> None:
    """Add scale B A to the weights, by logical name, in place; both in float32."""
    for layer, target, name, _ in adapter_shapes(config, lora):
        weight = weights[f"blocks.{layer}.{PLACES[target].weight}.weight"][PLACES[target].rows]
        weight.addmm_(adapters[f"{name}.b"], adapters[f"{name}.a"], alpha=lora.scale)


def add_adapters(model: Z2all, lora: LoraConfig) -> None:
    """Freeze a model and give its targets adapters without values. Call it once it is known which heads and inner units
    this process computes, before anything else is done to the model."""
    if lora.rank is None:
        return
    model.requires_grad_(False)
    model.lora, targets = lora, lora.targets_of(model.config)
    for _, router in routers(model):
        router.rate = 0.0  # its biases belong to the model that is frozen
    # float8 has too few digits for a path of rank r; its kernels take no such matrices either.
    linear = fp32_wgrad_linear if model.ops.taken["linear"] == "fp8" else model.ops.linear
    for block in model.blocks:
        for holder in dict.fromkeys(PLACES[name].holder for name in targets):
            layer, owner = block.get_submodule(holder), block.get_submodule(holder.partition(".")[0])
            assert isinstance(layer, Linear)
            alike = [name for name in LORA_TARGETS if PLACES[name].holder == holder]
            rows = [layer.out_features // len(alike)] * len(alike)
            if isinstance(owner, Attention) and len(alike) > 1:
                rows = [heads * owner.head_size for heads in (owner.heads, owner.kv_heads, owner.kv_heads)]
            layer.lora = Adapters(dict(zip(alike, rows, strict=True)), lora.scale, linear)
            for name, outputs in layer.lora.outputs.items():
                if name in targets:
                    with without_weights():
                        layer.lora[name] = Adapter(outputs, layer.in_features, lora.rank, layer.weight.dtype)
