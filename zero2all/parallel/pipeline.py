"""Pipeline parallelism: each process has some blocks of the model, and hidden states go from one to the next.

The first stage has the embedding, the last one the final norm and the head; blocks keep their numbers, so checkpoints
and initial weights do not depend on the cut. Between two stages one tensor travels: the residual with the last branch
already added, forward, and its gradient, backward. All processes of a pipeline read the same rows, so ids, positions
and documents are known in every stage.

In which order a process computes is decided by `zero2all.parallel.schedule`. Gradients are summed over the batch ranks
in the last action of a process, and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zero2all.estimate.flops import flops_per_token
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.z2all import PipelineStage, Z2all
from zero2all.ops.gradient_sink import deferring
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.mesh import DENSE, Mesh, coordinates, wait_for
from zero2all.parallel.run_config import SpreadConfig
from zero2all.parallel.schedule import Action, make_order

POSTED_AHEAD = 2
"""Actions whose input is awaited at once: the next one's arrives while the present one computes."""


# ---- which blocks a stage has ------------------------------------------------------------------------------------


class ModelCosts(NamedTuple):
    """FLOPs of one token, forward and backward."""

    blocks: list[float]
    head: float  # the embedding costs nothing: it reads and adds rows

    def of(self, stage: PipelineStage) -> float:
        """The cost of a stage."""
        return sum(self.blocks[stage.blocks.start : stage.blocks.stop]) + (self.head if stage.is_last else 0.0)


def model_costs(model: ModelConfig, seq_len: int) -> ModelCosts:
    """The costs of the parts of a model."""
    head = 6.0 * model.vocab_rows * model.hidden_size
    blocks = flops_per_token(model, seq_len)["causal"] - head
    dense = (flops_per_token(replace(model, moe=MoeConfig()), seq_len)["causal"] - head) / model.layers
    with_experts = (blocks - (model.layers - model.expert_layers) * dense) / max(1, model.expert_layers)
    each = [with_experts if model.has_experts(layer) else dense for layer in range(model.layers)]
    return ModelCosts(each, head)


def make_stages(costs: ModelCosts, count: int) -> list[PipelineStage]:
    """Cut the blocks into `count` stages whose costs are as equal as whole blocks allow: the most expensive one is as
    cheap as possible, and of all such cuts the one with the smallest sum of squares is taken."""
    layers = len(costs.blocks)
    assert count <= layers, f"{count} stages of {layers} blocks"
    before = [0.0, *accumulate(costs.blocks)]
    # best[end]: (dearest stage, sum of squares, borders) of the stages so far, where they end at block `end`.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for number in range(count):
        is_last = number + 1 == count
        found = {}
        for end in [layers] if is_last else range(number + 1, layers - (count - number - 1) + 1):
            options = []
            for start, (dearest, squares, _) in best.items():
                if start < end:
                    cost = before[end] - before[start] + (costs.head if is_last else 0.0)
                    options.append((max(dearest, cost), squares + cost**2, start))
            dearest, squares, start = min(options)
            found[end] = (dearest, squares, (*best[start][2], end))
        best = found
    borders = best[layers][2]
    return [PipelineStage(range(start, stop), start == 0, stop == layers) for start, stop in pairwise(borders)]


def keep_stages(model: Z2all, stages: Sequence[PipelineStage]) -> None:
    """Remove from a model what is in none of these stages."""
    kept = {number for stage in stages for number in stage.blocks}
    for number in range(model.config.layers):
        if number not in kept:
            model.blocks._modules.pop(str(number))
    if not any(stage.is_first for stage in stages):
        del model.embedding
        model.embedding_norm = None
    if not any(stage.is_last for stage in stages):
        del model.norm
        model.head = None


def problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """Why a run cannot be cut into stages: rule, numbers, what to do. ZeRO-2 and offload: `zero2all.parallel.check`."""
    if sizes.pipeline == 1:
        return []
    found, model, parallel = [], config.model, config.parallel
    stages = sizes.pipeline * parallel.chunks
    if stages > model.layers:
        found.append(
            f"The model has too few blocks: parallel.pipeline {sizes.pipeline} x parallel.chunks {parallel.chunks} = "
            f"{stages} stages, but model.layers is {model.layers}, and a stage needs at least one block. Use at most "
            f"{model.layers} stages."
        )
    if model.tied_embeddings:
        found.append(
            f"model.tied_embeddings does not work with parallel.pipeline {sizes.pipeline}: the first stage needs the "
            f"matrix as embedding and the last as head. Set model.tied_embeddings to false, or parallel.pipeline to 1."
        )
    if config.ops.compile != "none":
        found.append(
            f"ops.compile {config.ops.compile} does not work with parallel.pipeline {sizes.pipeline}: only whole "
            f"models are compiled. Set ops.compile to none."
        )
    if parallel.schedule == "zero_bubble" and parallel.zero == 3 and sizes.shard > 1:
        found.append(
            "parallel.schedule zero_bubble does not work with parallel.zero 3: it computes the gradients of matrices "
            "after the backward pass, when FSDP has already freed the weights. Set parallel.schedule to 1f1b, or "
            "parallel.zero to 1."
        )
    return found


# ---- the passes of a step ----------------------------------------------------------------------------------------


Forward = Callable[[PipelineStage, int, Tensor | None], Tensor]
"""(stage, number of the micro-batch, output of the stage before) -> output; of the last stage: what to call backward
on."""


class Pipeline:
    """Runs the stages of one process."""

    def __init__(
        self,
        config: ParallelConfig,
        model: ModelConfig,
        stages: Sequence[PipelineStage],
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`stages`: those of all processes; `dtype`: that of the weights."""
        self.stages, self._schedule, self._mesh = stages, config.schedule, mesh
        self._chunks = len(stages) // mesh.pipeline.size
        self.own = {number: stages[number] for number in range(mesh.pipeline.rank, len(stages), mesh.pipeline.size)}
        """The stages of this process, by number."""
        self._links = make_links(mesh, self._chunks > 1, device, config.timeout_seconds)
        self._width, self._device = model.hidden_size, device
        self._dtype = torch.promote_types(dtype, torch.float32) if model.fp32_residual else dtype

    def run(
        self,
        rows: Sequence[int],
        seq_len: int,
        forward: Forward,
        before_last: Callable[[], None],
        mark: Callable[[str], None],
    ) -> None:
        """Forward and backward passes of micro-batches with these numbers of rows. `before_last` is called before the
        last action; `mark` is told which part of a step has ended: "backward", or "bubble", a wait for another
        process."""
        axis = self._mesh.pipeline
        order = make_order(self._schedule, axis.rank, axis.size, self._chunks, len(rows))
        messages = Messages(self._links, self._dtype, self._device, mark)
        passes: dict[tuple[int, int], _Pass] = {}
        left: dict[tuple[int, int], list[Callable[[], None]]] = {}  # products that zero_bubble leaves for later
        for at, action in enumerate(order):
            for soon in order[at : at + POSTED_AHEAD]:
                self._expect(messages, soon, rows[soon.micro], seq_len)
            if at + 1 == len(order):
                before_last()
            key = (action.stage, action.micro)
            if action.kind == "forward":
                passes[key] = self._forward(messages, action, forward)
            elif action.kind == "backward":
                left[key] = self._backward(messages, action, passes.pop(key))
                mark("backward")
            else:
                with torch.no_grad():
                    for add_product in left.pop(key):
                        add_product()
                mark("backward")
        messages.finish()

    def forward_only(self, rows: int, seq_len: int, forward: Forward) -> None:
        """One forward pass, without gradients. A process is done when it has sent its own output."""
        messages = Messages(self._links, self._dtype, self._device, lambda _part: None)
        for number in self.own:
            action = Action("forward", number, 0)
            self._expect(messages, action, rows, seq_len)
            self._forward(messages, action, forward)
        messages.finish()

    def _expect(self, messages: Messages, action: Action, rows: int, seq_len: int) -> None:
        """Begin to receive what an action needs from another process."""
        mesh, stage = self._mesh, self.own[action.stage]
        shape = torch.Size((rows, seq_len // (mesh.context.size * mesh.tensor.size), self._width))
        if action.kind == "forward" and not stage.is_first:
            messages.expect("inputs", action.stage, action.micro, shape)
        if action.kind == "backward" and not stage.is_last:
            messages.expect("gradients_in", action.stage, action.micro, shape)

    def _forward(self, messages: Messages, action: Action, forward: Forward) -> _Pass:
        stage = self.own[action.stage]
        received = None
        if not stage.is_first:
            received = messages.receive("inputs", action.stage, action.micro)
            received.requires_grad_(torch.is_grad_enabled())
        output = forward(stage, action.micro, received)
        if not stage.is_last:
            messages.send("outputs", output)
        return _Pass(received, get_gradient_edge(output) if output.requires_grad else None)

    def _backward(self, messages: Messages, action: Action, one: _Pass) -> list[Callable[[], None]]:
        """Returns what zero_bubble leaves for later."""
        stage = self.own[action.stage]
        left: list[Callable[[], None]] = []
        gradient = None if stage.is_last else messages.receive("gradients_in", action.stage, action.micro)
        assert one.output is not None, "a forward pass without gradients"
        with deferring(left) if self._schedule == "zero_bubble" else nullcontext():
            torch.autograd.backward(one.output, gradient)
        if one.received is not None:
            assert one.received.grad is not None
            messages.send("gradients_out", one.received.grad)
        return left


class _Pass(NamedTuple):
    """A micro-batch in a stage, between its forward and its backward pass."""

    received: Tensor | None
    output: GradientEdge | None  # not the values, which only the next stage needs


# ---- messages between the stages: outputs go to the next process, gradients to the one before ---------------------


class StageLink(NamedTuple):
    """One direction between two neighbours; messages arrive in the order in which they were sent."""

    group: dist.ProcessGroup
    peer: int  # its rank among all processes


class Links(NamedTuple):
    """The links of one process; None at the ends of the pipeline."""

    inputs: StageLink | None
    outputs: StageLink | None
    gradients_in: StageLink | None
    gradients_out: StageLink | None


def make_links(mesh: Mesh, in_circle: bool, device: torch.device, timeout_seconds: float) -> Links:
    """The links of a pipeline; `in_circle`: also from the last process to the first. Every process of the run calls
    this. A message may take `timeout_seconds`. Each link is a group of its own, because NCCL runs what is queued on a
    group in order: a message that waits must not hold up one that goes the other way."""
    pipelines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.sizes.processes):
        place = coordinates(mesh.sizes, rank)
        pipelines.setdefault(tuple(place[name] for name in DENSE if name != "pipeline"), []).append(rank)
    found: dict[str, StageLink] = {}
    timeout = timedelta(seconds=timeout_seconds)
    for ranks in pipelines.values():
        for before, after in [*pairwise(ranks), *([(ranks[-1], ranks[0])] if in_circle else [])]:
            values, gradients = (dist.new_group([before, after], timeout) for _ in range(2))
            if mesh.place == before:
                found["outputs"], found["gradients_in"] = StageLink(values, after), StageLink(gradients, after)
            if mesh.place == after:
                found["inputs"], found["gradients_out"] = StageLink(values, before), StageLink(gradients, before)
    links = Links(*(found.get(name) for name in Links._fields))
    _connect(links, mesh.pipeline.rank, device)
    return links


def _connect(links: Links, stage: int, device: torch.device) -> None:
    """Send one number over every link. NCCL joins two processes when they first exchange something, and the host of
    each waits there for the other: in the middle of a schedule both would wait for ever."""
    number = torch.zeros(1, device=device)
    forward = [(links.outputs, dist.send), (links.inputs, dist.recv)]
    backward = [(links.gradients_out, dist.send), (links.gradients_in, dist.recv)]
    for exchanges in (forward, backward):
        # Even stages send first, odd ones receive first, so that no circle of senders waits.
        for link, exchange in exchanges if stage % 2 == 0 else reversed(exchanges):
            if link is not None:
                exchange(number, link.peer, group=link.group)


class Messages:
    """What is on its way to and from this process."""

    def __init__(self, links: Links, dtype: torch.dtype, device: torch.device, mark: Callable[[str], None]) -> None:
        self._links, self._dtype, self._device, self._mark = links, dtype, device, mark
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._awaited: dict[tuple[str, int, int], tuple[dist.Work, Tensor]] = {}

    def send(self, direction: Literal["outputs", "gradients_out"], values: Tensor) -> None:
        """Send to a neighbour, without waiting."""
        assert values.dtype == self._dtype, f"a stage returned {values.dtype}, not {self._dtype}"
        link = getattr(self._links, direction)
        values = values.detach().contiguous()
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        work = dist.isend(values, link.peer, group=link.group)
        assert work is not None, "this process is on the link"
        self._sent.append((work, values))

    def expect(self, direction: Literal["inputs", "gradients_in"], stage: int, micro: int, shape: torch.Size) -> None:
        """Begin to receive a message, unless that was done before. Messages must be expected in their order."""
        if (direction, stage, micro) not in self._awaited:
            link = getattr(self._links, direction)
            values = torch.empty(shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(values, link.peer, group=link.group)
            assert work is not None, "this process is on the link"
            self._awaited[direction, stage, micro] = work, values

    def receive(self, direction: Literal["inputs", "gradients_in"], stage: int, micro: int) -> Tensor:
        """Wait for an expected message (on a GPU: its stream does)."""
        work, values = self._awaited.pop((direction, stage, micro))
        wait_for([work])
        self._mark("bubble")
        return values

    def finish(self) -> None:
        """Wait until everything is sent."""
        wait_for(work for work, _ in self._sent)
        self._sent.clear()
        self._mark("bubble")
