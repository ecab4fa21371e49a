"""Mixture of experts on one GPU: our block against other ways to compute it, and a preset against a dense model.

    python benchmarks/moe.py                   z2all-moe, about a minute on an H200
    python benchmarks/moe.py --seconds 20      longer measurements of the models

The block, forward and backward, on the tokens of a micro-batch, all with the same weights and without shared experts:
ours; a plain loop over experts as one would write it in torch; and Hugging Face's Mixtral block, where transformers is
installed, with its loop and with torch's `grouped_mm`. Each is first held against the loop: same outputs, same gradient
of the input.

The preset: tokens/s and MFU by active parameters, beside a dense model in which every token uses as many.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import save_result
from zero2all.common.progress import say, show_log
from zero2all.config import RunConfig
from zero2all.estimate.flops import compute_mfu, flops_per_token
from zero2all.estimate.memory import GIB, estimate_memory
from zero2all.measure.clock import seconds_of
from zero2all.measure.short_run import measure_steps
from zero2all.model.config import ModelConfig, MoeConfig, parameter_counts
from zero2all.model.moe import MixtureOfExperts
from zero2all.ops.registry import resolve
from zero2all.parallel.device import pick_device
from zero2all.parallel.mesh import Mesh
from zero2all.predict.batch import BatchShape, load_measured_config, own_batch, parse_batch
from zero2all.train.build import op_context
from zero2all.train.micro_batch import memory_settings
from zero2all.train.state import DTYPES

AGREE_WITHIN = 0.05
"""Largest relative difference (of lengths) that rounding to bfloat16 explains."""
PASSES = 4
"""Micro-batches of an iteration of the models."""


class LoopOverExperts(nn.Module):
    """What one writes first: for each expert the tokens that chose it, its three matrices, and index_add_."""

    def __init__(self, ours: MixtureOfExperts) -> None:
        super().__init__()
        self.is_wide = True  # whether the router computes in float32; Mixtral's does not
        self.per_token = ours.router.per_token
        self.router = nn.Parameter(ours.router.weight.detach().clone())
        pairs = ours.experts.gate_up_pairs.detach()
        self.gates = nn.ParameterList(pairs[:, 0::2].contiguous().unbind())
        self.ups = nn.ParameterList(pairs[:, 1::2].contiguous().unbind())
        self.downs = nn.ParameterList(ours.experts.down.detach().clone().unbind())

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        rows = x.view(-1, x.shape[-1])
        logits = F.linear(rows.float(), self.router.float()) if self.is_wide else F.linear(rows, self.router)
        scores = logits.float().softmax(dim=-1)
        chosen_scores, chosen = scores.topk(self.per_token, dim=-1)
        gates = (chosen_scores / chosen_scores.sum(dim=-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(rows)
        for number, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            token, place = torch.where(chosen == number)
            own = rows[token]
            result = F.linear(F.silu(F.linear(own, gate)) * F.linear(own, up), down)
            y.index_add_(0, token, result * gates[token, place].unsqueeze(1))
        return y.view(x.shape)


def mixtral_block(loop: LoopOverExperts, config: ModelConfig, implementation: str) -> nn.Module | None:
    """Hugging Face's block with the same weights; None where transformers has none."""
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        return None
    moe = config.moe
    settings: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": moe.expert_size,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "experts_implementation": implementation,
    }
    theirs = MixtralSparseMoeBlock(MixtralConfig(**settings))
    block: Any = theirs.to(loop.router.device, loop.router.dtype).train()
    if not hasattr(block.experts, "gate_up_proj"):
        return None  # an older version, one module per expert
    with torch.no_grad():
        block.gate.weight.copy_(loop.router)
        gates_and_ups = [torch.cat(pair) for pair in zip(loop.gates, loop.ups, strict=True)]
        block.experts.gate_up_proj.copy_(torch.stack(gates_and_ups))
        block.experts.down_proj.copy_(torch.stack(list(loop.downs)))
    return theirs


def forward_backward(block: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """One pass; the output and the gradient of the input. Weight gradients are computed and dropped."""
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(dy)
    dx = x.grad
    assert dx is not None
    x.grad = None
    for parameter in block.parameters():
        parameter.grad = None
    return y.detach(), dx


def compare_blocks(config: RunConfig, batch: BatchShape, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a pass of each block."""
    dtype = DTYPES[config.train.precision]
    moe = dataclasses.replace(config.model.moe, router="softmax", shared_experts=0, dense_layers=0, balance_rate=0.0)
    model = dataclasses.replace(config.model, moe=moe)
    torch.manual_seed(1)
    ours = MixtureOfExperts(model, 0, resolve(config.ops, op_context(config, device.type, dtype)), None)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    ours = ours.to(device, dtype)
    ours.router.bias = ours.router.bias.float()
    loop = LoopOverExperts(ours).to(device)
    blocks: dict[str, nn.Module | None] = {"ours": ours, "loop over experts": loop}
    for implementation in ("eager", "grouped_mm"):
        blocks[f"Mixtral block, {implementation}"] = mixtral_block(loop, model, implementation)
    shape = (batch.samples, batch.seq_len, model.hidden_size)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    dy = torch.randn(shape, device=device).to(dtype)
    found: dict[str, Any] = {}
    for name, block in blocks.items():
        if block is None:
            say(f"{name}: not installed, or another version than this reads")
            continue
        loop.is_wide = not name.startswith("Mixtral")  # else near ties are decided otherwise
        wanted = forward_backward(loop, x, dy)
        errors = [_difference(*pair) for pair in zip(forward_backward(block, x, dy), wanted, strict=True)]
        assert max(errors) < AGREE_WITHIN, f"{name} differs from the loop by {errors}"
        seconds = seconds_of(_pass_of(block, x, dy), device)
        found[name] = {"milliseconds": 1e3 * seconds, "difference": max(errors)}
        say(f"{name:28}{1e3 * seconds:9.3f} ms   differs from the loop by {max(errors):.1e}")
    return found


def _pass_of(block: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], object]:
    return lambda: forward_backward(block, x, dy)


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def dense_of_equal_active_size(config: RunConfig) -> RunConfig:
    """The model without a router, in which every token goes through as many inner units."""
    moe = config.model.moe
    inner = (moe.experts_per_token + moe.shared_experts) * moe.expert_size
    model = dataclasses.replace(config.model, moe=MoeConfig(), intermediate_size=inner)
    return dataclasses.replace(config, model=model)


def compare_models(config: RunConfig, batch: BatchShape, device: torch.device, seconds: float) -> dict[str, Any]:
    """Speed and memory of the preset and of the dense model."""
    found: dict[str, Any] = {}
    for name, each in (("mixture", config), ("dense", dense_of_equal_active_size(config))):
        counts = parameter_counts(each.model)
        result = measure_steps(each, batch, seconds)
        mfu = compute_mfu(flops_per_token(each.model, batch.seq_len), result["tokens_per_second"], result["device"])
        ops = resolve(each.ops, op_context(each, device.type, DTYPES[each.train.precision]))
        estimate = estimate_memory(each.model, memory_settings(each, ops, Mesh(), batch.samples))
        kept = ("tokens_per_second", "steps", "loss", "cuda_graph", "gpu")
        found[name] = {
            "parameters": counts["total"],
            "active": counts["active"],
            "estimated_gib": estimate.total / GIB,
            "peak_gib": result["peak_bytes"] / GIB,
            "mfu": mfu,
            **{field: result[field] for field in kept},
        }
        say(
            f"{name:10}{counts['total'] / 1e6:8.1f} M parameters, {counts['active'] / 1e6:.1f} M active: "
            f"{result['tokens_per_second']:,.0f} tokens/s, causal MFU {mfu.get('causal', 0):.1%}, "
            f"peak {found[name]['peak_gib']:.1f} GiB (estimate {estimate.total / GIB:.1f})"
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    found["ratio"] = found["mixture"]["tokens_per_second"] / found["dense"]["tokens_per_second"]
    say(f"the mixture trains at {found['ratio']:.1%} of the tokens/s of the dense model of equal active size")
    return found


def main() -> None:
    """Measure and write results/moe.json."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--config", default="z2all-moe")
    arguments.add_argument("--batch", help="such as 16x2048x4; by default the preset's micro-batch, 4 passes")
    arguments.add_argument("--seconds", type=float, default=8.0, help="of each measurement of a model")
    arguments.add_argument("--no-save", action="store_true", help="print only")
    given, overrides = arguments.parse_known_args()
    config, notes = load_measured_config(given.config, overrides)
    for note in notes:
        say(note)
    device = pick_device(config.parallel.device)
    own = own_batch(config)
    batch = parse_batch(given.batch) if given.batch else dataclasses.replace(own, accumulation=PASSES)
    say(f"{given.config} on {batch}: {device}")
    values = {
        "batch": str(batch),
        "blocks": compare_blocks(config, batch, device),
        "models": compare_models(config, batch, device, given.seconds),
    }
    if not given.no_save:
        save_result("moe", values)


if __name__ == "__main__":
    show_log()
    main()
