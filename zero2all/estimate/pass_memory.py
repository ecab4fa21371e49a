"""What forward and backward of a micro-batch need in memory, moment by moment.

The operators state what they save and what is alive in their backward pass (`zero2all.ops.footprint`); here these are
put in the order of a pass. Forward, a block saves what its operators save:

    norm, its output, query/key/value, attention's result, norm, its output, gates and ups (…)

Backward, it is freed from the end. The gradients of the residual and of the branch not yet added to it (one tensor, if
they have one dtype) are there all the time, and at each operator what that operator says. A recomputed block keeps its
two inputs, and has all the others again while its backward pass runs. Of a group of blocks that is recomputed the first
keeps its inputs, and all of them have the others again when the backward pass of the last begins.

A process of a pipeline has more: what waiting micro-batches have saved, of which the head keeps the gradient of its
whole matrix; hidden states that are received ahead of time, and those that the device has not sent yet, because the
host runs ahead of it; and with zero_bubble inputs and output gradients of matrices until their products are computed.

Everything is a straight line over the tokens of a micro-batch, but for the chunk of logits. So `pass_memory` is
computed once for a model and its settings, and `PassMemory.phases` for each number of tokens, which is much faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from zero2all.estimate.flops import WHOLE_FORWARD, recomputed_blocks
from zero2all.estimate.memory_settings import MemorySettings
from zero2all.model.config import ModelConfig
from zero2all.ops.footprint import Moment, Sizes

FORWARD, LOSS, LAST_BLOCK, RECOMPUTED_BLOCK, FIRST_BLOCK = (
    "forward, last block",
    "forward and loss",
    "backward, last block",
    "backward, last recomputed block",
    "backward, first block",
)
IDS_AND_LOSSES = 8 + 8 + 4 + 4 + 4
"""Per token of a micro-batch: its id, its target, its weight in the loss twice, its loss."""
RECEIVED_AHEAD = 2
"""Hidden states of a pipeline that are awaited at once (`zero2all.parallel.pipeline`)."""
QUEUED_KERNELS, KERNELS_PER_BLOCK = 1024, 50
"""The host may queue so many kernels ahead of the device; forward and backward of a block have about so many. What is
sent stays in memory until the device gets there."""
TIME_TO_GET_AHEAD = 2 / 3
"""Of the passes of a step: the host gets ahead little by little. Chosen beside benchmarks/results/gpu_pipeline.json."""


class PhaseLines(NamedTuple):
    """A phase as straight lines: what blocks have saved (per token), and moments beside it."""

    name: str
    saved: float
    moments: tuple[Moment, ...]


class Phase(NamedTuple):
    """The worst moment of a phase."""

    name: str
    saved: float  # bytes that blocks and the last norm have saved for the backward pass
    working: float  # bytes beside them

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.saved + self.working


@dataclass(frozen=True)
class PassMemory:
    """The memory of forward and backward, for any number of tokens."""

    saved_per_token: float  # at the end of the forward pass, of one micro-batch
    lines: tuple[PhaseLines, ...]
    chunk_rows: Callable[[int], int] | None  # of the head, from the tokens of a pass; None: all tokens
    inputs: Moment  # what lies on the device for a pass: ids, weights in the loss, tables of positions

    def phases(self, tokens: int) -> list[Phase]:
        """The phases of a pass over so many tokens."""
        first = tokens if self.chunk_rows is None else min(tokens, self.chunk_rows(tokens))
        rows = (first, min(tokens - first, first))
        return [
            Phase(line.name, line.saved * tokens, max(_bytes(moment, tokens, rows) for moment in line.moments))
            for line in self.lines
        ]

    def input_bytes(self, tokens: int) -> float:
        """Of `inputs`."""
        return _bytes(self.inputs, tokens, (0, 0))


def _bytes(moment: Moment, tokens: int, rows: tuple[int, int]) -> float:
    """`rows`: tokens of the first chunk of the head, and of the second."""
    in_chunks = moment.per_row * rows[0] + moment.per_second_row * rows[1]
    return moment.per_token * tokens + in_chunks + moment.fixed


def pass_memory(model: ModelConfig, settings: MemorySettings) -> PassMemory:
    """The lines of a model as held by the process (`MemorySettings.held`)."""
    blocks = _Blocks(model, settings)
    head = settings.operators["linear_cross_entropy"]
    ends = _Ends(model, settings, blocks.sizes)
    saved, last = blocks.saved_up_to(model.layers), model.layers - 1
    others, kept = _waiting(blocks, ends, settings, saved)
    others += ends.embedding_saved * (1 if settings.stage is None else settings.stage.in_flight)
    lines = [PhaseLines(FORWARD, others + saved, blocks.forward(last))]
    lines.append(PhaseLines(LOSS, others + saved + ends.saved, ends.forward()))
    for name, number in ((LAST_BLOCK, last), (RECOMPUTED_BLOCK, blocks.last_whole_group), (FIRST_BLOCK, 0)):
        if name != RECOMPUTED_BLOCK or 0 < number < last:
            moments = blocks.backward(number)
            # The head and the last norm have freed what they saved when the last block begins.
            moments += ends.backward() if number == last else ()
            moments += ends.embedding(blocks.saved(0)) if number == 0 else ()
            moments += blocks.deferring(number)
            done = blocks.deferred(number + 1)
            lines.append(PhaseLines(name, others + done + blocks.saved_up_to(number + 1), moments))
    if kept:
        lines = [
            PhaseLines(name, saved, tuple(one._replace(fixed=one.fixed + kept) for one in moments))
            for name, saved, moments in lines
        ]
    chunk = None if head.chunk_rows is None else partial(head.chunk_rows, blocks.sizes)
    return PassMemory(saved + ends.saved, tuple(lines), chunk, _inputs(model, settings))


def _waiting(blocks: _Blocks, ends: _Ends, settings: MemorySettings, saved: float) -> tuple[float, float]:
    """Of a pipeline: what is there beside the micro-batch that is computed, per token and fixed."""
    stage = settings.stage
    if stage is None:
        return 0.0, 0.0
    ahead = min(settings.passes * TIME_TO_GET_AHEAD, QUEUED_KERNELS / (KERNELS_PER_BLOCK * stage.layers))
    messages = (RECEIVED_AHEAD + stage.sends * ahead) * blocks.residual
    # What a stage is given has its branch added already: a first block that keeps only its inputs has one, not two.
    stages = (stage.sends + stage.has_embedding + stage.has_head) // 2
    given = stages * blocks.branch if settings.recompute in WHOLE_FORWARD else 0.0
    per_token, fixed = ends.kept()
    heads = max(0, stage.heads - 1)
    per_token = heads * per_token + max(0, stage.deferred - 1) * blocks.deferred(0)
    return (stage.in_flight - 1.0) * (saved - given) + messages + per_token, heads * fixed


def _inputs(model: ModelConfig, settings: MemorySettings) -> Moment:
    """Ids and weights of the tokens, the weights of all tokens of the step, and the tables of positions; with a
    document mask every token has positions of its own."""
    per_token = float(IDS_AND_LOSSES + 4 * settings.passes)
    if settings.documents:
        per_token += 3 * 8 + 4 * model.head_size
    return Moment(per_token, 4.0 * model.max_seq_len * model.head_size)


class _Blocks:
    """The blocks of a model: what they save, and the moments of their backward pass. Per token, of which a tensor rank
    has 1/tensor in the residual and in the norms, but all of them inside of attention and feed-forward; experts see
    those of the residual."""

    def __init__(self, model: ModelConfig, settings: MemorySettings) -> None:
        self.model, self.settings, self.sizes = model, settings, settings.sizes(model)
        ops, sizes, share = settings.operators, self.sizes, settings.tensor
        self.width, self.hidden = sizes.value_bytes, sizes.hidden_size
        self.copy_bytes = ops["linear"].input_copy_bytes
        # The output of a norm is saved by the linear layer after it, as it is or as a copy.
        self.norm, self.normed = ops["rms_norm"].saved(sizes) / share, (self.copy_bytes or self.width) * self.hidden
        narrow_results = (settings.lora.rank or 0) * len(settings.lora.targets_of(model))
        self.attention = self._saved_by_attention() + self.width * narrow_results
        self.dropout = 2 * self.hidden / share if model.residual_dropout else 0
        self.feed_forward = {
            False: ops["feed_forward"].saved(sizes),
            True: ops["experts"].saved(sizes) / share if model.expert_layers else 0.0,
        }
        narrow = self.width if sizes.residual_bytes != self.width else 0
        self.gradients = (sizes.residual_bytes + narrow) * self.hidden / share  # of residual and branch
        self.residual, self.branch = sizes.residual_bytes * self.hidden / share, self.width * self.hidden / share
        self.inputs = self.residual + self.branch
        self.recomputed = {
            with_experts: self.inputs + sum(self._kept(with_experts))
            if settings.recompute == "selective"
            else self.inputs
            for with_experts in (False, True)
        }
        count = recomputed_blocks(model, settings.recompute, settings.recompute_every)
        self.every = settings.recompute_every if settings.recompute == "every_n" else 1
        self.last_recomputed = (count - 1) * self.every
        self.group = settings.recompute_every if settings.recompute == "groups" else 1
        self.last_whole_group = self.last_recomputed
        if self.group > 1 and model.layers > self.group:
            self.last_whole_group = model.layers // self.group * self.group - 1

    def _saved_by_attention(self) -> float:
        """Query, key, value and the result, which the projection after it reads, or a copy of it."""
        ops, sizes, settings = self.settings.operators, self.sizes, self.settings
        saved = ops["attention"].saved(sizes) + (self.width + self.copy_bytes) * sizes.query_size
        saved += 2 * self.width * sizes.kv_size * (settings.kv_copies(self.model) - 1)
        if ops["attention"].is_fused:  # plain matmuls save only what is counted with them
            saved += ops["rope"].saved(sizes)
            if ops["attention"].result_like_query and not ops["rope"].overwrites_input:
                saved += self.width * sizes.query_size
        elif sizes.qk_norm:  # what the norm keeps, but no rotated copies; float32 heads are views of the projection
            saved += ops["rope"].saved(sizes) - self.width * (sizes.query_size + sizes.kv_size)
            if self.width == sizes.wide_bytes:
                saved += self.width * (sizes.query_size + 2 * sizes.kv_size)
        return saved

    def _kept(self, with_experts: bool) -> tuple[float, float]:
        """Under `selective`, of the results of expensive operations: what the backward pass needs, and the rest."""
        ops, sizes = self.settings.operators, self.sizes
        feed_forward, share = ops["experts" if with_experts else "feed_forward"], self._share(with_experts)
        needed = feed_forward.kept_results(sizes) / share
        besides = self.width * self.hidden + feed_forward.kept_besides(sizes) / share  # the out projection's
        if not ops["rope"].overwrites(sizes.qk_norm):
            # The rotated copies are made again, so the projection's output is not among what is there anyway.
            qkv = self.width * (sizes.query_size + 2 * sizes.kv_size)
            needed, besides = needed + self.width * sizes.kv_size, besides + qkv - self.width * sizes.kv_size
        if ops["attention"].is_fused and not sizes.attention_dropout:
            needed += self.width * sizes.query_size + 4 * sizes.heads
        return needed, besides

    def _share(self, with_experts: bool) -> int:
        return self.settings.tensor if with_experts else 1

    def has_experts(self, number: int) -> bool:
        """Whether this block of the process has experts; the first ones have none."""
        return number >= self.model.layers - self.model.expert_layers

    def is_recomputed(self, number: int) -> bool:
        """Whether its forward pass runs twice."""
        return number <= self.last_recomputed and number % self.every == 0

    def whole(self, number: int) -> float:
        """What it saves if it recomputes nothing."""
        norms = 2 * (self.norm + self.normed)
        return norms + self.attention + self.feed_forward[self.has_experts(number)] + self.dropout

    def saved(self, number: int) -> float:
        """What it saves. The residual that enters a recomputed block is there already if the block before saved all:
        its second norm has it."""
        if not self.is_recomputed(number):
            return self.whole(number)
        if number % self.group:
            return 0.0
        shared = number > 0 and not self.is_recomputed(number - 1)
        residual = self.sizes.residual_bytes * self.hidden / self.settings.tensor if shared else 0.0
        return self.recomputed[self.has_experts(number)] - residual

    def saved_up_to(self, end: int) -> float:
        """What the first `end` blocks have on the device."""
        if self.last_recomputed < 0 and not self.model.expert_layers:
            return end * self.whole(0)
        return sum(self.saved(number) for number in range(end))

    def forward(self, number: int) -> tuple[Moment, ...]:
        """The moments of its forward pass, where it saves all: the branches of attention and of the block before, the
        residual before and after attention, and what the feed-forward says. A recomputed block has these in its
        backward pass."""
        if self.is_recomputed(number):
            return (Moment(self.inputs),)
        besides = 2 * (self.width * self.hidden / self.settings.tensor + self._residual())
        return tuple(Moment(besides + moment.per_token) for moment in self._feed_forward_again(number))

    def deferred(self, first: int) -> float:
        """With zero_bubble: inputs and output gradients of the matrices of all blocks from `first` on, which wait for
        their products. Experts: as much as they save, twice."""
        if self.settings.stage is None or not self.settings.stage.deferred:
            return 0.0
        sizes = self.sizes
        attention = self.hidden + sizes.query_size + sizes.query_size + 2 * sizes.kv_size + self.hidden
        dense = self.width * (attention + 2 * self.hidden + 3 * sizes.intermediate_size)
        experts = self.width * attention + 2 * self.feed_forward[True]
        return sum(experts if self.has_experts(number) else dense for number in range(first, self.model.layers))

    def deferring(self, number: int) -> tuple[Moment, ...]:
        """The end of the backward pass of a block whose products wait: it has freed all else."""
        own = self.deferred(number) - self.deferred(number + 1)
        return (Moment(own + self.gradients - self.saved(number)),) if own else ()

    def _residual(self) -> float:
        (norm,) = self.settings.operators["rms_norm"].forward(self.sizes)
        return norm.per_token / self.settings.tensor

    def _feed_forward_again(self, number: int) -> list[Moment]:
        with_experts = self.has_experts(number)
        operator = self.settings.operators["experts" if with_experts else "feed_forward"]
        share = self._share(with_experts)
        return [Moment(moment.per_token / share) for moment in operator.forward(self.sizes)]

    def backward(self, number: int) -> tuple[Moment, ...]:
        """The moments of its backward pass, beside what it and the blocks before it have saved."""
        with_experts, again = self.has_experts(number), 0.0
        if self.is_recomputed(number):
            again = sum(self.whole(each) for each in range(number - number % self.group, number + 1))
            if self.settings.recompute == "selective":
                again -= self._kept(with_experts)[0]
        moments = [Moment(per_token + again, fixed) for per_token, fixed in self._moments(with_experts)]
        if self.is_recomputed(number):  # the forward pass once more, up to its last saved tensor
            branches = 2 if number % self.group else 1  # also that of the block before, in a group
            besides = again + self.gradients + branches * self.width * self.hidden / self.settings.tensor
            besides += self._residual()
            moments += [Moment(besides + moment.per_token) for moment in self._feed_forward_again(number)]
        return tuple(moments)

    def _moments(self, with_experts: bool) -> list[tuple[float, float]]:
        """Bytes per token and fixed, from the feed-forward back to the first norm, less what has been freed."""
        ops, sizes, share = self.settings.operators, self.sizes, self.settings.tensor
        width, hidden, copies = self.width, self.hidden, 2 * self.copy_bytes
        query, qkv = sizes.query_size, sizes.query_size + 2 * sizes.kv_size
        writes = width if ops["linear"].writes_weight_gradient else 0
        residual = self.gradients
        gathered = width * hidden if share > 1 else 0  # the branch's of all tensor ranks
        (norm,) = ops["rms_norm"].backward(sizes)
        of_norm = residual + width * hidden + norm.per_token / share
        (attention,), (rope,) = ops["attention"].backward(sizes), ops["rope"].backward(sizes)

        feed_forward = ops["experts" if with_experts else "feed_forward"].backward(sizes)
        inside = self._share(with_experts)
        found = [(residual + gathered + moment.per_token / inside, moment.fixed) for moment in feed_forward]
        left = self.feed_forward[with_experts] + self.normed  # what has been freed
        found.append((of_norm - left, 0.0))
        left += self.norm + self.dropout / 2
        found.append((residual + gathered + (width * query + copies * hidden) - left, writes * query * hidden))
        found.append((residual + width * query + attention.per_token - left, 0.0))
        left += self.attention
        found.append((residual + width * qkv + rope.per_token - left, 0.0))
        found.append((residual + (width + copies) * qkv + width * hidden - left, float(writes * qkv * hidden)))
        left += self.normed
        found.append((of_norm - left, 0.0))
        return found


class _Ends:
    """What comes before the first block and after the last: embedding, last norm, head and loss."""

    def __init__(self, model: ModelConfig, settings: MemorySettings, sizes: Sizes) -> None:
        self.settings, self.sizes = settings, sizes
        self.has_head = settings.stage is None or settings.stage.has_head
        self.has_embedding = settings.stage is None or settings.stage.has_embedding
        self.table = float(sizes.value_bytes * model.vocab_rows * model.hidden_size)
        self.hidden_state = float(sizes.value_bytes * sizes.hidden_size)
        self.saved = settings.operators["rms_norm"].saved(sizes) / settings.tensor if self.has_head else 0.0
        norm = settings.operators["rms_norm"].saved(sizes) / settings.tensor
        self.embedding_saved = norm if self.has_embedding and model.embedding_norm else 0.0

    def forward(self) -> tuple[Moment, ...]:
        """Hidden states, and what the head needs; of a stage without it: what the next stage gets."""
        if not self.has_head:
            return (Moment(self.sizes.residual_bytes * self.sizes.hidden_size / self.settings.tensor),)
        head = self.settings.operators["linear_cross_entropy"].head
        assert head is not None, "every head says what it needs"
        state = self.hidden_state
        return tuple(moment._replace(per_token=moment.per_token + state) for moment in head.forward(self.sizes))

    def backward(self) -> tuple[Moment, ...]:
        """From the loss to the gradient of the last block's output."""
        if not self.has_head:
            return ()
        head = self.settings.operators["linear_cross_entropy"].head
        assert head is not None, "every head says what it needs"
        kept = self.saved + (self.hidden_state if head.keeps_hidden else 0.0)
        of_head = tuple(moment._replace(per_token=moment.per_token + kept) for moment in head.backward(self.sizes))
        (norm,) = self.settings.operators["rms_norm"].backward(self.sizes)
        return (*of_head, Moment(self.saved + self.hidden_state + norm.per_token / self.settings.tensor))

    def kept(self) -> tuple[float, float]:
        """Between loss and backward pass, per token and fixed: what the last norm saved, and the gradients that the
        head has computed, or its logits."""
        moments = self.backward()[:-1]
        return (moments[0].per_token - self.hidden_state, moments[0].fixed) if moments else (0.0, 0.0)

    def embedding(self, freed: float) -> tuple[Moment, ...]:
        """The gradient of the table, where it is a tensor of its own; the first block has `freed` what it saved."""
        if not self.has_embedding:
            return ()
        writes = self.settings.operators["embedding"].writes_weight_gradient
        return (Moment(self.hidden_state - freed, self.table if writes else 0.0),)
