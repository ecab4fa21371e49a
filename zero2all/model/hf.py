"""To and from Hugging Face folders: Llama and Qwen2 layouts, tensor for tensor.

Ours keeps q, k, v in one matrix, one behind the other, and gate, up in one, their rows alternating; theirs keeps them
apart. Splitting and joining rows changes no bit, so a folder that is imported and exported again holds the same
tensors. The biases decide the layout: q, k, v only is Qwen2; none or all four is Llama.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import require_free_space, write_json
from zero2all.common.schema import build
from zero2all.model.config import ModelConfig
from zero2all.model.rope import rope_base
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
TokenIds = Mapping[str, int | list[int] | None]
"""bos, eos and pad ids; a chat model may end at several."""
SHARD_BYTES = 5_000_000_000
VOCABULARY_TABLES = ("embedding.weight", "head.weight")
ALTERNATING = "feed_forward.gate_up_pairs"
"""The module whose rows are taken from its parts in turn."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUTS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
UNSUPPORTED_FIELDS = ("sliding_window", "layer_types", "quantization_config", "partial_rotary_factor")
UNSUPPORTED_SCALING = ("mscale", "mscale_all_dim", "truncate")
SCALING_NAMES = {
    "factor": "factor",
    "original_max_position_embeddings": "original_seq_len",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}
"""Their name of each field of the rope scaling, and ours."""


def write_hf_folder(
    folder: Path, config: ModelConfig, tensors: dict[str, Tensor], dtype: str, token_ids: TokenIds
) -> None:
    """Write config.json, generation_config.json and safetensors that transformers loads; `folder` must exist."""
    values = to_hf_config(config, dtype, token_ids)
    theirs = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in to_hf_tensors(config, tensors)}
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


def read_hf_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor], str]:
    """Config, our tensors in float32, and the dtype the folder stores."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadInputError(f"{folder} is no Hugging Face model folder: it has no config.json.")
    config = from_hf_config(_read_object(path), path)
    theirs = _read_tensors(folder)
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in theirs.values()}
    if not names <= DTYPES.keys():
        raise BadInputError(f"{folder} stores {sorted(names)}; only {', '.join(DTYPES)} can be imported.")
    dtype = "float32" if len(names) > 1 else names.pop()
    return config, from_hf_tensors(config, theirs, folder), dtype


def to_hf_tensors(config: ModelConfig, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors under their names, fused ones split, without the rows that pad the vocabulary."""
    for name, tensor in tensors.items():
        if name in VOCABULARY_TABLES:
            tensor = tensor[: config.vocab_ids]
        parts = _their_parts(config, name, len(tensor))
        yield from zip(parts, _taken_apart(name, tensor, list(parts.values())), strict=True)


def from_hf_tensors(config: ModelConfig, theirs: dict[str, Tensor], origin: Path) -> dict[str, Tensor]:
    """Their tensors under our names, joined and in float32; complains about missing, unknown and misshapen ones."""
    shapes = _our_shapes(config)
    shapes |= {name: (config.vocab_ids, *shapes[name][1:]) for name in VOCABULARY_TABLES if name in shapes}
    parts_of = {name: _their_parts(config, name, shape[0]) for name, shape in shapes.items()}
    wanted = {part: (rows, *shapes[name][1:]) for name, parts in parts_of.items() for part, rows in parts.items()}
    found = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    if config.tied_embeddings:
        found.pop("lm_head.weight", None)  # a copy of the embedding that some folders carry
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
            f"again; only plain Llama and Qwen2 models can be imported."
        )
    ours = {name: _put_together(name, [theirs[part].float() for part in parts]) for name, parts in parts_of.items()}
    padding = config.vocab_rows - config.vocab_ids
    for name in VOCABULARY_TABLES:
        if name in ours and padding:
            ours[name] = torch.nn.functional.pad(ours[name], (0, 0, 0, padding))
    return ours


def _our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Z2all model of this config; no memory is taken for them."""
    with torch.device("meta"):
        model = Z2all(config, resolve(OpsConfig(), "cpu"))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _their_parts(config: ModelConfig, name: str, rows: int) -> dict[str, int]:
    """Their names for one of our tensors, each with its share of our `rows`, in order (in turn where ALTERNATING)."""
    top = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in top:
        return {top[name]: rows}
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    query, shared, inner = config.heads * config.head_size, config.kv_heads * config.head_size, config.intermediate_size
    modules = {
        "attention_norm": {"input_layernorm": rows},
        "attention.qkv": {"self_attn.q_proj": query, "self_attn.k_proj": shared, "self_attn.v_proj": shared},
        "attention.out": {"self_attn.o_proj": rows},
        "feed_forward_norm": {"post_attention_layernorm": rows},
        ALTERNATING: {"mlp.gate_proj": inner, "mlp.up_proj": inner},
        "feed_forward.down": {"mlp.down_proj": rows},
    }
    return {f"model.layers.{layer}.{part}.{kind}": size for part, size in modules[module].items()}


def _taken_apart(name: str, tensor: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
    """The parts of one of our tensors, each of so many rows."""
    if ALTERNATING in name:
        return tensor.unflatten(0, (-1, len(rows))).unbind(1)
    return tensor.split(rows)


def _put_together(name: str, parts: list[Tensor]) -> Tensor:
    """One of our tensors from its parts."""
    if ALTERNATING in name:
        return torch.stack(parts, dim=1).flatten(0, 1)
    return torch.cat(parts)


def to_hf_config(config: ModelConfig, dtype: str, token_ids: TokenIds) -> dict[str, Any]:
    """config.json as transformers 4 and 5 read it."""
    layout = "qwen2" if config.attention_bias == "qkv" else "llama"
    if layout == "qwen2" and config.mlp_bias:
        raise BadInputError("attention_bias: qkv with mlp_bias has no Hugging Face layout; set one of them otherwise.")
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
    return values


def from_hf_config(values: dict[str, Any], origin: Path) -> ModelConfig:
    """Our config of a Llama or Qwen2 config.json; refuses what would be computed differently here."""
    layout = values.get("model_type")
    if layout not in LAYOUTS:
        raise BadInputError(f"{origin} is of model_type {layout!r}; only {' and '.join(LAYOUTS)} can be imported.")
    if values.get("hidden_act", "silu") != "silu":
        raise BadInputError(f"{origin} uses hidden_act {values['hidden_act']!r}; only silu can be imported.")
    strange = [name for name in UNSUPPORTED_FIELDS if values.get(name) and _matters(name, values)]
    if strange:
        raise BadInputError(f"{origin} sets {', '.join(strange)}, which Z2all does not have; it cannot be imported.")
    if values.get("vocab_size") is None:
        raise BadInputError(f"{origin} has no vocab_size; it cannot be imported.")
    llama_bias = "all" if values.get("attention_bias") else "none"
    # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling.
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
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
            "attention_bias": "qkv" if layout == "qwen2" else llama_bias,
            "mlp_bias": bool(values.get("mlp_bias", False)),
            "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
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
    """Whether a field of UNSUPPORTED_FIELDS changes the arithmetic, as opposed to standing there idle."""
    if name == "sliding_window":
        return bool(values.get("use_sliding_window", values.get("model_type") != "qwen2"))
    if name == "layer_types":
        return any(kind != "full_attention" for kind in values[name])
    return name != "partial_rotary_factor" or values[name] != 1.0


def _to_hf_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """Their record of the stretching; ntk is a base change and travels as rope_theta.

    Their own `dynamic` recomputes the base for every length it meets, so it is not what a model was trained with.
    """
    scaling = config.rope_scaling
    if scaling.kind in ("none", "ntk"):
        return None
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_seq_len
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        values |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    return values


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
    if kind not in ("linear", "llama3", "yarn"):
        raise BadInputError(f"{origin} stretches positions by {kind!r}; only linear, llama3 and yarn can be imported.")
    if rope.get("factor") is None:
        raise BadInputError(f"{origin} stretches positions by {kind!r} but names no factor.")
    known = {ours: rope[theirs] for theirs, ours in SCALING_NAMES.items() if rope.get(theirs) is not None}
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


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, but for the rotary tables that old folders carry."""
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    if not name.endswith("rotary_emb.inv_freq"):
                        tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"{path} is no readable safetensors file: {error}") from error
    if not tensors:
        raise BadInputError(f"The safetensors files in {folder} hold no tensors. Fetch the folder again.")
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """The files transformers would load: those the index names, or the only one; others may lie beside them."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadInputError(f"{index} has no weight_map. Fetch it again.")
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if not pickles:
        raise BadInputError(f"{folder} has no weights. Expected {SINGLE_FILE} or {INDEX_FILE}. Fetch the folder again.")
    raise BadInputError(
        f"{folder} has only pickled weights ({pickles[0]}), which zero2all never loads because they can run code. "
        f"Convert it with transformers (`model.save_pretrained(FOLDER)`) where you trust it."
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = jsonio.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be read as JSON ({error}). Fetch it again.") from error
    if not isinstance(value, dict):
        raise BadInputError(f"{path} should hold a JSON object and holds a {type(value).__name__}. Fetch it again.")
    return value
