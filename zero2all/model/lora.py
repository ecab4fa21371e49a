"""Low-rank adapters (LoRA): y = W x + scale B (A x), where W is frozen and only A and B are trained; and their folders.

The sum is one of activations. W + scale B A is formed once, in float32, when a trained model is used (`merge`): in
bfloat16 most of B A would be lost in the rounding of W. q, k and v lie in one matrix of ours, and the rows of gate and
up take turns; each of the seven has an A and a B of its own all the same, as in Hugging Face's peft.

Where the names in an adapter folder (adapter_config.json and adapter_model.safetensors) do not fit its model, peft
warns and computes with the base alone. Here nothing of an adapter is left out silently: unknown names, missing ones,
and settings that would change the result are errors.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json_object, write_json
from zero2all.common.schema import Problem, build
from zero2all.model.config import LORA_TARGETS, LoraConfig, LoraTarget, ModelConfig, lora_shapes
from zero2all.model.hf import STORED_DTYPES, nonfinite, open_tensors, plain_file, save_tensors, stored_tensors
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


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
EXPORT_AGAIN = "Save the adapter again with peft's save_pretrained, or with z2a export --adapter."
KEY = re.compile(r"base_model\.model\.model\.layers\.[0-9]{1,9}\.(?:self_attn|mlp)\.(\w{1,40})\.lora_[AB]\.weight")
BASE_MARK = "zero2all_base"
"""In the metadata of the weights: `base_fingerprint` of the model they belong to. peft does not read it."""
SAMPLED_VALUES = 4096
"""Of each matrix, for the fingerprint."""
KNOWN = (
    *("r", "lora_alpha", "use_rslora", "target_modules"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "layers_to_transform", "layers_pattern", "exclude_modules", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "runtime_config", "ensure_weight_tying"),
)
"""Settings that are used, and those that change no result once the names of all tensors are known."""
POSSIBLE = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
"""Values of others; pissa, olora and other beginnings change the base."""


def base_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Tells one base from another, by logical name: from evenly spread values of the matrices of its blocks, in
    bfloat16, so that it is the same whether they are stored in 32 bits or in 16."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(name for name, one in weights.items() if one.dim() > 1 and name.startswith("blocks.")):
        flat = weights[name].reshape(-1)
        values = flat[:: max(1, flat.numel() // SAMPLED_VALUES)].to("cpu", torch.bfloat16)
        digest.update(name.encode() + values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def write_adapter_folder(
    folder: Path, config: ModelConfig, lora: LoraConfig, weights: Mapping[str, Tensor], base: str
) -> None:
    """Write the adapters among `weights`, which has those of the base too; `base` is its name. `folder` must exist."""
    values: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    values |= {"r": lora.rank, "use_rslora": lora.rslora, "bias": "none", "use_dora": False, "inference_mode": True}
    values |= {"target_modules": list(lora.targets_of(config)), "lora_dropout": 0.0}
    values["lora_alpha"] = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    theirs = {
        their_name: weights[name].to("cpu", torch.float32).contiguous()
        for name, (their_name, _) in _counterparts(config, lora).items()
    }
    base_weights = {name: one for name, one in weights.items() if ".lora." not in name}
    is_rounded = any(one.dtype == torch.float16 for one in base_weights.values())  # other bits than bfloat16's are lost
    mark = {} if is_rounded else {BASE_MARK: base_fingerprint(base_weights)}
    save_tensors(theirs, folder / WEIGHTS_FILE, **mark)
    write_json(folder / CONFIG_FILE, values)


def read_adapter_folder(
    folder: Path, config: ModelConfig, base: Mapping[str, Tensor]
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The settings of an adapter of `base`, and its tensors by our names in float32."""
    path = plain_file(folder / WEIGHTS_FILE, EXPORT_AGAIN)
    values = read_json_object(plain_file(folder / CONFIG_FILE, EXPORT_AGAIN), EXPORT_AGAIN)
    stored = stored_tensors([path])
    lora = _settings(values, folder / CONFIG_FILE, {match[1] for name in stored if (match := KEY.fullmatch(name))})
    wanted = _counterparts(config, lora)
    shapes = dict(wanted.values())
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    for name, (shape, kind) in stored.items():
        if name not in shapes:
            problems.append(f"{name[:200]!r} is unknown")
        elif shape != shapes[name] or kind not in STORED_DTYPES:
            problems.append(f"{name} is {kind} of shape {shape} instead of {shapes[name]}")
    if problems:
        raise BadInputError(
            f"The adapter {folder} does not fit this model: {'; '.join(problems[:4] + ['…'] * (len(problems) > 4))}. "
            f"Expected: lora_A and lora_B of {', '.join(lora.targets_of(config))} in all {config.layers} layers, in "
            f"float32, bfloat16 or float16, and nothing else. Take the model that it was trained on."
        )
    with open_tensors(path) as file:
        mark = (file.metadata() or {}).get(BASE_MARK)
        tensors = {name: file.get_tensor(theirs).float() for name, (theirs, _) in wanted.items()}
    if mark is not None and mark != base_fingerprint(base):
        raise BadInputError(
            f"The adapter {folder} belongs to another base: it was trained on {values.get('base_model_name_or_path')}, "
            f"whose weights are not these ({mark} instead of {base_fingerprint(base)}). Take that model."
        )
    broken = [name for name, tensor in tensors.items() if nonfinite(tensor)]
    if broken:
        raise BadInputError(f"{path}: {len(broken)} tensors have values that are NaN or infinite ({broken[0]}).")
    return lora, tensors


def _settings(values: Mapping[str, Any], path: Path, found: set[str]) -> LoraConfig:
    """Those that decide the result, checked; `found`: targets that have tensors."""
    asked = {"peft_type": "nothing", **values}
    unknown = {name: one for name, one in asked.items() if one and name not in KNOWN}
    wrong = [f"{name}: {str(one)[:80]}" for name, one in unknown.items() if one not in POSSIBLE.get(name, ())]
    if wrong:
        raise BadInputError(f"{path} asks for {', '.join(wrong)}. Only plain LoRA on the matrices of blocks is known.")
    named = values.get("target_modules")  # a list of names or their ends; else a pattern, and the tensors say it
    targets = {str(name).rpartition(".")[2] for name in named} if isinstance(named, list) else found
    fields = {"rank": values.get("r"), "alpha": values.get("lora_alpha", 8), "targets": sorted(targets)}
    problems: list[Problem] = []
    lora: LoraConfig = build(LoraConfig, fields | {"rslora": values.get("use_rslora", False)}, "", problems)
    if problems or lora.rank is None or not targets:
        raise BadInputError(f"{path}: {'; '.join(map(str, problems)) or 'r or the targets are missing'} {EXPORT_AGAIN}")
    return lora


def _counterparts(config: ModelConfig, lora: LoraConfig) -> dict[str, tuple[str, tuple[int, int]]]:
    """By our name: peft's, and the shape."""
    found = {}
    for layer, target, name, (outputs, inputs) in adapter_shapes(config, lora):
        part = "self_attn" if target in LORA_TARGETS[:4] else "mlp"
        theirs = f"base_model.model.model.layers.{layer}.{part}.{target}"
        assert lora.rank is not None
        found[f"{name}_a"] = (f"{theirs}.lora_A.weight", (lora.rank, inputs))
        found[f"{name}_b"] = (f"{theirs}.lora_B.weight", (outputs, lora.rank))
    return found
