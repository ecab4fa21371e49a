"""The layout table: every parameter of a model by its logical name, and how it may be cut.

The model keeps some logical parameters together in one tensor, because one matmul is faster than three: q, k and v lie
one after the other in `attention.qkv`. Everything outside the forward pass works on logical parameters: initial
weights (`zero2all.model.init`), optimizers, the gradient norm, checkpoints, the printed plan.

A process holds a box of a parameter: a range along the dimension that the tensor or the expert axis cuts, or all of it.
The matrices of all experts of a block are one parameter, (experts, rows, columns), which the expert axis cuts along its
first dimension. Routers and experts are never cut over the tensor axis: each tensor rank has its own tokens there.
Parameters of other pipeline stages are not in its table at all.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from zero2all.model.config import LoraConfig, ModelConfig, ParameterKind
from zero2all.model.init import initial_values
from zero2all.model.lora import adapter_shapes
from zero2all.model.moe import routers
from zero2all.model.z2all import Z2all
from zero2all.parallel.mesh import Mesh, Spread
from zero2all.parallel.parts import Box, TensorPart


@dataclass(frozen=True)
class LogicalParameter:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    holder: str  # the tensor of the model it lies in
    first_row: int = 0  # of its rows in the holder
    tensor_dimension: int | None = None  # cut by tensor parallelism; None: every tensor rank has a copy
    most_pieces: int | None = None  # along it: more tensor ranks than these have copies of the pieces; None: any number
    alternating: int = 1  # how many matrices take the rows of this one in turn
    box: Box | None = None  # what this process holds of it; None: everything
    spread: Spread = "cut"
    copies: int = 1
    """Tensor ranks that hold the same box of a parameter that is cut among others: kv heads, where they are fewer."""

    @property
    def held(self) -> Box:
        """What this process holds of it."""
        return self.box or Box.whole(self.shape)

    @property
    def start(self) -> int:
        """Where the box begins in the flattened holder."""
        return self.first_row * math.prod(self.held.lengths[1:])

    @property
    def numel(self) -> int:
        """The number of values in the box."""
        return math.prod(self.held.lengths)


def layout_table(config: ModelConfig) -> list[LogicalParameter]:
    """Every parameter of a Z2all model, in the order of `named_parameters` and of the rows in their holders."""
    hidden, inner, table_rows = config.hidden_size, config.intermediate_size, config.vocab_rows
    query, shared = config.heads * config.head_size, config.kv_heads * config.head_size
    table = [LogicalParameter("embedding.weight", (table_rows, hidden), "embedding", "embedding.weight", 0, 0)]

    def add(
        name: str, shape: tuple[int, ...], kind: ParameterKind, dimension: int | None, alternating: int = 1
    ) -> None:
        table.append(LogicalParameter(name, shape, kind, name, 0, dimension, alternating=alternating))

    def add_linear(name: str, rows: int, columns: int, dimension: int, bias: bool, alternating: int = 1) -> None:
        add(f"{name}.weight", (rows, columns), "matrix", dimension, alternating)
        if bias:  # it is added once where the sum over columns is cut
            add(f"{name}.bias", (rows,), "bias", 0 if dimension == 0 else None, alternating)

    if config.embedding_norm:
        add("embedding_norm.weight", (hidden,), "norm", None)
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        add(f"{block}.attention_norm.weight", (hidden,), "norm", None)
        for end in ("weight", "bias") if config.attention_bias != "none" else ("weight",):
            first = 0
            for part, rows, heads in (
                ("q", query, config.heads),
                ("k", shared, config.kv_heads),
                ("v", shared, config.kv_heads),
            ):
                shape = (rows, hidden) if end == "weight" else (rows,)
                kind: ParameterKind = "matrix" if end == "weight" else "bias"
                name, holder = f"{block}.attention.{part}.{end}", f"{block}.attention.qkv.{end}"
                table.append(LogicalParameter(name, shape, kind, holder, first, 0, heads))
                first += rows
        add_linear(f"{block}.attention.out", hidden, query, 1, config.attention_bias == "all")
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            add(f"{block}.attention.{name}.weight", (config.head_size,), "norm", None)
        add(f"{block}.feed_forward_norm.weight", (hidden,), "norm", None)
        if config.has_experts(layer):
            table.extend(_experts(f"{block}.feed_forward", config))
            continue
        add_linear(f"{block}.feed_forward.gate_up_pairs", 2 * inner, hidden, 0, config.mlp_bias, alternating=2)
        add_linear(f"{block}.feed_forward.down", hidden, inner, 1, config.mlp_bias)
    add("norm.weight", (hidden,), "norm", None)
    if not config.tied_embeddings:
        add("head.weight", (table_rows, hidden), "head", 0)
    return table


def _experts(place: str, config: ModelConfig) -> Iterator[LogicalParameter]:
    """The feed-forward part of a block with experts."""
    hidden, moe = config.hidden_size, config.moe

    def one(name: str, shape: tuple[int, ...], kind: ParameterKind, alternating: int = 1) -> LogicalParameter:
        return LogicalParameter(f"{place}.{name}", shape, kind, f"{place}.{name}", alternating=alternating)

    yield one("router.weight", (moe.experts, hidden), "router")
    yield one("experts.gate_up_pairs", (moe.experts, 2 * moe.expert_size, hidden), "expert", 2)
    yield one("experts.down", (moe.experts, hidden, moe.expert_size), "expert")
    if moe.shared_experts:
        yield one("shared.gate_up_pairs.weight", (2 * config.shared_size, hidden), "matrix", 2)
        yield one("shared.down.weight", (hidden, config.shared_size), "matrix")


def trained_table(config: ModelConfig, lora: LoraConfig) -> list[LogicalParameter]:
    """The parameters that an optimizer updates: those of the adapters where there are some, else all. Of the first
    matrix of a pair, whose rows tensor parallelism cuts, B is cut and each rank has A; of the second A is cut, by
    columns. What each rank has sees a part of the sum in its gradient, as biases do."""
    if lora.rank is None:
        return layout_table(config)
    table, heads = [], {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
    for _, target, name, (outputs, inputs) in adapter_shapes(config, lora):
        is_second, most = target in ("o_proj", "down_proj"), heads.get(target)
        a, b, rank = f"{name}_a", f"{name}_b", lora.rank
        table.append(LogicalParameter(a, (rank, inputs), "matrix", a, 0, 1 if is_second else None))
        table.append(LogicalParameter(b, (outputs, rank), "matrix", b, 0, None if is_second else 0, most))
    return table


def held_table(table: Iterable[LogicalParameter], holders: Iterable[str], mesh: Mesh) -> list[LogicalParameter]:
    """What a process of the mesh holds, with the rows in its own holders: `holders` are the tensors of its model, which
    are those of its pipeline stage."""
    here, found = set(holders), []
    rows: dict[str, int] = {}
    for one in table:
        if one.holder not in here:
            continue
        dimension, axis = one.tensor_dimension, mesh.tensor
        spread: Spread = "copied" if dimension is None and axis.size > 1 else "cut"
        if one.kind == "expert":
            dimension, axis, spread = 0, mesh.expert, "expert"
        box, copies = Box.whole(one.shape), 1
        if dimension is not None:
            pieces = min(axis.size, one.most_pieces or axis.size)
            copies = axis.size // pieces
            box = Box.share(one.shape, dimension, axis.rank // copies, pieces)
        found.append(replace(one, box=box, spread=spread, copies=copies, first_row=rows.get(one.holder, 0)))
        rows[one.holder] = found[-1].first_row + box.lengths[0]
    return found


@torch.no_grad()
def draw(parts: Mapping[str, TensorPart], config: ModelConfig, seed: int) -> None:
    """Write the initial weights of a model into the parts of its parameters, several at a time."""

    def write(parameter: LogicalParameter) -> None:
        part = parts[parameter.name]
        count = part.values.numel()
        if count:
            values = initial_values(parameter.name, parameter.shape, parameter.kind, config, seed)
            values = values[part.box.slices].reshape(-1)
            part.values.copy_(values[part.start : part.start + count].view(part.values.shape))

    # Of large ones only a few at a time: each is a float32 tensor in host memory.
    with ThreadPoolExecutor(min(8, torch.get_num_threads())) as threads:
        list(threads.map(write, [one for one in layout_table(config) if one.name in parts]))


def init_weights(model: Z2all, seed: int) -> None:
    """The same for a whole model."""
    draw(model_parts(model), model.config, seed)


def router_biases(model: Z2all) -> dict[str, TensorPart]:
    """The biases that balance the experts, by name; every process has all of those of its blocks. Live. No gradient
    moves them, so they are in no table, but they belong to the model."""
    return {f"{name}.bias": TensorPart.whole(router.bias) for name, router in routers(model)}


def model_parts(model: Z2all) -> dict[str, TensorPart]:
    """The weights of a whole model by logical name, and the biases of its routers; live."""
    holders, parts = dict(model.named_parameters()), {}
    for one in layout_table(model.config):
        values = holders[one.holder].detach().view(-1)[one.start : one.start + one.numel]
        parts[one.name] = TensorPart.whole(values.view(one.shape))
    return parts | router_biases(model)
