"""To and from GGUF, the one file that llama.cpp, ollama and LM Studio load: weights, shape, tokenizer, chat template.

A model leaves under Hugging Face's names (model/hf.py), renamed as llama.cpp calls them, and comes back as a Hugging
Face folder, which `import_folder` reads. What is more than a name:

q, k of Llama    llama.cpp turns neighbouring pairs (0, 1), we the halves (0, D/2): row h + 2 i of a head was i + h D/2
experts          the matrices of all experts of a block are one tensor
llama3 scaling   a tensor of D/2 divisors of the frequencies, and our fields beside it for the way back
q8_0, q4_0       32 values share one float16 scale: 8.5 and 4.5 bits a weight. The head stays q8_0 in a q4_0 file, since
                 its error reaches the logits directly; vectors and routers stay float32
tokenizer        byte-level BPE without normalisation whose pretoken pattern llama.cpp has under a name. Any other would
                 give other ids without a word, so it is refused
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import atomic_file, read_json, read_json_object, require_free_space, write_json
from zero2all.common.workspace import Workspace
from zero2all.exchange import Imported, import_folder
from zero2all.infer.load import LoadedModel
from zero2all.model.config import ModelConfig, RopeScaling
from zero2all.model.hf import SINGLE_FILE, save_tensors, to_hf_tensors
from zero2all.model.hf_config import LAYOUTS, hf_layout, to_hf_config
from zero2all.model.rope import rope_frequencies
from zero2all.tokenizer.chat import USUAL_NAMES, own_template
from zero2all.tokenizer.config import PRETOKEN_PATTERN
from zero2all.tokenizer.foreign import CL100K_PATTERN
from zero2all.tokenizer.hf_bbpe import pretokens
from zero2all.tokenizer.load import Tokenizer
from zero2all.tokenizer.save import (
    CHAT_TEMPLATE_NAME,
    CONFIG_NAME,
    TOKENIZER_NAME,
    assembled_json,
    bpe_model,
    opening_processor,
)

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}
"""What llama.cpp calls a file whose matrices are of this type."""
FETCH_AGAIN = "Download the file again, or import the Hugging Face folder of the model."
ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""Hugging Face's model_type -> llama.cpp's architecture."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens; llama.cpp finds user-defined ones in every text, control tokens only where it is told to."""

BRANCHES = ("gate", "up", "down")
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    **{f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{letter}_norm": f"attn_{letter}_norm" for letter in "qk"},
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in BRANCHES},
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in BRANCHES},
    "mlp.gate": "ffn_gate_inp",
}
MIXTRAL_NAMES = {"block_sparse_moe.gate": "ffn_gate_inp"}
MIXTRAL_NAMES |= {f"block_sparse_moe.experts.w{n}": f"ffn_{part}_exps" for n, part in zip("132", BRANCHES, strict=True)}
SHAPE = {"vocab_size": "vocab_size", "context_length": "max_position_embeddings", "block_count": "num_hidden_layers"}
SHAPE |= {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size"}
SHAPE |= {"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"}
SHAPE |= {f"attention.{part}_length": "head_dim" for part in ("key", "value")} | {"rope.dimension_count": "head_dim"}
SHAPE |= {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
SHAPE |= {"expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}
"""llama.cpp's field, below the name of the architecture -> that of config.json."""
YARN = {"original_context_length": "original_max_position_embeddings"}
YARN |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
"""The same of the rope scaling."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a ByteLevel pre-tokenizer without a Split before it cuts with."""
PRE_TOKENIZERS = {"qwen2": (PRETOKEN_PATTERN, False), "gpt-2": (GPT2_PATTERN, False)}
PRE_TOKENIZERS |= {"smaug-bpe": (CL100K_PATTERN, False), "llama-bpe": (CL100K_PATTERN, True)}
"""llama.cpp's name -> its regular expression, and whether a pretoken that is a piece is taken without merging."""
PROBES = ("don't", "3.14 and 2026", "中文，标点。", "e\u0301te\u0301", "ﬁ Ａ１", "x\n\n  y\n", "x_y--!!\n", "🙂 é")
"""Texts that pre-tokenizers and normalisations treat differently."""


def export_gguf(loaded: LoadedModel, tokenizer_folder: Path, target: Path, kind: GgufType = "f16") -> None:
    """Write a run as the file `target`, which appears only when it is whole."""
    if target.suffix != ".gguf" or target.exists():
        raise UsageError(f"{target} is to be a new file whose name ends in .gguf. Choose another --out.")
    library, config = _library(), loaded.model.config
    hf_config, fields = to_hf_config(config, "float32", {}), _model_fields(config)
    fields |= _tokenizer_fields(loaded.tokenizer, tokenizer_folder, config.vocab_ids)
    fields |= {"general.name": loaded.name, "general.file_type": FILE_TYPES[kind]}
    fields |= {"general.quantization_version": library.GGML_QUANT_VERSION}
    writer = library.GGUFWriter(None, ARCHITECTURES[hf_config["model_type"]])
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array}
    for key, value in fields.items():
        adders[type(value)](key, value)
    parts: dict[str, list[Tensor]] = {}  # several: those of the experts, in their order
    for name, tensor in to_hf_tensors(config, loaded.weights()):
        parts.setdefault(_gguf_name(name), []).append(tensor)
    if config.rope_scaling.kind == "llama3":
        plain, _ = rope_frequencies(replace(config, rope_scaling=RopeScaling()))
        parts["rope_freqs.weight"] = [plain / rope_frequencies(config)[0]]
    head = "output.weight" if "output.weight" in parts else "token_embd.weight"
    types, size = {}, 1 << 24
    for name, tensors in parts.items():
        types[name] = library.GGMLQuantizationType[_type(name, tensors[0], kind, head).upper()]
        shape = (len(tensors), *tensors[0].shape) if "_exps." in name else tuple(tensors[0].shape)
        shape = library.quants.quant_shape_to_byte_shape(shape, types[name])
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), types[name])
        size += math.prod(shape)
    require_free_space(target.parent, size, "the GGUF file")
    with atomic_file(target) as file:
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensors in parts.items():
            tensor = torch.stack(tensors) if "_exps." in name else tensors[0]
            tensor = _permuted(tensor.detach().float().cpu(), name.split(".")[-2], hf_config, (2, -1))
            if types[name].name == "F16" and tensor.abs().max() > 65504:
                raise BadInputError(f"{name} has values above 65504, the most of f16. Use --type bf16.")
            values = library.quants.quantize(tensor.contiguous().numpy(), types[name])
            writer.write_tensor_data(values.view(np.uint8))
        writer.close()


def import_gguf(path: Path, workspace: Workspace, name: str, **options: Any) -> Imported:
    """Make the run `name` at step 0 from a GGUF file; `options`: those of `import_folder`. f32, f16 and bf16 come
    exactly, quantised weights as the values they stand for."""
    library = _library()

    class Reader(library.GGUFReader):  # type: ignore[name-defined]
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            """Without this, a damaged length of an array is counted to its end behind that of the file."""
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"it ends inside a field at byte {offset:,}")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Reader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        config = _hf_config(fields, {one.name for one in reader.tensors})
        tokenizer_json, tokenizer_config, template = _tokenizer_files(fields)
        tensors: dict[str, Tensor] = {}
        for one in reader.tensors:
            if one.name != "rope_freqs.weight":
                values = torch.from_numpy(library.quants.dequantize(one.data, one.tensor_type).astype(np.float32))
                tensors |= _hf_tensors(one.name, values, config)
    except BadInputError as error:
        raise BadInputError(f"{path} cannot be imported: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInputError(f"{path} is not a whole GGUF file of a language model ({reason}). {FETCH_AGAIN}") from error
    beside = next(folder for folder in workspace.root.absolute().parents if folder.is_dir())
    require_free_space(beside, sum(each.nbytes for each in tensors.values()), "the weights of the GGUF file")
    with tempfile.TemporaryDirectory(prefix="z2a-gguf-", dir=beside) as place:
        folder = Path(place) / path.name  # errors name it
        folder.mkdir()
        save_tensors(tensors, folder / SINGLE_FILE)
        tensors.clear()
        write_json(folder / "config.json", config)
        write_json(folder / TOKENIZER_NAME, tokenizer_json)
        write_json(folder / CONFIG_NAME, tokenizer_config)
        if template:
            (folder / CHAT_TEMPLATE_NAME).write_text(template, encoding="utf-8")
        return import_folder(folder, workspace, name, origin=path, **options)


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise UsageError("GGUF files need the package gguf: pip install 'zero2all[gguf]'.") from None
    return gguf


def _gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of Hugging Face's; the experts of a block share one."""
    place, _, kind = name.rpartition(".")
    if place in TOP_NAMES:
        return f"{TOP_NAMES[place]}.{kind}"
    _, _, layer, place = place.split(".", 3)
    place = re.sub(r"\.experts\.[0-9]+\.", ".experts.", place)
    return f"blk.{layer}.{(BLOCK_NAMES | MIXTRAL_NAMES)[place]}.{kind}"


def _hf_tensors(name: str, values: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The way back: under Hugging Face's names, one for each expert."""
    place, _, kind = name.rpartition(".")
    top = {ours: theirs for theirs, ours in TOP_NAMES.items()}
    if place in top:
        return {f"{top[place]}.{kind}": values}
    found = re.fullmatch(r"blk\.([0-9]{1,9})\.(\w+)", place)
    is_mixtral = config["model_type"] == "mixtral"
    names = {ours: theirs for theirs, ours in (BLOCK_NAMES | (MIXTRAL_NAMES if is_mixtral else {})).items()}
    if found is None or found[2] not in names:
        raise BadInputError(f"it has the tensor {name!r}, which no model of ours has.")
    stem = f"model.layers.{found[1]}.{names[found[2]]}"
    if found[2].endswith("_exps"):
        stems = (stem.replace(".experts.", f".experts.{number}.") for number in range(len(values)))
        return {f"{expert}.{kind}": one.contiguous() for expert, one in zip(stems, values, strict=True)}
    return {f"{stem}.{kind}": _permuted(values, found[2], config, (-1, 2)).contiguous()}


def _permuted(values: Tensor, part: str, config: Mapping[str, Any], order: tuple[int, int]) -> Tensor:
    """The rows of Llama's q and k: with the order (2, -1) from halves of a head to pairs, with (-1, 2) back."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)
    if heads is None or config["model_type"] not in ("llama", "mixtral"):
        return values
    return values.unflatten(0, (config[heads], *order)).transpose(1, 2).flatten(0, 2)


def _type(name: str, tensor: Tensor, asked: GgufType, head: str) -> GgufType:
    if tensor.dim() == 1 or ".ffn_gate_inp." in name:
        return "f32"
    if asked in ("q8_0", "q4_0") and tensor.shape[-1] % 32:
        width = tensor.shape[-1]
        raise BadInputError(f"{name} has rows of {width} values; {asked} needs a multiple of 32. Use --type f16.")
    return "q8_0" if asked == "q4_0" and name == head else asked


def _model_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of the shape; an error where llama.cpp computes another model."""
    layout, moe, scaling = hf_layout(config), config.moe, config.rope_scaling
    is_qwen, is_narrow = layout != "llama", config.head_size * config.heads != config.hidden_size
    refused = {
        f"{LAYOUTS[layout]} is not converted yet": layout not in ARCHITECTURES,
        "its Qwen3 has no attention_bias": config.qk_norm and config.attention_bias != "none",
        "its Qwen3-MoE has experts in every block (moe.dense_layers 0)": config.qk_norm and moe.dense_layers > 0,
        "the heads of its Qwen2 have hidden_size / heads values": layout == "qwen2" and is_narrow,
        "only its Llama has the rope_scaling llama3": scaling.kind == "llama3" and is_qwen,
        "it computes the attention_factor of yarn itself": scaling.attention_factor is not None,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise BadInputError(f"llama.cpp cannot compute this model: {reason}. Export it with --to hf instead.")
    architecture, theirs = ARCHITECTURES[layout], to_hf_config(config, "float32", {})
    fields = {key: theirs[name] for key, name in SHAPE.items() if name in theirs}
    rope = theirs["rope_scaling"]
    if scaling.kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
        fields |= {f"rope.scaling.{key}": rope[name] for key, name in YARN.items() if name in rope}
    if moe.experts:
        fields["expert_count"] = moe.experts
    own = {"zero2all.rope_scaling": json.dumps(rope)} if scaling.kind == "llama3" else {}
    return {f"{architecture}.{key}": value for key, value in fields.items()} | own


def _tokenizer_fields(tokenizer: Tokenizer, folder: Path, rows: int) -> dict[str, Any]:
    """The tokenizer as llama.cpp reads it: `rows` tokens, those without a piece unused."""
    source = read_json_object(folder / TOKENIZER_NAME)
    config = read_json(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    name = _pre_tokenizer_name(source, tokenizer)
    added = {token["id"]: token for token in source.get("added_tokens", [])}
    names = {number: piece for piece, number in source["model"]["vocab"].items()}
    names |= {number: token["content"] for number, token in added.items()}
    names |= {number: control for control, number in tokenizer.control.items()}
    kinds = dict.fromkeys(names, NORMAL) | dict.fromkeys(added, USER_DEFINED)
    kinds |= dict.fromkeys(tokenizer.control_ids, CONTROL)
    opening = _opening(tokenizer)
    usual = (tokenizer.control_roles.get("message_end", ""), *USUAL_NAMES["message_end"])
    turn_ends = [tokenizer.control[end] for end in usual if end in tokenizer.control]
    stops = [number for number in (*tokenizer.end_ids, *turn_ends) if number != tokenizer.end_id]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [names.get(number, f"[PAD{number}]") for number in range(rows)],
        "tokenizer.ggml.token_type": [kinds.get(number, UNUSED) for number in range(rows)],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in source["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.end_id,
        "tokenizer.ggml.add_bos_token": opening is not None,
    }
    begin = tokenizer.begin_id if opening is None else opening
    numbers = {"bos": begin, "padding": tokenizer.pad_id, "eot": stops[0] if stops else None}
    fields |= {f"tokenizer.ggml.{role}_token_id": number for role, number in numbers.items() if number is not None}
    path = folder / CHAT_TEMPLATE_NAME
    template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    template = template if isinstance(template, str) else own_template(tokenizer)
    if template:  # {% generation %} marks what was trained; only transformers knows the tag
        template = re.sub(r"({%[-+]?\s*)generation(\s*[-+]?%})", r"\1if true\2", template)
        fields["tokenizer.chat_template"] = re.sub(r"({%[-+]?\s*)endgeneration(\s*[-+]?%})", r"\1endif\2", template)
    return fields


def _opening(tokenizer: Tokenizer) -> int | None:
    """The token that comes before every text; of a tokenizer of ours, the one that opened documents in training."""
    plain, whole = tokenizer.encode_text("a"), tokenizer.backend.encode("a").ids
    before = whole[: len(whole) - len(plain)]
    if whole[len(before) :] != plain or len(before) > 1:
        raise BadInputError("The tokenizer puts more than one token before a text, which llama.cpp cannot do.")
    if before or not tokenizer.control_roles:
        return before[0] if before else None
    return tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id


def _pre_tokenizer_name(source: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """llama.cpp's name of what cuts a text into pretokens; BadInputError where its ids would be others."""
    model, cutting = source["model"], source.get("pre_tokenizer")
    spaced = any(token["lstrip"] or token["rstrip"] for token in source.get("added_tokens", []))
    odd = {name: model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")}
    odd |= {"type": model["type"] != "BPE" or not tokenizer.is_byte_level, "spaces beside added tokens": spaced}
    odd |= {"no pre-tokenizer": cutting is None}
    if any(odd.values()):
        what = ", ".join(name for name, is_so in odd.items() if is_so)
        raise BadInputError(f"llama.cpp has only byte-level BPE; this tokenizer is another ({what}). Export --to hf.")
    normalizer = tokenizer.backend.normalizer
    if normalizer is not None:
        changed = next((text for text in PROBES if normalizer.normalize_str(text) != text), None)
        raise BadInputError(
            f"The tokenizer normalises text ({tokenizer.normalisation}), which llama.cpp does not do: {changed!r} "
            f"would get other ids. Train a tokenizer with --normalise none, or export with --to hf."
        )
    plain = json.loads(json.dumps(cutting).replace('"trim_offsets": false', '"trim_offsets": true'))  # no effect on ids
    for name, (pattern, is_whole) in PRE_TOKENIZERS.items():
        if plain == _pre_tokenizer(pattern) and is_whole == bool(model.get("ignore_merges")):
            return name
    cuts = ((text, pretokens(cutting, text), pretokens(_pre_tokenizer(PRETOKEN_PATTERN), text)) for text in PROBES)
    first = next((f": {text!r} is {ours} here, {theirs} in qwen2" for text, ours, theirs in cuts if ours != theirs), "")
    raise BadInputError(
        f"llama.cpp has no pre-tokenizer that cuts text as this tokenizer does{first}. Export it with --to hf, or "
        f"train a tokenizer with the usual --pattern."
    )


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    """`pre_tokenizer` of tokenizer.json that cuts with this pattern."""
    is_own = pattern == GPT2_PATTERN
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": is_own}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return byte_level if is_own else {"type": "Sequence", "pretokenizers": [split, byte_level]}


def _hf_config(fields: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """config.json of a file with these fields and tensors."""
    architecture = fields["general.architecture"]
    layouts = {theirs: layout for layout, theirs in ARCHITECTURES.items() if layout != "mixtral"}
    if architecture not in layouts:
        raise BadInputError(f"its architecture is {architecture!r}. Only {', '.join(layouts)} can be imported.")
    shape = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    experts, heads = shape.get("expert_count"), shape["attention.head_count"]
    layout = "mixtral" if experts and architecture == "llama" else layouts[architecture]
    head_size = shape.setdefault("attention.key_length", shape["embedding_length"] // heads)
    if shape.get("rope.dimension_count", head_size) != head_size:
        raise BadInputError("only a part of each head is rotated (rope.dimension_count).")
    rope = {name: _short(shape.get(f"rope.scaling.{key}")) for key, name in YARN.items()}
    rope |= {"rope_type": shape.get("rope.scaling.type", "none"), "factor": _short(shape.get("rope.scaling.factor"))}
    if "rope_freqs.weight" in names:
        if "zero2all.rope_scaling" not in fields:
            raise BadInputError("its rope scaling (llama3) is stored as factors, which do not tell its settings.")
        rope = json.loads(fields["zero2all.rope_scaling"])
    return {
        **{name: _short(shape.get(key)) for key, name in reversed(SHAPE.items())},
        "model_type": layout,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "rope_scaling": None if rope["rope_type"] == "none" else rope,
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names and layout != "qwen2",
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "num_local_experts": experts,
        "norm_topk_prob": True,
        "sliding_window": shape.get("attention.sliding_window"),
    }


def _short(value: Any) -> Any:
    """Of a number that was a float32 the shortest that rounds to it: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _tokenizer_files(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    kind, name = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise BadInputError(f"its tokenizer is {kind}, {name}. Expected: gpt2 with {', '.join(PRE_TOKENIZERS)}.")
    pattern, is_whole = PRE_TOKENIZERS[name]
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    vocab = {token: number for number, token in enumerate(tokens) if kinds[number] != UNUSED}
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    control, user = ({token: n for token, n in vocab.items() if kinds[n] == kind} for kind in (CONTROL, USER_DEFINED))
    end, begin = fields["tokenizer.ggml.eos_token_id"], fields.get("tokenizer.ggml.bos_token_id")
    roles = {"eos_token": end, "pad_token": fields.get("tokenizer.ggml.padding_token_id")}
    roles |= {"bos_token": begin if begin != end else None}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    options = {"ignore_merges": True} if is_whole else {}
    source = assembled_json(None, _pre_tokenizer(pattern), decoder, bpe_model(vocab, merges, **options))
    source["added_tokens"] = [{"id": n, "content": token, **plain, "special": False} for token, n in user.items()]
    if fields.get("tokenizer.ggml.add_bos_token") and begin is not None:
        source["post_processor"] = opening_processor(tokens[begin], begin)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(n): {"content": token, **plain, "special": True} for token, n in control.items()},
        **{role: tokens[number] for role, number in roles.items() if number is not None},
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return source, config, fields.get("tokenizer.chat_template", "")
