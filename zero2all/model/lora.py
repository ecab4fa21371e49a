"""Low-rank adapters (LoRA): y = W x + scale B (A x), where W is frozen and only A and B are trained.

The sum is one of activations. W + scale B A is formed once, in float32, when a trained model is used (`merge`): in
bfloat16 most of B A would be lost in the rounding of W. q, k and v lie in one matrix of ours, and the rows of gate and
up take turns; each of the seven has an A and a B of its own all the same, as in peft (`zero2all.model.peft`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from zero2all.model.config import LORA_TARGETS, LoraConfig, LoraTarget, ModelConfig, lora_shapes
from zero2all.model.init import generator_of
from zero2all.model.moe import routers
from zero2all.model.z2all import Z2all
from zero2all.ops.linear import LinearOp, fp32_wgrad_linear

PLACES: dict[LoraTarget, tuple[str, str, slice]] = {
    "q_proj": ("attention.qkv", "attention.q", slice(None)),
    "k_proj": ("attention.qkv", "attention.k", slice(None)),
    "v_proj": ("attention.qkv", "attention.v", slice(None)),
    "o_proj": ("attention.out", "attention.out", slice(None)),
    "gate_proj": ("feed_forward.gate_up_pairs", "feed_forward.gate_up_pairs", slice(0, None, 2)),
    "up_proj": ("feed_forward.gate_up_pairs", "feed_forward.gate_up_pairs", slice(1, None, 2)),
    "down_proj": ("feed_forward.down", "feed_forward.down", slice(None)),
}
"""Of each target: the layer that computes it, its logical parameter, and its rows there."""


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> Iterator[tuple[int, LoraTarget, str, tuple[int, int]]]:
    """(layer, target, name of the adapter, (outputs, inputs)), in the order of the model's parameters."""
    for layer in range(config.layers):
        for target in lora.targets_of(config):
            yield layer, target, f"blocks.{layer}.{PLACES[target][0]}.lora.{target}", lora_shapes(config)[target]


def initial_adapters(config: ModelConfig, lora: LoraConfig, seed: int) -> dict[str, Tensor]:
    """As peft begins: A uniform in +-1/sqrt(inputs), each drawn from the seed and its name; B zero, so that the model
    is that without adapters."""
    found, rank = {}, lora.rank or 0
    for _, _, name, (outputs, inputs) in adapter_shapes(config, lora):
        limit = 1 / math.sqrt(inputs)
        found[f"{name}_a"] = torch.empty(rank, inputs).uniform_(-limit, limit, generator=generator_of(seed, name))
        found[f"{name}_b"] = torch.zeros(outputs, rank)
    return found


@torch.no_grad()
def merge(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], config: ModelConfig, lora: LoraConfig) -> None:
    """Add scale B A to the weights, by logical name, in place; both in float32."""
    for layer, target, name, _ in adapter_shapes(config, lora):
        _, weight, rows = PLACES[target]
        matrix = weights[f"blocks.{layer}.{weight}.weight"][rows]
        matrix.addmm_(adapters[f"{name}_b"], adapters[f"{name}_a"], alpha=lora.scale)


class Adapters(nn.Module):
    """Those of one layer: of each of its targets A (r, inputs) and B (outputs, r)."""

    def __init__(self, outputs: Mapping[LoraTarget, int], scale: float, linear: LinearOp) -> None:
        """`outputs`: of every target in the layer, also of those without an adapter."""
        super().__init__()
        self.outputs, self.scale, self.linear = outputs, scale, linear

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> what is added to W x, (..., outputs of the layer)."""
        parts = []
        for target, outputs in self.outputs.items():
            if hasattr(self, f"{target}_a"):
                narrow = self.linear(x, self.get_parameter(f"{target}_a"), None) * self.scale  # (..., r)
                parts.append(self.linear(narrow, self.get_parameter(f"{target}_b"), None))
            else:
                parts.append(x.new_zeros(*x.shape[:-1], outputs))
        return torch.stack(parts, -1).flatten(-2) if "gate_proj" in self.outputs else torch.cat(parts, -1)


def add_adapters(model: Z2all, lora: LoraConfig, config: ModelConfig) -> None:
    """Freeze a model and give its targets adapters without values. `config`: with the heads and inner units that this
    process has. Call it before the model is compiled, sharded, or cut into stages."""
    if lora.rank is None:
        return
    model.requires_grad_(False)
    model.lora, shapes = lora, lora_shapes(config)
    for _, router in routers(model):
        router.rate = 0.0  # its biases belong to the model that is frozen
    # float8 has too few digits for a path of rank r, and its kernels take no such matrices.
    linear = fp32_wgrad_linear if model.ops.taken["linear"] == "fp8" else model.ops.linear
    for number, target, _, _ in adapter_shapes(model.config, lora):
        layer, place = model.blocks[number].get_submodule(PLACES[target][0]), PLACES[target][0]
        if not hasattr(layer, "lora"):
            alike = {name: shapes[name][0] for name in LORA_TARGETS if PLACES[name][0] == place}
            layer.add_module("lora", Adapters(alike, lora.scale, linear))
        (outputs, inputs), dtype = shapes[target], model.embedding.weight.dtype
        for end, shape in (("a", (lora.rank, inputs)), ("b", (outputs, lora.rank))):
            values = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
            layer.get_submodule("lora").register_parameter(f"{target}_{end}", values)
