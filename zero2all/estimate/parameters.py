"""Parameters of a model by part: of ours and its relatives (Llama, mixtures of experts), with latent attention, of GPT.

Llama: P = L (2 h h_q + 2 h h_kv + 3 h f + 2 h) + h + g V h, g = 1 with tied embeddings, else 2. A block with E experts
has E x 3 h f_e + h E in place of 3 h f, of which a token uses the experts it goes to. Latent attention (MLA) has, per
layer, h r_q + r_q a (d_n + d_r) + h (r_kv + d_r) + r_kv a (d_n + d_v) + a d_v h. GPT (Narayanan et al. 2021, eq. 2):
P = 12 L h^2 (1 + 13 / (12 h) + (V + s) / (12 L h)).

`matmul` are those that a token is multiplied with: no lookup, no norms, no biases; the head even where it is tied.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zero2all.model.config import ModelConfig, MoeConfig, parameter_counts


@dataclass(frozen=True)
class Counted:
    """What the calculators need to know of a model. None: not known."""

    name: str
    parts: Mapping[str, int]  # add up to the total
    active: int
    matmul: int | None = None
    layers: int | None = None
    hidden_size: int | None = None
    attention_width: int | None = None
    """Layers x heads x half of the width of a query and a value: what 12 x seq_len is multiplied with."""
    cache_values: int | None = None  # kept of each token when generating
    kv_size: int | None = None  # width of the keys of a layer
    seq_len: int | None = None
    expert_layers: int = 0
    experts_per_token: int | None = None
    config: ModelConfig | None = None  # where it is of our kind
    step_tokens: int | None = None  # of a run's config
    run_tokens: int | None = None
    checkpoint_bytes: float | None = None
    optimizer: str = "adamw"

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Unpadded(ModelConfig):
    """A model by its published numbers: its tables have a row per id, no padding."""

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head."""
        return self.vocab_ids


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention: ranks of queries and of keys and values; of a head without and with positions, and
    of its values."""

    query_rank: int
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer, without norms."""
        queries = self.query_rank * (hidden + heads * (self.plain_dim + self.rope_dim))
        keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.plain_dim + self.value_dim)
        return queries + keys + heads * self.value_dim * hidden


def counted(config: ModelConfig, name: str, seq_len: int | None = None, latent: Latent | None = None) -> Counted:
    """Of one of our models, or one like it; with `latent`, its attention is replaced."""
    counts, hidden, moe, heads = parameter_counts(config), config.hidden_size, config.moe, config.heads
    grouped = 2 * hidden * (heads + config.kv_heads) * config.head_size
    attention = latent.parameters(hidden, heads) if latent else grouped
    more = config.layers * (attention - grouped)
    experts = config.expert_layers * 3 * hidden * moe.expert_size * (moe.experts + moe.shared_experts)
    parts = {
        "embedding": counts["embedding"],
        "attention": config.layers * attention,
        "feed-forward": (config.layers - config.expert_layers) * 3 * hidden * config.intermediate_size,
        "experts": experts,
        "routers": config.expert_layers * hidden * moe.experts,
        "norms": (2 * config.layers + 1 + config.embedding_norm) * hidden
        + config.qk_norm * 2 * config.layers * config.head_size,
        "head": counts["head"],
    }
    parts["biases"] = counts["total"] + more - sum(parts.values())
    width = (latent.plain_dim + latent.rope_dim + latent.value_dim) / 2 if latent else config.head_size
    of_layer = latent.kv_rank + latent.rope_dim if latent else 2 * config.kv_heads * config.head_size
    return Counted(
        name=name,
        parts={part: count for part, count in parts.items() if count},
        active=counts["active"] + more,
        matmul=counts["matmul"] + more,
        layers=config.layers,
        hidden_size=hidden,
        attention_width=round(config.layers * heads * width),
        cache_values=config.layers * of_layer,
        kv_size=config.kv_heads * config.head_size,
        seq_len=seq_len,
        expert_layers=config.expert_layers,
        experts_per_token=moe.experts_per_token if moe.experts else None,
        config=None if latent else config,
    )


def counted_gpt(hidden: int, layers: int, vocab: int, seq_len: int, name: str = "GPT") -> Counted:
    """Of a GPT: biases, learned positions, inner width 4 h, tied head. Without its last norm, as in the paper."""
    parts = {
        "embedding": vocab * hidden,
        "positions": seq_len * hidden,
        "attention": 4 * layers * hidden**2,
        "feed-forward": 8 * layers * hidden**2,
        "norms": 4 * layers * hidden,
        "biases": 9 * layers * hidden,
    }
    total, matmul, width = sum(parts.values()), 12 * layers * hidden**2 + vocab * hidden, layers * hidden
    return Counted(name, parts, total, matmul, layers, hidden, width, 2 * width, hidden, seq_len)


def counted_by_total(
    params: int,
    active: int | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    vocab: int | None = None,
    seq_len: int | None = None,
) -> Counted:
    """Of a model of which only the number of parameters is known, and perhaps some of its widths. Its embedding counts
    as not tied, and its heads as wide as the model."""
    table = vocab * hidden if vocab and hidden else 0
    parts = {"embedding": table, "blocks": params - 2 * table, "head": table} if table else {"all": params}
    matmul = (active or params) - table if table else None
    width = layers * hidden if layers and hidden else None
    return Counted("plain numbers", parts, active or params, matmul, layers, hidden, width, seq_len=seq_len)


def llama(
    name: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int, seq_len: int
) -> Counted:
    """A model of the Llama family, untied."""
    shape = Unpadded(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    return counted(shape, name, seq_len)


def _mixtral() -> Counted:
    moe = MoeConfig(experts=8, experts_per_token=2, expert_size=14336)
    shape = Unpadded(vocab_size=32000, hidden_size=4096, layers=32, heads=32, kv_heads=8, head_dim=128, moe=moe)
    return counted(shape, "mixtral-8x7b", 8192)


def _deepseek_v3() -> Counted:
    moe = MoeConfig(experts=256, experts_per_token=8, expert_size=2048, shared_experts=1, dense_layers=3)
    shape = Unpadded(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, layers=61, heads=128, kv_heads=128, moe=moe
    )
    return counted(shape, "deepseek-v3", 4096, Latent(1536, 512, 128, 64, 128))


_LLAMAS = (
    llama("tinyllama", 2048, 22, 32, 4, 64, 5632, 32000, 2048),
    llama("llama-2-7b", 4096, 32, 32, 32, 128, 11008, 32000, 4096),
    llama("llama-2-13b", 5120, 40, 40, 40, 128, 13824, 32000, 4096),
    llama("llama-2-70b", 8192, 80, 64, 8, 128, 28672, 32000, 4096),
    llama("llama-3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256, 8192),
    llama("llama-3.1-70b", 8192, 80, 64, 8, 128, 28672, 128256, 8192),
    llama("llama-3.1-405b", 16384, 126, 128, 8, 128, 53248, 128256, 8192),
)
_OTHERS = (_mixtral(), _deepseek_v3(), counted_gpt(12288, 96, 51200, 2048, "gpt-3"))
KNOWN_MODELS = {model.name: model for model in (*_LLAMAS, *_OTHERS)}
"""Published models by name."""
