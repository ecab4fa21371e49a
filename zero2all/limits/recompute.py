"""What recomputation costs: the floating-point work of a run that its model does not need.

MFU counts what the model needs, HFU (hardware FLOPs utilisation) also what `zero2all.model.recompute` does a second
time. A run that recomputes has a high HFU and a lower MFU; only MFU says how fast it learns.

What a recomputed block does again:
full, every_n  all matmuls and attention. torch stops before the last matmul, the down projection, whose result the
               backward pass does not need; a fused feed-forward is one function and runs whole.
selective      only norms and the like, which count as 0 here; and the qkv projection where the rotary kernel
               overwrites its output, and attention where it has dropout or consists of plain matmuls.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero2all.limits.flops import CONVENTIONS, flops_per_token, peak_flops
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.ops.footprint import Footprint


def recomputed_blocks(config: ModelConfig, kind: str, every_n: int) -> int:
    """How many blocks run their forward pass twice."""
    return {"none": 0, "every_n": -(-config.layers // every_n)}.get(kind, config.layers)


def recomputed_flops_per_token(
    config: ModelConfig, seq_len: int, kind: str, every_n: int, operators: Mapping[str, Footprint]
) -> dict[str, float]:
    """FLOPs per token of the second forward passes, under each convention; `operators` are `Ops.footprints`."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_size
    qkv = hidden * (heads + 2 * config.kv_heads * config.head_size)
    down = 0 if operators["feed_forward"].is_fused else hidden * inner
    matrices = {"full": qkv + hidden * heads + 3 * hidden * inner - down}
    matrices["every_n"] = matrices["full"]
    matrices["selective"] = qkv if operators["rope"].overwrites_input else 0
    attends = kind in ("full", "every_n") or (
        kind == "selective" and (config.attention_dropout > 0 or not operators["attention"].is_fused)
    )
    attention = 4.0 * heads * seq_len if attends else 0.0
    others = (parameter_counts(config)["blocks"] - hidden) // config.layers - (
        qkv + hidden * heads + 3 * hidden * inner
    )
    blocks = recomputed_blocks(config, kind, every_n)
    multiplied = matrices.get(kind, 0)
    return {
        "seed": blocks * (2.0 * (multiplied + (others if kind in ("full", "every_n") else 0)) + attention),
        "palm": blocks * (2.0 * multiplied + attention),
        "causal": blocks * (2.0 * multiplied + attention / 2),
    }


def hardware_flops_utilisation(
    config: ModelConfig,
    seq_len: int,
    tokens_per_second: float,
    device_name: str,
    kind: str,
    every_n: int,
    operators: Mapping[str, Footprint],
) -> dict[str, float]:
    """HFU = tokens/s x (FLOPs the model needs + those done again) / peak, under each convention; empty when the
    device's peak is unknown."""
    peak = peak_flops(device_name)
    if peak is None:
        return {}
    needed = flops_per_token(config, seq_len)
    again = recomputed_flops_per_token(config, seq_len, kind, every_n, operators)
    return {name: tokens_per_second * (needed[name] + again[name]) / peak for name in CONVENTIONS}
