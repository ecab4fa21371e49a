"""Expert parallelism: each process of the expert axis has some of the experts of every block; tokens go to them.

A process routes its own tokens, sorts them by expert, and sends each to the process that has the expert: first how many
(one number for each expert), then the tokens and their gates. What came is sorted by local expert, computed, put back
in the order in which it came, and sent back. The backward pass sends the gradients the same ways in reverse.

    here   tokens of this process, by expert          -> all-to-all ->   there   by process, then by local expert
    there  sorted by local expert, computed, put back -> all-to-all ->   here    in the order in which they were sent

How many tokens go where changes with every pass, so the host has to read the counts: one wait per block and pass.

The expert axis is folded out of shard x context x tensor (`zero2all.parallel.mesh`): each of these processes has tokens
of its own here, tensor ranks those of their part of the sequence.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2all.model.moe import Compute, MixtureOfExperts
from zero2all.model.z2all import Z2all
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.mesh import Axis, Mesh
from zero2all.parallel.run_config import SpreadConfig


def spread_experts(model: Z2all, mesh: Mesh) -> None:
    """Leave this process its experts of a model on the meta device, and send tokens to the others."""
    if mesh.expert.size == 1:
        return
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            experts = module.experts
            for name, parameter in list(experts.named_parameters()):
                shape = (len(parameter) // mesh.expert.size, *parameter.shape[1:])
                setattr(experts, name, nn.Parameter(parameter.new_empty(shape)))
            module.spread = TokenExchange(mesh.expert)


class TokenExchange:
    """Takes tokens to their experts and back; see `MixtureOfExperts.spread`."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, x: Tensor, gates: Tensor, ends: Tensor, compute: Compute) -> Tensor:
        """As `Compute`, for tokens whose experts are elsewhere."""
        counts = ends.diff(prepend=ends.new_zeros(1))  # (E,) tokens of this process for each expert
        arriving = torch.empty_like(counts)  # (processes, local experts), flat
        dist.all_to_all_single(arriving, counts, group=self._axis.group)
        by_process = torch.stack((counts, arriving)).view(2, self._axis.size, -1)
        sent, received = by_process.sum(dim=-1).tolist()  # the host waits
        local = by_process.shape[-1]
        expert_of = torch.arange(local, device=x.device).repeat(self._axis.size)
        by_expert, order = expert_of.repeat_interleave(arriving, output_size=sum(received)).sort(stable=True)
        back = order.argsort()
        local_ends = torch.searchsorted(by_expert, torch.arange(local, device=x.device), right=True)
        came: Tensor = _TokenAllToAll.apply(x, sent, received, self._axis.group)
        gates_came: Tensor = _TokenAllToAll.apply(gates, sent, received, self._axis.group)
        y = compute(_permuted(came, order, back), _permuted(gates_came, order, back), local_ends)
        returned: Tensor = _TokenAllToAll.apply(_permuted(y, back, order), received, sent, self._axis.group)
        return returned


def _permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    moved: Tensor = _Permuted.apply(rows, order, inverse)
    return moved


class _Permuted(torch.autograd.Function):
    """Rows in another order. Torch's own backward would add them up one by one, because it does not know that no row
    occurs twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, dmoved: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return dmoved.index_select(0, inverse), None, None


class _TokenAllToAll(torch.autograd.Function):
    """Send the first `sent[0]` rows to process 0, the next `sent[1]` to process 1, and so on; returns what came, in the
    order of processes. Gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, dcame: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return _exchanged(dcame, received, sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
    return came


def problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """Why the experts of a run cannot be spread over this many processes."""
    moe, found = config.model.moe, []
    if sizes.expert > 1 and not moe.experts:
        found.append(
            f"parallel.expert is {sizes.expert}, but the model has no experts. Set model.moe.experts, or "
            f"set parallel.expert to 1."
        )
    elif moe.experts % sizes.expert:
        found.append(
            f"model.moe.experts ({moe.experts}) is not a multiple of parallel.expert ({sizes.expert}): all "
            f"processes have the same number of experts. Choose a divisor of {moe.experts}."
        )
    if config.parallel.zero == 3 and moe.experts and max(sizes.expert, sizes.tensor) > 1:
        found.append(
            f"parallel.zero 3 gathers whole experts, so it does not work with parallel.expert {sizes.expert} and "
            f"parallel.tensor {sizes.tensor}. Set parallel.zero to 0, 1 or 2, or the other two to 1."
        )
    return found
