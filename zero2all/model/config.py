"""The shape of a Z2all model. No torch here: planning and validation must not need it."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from zero2all.common.schema import PositiveFloat, Problem, Range, ShareBelowOne

VOCAB_MULTIPLE = 64
"""With 64,321 columns instead of 64,320 the head is five to seven times slower on an H200: rows are not aligned."""

ParameterKind = Literal["matrix", "expert", "router", "embedding", "head", "norm", "bias"]
PARAMETER_KINDS: tuple[ParameterKind, ...] = ("matrix", "expert", "router", "embedding", "head", "norm", "bias")
"""The role of a parameter; each kind is a parameter group of the optimizer."""

# Many times the largest models there are. A larger value is an error or an attack, and would fail only when built.
Layers = Annotated[int, Range(minimum=1, maximum=10_000)]
LayersOrNone = Annotated[int, Range(minimum=0, maximum=10_000)]
Experts = Annotated[int, Range(minimum=0, maximum=1 << 16)]
Heads = Annotated[int, Range(minimum=1, maximum=1 << 16)]
Width = Annotated[int, Range(minimum=1, maximum=1 << 22)]
Ids = Annotated[int, Range(minimum=1, maximum=1 << 28)]
Positions = Annotated[int, Range(minimum=1, maximum=1 << 24)]
Base = Annotated[float, Range(above=0, maximum=1e12)]
Factor = Annotated[float, Range(minimum=1e-6, maximum=1e6)]
Rate = Annotated[float, Range(minimum=0, maximum=1)]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the length a model was trained at."""

    kind: Literal["none", "linear", "ntk", "llama3", "yarn"] = "none"
    """none; linear: position interpolation; ntk: a larger base; llama3 and yarn: by wavelength, as those models do."""
    factor: Factor = 1.0
    """How many times longer than `original_seq_len` positions may become."""
    original_seq_len: Positions | None = None
    """Sequence length in tokens of the original training; needed by llama3 and yarn."""
    low_freq_factor: Factor = 1.0
    """llama3: wavelengths above original_seq_len / this are fully interpolated."""
    high_freq_factor: Factor = 4.0
    """llama3: wavelengths below original_seq_len / this are not changed."""
    beta_fast: Factor = 32.0
    """yarn: rotations over the original length above which a dimension is not changed."""
    beta_slow: Factor = 1.0
    """yarn: rotations over the original length below which a dimension is fully interpolated."""
    attention_factor: Factor | None = None
    """yarn: factor on cos and sin, so attention logits grow by its square; null takes 0.1 ln(factor) + 1."""

    def problems(self, place: str) -> list[Problem]:
        """Fields that the kind needs and that are missing or do not fit."""
        found = []
        if self.kind in ("llama3", "yarn") and self.original_seq_len is None:
            expected = f"the original length in tokens, for {self.kind}"
            found.append(Problem(f"{place}.original_seq_len", None, expected))
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            expected = f"a number above low_freq_factor ({self.low_freq_factor:g})"
            found.append(Problem(f"{place}.high_freq_factor", self.high_freq_factor, expected))
        return found


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: which blocks have experts instead of one SwiGLU, and how tokens choose among them."""

    experts: Experts = 0
    """Experts per block; 0: every block has one SwiGLU for all tokens."""
    experts_per_token: Heads = 2
    """Experts that each token goes to."""
    expert_size: Width = 512
    """Width inside the SwiGLU of one expert."""
    shared_experts: Experts = 0
    """Experts that every token goes to, in addition to those the router chooses."""
    dense_layers: LayersOrNone = 0
    """Number of first blocks without experts: they have one SwiGLU of model.intermediate_size."""
    router: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function from router logits to scores. The gates of a token are its experts' scores, divided by their sum."""
    balance_rate: Rate = 0.001
    """How far an expert's routing bias moves after each step: up if it got fewer tokens than the mean, else down. The
    bias only affects which experts are chosen. 0: no balancing."""

    def problems(self, place: str) -> list[Problem]:
        """Fields that are valid alone but do not fit together."""
        if self.experts and self.experts_per_token > self.experts:
            expected = f"at most {place}.experts ({self.experts})"
            return [Problem(f"{place}.experts_per_token", self.experts_per_token, expected)]
        return []


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: Ids | None = None
    """Number of token ids the model can predict; null takes the tokenizer's size."""
    hidden_size: Width = 2048
    """Width of the residual stream."""
    intermediate_size: Width = 5632
    """Width inside the SwiGLU block."""
    layers: Layers = 22
    """Number of transformer blocks."""
    heads: Heads = 32
    """Query heads; each is head_dim wide."""
    kv_heads: Heads = 8
    """Key/value heads, shared by heads / kv_heads query heads each."""
    head_dim: Heads | None = None
    """Width of one head; null takes hidden_size / heads."""
    max_seq_len: Positions = 2048
    """Longest sequence in tokens that the model supports; exported as max_position_embeddings."""
    rope_theta: Base = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How rotary positions are stretched for long context."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square inside every RMSNorm."""
    qk_norm: bool = False
    """RMSNorm with learned weights over each query and key head before the rotary positions, as in Qwen3."""
    init_std: PositiveFloat | None = 0.02
    """Standard deviation of the initial matrices; null takes 1 / sqrt(hidden_size)."""
    init_embedding_std: PositiveFloat | None = None
    """That of the embedding; null takes init_std."""
    init_head_std: PositiveFloat | None = None
    """That of the output head, unless tied_embeddings; null takes init_std."""
    init_residual: Literal["scaled", "zero"] = "scaled"
    """Projections into the residual (attention output, down) start with init_std / sqrt(2 * layers), or at zero."""
    init_qk_gain: PositiveFloat = 1.0
    """Start of the weights of qk_norm; its square is the standard deviation of the attention logits of a new model."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases of the attention projections: qkv as in Qwen2, all as in Llama with attention_bias."""
    mlp_bias: bool = False
    """Biases of the three SwiGLU projections."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """Mixture of experts."""
    embedding_norm: bool = False
    """RMSNorm on the embedding: its rows may grow, as large learning rates make them, without drowning what the blocks
    add. Exported as scaled rows."""
    tied_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    embedding_dropout: ShareBelowOne = 0.0
    """Dropout on the embeddings, in training only."""
    attention_dropout: ShareBelowOne = 0.0
    """Dropout on attention weights, in training only."""
    residual_dropout: ShareBelowOne = 0.0
    """Dropout on what each block adds to the residual, in training only."""
    fp32_residual: bool = False
    """Keep the residual stream in float32 when the blocks compute in bfloat16."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.heads

    @property
    def matrix_std(self) -> float:
        """Standard deviation of the initial matrices."""
        return self.init_std or self.hidden_size**-0.5

    @property
    def head_std(self) -> float:
        """That of the output head; with tied embeddings, of the embedding."""
        return (self.init_embedding_std if self.tied_embeddings else self.init_head_std) or self.matrix_std

    @property
    def head_std_field(self) -> str:
        """The config field that sets it."""
        own = "init_embedding_std" if self.tied_embeddings else "init_head_std"
        return f"model.{own if getattr(self, own) else 'init_std'}"

    @property
    def vocab_ids(self) -> int:
        """Ids the model can predict; only a resolved config (see `zero2all.config`) has them."""
        if self.vocab_size is None:
            raise AssertionError("vocab_size is still None: resolve the config against its tokenizer first")
        return self.vocab_size

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head: the ids, padded to a multiple of VOCAB_MULTIPLE. Padding is never
        predicted and learns nothing."""
        return -(-self.vocab_ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts."""
        return self.moe.experts > 0 and layer >= self.moe.dense_layers

    @property
    def expert_layers(self) -> int:
        """The number of blocks with experts."""
        return max(0, self.layers - self.moe.dense_layers) if self.moe.experts else 0

    @property
    def router_rows(self) -> int:
        """Experts that a router chooses among."""
        return self.moe.experts

    @property
    def shared_size(self) -> int:
        """Width of the SwiGLU of the shared experts of a block."""
        return self.moe.shared_experts * self.moe.expert_size

    def problems(self, place: str) -> list[Problem]:
        """Fields that are valid alone but do not fit together."""
        found = self.moe.problems(f"{place}.moe")
        if self.moe.experts and self.mlp_bias:
            found.append(
                Problem(f"{place}.mlp_bias", True, f"false, because the experts of {place}.moe have no biases")
            )
        if self.moe.experts and self.moe.dense_layers >= self.layers:
            expected = f"fewer than {place}.layers ({self.layers}), or {place}.moe.experts 0"
            found.append(Problem(f"{place}.moe.dense_layers", self.moe.dense_layers, expected))
        if self.embedding_norm and self.tied_embeddings:
            expected = f"false with {place}.tied_embeddings: export scales the rows, and the head needs them unscaled"
            found.append(Problem(f"{place}.embedding_norm", True, expected))
        if self.head_dim is None and self.hidden_size % self.heads:
            found.append(
                Problem(f"{place}.hidden_size", self.hidden_size, f"a multiple of {place}.heads ({self.heads})")
            )
        elif self.head_size % 2:
            found.append(
                Problem(f"{place}.head_dim", self.head_size, "an even width, because RoPE rotates pairs of values")
            )
        if self.heads % self.kv_heads:
            found.append(Problem(f"{place}.kv_heads", self.kv_heads, f"a divisor of {place}.heads ({self.heads})"))
        found += self.rope_scaling.problems(f"{place}.rope_scaling")
        if self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            found.append(Problem(f"{place}.rope_theta", self.rope_theta, "a number above 1, for yarn"))
        return found


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)
"""The matrices that may have an adapter, by peft's names; the first four are attention's."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: W x + scale B (A x), where W is frozen. Names and conventions are peft's."""

    rank: Annotated[int, Range(minimum=1, maximum=1 << 14)] | None = None
    """Rows of A and columns of B, such as 16. None: no adapters; all weights are trained."""
    alpha: PositiveFloat = 32.0
    """scale is alpha / rank, so that the best learning rate hardly depends on the rank."""
    targets: list[LoraTarget] | None = None
    """Matrices that have an adapter. None or an empty list: all seven; of a model with experts the four of
    attention."""
    rslora: bool = False
    """Whether scale is alpha / sqrt(rank) instead."""

    @property
    def scale(self) -> float:
        """Factor on B (A x)."""
        assert self.rank is not None, "there are no adapters"
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def targets_of(self, model: ModelConfig) -> tuple[LoraTarget, ...]:
        """The matrices of each block of a model that have an adapter, in the order of LORA_TARGETS."""
        most = LORA_TARGETS[:4] if model.moe.experts else LORA_TARGETS
        return () if self.rank is None else tuple(name for name in most if name in (self.targets or most))

    def parameters(self, model: ModelConfig) -> int:
        """Values of all adapters."""
        shapes = lora_shapes(model)
        return (self.rank or 0) * model.layers * sum(sum(shapes[name]) for name in self.targets_of(model))


def lora_shapes(config: ModelConfig) -> dict[LoraTarget, tuple[int, int]]:
    """(outputs, inputs) of each target; with the config of a tensor rank, of what it has."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    shapes = [(heads * size, hidden) for heads in (config.heads, config.kv_heads, config.kv_heads)]
    shapes += [(hidden, config.heads * size), (inner, hidden), (inner, hidden), (hidden, inner)]
    return dict(zip(LORA_TARGETS, shapes, strict=True))


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part: embedding, blocks, head (0 when tied), total; `active`: those that one token uses, which are
    all but the experts it did not choose; `matmul`: of these, those in matmuls.

    `blocks` includes the final norm and that of the embedding. `matmul` is every matrix, the output head once, and
    neither norms nor biases.
    """
    hidden, inner, head, moe = config.hidden_size, config.intermediate_size, config.head_size, config.moe
    qkv_rows = (config.heads + 2 * config.kv_heads) * head
    attention = hidden * (qkv_rows + config.heads * head)
    norms = 2 * hidden + (2 * head if config.qk_norm else 0)
    biases = 0 if config.attention_bias == "none" else qkv_rows
    biases += hidden if config.attention_bias == "all" else 0
    biases += 2 * inner + hidden if config.mlp_bias else 0
    expert = 3 * hidden * moe.expert_size
    chosen = hidden * config.router_rows + 3 * hidden * config.shared_size + moe.experts_per_token * expert
    dense_layers = config.layers - config.expert_layers
    matrices = config.layers * attention + dense_layers * 3 * hidden * inner + config.expert_layers * chosen
    idle = config.expert_layers * (moe.experts - moe.experts_per_token) * expert
    table = config.vocab_rows * hidden
    blocks = matrices + idle + config.layers * (norms + biases) + (1 + config.embedding_norm) * hidden
    output_head = 0 if config.tied_embeddings else table
    total = table + blocks + output_head
    return {
        "embedding": table,
        "blocks": blocks,
        "head": output_head,
        "total": total,
        "active": total - idle,
        "matmul": matrices + table,
    }
