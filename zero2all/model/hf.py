"""To and from Hugging Face folders: Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and GLM-4 MoE, tensor for tensor.

Ours are the logical parameters that a checkpoint holds. They differ in two things: gate and up are one matrix of ours,
their rows alternating, and the matrices of all experts of a block are one tensor. Splitting and joining changes no bit,
so a folder that is imported and exported again holds the same tensors. `hf_config` says which layout a model has.
"""

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
from zero2all.common.workspace import is_folder_name
from zero2all.model.config import ModelConfig
from zero2all.model.hf_config import FETCH_AGAIN, LAYOUTS, TokenIds, from_hf_config, hf_layout, to_hf_config
from zero2all.model.z2all import scaled_rows

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5_000_000_000
VOCABULARY_TABLES = ("embedding.weight", "head.weight")
LAYER_NUMBER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""What safetensors calls them."""
ROUTER_BIAS, HF_ROUTER_BIAS = "router.bias", "e_score_correction_bias"
"""How the names of the balancing biases end; they are stored in float32, whatever the weights are."""


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
        save_tensors(shards[0], folder / SINGLE_FILE)
    else:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_tensors(shard, folder / name)
            weight_map |= dict.fromkeys(shard, name)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index)
    write_json(folder / "config.json", values)
    known_ids = {name: value for name, value in token_ids.items() if value is not None}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **known_ids})


def save_tensors(tensors: dict[str, Tensor], path: Path, **metadata: str) -> None:
    """A safetensors file that those may read who may read any other new file: the library's own is its owner's
    alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt", **metadata})
    path.chmod(mode)


@dataclass(frozen=True)
class HfFolder:
    """A Hugging Face folder whose names, shapes and dtypes fit its config; no tensor was read yet."""

    folder: Path
    config: ModelConfig
    files: list[Path]
    dtype: str  # that of its weights; float32 where there are several

    def fill(self, ours: Mapping[str, Tensor]) -> None:
        """Write its tensors into ours, one at a time, each converted to the dtype and device of its target; padding
        rows and the biases that no softmax router has become 0. Weights that are NaN or infinite are refused."""
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
            with open_tensors(path) as file:
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
        raise BadInputError(f"{folder} is not a Hugging Face model folder: it has no config.json.")
    config = from_hf_config(read_json_object(path, FETCH_AGAIN), path)
    files = _weight_files(folder)
    stored = stored_tensors(files)
    _check_shapes(config, {name: shape for name, (shape, _) in stored.items()}, folder)
    names = {dtype for name, (_, dtype) in stored.items() if not name.endswith(HF_ROUTER_BIAS)}
    if not names <= STORED_DTYPES.keys():
        raise BadInputError(f"{folder} stores {', '.join(sorted(names))}. Only {', '.join(DTYPES)} can be imported.")
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
    layout = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE"}.get(hf_layout(config))
    if layout and any(tensor.any() for name, tensor in tensors.items() if name.endswith(ROUTER_BIAS)):
        raise BadInputError(
            f"The router of this model has balancing biases. {layout} has none, so the routing would change. "
            f"Train with model.moe.balance_rate 0, or with model.moe.router sigmoid and a shared expert (GLM-4 MoE)."
        )
    if config.embedding_norm:  # no layout has it: each row is stored as the norm leaves it
        rows = scaled_rows(tensors["embedding.weight"], tensors["embedding_norm.weight"], config.rms_norm_eps)
        tensors = {**tensors, "embedding.weight": rows}
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
            f"The tensors in {origin} do not fit its config.json: num_hidden_layers is {config.layers:,}, but the "
            f"weights have {layers:,} layers. {FETCH_AGAIN}"
        )
    wanted = {part: shape for parts in _counterparts(config).values() for part, shape in parts.items()}
    found = {name: shape for name, shape in found.items() if not (config.tied_embeddings and name == "lm_head.weight")}
    # A tied model has no head of its own; some folders carry a copy of the embedding there.
    missing = [part for part in wanted if part not in found]
    without_norm = next((part for part in missing if part.endswith(("q_norm.weight", "k_norm.weight"))), None)
    if without_norm is not None:
        raise BadInputError(
            f"The config.json of {origin} is that of a model with qk_norm, but {without_norm} is missing. "
            f"{FETCH_AGAIN} A model that was trained without qk_norm has another model_type: llama, or mixtral."
        )
    problems = [f"{part} is missing" for part in missing]
    problems += [
        f"{part} has shape {found[part]} instead of {shape}"
        for part, shape in wanted.items()
        if found.get(part, shape) != shape
    ]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - wanted.keys())]
    if problems:
        found_problems = "; ".join(problems[:4] + ["…"] * (len(problems) > 4))
        raise BadInputError(
            f"The tensors in {origin} do not fit its config.json: {found_problems}. {FETCH_AGAIN} Only plain models "
            f"of these kinds can be imported: {', '.join(LAYOUTS)}."
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
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            table[f"{ours}.attention.{name}.weight"] = {f"{attention}.{name}.weight": (config.head_size,)}
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
    hidden, moe, layout = config.hidden_size, config.moe, hf_layout(config)
    is_mixtral = layout == "mixtral"
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
    if layout == "glm4_moe":
        shared, width = f"{place}.shared_experts", config.shared_size
        table[f"{ours}.{ROUTER_BIAS}"] = {f"{place}.gate.{HF_ROUTER_BIAS}": (moe.experts,)}
        table[f"{ours}.shared.gate_up_pairs.weight"] = {
            f"{shared}.{name}.weight": (width, hidden) for name in (gate, up)
        }
        table[f"{ours}.shared.down.weight"] = {f"{shared}.{down}.weight": (hidden, width)}
    return table


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


def stored_tensors(files: list[Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor in these files, by their headers."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in files:
        with open_tensors(path) as file:
            for name in _weight_names(file):
                if name in found:
                    raise BadInputError(f"{path} contains {name[:80]!r}, and so does another file. {FETCH_AGAIN}")
                tensor = file.get_slice(name)
                found[name] = tuple(tensor.get_shape()), tensor.get_dtype()
    if not found:
        raise BadInputError(f"The safetensors files in {files[0].parent} contain no tensors. {FETCH_AGAIN}")
    return found


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file; what is wrong with it becomes BadInputError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path} is not a readable safetensors file: {error}") from error


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
                    f"{index} names the file {name[:200]!r}. Only files in the same folder are opened: expected names "
                    f"without slashes."
                )
        return [plain_file(folder / name) for name in sorted(named)]
    if (folder / SINGLE_FILE).exists():
        return [plain_file(folder / SINGLE_FILE)]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if not pickles:
        raise BadInputError(f"{folder} has no weights. Expected {SINGLE_FILE} or {INDEX_FILE}. {FETCH_AGAIN}")
    raise BadInputError(
        f"{folder} has only pickled weights ({pickles[0]}), which zero2all never loads because they can run code. "
        f"If you trust it, convert it with transformers (`model.save_pretrained(FOLDER)`)."
    )


def plain_file(path: Path, remedy: str = FETCH_AGAIN) -> Path:
    """Opening a fifo would wait for its writer forever."""
    if not path.is_file():
        if path.exists():
            raise BadInputError(f"{path} is neither a file nor a link to one. {remedy}")
        raise BadInputError(f"{path} is missing. {remedy}")
    return path
