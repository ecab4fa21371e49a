"""config.json of Hugging Face folders: the layouts we have, and each of their settings in our terms.

Without experts qk_norm makes a Qwen3; else the biases decide the layout: q, k, v only is Qwen2; none or all four is
Llama. With experts the router does: softmax, without a balancing bias and shared experts, is Qwen3-MoE with qk_norm,
and Mixtral without it and without dense layers; sigmoid with shared experts is GLM-4 MoE, which has all of these too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.schema import build
from zero2all.model.config import ModelConfig
from zero2all.model.rope import rope_base

FETCH_AGAIN = "Fetch the folder again."
TokenIds = Mapping[str, int | list[int] | None]
"""bos, eos and pad ids; a chat model may have several eos ids."""
LAYOUTS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
PLAIN_GLM = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
"""Fields of GLM-4 MoE that must have these values; they are also transformers' defaults."""
QWEN_MOE_DEFAULTS: dict[str, Any] = {"decoder_sparse_step": 1, "norm_topk_prob": False, "mlp_only_layers": []}
"""transformers' values of fields of Qwen3-MoE where a folder does not set them."""
UNSUPPORTED_FIELDS = ("sliding_window", "layer_types", "quantization_config", "partial_rotary_factor")
TYPES: dict[str, tuple[type, str]] = {
    "layer_types": (list, "a list of texts"),
    "mlp_only_layers": (list, "a list of numbers"),
    "use_qk_norm": (bool, "true or false"),
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


def hf_layout(config: ModelConfig) -> str:
    """The model_type that computes what this model computes; an error where there is none."""
    moe, biases = config.moe, config.attention_bias
    if config.qk_norm and not moe.experts:
        if biases == "qkv" or config.mlp_bias:
            raise BadInputError(
                f"A model with qk_norm, attention_bias {biases} and mlp_bias {str(config.mlp_bias).lower()} has no "
                f"Hugging Face layout. Qwen3, which has qk_norm, needs: attention_bias none or all, mlp_bias false."
            )
        return "qwen3"
    if not moe.experts:
        if biases == "qkv" and config.mlp_bias:
            raise BadInputError(
                "attention_bias qkv together with mlp_bias has no Hugging Face layout. Change one of the two."
            )
        return "qwen2" if biases == "qkv" else "llama"
    is_plain = moe.router == "softmax" and not moe.shared_experts
    if is_plain and config.qk_norm and biases != "qkv":
        return "qwen3_moe"
    if is_plain and not config.qk_norm and not moe.dense_layers and biases == "none":
        return "mixtral"
    if moe.router == "sigmoid" and moe.shared_experts and biases != "all" and moe.experts > 1:
        return "glm4_moe"
    raise BadInputError(
        f"A model with moe.router {moe.router}, moe.shared_experts {moe.shared_experts}, moe.dense_layers "
        f"{moe.dense_layers}, attention_bias {biases} and qk_norm {str(config.qk_norm).lower()} has no Hugging Face "
        f"layout. Mixtral needs: softmax, 0, 0, none, false. Qwen3-MoE needs: softmax, 0, any, none or all, true. "
        f"GLM-4 MoE needs: sigmoid, 1 or more, any, none or qkv, any."
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
        "initializer_range": config.matrix_std,
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
    if layout in ("qwen3", "qwen3_moe"):
        values["attention_bias"] = config.attention_bias == "all"
    if moe.experts:
        values["num_experts_per_tok"] = moe.experts_per_token
    if layout == "mixtral":
        values |= {"num_local_experts": moe.experts, "intermediate_size": moe.expert_size}
    if layout == "qwen3_moe":
        values |= {
            "num_experts": moe.experts,
            "moe_intermediate_size": moe.expert_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(moe.dense_layers)),
        }
    if layout == "glm4_moe":
        values |= {
            **PLAIN_GLM,
            "use_qk_norm": config.qk_norm,
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
    if layout == "qwen3_moe":
        found = {name: values.get(name, default) for name, default in QWEN_MOE_DEFAULTS.items()}
        dense = found["mlp_only_layers"] = found["mlp_only_layers"] or []
        first = list(range(len(dense)))
        _refuse_unlike(found, {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": first}, origin)
        return {
            "experts": values.get("num_experts", values.get("num_local_experts")),
            "experts_per_token": values.get("num_experts_per_tok"),
            "expert_size": values.get("moe_intermediate_size"),
            "dense_layers": len(dense),
            "router": "softmax",
            "balance_rate": 0.0,  # no bias, as Mixtral
        }
    if layout != "glm4_moe":
        return {}
    rope = values.get("rope_parameters") or {}
    rotated = values.get("partial_rotary_factor", rope.get("partial_rotary_factor", 0.5))  # transformers' default
    found = {name: values.get(name, plain) for name, plain in PLAIN_GLM.items()} | {"partial_rotary_factor": rotated}
    _refuse_unlike(found, PLAIN_GLM | {"partial_rotary_factor": 1.0}, origin)
    return {
        "experts": values.get("n_routed_experts"),
        "experts_per_token": values.get("num_experts_per_tok"),
        "expert_size": values.get("moe_intermediate_size"),
        "shared_experts": values.get("n_shared_experts"),
        "dense_layers": values.get("first_k_dense_replace"),
    }


def _refuse_unlike(found: Mapping[str, Any], plain: Mapping[str, Any], origin: Path) -> None:
    """An error unless fields have the values that Z2all computes with."""
    odd = [f"{name} {str(found[name])[:40]} != {plain[name]}" for name in plain if found[name] != plain[name]]
    if odd:
        raise BadInputError(f"{origin} cannot be imported: Z2all does not support these settings: {'; '.join(odd)}.")


def from_hf_config(values: dict[str, Any], origin: Path) -> ModelConfig:
    """Our config of a config.json of one of LAYOUTS; refuses what would be computed differently here."""
    layout = values.get("model_type")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise BadInputError(f"{origin} has the model_type {layout!r}. Only {', '.join(LAYOUTS)} can be imported.")
    for name, (kind, words) in TYPES.items():
        if values.get(name) is not None and not isinstance(values[name], kind):
            raise BadInputError(
                f"{origin} cannot be imported: {name} is {str(values[name])[:80]!r}, expected {words}. {FETCH_AGAIN}"
            )
    if values.get("hidden_act", "silu") != "silu":
        raise BadInputError(f"{origin} uses hidden_act {values['hidden_act']!r}. Only silu can be imported.")
    with_bias = {"llama": "all", "glm4_moe": "qkv", "qwen3": "all", "qwen3_moe": "all"}.get(layout, "none")
    attention_bias = "qkv" if layout == "qwen2" else with_bias if values.get("attention_bias") else "none"
    # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling.
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    strange = [name for name in UNSUPPORTED_FIELDS if values.get(name) and _matters(name, values)]
    if strange:
        raise BadInputError(f"{origin} cannot be imported: it sets {', '.join(strange)}, which Z2all does not support.")
    if values.get("vocab_size") is None:
        raise BadInputError(f"{origin} cannot be imported: it has no vocab_size.")
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
            "head_dim": values.get("head_dim", 128 if layout == "qwen3" else None),  # transformers' default
            "max_seq_len": values.get("max_position_embeddings"),
            "rope_theta": rope.get("rope_theta") or values.get("rope_theta") or 10000.0,
            "rope_scaling": _from_hf_scaling(rope, values.get("max_position_embeddings"), origin),
            "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
            "init_std": values.get("initializer_range", 0.02),
            "attention_bias": attention_bias,
            "qk_norm": layout in ("qwen3", "qwen3_moe") or bool(layout == "glm4_moe" and values.get("use_qk_norm")),
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
        return bool(values.get("use_sliding_window", not str(values.get("model_type")).startswith("qwen")))
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
        raise BadInputError(
            f"{origin} cannot be imported: its rope scaling sets {', '.join(odd)}, which Z2all does not support."
        )
    kind = _kind(rope)
    if kind == "default":
        return {}
    if kind not in list(SCALING_FIELDS):  # it may be anything, also unhashable
        raise BadInputError(f"{origin} has the rope scaling {kind!r}. Only linear, llama3 and yarn can be imported.")
    if rope.get("factor") is None:
        raise BadInputError(f"{origin} cannot be imported: its rope scaling {kind!r} has no factor.")
    names = {"factor": "factor", **SCALING_NAMES}
    known = {ours: rope[theirs] for theirs, ours in names.items() if rope.get(theirs) is not None}
    if kind != "linear":
        known.setdefault("original_seq_len", max_seq_len)
    return {"kind": kind, **known}


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))
