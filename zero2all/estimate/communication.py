"""Bytes that one process exchanges in a training step, by collective and axis.

Gradients and weights, with G bytes of gradients (4 a parameter that the process holds), W bytes of weights (2 in
bfloat16), m micro-batches, n processes along the shard axis and r with other tokens for the same weights (replicate x
context):

    zero 0   all-reduce G over r
    zero 1   reduce-scatter G over n                      all-gather W over n
    zero 2   reduce-scatter G over n, in each of m passes  all-gather W over n
    zero 3   reduce-scatter G over n                      all-gather W over n twice in each of m passes: FSDP2 frees the
                                                          weights between the forward and the backward pass
    hybrid   with r > 1, zero 1 to 3 also all-reduce the part of a process, G/n, over r; zero 2 in each pass

With `parallel.compress: bf16` G is 2 bytes a parameter.

What every tensor rank has a copy of (norms) is summed over the tensor axis too. Experts are cut over the expert axis;
for them n is the number of processes with the same experts (shard x context x tensor / expert), and r is replicate.

Activations, in each of m passes, with A bytes of hidden states of the process's tokens (tokens x width x 2):

    tensor    per block 4 all-gathers and 4 reduce-scatters of A (before and after attention and feed-forward, forward
              and backward); one of each at both ends; three numbers a token for the loss. A block that is recomputed
              gathers twice more, and sums once more: its last sum is needed again only for dropout. A block with
              experts gathers and sums for attention only. Where ranks have copies of kv heads, the gradients of these
              are summed too
    context   per block, with Q and K bytes of the queries and keys of the process's tokens (heads x head width x 2 a
              token): ulysses 2 all-to-alls of Q + 2 K and 2 of Q, where K counts repeated heads; gather an all-gather
              and a reduce-scatter of 2 K x context. A block that is recomputed does its forward part twice
    pipeline  A/tensor to the next stage, and as much back
    expert    per block with experts 4 all-to-alls of A/tensor x experts per token, 2 of as many gates, and one of the
              counts; the mean over processes: how much comes back to one depends on the routing. A block that is
              recomputed does its forward part twice. The tensor axis gathers nothing for experts

Three numbers each: the whole tensor; what a process hands to the collective, which a counter of inputs sees (the whole
tensor, but only its own part for an all-gather); and what it sends over its links in a ring, which is 2 (n - 1)/n of
the whole for an all-reduce, all of it for a send, and (n - 1)/n for the others. It receives as much.

Buckets whose owners have ranges of different length (8-bit AdamW, Muon) are reduced and broadcast range by range: the
same bytes as a reduce-scatter and an all-gather, which is what they are called here.

Muon, where zero 3 or tensor ranks cut matrices, with M values of matrices in a process: an all-to-all of 2 M values, to
the owner of each matrix and back, in bfloat16 (a float32 run: float32). The mean over processes.

Not counted: padding (pass `buffers` to count it), validation and saving.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zero2all.estimate.flops import recomputed_blocks, stopped_blocks
from zero2all.estimate.memory_settings import WIDTHS, MemorySettings, copied_values, expert_values
from zero2all.model.config import ModelConfig, parameter_counts

LOSS = ("replicate", "shard", "context")
WORLD = ("pipeline", *LOSS, "tensor")
COUNT_BYTES = 8
FIGURE_BYTES = 8
"""The figures of a step are float64."""


Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send"]


@dataclass(frozen=True)
class Transfer:
    """One kind of tensor that crosses between processes, over a whole step."""

    collective: Collective
    what: str
    axis: str  # of the mesh, or a product of axes
    ranks: int
    whole: float  # bytes of the whole tensor
    hidden_by: str = ""  # what can be computed meanwhile; empty: the processes wait
    share: float | None = None  # of an all-gather, the part of this process; None: 1 / ranks

    @property
    def given(self) -> float:
        """Bytes that a process hands to the collective."""
        if self.collective != "all-gather":
            return self.whole
        return self.whole / self.ranks if self.share is None else self.whole * self.share

    @property
    def sent(self) -> float:
        """Bytes that a process sends in a ring; it receives as many."""
        if self.collective == "send":
            return self.whole
        rounds = 2 if self.collective == "all-reduce" else 1
        return rounds * (self.ranks - 1) / self.ranks * self.whole


def communication_per_step(
    model: ModelConfig,
    settings: MemorySettings,
    figures: int = 0,
    buffers: Mapping[str, int] | None = None,
    own: Mapping[str, int] | None = None,
) -> list[Transfer]:
    """What one process exchanges in a step; empty for a single process. `figures`: how many numbers of the step
    (losses, counts, the norm) are summed over all processes. `buffers`: values in the flat buffers with their padding,
    by spread (cut, copied); None: the parameters alone. `own`: of these, the values that this process updates (ZeRO-1
    and 2); None: equal shares."""
    transfers = [
        *_gradients_and_weights(model, settings, buffers or _values(model, settings), own or {}),
        *_momenta(model, settings),
        *_tensor(model, settings),
        *_context(model, settings),
        *_expert(model, settings),
        *_pipeline(model, settings),
        _all_reduce(settings, WORLD, "figures", float(FIGURE_BYTES * figures)),
        # the number of tokens that count
        _all_reduce(settings, LOSS, "figures", float(FIGURE_BYTES * bool(figures))),
    ]
    return [transfer for transfer in transfers if transfer.ranks > 1 and transfer.whole]


def _all_reduce(
    settings: MemorySettings, axes: Sequence[str], what: str, whole: float, hidden_by: str = ""
) -> Transfer:
    """Over a product of axes, named by those that have more than one process."""
    names = [name for name in axes if getattr(settings, name) > 1]
    ranks = math.prod(getattr(settings, name) for name in names)
    return Transfer("all-reduce", what, " x ".join(names), ranks, whole, hidden_by)


def _values(model: ModelConfig, settings: MemorySettings) -> dict[str, int]:
    """The values that a process holds, by spread."""
    held, lora = settings.held(model), settings.lora
    if lora.rank:  # of every adapter the side of the residual is on all tensor ranks
        copied = lora.rank * held.layers * held.hidden_size * len(lora.targets_of(held)) if settings.tensor > 1 else 0
        return {"cut": settings.trained(held) - copied, "copied": copied, "expert": 0}
    copied = copied_values(held) if settings.tensor > 1 else 0
    experts = 0 if settings.is_fsdp else expert_values(held)
    return {"cut": parameter_counts(held)["total"] - copied - experts, "copied": copied, "expert": experts}


def _gradients_and_weights(
    model: ModelConfig, settings: MemorySettings, buffers: Mapping[str, int], owned: Mapping[str, int]
) -> list[Transfer]:
    width, passes = WIDTHS[settings.precision], settings.passes
    meanwhile = "last backward" if settings.overlap and settings.stage is None else ""
    found = []
    for spread, values in ((spread, values) for spread, values in buffers.items() if values):
        gradients = float((2 if settings.compress == "bf16" else settings.gradient_bytes) * values)
        if settings.is_fsdp:  # reduces in float32 whatever the optimizer
            gradients = float(max(4, width) * (values + _reduced_again(model, settings, spread)))
        if settings.zero == 2:
            gradients *= passes
        scatter, axes = "shard", ["replicate", "context"]
        if spread == "expert" and not settings.is_fsdp:
            scatter, axes = "expert_shard", ["replicate"] if settings.zero else ["replicate", "expert_shard"]
        ranks = getattr(settings, scatter)
        share = owned[spread] / values if spread in owned else 1 / (ranks if settings.zero else 1)
        own = gradients * share
        if spread == "copied" and settings.is_fsdp:  # FSDP does not know of the tensor axis
            found.append(_all_reduce(settings, ["tensor"], "gradients", own))
        elif spread == "copied":
            axes.append("tensor")
        if settings.zero >= 1:
            found.append(Transfer("reduce-scatter", "gradients", scatter, ranks, gradients, meanwhile))
        found.append(_all_reduce(settings, axes, "gradients", own, meanwhile))
        gathers = {0: 0, 3: 2 * passes}.get(settings.zero, 1)
        next_one = "block before" if settings.zero == 3 else "next forward"
        if settings.lora.rank and settings.is_fsdp and spread == "cut":  # what is frozen is gathered too
            values += parameter_counts(settings.held(model))["total"]
        whole = float(gathers * width * values)
        found.append(Transfer("all-gather", "weights", scatter, ranks, whole, next_one, share))
    return found


def _momenta(model: ModelConfig, settings: MemorySettings) -> list[Transfer]:
    """Matrices that are cut, to the process that orthogonalises them and back. Experts are not cut."""
    ranks = settings.tensor * (settings.shard if settings.is_fsdp else 1)
    if settings.optimizer != "muon" or ranks == 1:
        return []
    held, counts = settings.held(model), parameter_counts(settings.held(model))
    expert, shared = 3 * held.hidden_size * held.moe.expert_size, 3 * held.hidden_size * held.shared_size
    routed = held.hidden_size * held.router_rows + held.moe.experts_per_token * expert
    values = counts["matmul"] - counts["embedding"] - held.expert_layers * routed
    if not settings.is_fsdp:  # every tensor rank has shared experts and a single kv head whole
        kv = 2 * held.hidden_size * held.head_size if model.kv_heads == 1 else 0
        values -= held.expert_layers * shared + held.layers * kv
    axes = "tensor" if not settings.is_fsdp else "shard x tensor" if settings.tensor > 1 else "shard"
    size = 2.0 * WIDTHS[settings.precision] * values / settings.state_ranks
    return [Transfer("all-to-all", "momentum", axes, ranks, size)]


def _reduced_again(model: ModelConfig, settings: MemorySettings, spread: str) -> int:
    """Values that FSDP reduces twice after several passes: its root, behind the head and at the end."""
    if settings.passes == 1 or settings.lora.rank:
        return 0
    if settings.tensor == 1:
        return parameter_counts(model)["embedding"] + model.hidden_size
    return model.hidden_size if spread == "copied" else parameter_counts(model)["embedding"] // settings.tensor


def _tensor(model: ModelConfig, settings: MemorySettings) -> list[Transfer]:
    """Hidden states between tensor ranks."""
    if settings.tensor == 1:
        return []
    states = float(settings.passes * settings.tokens * model.hidden_size * WIDTHS[settings.precision])
    held = settings.held(model)
    has_embedding = settings.stage is None or settings.stage.has_embedding
    has_head = settings.stage is None or settings.stage.has_head
    ends = has_embedding + has_head
    again = recomputed_blocks(held, settings.recompute, settings.recompute_every)
    # Experts work on the positions of their rank: only attention gathers and sums in their blocks.
    dense = held.layers - held.expert_layers
    dense_again = again * dense // max(1, held.layers)
    once = 2 * (held.layers + dense) + ends
    # The sum after the last matmul is needed again for dropout, and for the next block of a group.
    stopped = 0 if model.residual_dropout else stopped_blocks(held, settings.recompute, settings.recompute_every)
    gathers, sums = once + again + dense_again, once + again + max(0, dense_again - stopped)
    if settings.lora.rank and has_embedding:  # no gradient goes back behind the first adapters
        gathers, sums = gathers - 1, sums - 1
    copied_heads = model.kv_heads if settings.tensor > model.kv_heads else 0
    of_head = 2 * model.head_size * (model.hidden_size + (model.attention_bias != "none"))  # keys and values
    of_heads = float(settings.gradient_bytes * held.layers * copied_heads * of_head) / settings.state_ranks
    of_loss = float(settings.passes * settings.tokens * max(4, WIDTHS[settings.precision]) * 3 * has_head)
    return [
        Transfer("all-gather", "hidden states", "tensor", settings.tensor, gathers * states),
        Transfer("reduce-scatter", "hidden states", "tensor", settings.tensor, sums * states),
        Transfer("all-reduce", "kv heads", "tensor", settings.tensor, of_heads),
        Transfer("all-reduce", "losses", "tensor", settings.tensor, of_loss),
    ]


def _context(model: ModelConfig, settings: MemorySettings) -> list[Transfer]:
    """Heads of attention between context ranks."""
    if settings.context == 1:
        return []
    held, ranks = settings.held(model), settings.context
    of_head = float(settings.passes * settings.tokens * model.head_size * WIDTHS[settings.precision])
    backward = held.layers
    forward = held.layers + recomputed_blocks(held, settings.recompute, settings.recompute_every)
    keys_and_values = 2 * held.kv_heads * settings.kv_copies(held) * of_head
    if settings.context_method == "gather":
        return [
            Transfer("all-gather", "keys and values", "context", ranks, forward * keys_and_values),
            Transfer("reduce-scatter", "keys and values", "context", ranks, backward * keys_and_values),
        ]
    heads = 2 * held.heads * of_head + keys_and_values
    return [Transfer("all-to-all", "attention heads", "context", ranks, (forward + backward) * heads)]


def _expert(model: ModelConfig, settings: MemorySettings) -> list[Transfer]:
    """Tokens to their experts and back, with their gates, where all experts get as many; and how many there are."""
    if settings.expert == 1:
        return []
    held, width = settings.held(model), WIDTHS[settings.precision]
    recomputed = recomputed_blocks(held, settings.recompute, settings.recompute_every)
    backward, forward = held.expert_layers, held.expert_layers + min(recomputed, held.expert_layers)
    pairs = settings.passes * settings.tokens // settings.tensor * model.moe.experts_per_token
    of_pair = 2 * model.hidden_size * width + max(4, width)
    counts = forward * settings.passes * model.moe.experts * COUNT_BYTES
    whole = float((forward + backward) * pairs * of_pair + counts)
    return [Transfer("all-to-all", "tokens", "expert", settings.expert, whole)]


def _pipeline(model: ModelConfig, settings: MemorySettings) -> list[Transfer]:
    """Hidden states, and their gradients, between neighbouring stages."""
    if settings.stage is None:
        return []
    width = max(4, WIDTHS[settings.precision]) if model.fp32_residual else WIDTHS[settings.precision]
    states = float(settings.passes * settings.tokens // settings.tensor * model.hidden_size * width)
    meanwhile = "other micro-batches" if settings.passes > settings.pipeline else ""
    whole = settings.stage.sends * states
    return [Transfer("send", "hidden states", "pipeline", settings.pipeline, whole, meanwhile)]


def bytes_sent(transfers: Sequence[Transfer]) -> float:
    """Bytes that a process sends in a step, in rings; it receives as many."""
    return sum(transfer.sent for transfer in transfers)


@dataclass(frozen=True)
class AxisTraffic:
    """What the processes of an axis exchange in a step."""

    axis: str
    sent: float  # by one process
    waited: float  # of these, what nothing can hide


def by_axis(transfers: Sequence[Transfer]) -> list[AxisTraffic]:
    """The axes, the one that tolerates a slow link best first: those whose traffic can be hidden before those that make
    the processes wait, and among these the one that sends least. What goes over a product of axes counts for each of
    them; figures are left out, they are a few bytes."""
    found: dict[str, AxisTraffic] = {}
    for one in transfers:
        for axis in one.axis.split(" x ") if one.what != "figures" else ():
            before = found.get(axis, AxisTraffic(axis, 0.0, 0.0))
            waited = before.waited + (0.0 if one.hidden_by else one.sent)
            found[axis] = AxisTraffic(axis, before.sent + one.sent, waited)
    return sorted(found.values(), key=lambda axis: (axis.waited, axis.sent))
