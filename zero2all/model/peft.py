"""Adapter folders of Hugging Face's peft: adapter_config.json and adapter_model.safetensors.

Where the names in such a folder do not fit its model, peft warns and computes with the base alone. Here nothing of an
adapter is left out silently: unknown names, missing ones, and settings that would change the result are errors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json_object, write_json
from zero2all.common.schema import Problem, build
from zero2all.model.config import LORA_TARGETS, LoraConfig, ModelConfig
from zero2all.model.hf import STORED_DTYPES, nonfinite, open_tensors, plain_file, stored_tensors
from zero2all.model.lora import adapter_shapes

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
EXPORT_AGAIN = "Save the adapter again with peft's save_pretrained, or with z2a export --adapter."
KEY = re.compile(r"base_model\.model\.model\.layers\.[0-9]{1,9}\.(?:self_attn|mlp)\.(\w{1,40})\.lora_[AB]\.weight")
BASE_MARK = "zero2all_base"
"""In the metadata of the weights: `base_fingerprint` of the model they belong to. peft does not read it."""
SAMPLED_VALUES = 4096
"""Of each matrix, for the fingerprint."""
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "layers_to_transform", "layers_pattern", "exclude_modules", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "runtime_config", "ensure_weight_tying"),
}
"""Settings that change no result once the names of all tensors are known."""
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base as it is; pissa, olora and others change it."""


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
    mark = base_fingerprint({name: one for name, one in weights.items() if ".lora." not in name})
    save_file(theirs, folder / WEIGHTS_FILE, metadata={"format": "pt", BASE_MARK: mark})
    write_json(folder / CONFIG_FILE, values)


def read_adapter_folder(
    folder: Path, config: ModelConfig, base: Mapping[str, Tensor]
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The settings of an adapter of `base`, and its tensors by our names in float32."""
    path = plain_file(folder / WEIGHTS_FILE, EXPORT_AGAIN)
    values = read_json_object(plain_file(folder / CONFIG_FILE, EXPORT_AGAIN), EXPORT_AGAIN)
    stored = stored_tensors([path])
    found = {match[1] for name in stored if (match := KEY.fullmatch(name))}
    lora = _settings(values, folder / CONFIG_FILE, found)
    wanted = _counterparts(config, lora)
    shapes = dict(wanted.values())
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    problems += [
        f"{name} has shape {stored[name][0]} instead of {shape}"
        for name, shape in shapes.items()
        if stored.get(name, (shape,))[0] != shape
    ]
    problems += [f"{name[:200]!r} is unknown" for name in sorted(stored.keys() - shapes.keys())]
    problems += [f"{name[:200]} is in {kind}" for name, (_, kind) in stored.items() if kind not in STORED_DTYPES]
    if problems:
        raise BadInputError(
            f"The adapter {folder} does not fit this model: {'; '.join(problems[:4] + ['…'] * (len(problems) > 4))}. "
            f"An adapter has lora_A and lora_B of {', '.join(sorted(found)) or 'its targets'} in all {config.layers} "
            f"layers, and nothing else. Take the model that it was trained on."
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
    known = {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "bias", "init_lora_weights"}
    wrong = {name: one for name, one in values.items() if one and name not in known | WITHOUT_EFFECT}
    wrong |= {"peft_type": values.get("peft_type")} if values.get("peft_type") != "LORA" else {}
    wrong |= {"bias": values["bias"]} if values.get("bias", "none") != "none" else {}
    start = values.get("init_lora_weights", True)
    wrong |= {} if start in PLAIN_STARTS else {"init_lora_weights": start}
    if wrong:
        named = ", ".join(f"{name}: {str(one)[:80]}" for name, one in wrong.items())
        raise BadInputError(f"{path} asks for {named}. Only plain LoRA on the seven matrices of a block can be used.")
    problems: list[Problem] = []
    fields = {"rank": values.get("r", 8), "alpha": values.get("lora_alpha", 8), "targets": sorted(found)}
    lora = build(LoraConfig, fields | {"rslora": values.get("use_rslora", False)}, "", problems)
    if problems or lora.rank is None or not found:
        raise BadInputError(f"{path}: {'; '.join(map(str, problems)) or 'it has no adapter'} {EXPORT_AGAIN}")
    targets = values.get("target_modules")
    if isinstance(targets, list) and {str(name).rpartition(".")[2] for name in targets} != found:
        raise BadInputError(
            f"{path} names the targets {', '.join(map(str, targets))[:200]}, and the weights have adapters of "
            f"{', '.join(sorted(found))}. {EXPORT_AGAIN}"
        )
    assert isinstance(lora, LoraConfig)
    return lora


def _counterparts(config: ModelConfig, lora: LoraConfig) -> dict[str, tuple[str, tuple[int, int]]]:
    """By our name: peft's, and the shape."""
    found = {}
    for layer, target, name, (outputs, inputs) in adapter_shapes(config, lora):
        part = "self_attn" if target in LORA_TARGETS[:4] else "mlp"
        theirs = f"base_model.model.model.layers.{layer}.{part}.{target}"
        assert lora.rank is not None
        found[f"{name}.a"] = (f"{theirs}.lora_A.weight", (lora.rank, inputs))
        found[f"{name}.b"] = (f"{theirs}.lora_B.weight", (outputs, lora.rank))
    return found
