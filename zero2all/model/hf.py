"""To and from Hugging Face folders: Llama, Qwen2, Mixtral and GLM-4 MoE layouts, tensor for tensor.

Ours are the logical parameters that a checkpoint holds. They differ in two things: gate and up are one matrix of ours,
their rows alternating, and the matrices of all experts of a block are one tensor. Splitting and joining changes no bit,
so a folder that is imported and exported again holds the same tensors.

Without experts the biases decide the layout: q, k, v only is Qwen2; none or all four is Llama. With experts the router
does: softmax, without a balancing bias, shared experts and dense layers, is Mixtral; sigmoid with shared experts is
GLM-4 MoE, which has the other two as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json_object, require_free_space, write_json
from zero2all.common.schema import build
from zero2all.common.workspace import is_folder_name
from zero2all.model.config import ModelConfig
from zero2all.model.rope import rope_base

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
TokenIds = Mapping[str, int | list[int] | None]
"""bos, eos and pad ids; a chat model may have several eos ids."""
SHARD_BYTES = 5_000_000_000
VOCABULARY_TABLES = ("embedding.weight", "head.weight")
LAYER_NUMBER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
FETCH_AGAIN = "Fetch the folder again."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""What safetensors calls them."""
LAYOUTS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
ROUTER_BIAS, HF_ROUTER_BIAS = "router.bias", "e_score_correction_bias"
"""How the names of the balancing biases end; they are stored in float32, whatever the weights are."""
PLAIN_GLM = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "use_qk_norm": False}
"""Fields of GLM-4 MoE that must have these values; they are also transformers' defaults."""
UNSUPPORTED_FIELDS = ("sliding_window", "layer_types", "quantization_config", "partial_rotary_factor")
TYPES: dict[str, tuple[type, str]] = {
    "layer_types": (list, "a list of texts"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    "attention_bias": (bool, "true or false"),
    "mlp_bias": (bool, "true or false"),
    "tie_word_embeddings": (bool, "true or false"),
}
"""What a field has to be where it is set; the others are checked as fields of our own config."""
UNSUPPORTED_SCALING = ("mscale", "mscale_all_dim", "truncate")
SCALING_NAMES = {"original_max_position_embeddings": "original_seq_len"} | {
    name: name for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
}
"""Their name of each field of the rope scaling beside its factor, and ours."""
SCALING_FIELDS = {
    "linear": (),
    "llama3": ("original_seq_len", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_seq_len", "beta_fast", "beta_slow", "attention_factor"),
}
"""The fields that each kind of scaling has."""


def write_hf_folder(
    folder: Path, config: ModelConfig, tensors: dict[str, Tensor], dtype: str, token_ids: TokenIds
) -> None:
    """Write config.json, generation_config.json and safetensors that transformers loads; `folder` must exist."""
    values = to_hf_config(config, dtype, token_ids)
    theirs = {
        name: tensor.to(torch.float32 if name.endswith(HF_ROUTER_BIAS) else DTYPES[dtype]).contiguous()
        for name, tensor in to_hf_tensors(config, tensors)
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in theirs.values())
    require_free_space(folder, size + (1 << 20), "the exported weights")
    shards = _shards(theirs)
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE_FILE, metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, name)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index)
    write_json(folder / "config.json", values)
    known_ids = {name: value for name, value in token_ids.items() if value is not None}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **known_ids})


@dataclass(frozen=True)
class HfFolder:
    """A Hugging Face folder whose names, shapes and dtypes fit its config; no tensor was read yet."""

    folder: Path
    config: ModelConfig
    files: list[Path]
    dtype: str  # that of its weights; float32 where there are several

    def fill(self, ours: Mapping[str, Tensor]) -> None:
        """Write its tensors into ours, one at a time, each converted to the dtype and device of its target; padding
        rows and the biases that Mixtral does not have become 0. Weights that are NaN or infinite are refused."""
        targets: dict[str, Tensor] = {}
        for name, theirs in _counterparts(self.config).items():
            targets |= zip(theirs, _taken_apart(ours[name], len(theirs)), strict=True)
        for name, tensor in ours.items():
            if name in VOCABULARY_TABLES:
                tensor[self.config.vocab_ids :] = 0
            elif name.endswith(ROUTER_BIAS):
                tensor.zero_()
        broken: dict[str, tuple[int, int]] = {}
        for path in self.files:
            with _opened(path) as file:
                for name in _weight_names(file):
                    tensor = file.get_tensor(name)
                    if count := nonfinite(tensor):
                        broken[name] = count, tensor.numel()
                    elif name in targets:  # a tied model may have a copy of its embedding
                        target = targets[name]
                        target[: len(tensor)].copy_(tensor)
        self._refuse(broken, len(targets))

    def _refuse(self, broken: dict[str, tuple[int, int]], tensors: int) -> None:
        """A single NaN makes every output NaN, and training would refuse each step."""
        if broken:
            name, (count, of) = next(iter(broken.items()))
            raise BadInputError(
                f"{sum(count for count, _ in broken.values()):,} weights in {self.folder} are NaN or infinite, in "
                f"{len(broken):,} of {tensors:,} tensors ({name}: {count:,} of {of:,}). {FETCH_AGAIN}"
            )


def open_hf_folder(folder: Path) -> HfFolder:
    """A model folder, with everything checked that its headers say.

    The folder may be anybody's: no name in it leads elsewhere (its own links may, as those of a Hugging Face cache do),
    only plain files are read, and no memory is taken before names and shapes fit the config.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise BadInputError(f"{folder} is no Hugging Face model folder: it has no config.json.")
    config = from_hf_config(read_json_object(path, FETCH_AGAIN), path)
    files = _weight_files(folder)
    stored = _stored_tensors(files)
    _check_shapes(config, {name: shape for name, (shape, _) in stored.items()}, folder)
    names = {dtype for name, (_, dtype) in stored.items() if not name.endswith(HF_ROUTER_BIAS)}
    if not names <= STORED_DTYPES.keys():
        raise BadInputError(f"{folder} stores {sorted(names)}; only {', '.join(DTYPES)} can be imported.")
    return HfFolder(folder, config, files, "float32" if len(names) > 1 else STORED_DTYPES[names.pop()])


def read_hf_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor], str]:
    """Config, our tensors in float32, and the dtype the folder stores."""
    opened = open_hf_folder(folder)
    tensors = {name: torch.empty(shape) for name, shape in _our_shapes(opened.config).items()}
    opened.fill(tensors)
    return opened.config, tensors, opened.dtype


def nonfinite(tensor: Tensor) -> int:
    """How many values are NaN or infinite. The sum says in one pass that there are none."""
    return 0 if bool(tensor.sum().isfinite()) else int(tensor.numel() - tensor.isfinite().sum())


def to_hf_tensors(config: ModelConfig, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors, by logical name, under Hugging Face's names, without the padding rows of the vocabulary."""
    if hf_layout(config) == "mixtral" and any(
        tensor.any() for name, tensor in tensors.items() if name.endswith(ROUTER_BIAS)
    ):
        raise BadInputError(
            "The experts of this model were balanced by a bias, which Mixtral does not have: its routing would change. "
            "Train with model.moe.balance_rate 0, or with model.moe.router sigmoid and a shared expert (GLM-4 MoE)."
        )
    for name, theirs in _counterparts(config).items():
        tensor = tensors[name][: config.vocab_ids] if name in VOCABULARY_TABLES else tensors[name]
        yield from zip(theirs, _taken_apart(tensor, len(theirs)), strict=True)


def _our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our logical parameters, and the balancing biases of the experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, theirs in _counterparts(config).items():
        rows, *columns = next(iter(theirs.values()))
        if ".experts." in name:
            experts = config.moe.experts
            shapes[name] = (experts, len(theirs) // experts * rows, *columns)
        else:
            shapes[name] = (config.vocab_rows if name in VOCABULARY_TABLES else len(theirs) * rows, *columns)
        if name.endswith("router.weight"):
            shapes[name.replace("router.weight", ROUTER_BIAS)] = (rows,)
    return shapes


def _taken_apart(tensor: Tensor, count: int) -> list[Tensor]:
    """Views of the matrices whose rows take turns in ours; of experts (E, rows, columns) those of the first, of the
    second, and so on."""
    stack = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
    turns = count // len(stack)
    return [matrix[at::turns] for matrix in stack for at in range(turns)]


def _check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]], origin: Path) -> None:
    """An error unless exactly the tensors of this config were found."""
    layers = max((int(match[1]) + 1 for name in found if (match := LAYER_NUMBER.match(name))), default=0)
    if layers != config.layers:
        raise BadInputError(
            f"The tensors in {origin} do not fit its config.json: num_hidden_layers is {config.layers:,}, and the "
            f"weights are those of {layers:,} layers. {FETCH_AGAIN}"
        )
    wanted = {part: shape for parts in _counterparts(config).values() for part, shape in parts.items()}
    found = {name: shape for name, shape in found.items() if not (config.tied_embeddings and name == "lm_head.weight")}
    # A tied model has no head of its own; some folders carry a copy of the embedding there.
    problems = [f"{part} is missing" for part in wanted if part not in found]
    problems += [
        f"{part} has shape {found[part]} instead of {shape}"
        for part, shape in wanted.items()
        if found.get(part, shape) != shape
    ]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - wanted.keys())]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise BadInputError(
            f"The tensors in {origin} do not fit its config.json: {'; '.join(problems[:4])}{more}. Fetch the folder "
            f"again; only plain models of these kinds can be imported: {', '.join(LAYOUTS)}."
        )


def _counterparts(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each of our logical parameters, in their order, its counterparts and their shapes. Where there are two, our
    rows come from them in turn."""
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, (config.vocab_ids, config.hidden_size)
    query, shared = config.heads * config.head_size, config.kv_heads * config.head_size
    table: dict[str, dict[str, tuple[int, ...]]] = {"embedding.weight": {"model.embed_tokens.weight": vocabulary}}

    def add(ours: str, theirs: tuple[str, ...], rows: int, columns: int, bias: bool) -> None:
        table[f"{ours}.weight"] = {f"{name}.weight": (rows, columns) for name in theirs}
        if bias:
            table[f"{ours}.bias"] = {f"{name}.bias": (rows,) for name in theirs}

    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        table[f"{ours}.attention_norm.weight"] = {f"{theirs}.input_layernorm.weight": (hidden,)}
        for name, rows in (("q", query), ("k", shared), ("v", shared)):
            has_bias = config.attention_bias != "none"
            add(f"{ours}.attention.{name}", (f"{attention}.{name}_proj",), rows, hidden, has_bias)
        add(f"{ours}.attention.out", (f"{attention}.o_proj",), hidden, query, config.attention_bias == "all")
        table[f"{ours}.feed_forward_norm.weight"] = {f"{theirs}.post_attention_layernorm.weight": (hidden,)}
        if config.has_experts(layer):
            table |= _expert_counterparts(config, f"{ours}.feed_forward", theirs)
            continue
        pairs = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        add(f"{ours}.feed_forward.gate_up_pairs", pairs, inner, hidden, config.mlp_bias)
        add(f"{ours}.feed_forward.down", (f"{mlp}.down_proj",), hidden, inner, config.mlp_bias)
    table["norm.weight"] = {"model.norm.weight": (hidden,)}
    if not config.tied_embeddings:
        table["head.weight"] = {"lm_head.weight": vocabulary}
    return table


def _expert_counterparts(config: ModelConfig, ours: str, block: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """The same for the feed-forward part of a block with experts."""
    hidden, moe, is_mixtral = config.hidden_size, config.moe, hf_layout(config) == "mixtral"
    place = f"{block}.block_sparse_moe" if is_mixtral else f"{block}.mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    numbers = range(moe.experts)
    wide, narrow = (moe.expert_size, hidden), (hidden, moe.expert_size)
    table: dict[str, dict[str, tuple[int, ...]]] = {
        f"{ours}.router.weight": {f"{place}.gate.weight": (moe.experts, hidden)},
        f"{ours}.experts.gate_up_pairs": {
            f"{place}.experts.{number}.{name}.weight": wide for number in numbers for name in (gate, up)
        },
        f"{ours}.experts.down": {f"{place}.experts.{number}.{down}.weight": narrow for number in numbers},
    }
    if not is_mixtral:
        shared, width = f"{place}.shared_experts", config.shared_size
        table[f"{ours}.{ROUTER_BIAS}"] = {f"{place}.gate.{HF_ROUTER_BIAS}": (moe.experts,)}
        table[f"{ours}.shared.gate_up_pairs.weight"] = {
            f"{shared}.{name}.weight": (width, hidden) for name in (gate, up)
        }
        table[f"{ours}.shared.down.weight"] = {f"{shared}.{down}.weight": (hidden, width)}
    return table


def hf_layout(config: ModelConfig) -> str:
    """The model_type that computes what this model computes; an error where there is none."""
    moe, biases = config.moe, config.attention_bias
    if not moe.experts:
        if biases == "qkv" and config.mlp_bias:
            raise BadInputError(
                "attention_bias: qkv with mlp_bias has no Hugging Face layout; set one of them otherwise."
            )
        return "qwen2" if biases == "qkv" else "llama"
    if moe.router == "softmax" and not moe.shared_experts and not moe.dense_layers and biases == "none":
        return "mixtral"
    if moe.router == "sigmoid" and moe.shared_experts and biases != "all" and moe.experts > 1:
        return "glm4_moe"
    raise BadInputError(
        f"A model with moe.router {moe.router}, moe.shared_experts {moe.shared_experts}, moe.dense_layers "
        f"{moe.dense_layers} and attention_bias {biases} has no Hugging Face layout. Mixtral is: softmax, 0, 0, none. "
        f"GLM-4 MoE is: sigmoid, 1 or more, any, none or qkv."
    )


def to_hf_config(config: ModelConfig, dtype: str, token_ids: TokenIds) -> dict[str, Any]:
    """config.json as transformers 4 and 5 read it."""
    layout, moe = hf_layout(config), config.moe
    values: dict[str, Any] = {
        "architectures": [LAYOUTS[layout]],
        "model_type": layout,
        "vocab_size": config.vocab_ids,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": config.attention_dropout,
        "rope_theta": rope_base(config),
        "rope_scaling": _to_hf_scaling(config),
        "torch_dtype": dtype,
        "use_cache": True,
        **token_ids,
    }
    if layout == "llama":
        values |= {"attention_bias": config.attention_bias == "all", "mlp_bias": config.mlp_bias}
    if moe.experts:
        values["num_experts_per_tok"] = moe.experts_per_token
    if layout == "mixtral":
        values |= {"num_local_experts": moe.experts, "intermediate_size": moe.expert_size}
    if layout == "glm4_moe":
        values |= {
            **PLAIN_GLM,
            "n_routed_experts": moe.experts,
            "moe_intermediate_size": moe.expert_size,
            "n_shared_experts": moe.shared_experts,
            "first_k_dense_replace": moe.dense_layers,
            "attention_bias": config.attention_bias == "qkv",
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
        }
    return values


def _from_hf_moe(values: dict[str, Any], layout: str, origin: Path) -> dict[str, Any]:
    """Our settings of the experts of a config.json."""
    if layout == "mixtral":
        return {
            "experts": values.get("num_local_experts"),
            "experts_per_token": values.get("num_experts_per_tok"),
            "expert_size": values.get("intermediate_size"),
            "router": "softmax",
            "balance_rate": 0.0,  # Mixtral has no bias; with one it could not be exported as Mixtral again
        }
    if layout != "glm4_moe":
        return {}
    rope = values.get("rope_parameters") or {}
    rotated = values.get("partial_rotary_factor", rope.get("partial_rotary_factor", 0.5))  # transformers' default
    found = {name: values.get(name, plain) for name, plain in PLAIN_GLM.items()} | {"partial_rotary_factor": rotated}
    plain = PLAIN_GLM | {"partial_rotary_factor": 1.0}
    odd = [f"{name} {str(found[name])[:40]}, not {plain[name]}" for name in plain if found[name] != plain[name]]
    if odd:
        raise BadInputError(f"{origin} cannot be imported, because Z2all has only plain experts: {'; '.join(odd)}.")
    return {
        "experts": values.get("n_routed_experts"),
        "experts_per_token": values.get("num_experts_per_tok"),
        "expert_size": values.get("moe_intermediate_size"),
        "shared_experts": values.get("n_shared_experts"),
        "dense_layers": values.get("first_k_dense_replace"),
    }


def from_hf_config(values: dict[str, Any], origin: Path) -> ModelConfig:
    """Our config of a config.json of one of LAYOUTS; refuses what would be computed differently here."""
    layout = values.get("model_type")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise BadInputError(f"{origin} is of model_type {layout!r}; only {', '.join(LAYOUTS)} can be imported.")
    for name, (kind, words) in TYPES.items():
        if values.get(name) is not None and not isinstance(values[name], kind):
            raise BadInputError(
                f"{origin} cannot be imported: {name} is {str(values[name])[:80]!r}, expected {words}. {FETCH_AGAIN}"
            )
    if values.get("hidden_act", "silu") != "silu":
        raise BadInputError(f"{origin} uses hidden_act {values['hidden_act']!r}; only silu can be imported.")
    with_bias = {"llama": "all", "glm4_moe": "qkv"}.get(layout, "none")
    attention_bias = "qkv" if layout == "qwen2" else with_bias if values.get("attention_bias") else "none"
    # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling.
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    strange = [name for name in UNSUPPORTED_FIELDS if values.get(name) and _matters(name, values)]
    if strange:
        raise BadInputError(f"{origin} sets {', '.join(strange)}, which Z2all does not have; it cannot be imported.")
    if values.get("vocab_size") is None:
        raise BadInputError(f"{origin} has no vocab_size; it cannot be imported.")
    problems: list[Any] = []
    config = build(
        ModelConfig,
        {
            "vocab_size": values.get("vocab_size"),
            "hidden_size": values.get("hidden_size"),
            "intermediate_size": values.get("intermediate_size"),
            "layers": values.get("num_hidden_layers"),
            "heads": values.get("num_attention_heads"),
            "kv_heads": values.get("num_key_value_heads") or values.get("num_attention_heads"),
            "head_dim": values.get("head_dim"),
            "max_seq_len": values.get("max_position_embeddings"),
            "rope_theta": rope.get("rope_theta") or values.get("rope_theta") or 10000.0,
            "rope_scaling": _from_hf_scaling(rope, values.get("max_position_embeddings"), origin),
            "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
            "init_std": values.get("initializer_range", 0.02),
            "attention_bias": attention_bias,
            "moe": _from_hf_moe(values, layout, origin),
            "mlp_bias": values.get("mlp_bias") or False,
            "tied_embeddings": values.get("tie_word_embeddings") or False,
            "attention_dropout": values.get("attention_dropout", 0.0),
        },
        "config.json",
        problems,
    )
    problems += config.problems("config.json") if not problems else []
    if problems:
        raise BadInputError(f"{origin} cannot be imported: {'; '.join(str(problem) for problem in problems)}")
    assert isinstance(config, ModelConfig), "build returns what it was asked for"
    return config


def _matters(name: str, values: dict[str, Any]) -> bool:
    """Whether a field of UNSUPPORTED_FIELDS changes the arithmetic; some folders set it without effect."""
    if name == "sliding_window":
        return bool(values.get("use_sliding_window", values.get("model_type") != "qwen2"))
    if name == "layer_types":
        return any(kind != "full_attention" for kind in values[name])
    return name != "partial_rotary_factor" or values[name] != 1.0


def _to_hf_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """`rope_scaling` of config.json; ntk is a change of the base and is exported as rope_theta."""
    scaling = config.rope_scaling
    if scaling.kind in ("none", "ntk"):
        return None
    fields = SCALING_FIELDS[scaling.kind]
    known = {theirs: getattr(scaling, ours) for theirs, ours in SCALING_NAMES.items() if ours in fields}
    values = {name: value for name, value in known.items() if name != "attention_factor" or value is not None}
    return {"rope_type": scaling.kind, "factor": scaling.factor, **values}


def _from_hf_scaling(rope: dict[str, Any], max_seq_len: int | None, origin: Path) -> dict[str, Any]:
    odd = [name for name in UNSUPPORTED_SCALING if rope.get(name) is not None]
    odd += [name for name, value in rope.items() if isinstance(value, dict)]  # settings per kind of layer
    odd += ["partial_rotary_factor"] if rope.get("partial_rotary_factor") not in (None, 1.0) else []
    odd += ["attention_factor"] if rope.get("attention_factor") is not None and _kind(rope) != "yarn" else []
    if odd:
        raise BadInputError(f"{origin} sets {', '.join(odd)} in its rope scaling, which Z2all does not have.")
    kind = _kind(rope)
    if kind == "default":
        return {}
    if kind not in list(SCALING_FIELDS):  # it may be anything, also unhashable
        raise BadInputError(f"{origin} stretches positions by {kind!r}; only linear, llama3 and yarn can be imported.")
    if rope.get("factor") is None:
        raise BadInputError(f"{origin} stretches positions by {kind!r} but names no factor.")
    names = {"factor": "factor", **SCALING_NAMES}
    known = {ours: rope[theirs] for theirs, ours in names.items() if rope.get(theirs) is not None}
    if kind != "linear":
        known.setdefault("original_seq_len", max_seq_len)
    return {"kind": kind, **known}


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, cut where a file would pass SHARD_BYTES."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + tensor_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor_bytes
    return shards


def _stored_tensors(files: list[Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor in these files, by their headers."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in files:
        with _opened(path) as file:
            for name in _weight_names(file):
                if name in found:
                    raise BadInputError(f"{path} holds {name[:80]!r}, and another file does too. {FETCH_AGAIN}")
                tensor = file.get_slice(name)
                found[name] = tuple(tensor.get_shape()), tensor.get_dtype()
    if not found:
        raise BadInputError(f"The safetensors files in {files[0].parent} hold no tensors. {FETCH_AGAIN}")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path} is no readable safetensors file: {error}") from error


def _weight_names(file: Any) -> list[str]:
    """The tensors of a file, without the rotary tables of old folders."""
    return [name for name in file.keys() if not name.endswith("rotary_emb.inv_freq")]  # noqa: SIM118  (no mapping)


def _weight_files(folder: Path) -> list[Path]:
    """The files transformers would load: those the index names, or the only one; others may lie beside them."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json_object(index, FETCH_AGAIN).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BadInputError(f"{index} has no weight_map. {FETCH_AGAIN}")
        named = list(dict.fromkeys(map(str, weight_map.values())))
        for name in named:
            if not is_folder_name(name):
                raise BadInputError(
                    f"{index} names the file {name[:200]!r}. Expected are names of files beside it, without slashes; "
                    f"nothing else is opened."
                )
        return [_plain_file(folder / name) for name in sorted(named)]
    if (folder / SINGLE_FILE).exists():
        return [_plain_file(folder / SINGLE_FILE)]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if not pickles:
        raise BadInputError(f"{folder} has no weights. Expected {SINGLE_FILE} or {INDEX_FILE}. {FETCH_AGAIN}")
    raise BadInputError(
        f"{folder} has only pickled weights ({pickles[0]}), which zero2all never loads because they can run code. "
        f"Convert it with transformers (`model.save_pretrained(FOLDER)`) where you trust it."
    )


def _plain_file(path: Path) -> Path:
    """Opening a fifo would wait for its writer forever."""
    if not path.is_file():
        problem = "is neither a file nor a link to one" if path.exists() else "is missing"
        raise BadInputError(f"{path} {problem}. {FETCH_AGAIN}")
    return path
