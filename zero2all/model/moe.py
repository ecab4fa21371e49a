"""Mixture of experts: a router sends each token to a few experts; what they return is added up, weighted by gates.

    scores = sigmoid or softmax of x W_router^T, in float32
    the k experts with the largest score + bias are chosen; gates = their scores / the sum of their scores
    y = sum of gate * expert(x) over the chosen, + shared experts(x)

No token is dropped: the (token, expert) pairs are sorted by expert, every expert computes what it got, and the results
are added back in the order of the tokens.

The experts are kept busy by the bias alone, without an auxiliary loss that would pull at the gradient: after each step
the bias of an expert moves by `balance_rate`, up where its load was below the mean. The load is counted over the tokens
of the whole step that have a gradient, in the backward pass: so a block that is computed again counts once, rows of
padding not at all, and validation and generation count nothing.

Legend: N tokens of a pass, k experts per token, E experts, C hidden width, F inner width of an expert.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zero2all.model.config import ModelConfig
from zero2all.ops.experts import run_experts, sum_rows
from zero2all.ops.precision import widened, without_autocast
from zero2all.ops.registry import Ops

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens sorted by expert, their gates, where the tokens of each expert end) -> gate * expert(token)."""


class Router(nn.Module):
    """Chooses the experts of each token, and keeps count of how often each was chosen."""

    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        moe = config.moe
        self.number = layer - moe.dense_layers  # of its block, among those with experts
        self.kind, self.per_token, self.rate = moe.router, moe.experts_per_token, moe.balance_rate
        self.weight = nn.Parameter(torch.zeros(moe.experts, config.hidden_size))
        self.register_buffer("bias", torch.zeros(moe.experts))
        self.register_buffer("load", torch.zeros(moe.experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (N, C) -> gates, in float32, and numbers of experts, both (N, k)."""
        logits: Tensor = _RouterLogits.apply(x, self.weight)  # (N, E)
        scores = logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(dim=-1)
        chosen = (scores.detach() + self.bias).topk(self.per_token, dim=-1).indices
        gates = scores.gather(1, chosen)
        return gates / (gates.sum(dim=-1, keepdim=True) + 1e-20), chosen

    @torch.no_grad()
    def balance(self, load: Tensor, refused: Tensor) -> None:
        """Move the biases towards the mean load, unless the step was refused (a bool on the device). `load` (E,) is
        that of the whole step, summed over all processes."""
        move = self.rate * torch.sign(load.mean() - load)
        self.bias += torch.where(refused, 0.0, move).to(self.bias.dtype)

    @torch.no_grad()
    def clear(self, device: torch.device | None = None) -> None:
        """Set bias and load to zero; on the meta device, allocate them. A bias is never narrower than float32."""
        device = device or self.bias.device
        self.bias = torch.zeros(self.bias.shape, dtype=widened(self.bias).dtype, device=device)
        self.load = torch.zeros(self.load.shape, dtype=self.load.dtype, device=device)


class _RouterLogits(torch.autograd.Function):
    """x W^T in float32 (float64 in float64), of which only the narrow tensors are saved."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda and x.dtype == torch.bfloat16:  # exact products, summed in float32, on the tensor cores
            return torch.mm(x, weight.to(x.dtype).t(), out_dtype=torch.float32)
        return widened(x) @ widened(weight).t()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if x.is_cuda and x.dtype == torch.bfloat16:
            dlogits = dlogits.to(x.dtype)
            return dlogits @ weight.to(x.dtype), (dlogits.t() @ x).to(weight.dtype)
        dx, dweight = dlogits @ widened(weight), dlogits.t() @ widened(x)
        return dx.to(x.dtype), dweight.to(weight.dtype)


class Experts(nn.Module):
    """The weights of all experts of a block, or of those in this process, as two stacks of matrices."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        count, inner, hidden = config.moe.experts, config.moe.expert_size, config.hidden_size
        self.gate_up_pairs = nn.Parameter(torch.zeros(count, 2 * inner, hidden))
        self.down = nn.Parameter(torch.zeros(count, hidden, inner))

    def forward(self, x: Tensor, gates: Tensor, ends: Tensor) -> Tensor:
        """See `Compute`."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            return run_experts(
                x.to(dtype), gates, self.gate_up_pairs.to(dtype), self.down.to(dtype), ends, self.ops.swiglu
            )
        return run_experts(x, gates, self.gate_up_pairs, self.down, ends, self.ops.swiglu)


class MixtureOfExperts(nn.Module):
    """The feed-forward part of a block with experts."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(config, layer)
        self.experts = Experts(config, ops)
        self.shared = shared
        self.spread: Callable[[Tensor, Tensor, Tensor, Compute], Tensor] | None = None
        """Takes the tokens to the processes that have their experts, and brings the results back
        (`zero2all.parallel.expert`); None: all experts are here."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        y = self.routed(x.reshape(-1, x.shape[-1])).view(x.shape)
        return y if self.shared is None else y + self.shared(x)

    def routed(self, x: Tensor) -> Tensor:
        """What the chosen experts return for tokens (N, C), weighted and added up."""
        router = self.router
        gates, chosen = router(x)
        by_expert, order = chosen.view(-1).to(torch.int32).sort(stable=True)  # pairs (N k), by expert, then by token
        numbers = torch.arange(max(len(order), len(router.load)), device=order.device)
        places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
        ends = torch.searchsorted(by_expert, numbers[: len(router.load)].to(torch.int32), right=True)
        pairs: Tensor = _MovePairs.apply(x, order, places, router.per_token, True)
        sorted_gates = gates.view(-1)[order]
        compute: Compute = self.experts
        y = (
            compute(pairs, sorted_gates, ends)
            if self.spread is None
            else self.spread(pairs, sorted_gates, ends, compute)
        )
        added: Tensor = _MovePairs.apply(y, order, places, router.per_token, False)
        if torch.is_grad_enabled():
            added = _CountLoad.apply(added, chosen, router.load)
        return added.to(x.dtype)


class _MovePairs(torch.autograd.Function):
    """`to_pairs`: tokens (N, C) -> (N k, C), one row for each (token, expert) pair, in `order`. Else the way back: rows
    of pairs (N k, C) -> the sum for each token (N, C). Each is the backward pass of the other. `places` is the inverse
    of `order`: with it the gradient of a token is a sum over its k rows, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, per_token: int, to_pairs: bool) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.per_token, ctx.to_pairs = per_token, to_pairs
        return _moved(rows, order, places, per_token, to_pairs)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        order, places = ctx.saved_tensors
        return _moved(drows, order, places, ctx.per_token, not ctx.to_pairs), None, None, None, None


def _moved(rows: Tensor, order: Tensor, places: Tensor, per_token: int, to_pairs: bool) -> Tensor:
    return rows.index_select(0, order // per_token) if to_pairs else sum_rows(rows, places, per_token)


class _CountLoad(torch.autograd.Function):
    """Leaves the output of the experts as it is. Its backward adds, to the load of each expert, the tokens that chose
    it and have a gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, chosen: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.load = load
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (chosen,) = ctx.saved_tensors
        counts = (dy != 0).any(dim=-1, keepdim=True).expand_as(chosen)
        ctx.load.scatter_add_(0, chosen.reshape(-1), counts.reshape(-1).to(ctx.load.dtype))
        return dy, None, None


def routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """The routers of a model by name, from its first block to its last."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield name, module
