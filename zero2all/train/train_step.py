"""One optimizer step: forward and backward over this process's micro-batches, reduce, check, update.

The gradient is that of the mean loss over all tokens of the global batch that count (all of them, unless rows are
padded or prompts masked), whatever the micro-batch and the number of processes; the loss of each
channel and of each row comes from the same forward pass.

On a GPU the host only queues work. Whether the update is made is decided on the device, by limits known before the
step. The stats come back as `PendingStep`, copied in the background, so that reading them a step later does not wait.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.common.fault import fault_point
from zero2all.config import RunConfig
from zero2all.model.moe import routers
from zero2all.model.z2all import PipelineStage
from zero2all.packed.loader import Batch
from zero2all.parallel.context import own_tokens, places_of
from zero2all.parallel.world import World
from zero2all.train.guards.detector import StepLimits
from zero2all.train.objective import NamesTargets, Objective, Scored
from zero2all.train.state import TrainState
from zero2all.train.step_stats import PendingStep, StepStats
from zero2all.train.step_timer import StepTimer

CORE_SHARE = 0.75
"""Of the rows of a step, the lowest: those of its core loss."""


@dataclass(frozen=True)
class StepPlan:
    """What is decided about a step before it begins."""

    lr: float
    limits: StepLimits | None = None
    """Beyond these limits the device refuses the update; None: it refuses only what is not finite."""
    stop_requested: bool = False
    """Whether this process was asked to stop; the others learn it from the stats."""
    folder_changed: bool = False
    """Whether this process, rank 0, found something in the run's folder; the others learn it from the stats."""
    pace: tuple[float, float] = (0.0, 0.0)
    """Seconds of this process in a step before (`stragglers`); the others learn them from the stats."""
    weight_decay_share: float = 1.0
    """Of the weight decay (`optim.decay_schedule`)."""
    momentum: float | None = None
    """Of Muon, by its schedule; None: optim.momentum."""
    is_rerun: bool = False
    """Compute everything but the update: the same step follows."""
    objective: Objective | None = None
    """What is learned; None: the mean loss of the tokens that count."""


def train_step(
    state: TrainState, batch: Batch, channels: int, config: RunConfig, world: World, plan: StepPlan
) -> PendingStep:
    """Advance `state` by one step on `batch`."""
    timer = StepTimer(world.device)
    # Dropout depends on (seed, step, rank) alone, so a resumed run needs no stored random state.
    rank, _ = config.batch_place(world.rank, world.size)
    torch.manual_seed(_step_key(config.train.seed, state.step, rank))
    for _, router in routers(state.model):
        router.load.zero_()
    sums = forward_backward(state, batch, config, world, timer, plan.objective)
    stats = _own_stats(state, batch, channels, world, plan)
    if world.mesh.reports:
        add_losses(stats, batch, *sums)
    # Gradients were summed during the last backward pass (parallel/reduce.py); here only the stats are.
    world.mesh.world.sum(stats.values)
    norm = stats.grad_norm.sqrt()
    if state.loss_scale is not None:
        norm = norm / state.loss_scale.scale
    timer.mark("reduce")
    fault_point("update", state.step + 1)
    _judge_and_update(state, stats, norm, config.optim.clip_grad_norm, plan)
    timer.mark("optimizer")
    before = state.tokens
    if not plan.is_rerun:
        state.step += 1
        state.tokens += batch.global_tokens
    return PendingStep(state.step, (before, state.tokens), plan.lr, stats, timer)


def forward_backward(
    state: TrainState,
    batch: Batch,
    config: RunConfig,
    world: World,
    timer: StepTimer,
    objective: Objective | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulate the gradient; returns the summed loss and the summed token weights of each row of this process, and
    the numbers of the objective, float64."""
    passes = _Passes(state, batch, config, world, timer)
    numbers = passes.weigh(objective)
    if state.pipeline is None:
        passes.run()
    else:
        passes.run_pipeline()
    return passes.row_nats, passes.counts.sum(dim=1, dtype=torch.float64), numbers


def score(
    state: TrainState, batch: Batch, config: RunConfig, world: World, further_targets: Tensor | None = None
) -> Scored:
    """The loss of every target of the rows of this process, and of further ones (B, T, K), without gradient. Called by
    every process."""
    return _Passes(state, batch, config, world, StepTimer(world.device)).score(further_targets)


class _Passes:
    """The passes of a step over this process's micro-batches."""

    def __init__(self, state: TrainState, batch: Batch, config: RunConfig, world: World, timer: StepTimer) -> None:
        self.state, self.timer, self.device, self.z_loss = state, timer, world.device, config.train.z_loss
        self.batch, self.mesh = batch, world.mesh
        self.wide = torch.promote_types(state.weights.dtype, torch.float32)
        self.tokens = torch.as_tensor(batch.tokens)
        masked = batch.document_ids is not None and config.data.document_mask
        self.document_ids = torch.as_tensor(batch.document_ids) if masked else None
        rows, self.seq_len = self.tokens.shape[0], self.tokens.shape[1] - 1
        self.places = places_of(config.model, config.parallel, world.mesh, self.seq_len, self.device)
        self.counts = own_tokens(self._weights_of_targets(batch), self.places)  # (B, T)
        self.row_nats = torch.zeros(rows, dtype=torch.float64, device=self.device)
        self.further: Tensor | None = None  # (B, T, K) targets beside those of the data
        # Rows of one pass. A stage with longer sequences keeps the tokens of a pass, so that it needs no more memory.
        self.micro = max(1, state.micro_batch_samples * config.data.seq_len // self.seq_len)
        self.slices = [slice(first, min(first + self.micro, rows)) for first in range(0, rows, self.micro)]

    def weigh(self, objective: Objective | None) -> Tensor:
        """Set the share of each target in the loss of the global batch, (B, S); returns the objective's numbers."""
        if objective is None:
            counted = self.mesh.loss.sum(self.counts.sum(dtype=torch.float64)).clamp(min=1.0)
            self.shares = (self.counts / counted).to(self.wide)
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        further = objective.further_targets(self.batch) if isinstance(objective, NamesTargets) else None
        weights, numbers = objective.weights(self.score(further))
        self.shares = weights.to(self.wide)
        # Each process with a part of a row has the numbers of the whole row.
        return numbers if self.mesh.context.rank == 0 else torch.zeros_like(numbers)

    @torch.no_grad()
    def score(self, further: Tensor | None = None) -> Scored:
        """Forward passes only."""
        self.further = further
        counts = self.counts if further is None else self.counts.unsqueeze(-1).repeat(1, 1, 1 + further.shape[-1])
        nats = torch.zeros(counts.shape, dtype=self.wide, device=self.device)
        for here in self.slices:
            ids = self.tokens[here].to(self.device, non_blocking=True)

            def forward(
                stage: PipelineStage | None, _: int, x: Tensor | None, here: slice = here, ids: Tensor = ids
            ) -> Tensor:
                hidden = self._hidden(here, ids, stage, x)
                if stage is None or stage.is_last:
                    nats[here] = self.state.model.head_loss(hidden, self._targets(here, ids), counts[here])[1]
                self.timer.mark("score")
                return hidden

            if self.state.pipeline is None:
                forward(None, 0, None)
            else:
                self.state.pipeline.forward_only(len(ids), self.seq_len, forward)
        for _, router in routers(self.state.model):
            router.load.zero_()  # tokens are counted once
        mesh, places = self.mesh, self.places
        return Scored(nats, self.counts, self.batch, lambda x: own_tokens(x, places), mesh.context.sum, mesh.batch.sum)

    def _weights_of_targets(self, batch: Batch) -> Tensor:
        """How much each target counts in the loss, (B, T)."""
        if batch.weights is None:
            return torch.ones(self.tokens.shape[0], self.seq_len, dtype=self.wide, device=self.device)
        return torch.as_tensor(batch.weights).to(self.device, dtype=self.wide, non_blocking=True)

    def run(self) -> None:
        """One pass after the other."""
        state = self.state
        for here in self.slices:
            is_last = here is self.slices[-1]
            state.weights.begin_pass(is_last)
            ids, shares = self._to_device(here)
            # A pass that communicates cannot be captured, and a graph is of one shape.
            is_shorter = len(self.slices) > 1 and here.stop - here.start < self.micro
            if state.cuda_graph is not None and not is_shorter and not (is_last and state.weights.communicates):
                self.timer.mark("collate")
                losses = state.cuda_graph(ids, shares)  # also forward and loss: nothing can be measured inside
                self._keep_losses(here, losses)
            else:
                self._forward(here, ids, shares).backward()
            state.weights.end_pass()
            self.timer.mark("backward")

    def run_pipeline(self) -> None:
        """Run the passes in the order of the pipeline's schedule; the other blocks are in other processes."""
        weights, pipeline = self.state.weights, self.state.pipeline
        assert pipeline is not None, "only a pipeline has a schedule"
        weights.begin_pass(False)
        pipeline.run(
            [here.stop - here.start for here in self.slices],
            self.seq_len,
            lambda stage, number, x: self._forward(
                self.slices[number], *self._to_device(self.slices[number]), stage, x
            ),
            lambda: weights.begin_pass(True),
            self.timer.mark,
        )
        weights.end_pass()
        self.timer.mark("backward")

    def _to_device(self, here: slice) -> tuple[Tensor, Tensor]:
        """The ids of some rows (B, T + 1), and the share of each target in the loss of the global batch."""
        return self.tokens[here].to(self.device, non_blocking=True), self.shares[here]

    def _forward(
        self, here: slice, ids: Tensor, shares: Tensor, stage: PipelineStage | None = None, x: Tensor | None = None
    ) -> Tensor:
        """What to call backward on; of a stage that is not the last: what the next one gets."""
        scale = self.state.loss_scale
        hidden = self._hidden(here, ids, stage, x)
        self.timer.mark("forward")
        if stage is not None and not stage.is_last:
            return hidden
        targets = self._targets(here, ids)
        total, losses = self.state.model.head_loss(hidden, targets, shares, self.z_loss)
        self._keep_losses(here, losses)
        self.timer.mark("loss")
        return total if scale is None else total * scale.scale

    def _targets(self, here: slice, ids: Tensor) -> Tensor:
        """(B, S), or with further ones (B, S, 1 + K)."""
        further = None if self.further is None else torch.cat((ids[:, 1:, None], self.further[here]), dim=-1)
        return own_tokens(ids[:, 1:] if further is None else further, self.places)

    def _hidden(self, here: slice, ids: Tensor, stage: PipelineStage | None, x: Tensor | None) -> Tensor:
        """What the model gives before the head; of a stage that is not the last: what the next one gets."""
        documents = None
        if self.document_ids is not None:
            documents = self.document_ids[here, :-1].to(self.device, non_blocking=True)
        self.timer.mark("collate")
        tokens = own_tokens(ids[:, :-1], self.places)
        hidden: Tensor = self.state.model(tokens, document_ids=documents, places=self.places, stage=stage, x=x)
        return hidden

    def _keep_losses(self, here: slice, losses: Tensor) -> None:
        losses = losses if self.further is None else losses[..., 0]
        self.row_nats[here] = (losses * self.counts[here]).sum(dim=1, dtype=torch.float64)


def _own_stats(state: TrainState, batch: Batch, channels: int, world: World, plan: StepPlan) -> StepStats:
    """What this process adds to the sum over all of them, except losses."""
    model = state.model.config
    experts = (model.expert_layers, model.moe.experts)
    numbers = 0 if plan.objective is None else len(plan.objective.metrics)
    stats = StepStats(channels, batch.global_rows, world.size, experts, world.device, numbers)
    stats.stop_requested.fill_(plan.stop_requested)  # an assignment would copy the number and wait for the copy
    stats.folder_changed.fill_(plan.folder_changed)
    stats.grad_norm.copy_(state.weights.squared_norm_share())
    for place, seconds in enumerate(plan.pace if world.size > 1 else ()):
        stats.paces[world.rank, place].fill_(seconds)
    # Counted where the tokens are: on every tensor rank, and in every stage; those of other stages stay zero.
    for _, router in routers(state.model):
        stats.expert_loads[router.number] = router.load
    return stats


def add_losses(stats: StepStats, batch: Batch, row_nats: Tensor, row_counts: Tensor, numbers: Tensor) -> None:
    """Write the losses of this process's rows into the stats of the global batch, and the objective's numbers."""
    channel_of = torch.as_tensor(batch.channels).to(row_nats.device, non_blocking=True)
    own = slice(batch.first_row, batch.first_row + batch.real_rows)
    stats.channel_nats.copy_(_by_channel(row_nats, channel_of, len(stats.channel_nats)))
    stats.channel_counts.copy_(_by_channel(row_counts, channel_of, len(stats.channel_counts)))
    stats.row_nats[own] = row_nats[: batch.real_rows]
    stats.row_counts[own] = row_counts[: batch.real_rows]
    stats.numbers.copy_(numbers)


def _by_channel(of_rows: Tensor, channel_of: Tensor, channels: int) -> Tensor:
    """Sums over the rows of each channel. index_add_ on a GPU would add them in a different order each time."""
    is_of = torch.arange(channels, device=of_rows.device).unsqueeze(1) == channel_of  # (channels, rows)
    return torch.where(is_of, of_rows, 0.0).sum(dim=1)


def _core_loss(nats: Tensor, counts: Tensor) -> Tensor:
    """The mean loss of the lowest rows, CORE_SHARE of them and at least one, of their sums (rows,)."""
    lowest = torch.argsort(nats / counts.clamp(min=1.0), stable=True)[: max(1, int(CORE_SHARE * len(nats)))]
    return nats[lowest].sum() / counts[lowest].sum().clamp(min=1.0)


def _judge_and_update(state: TrainState, stats: StepStats, norm: Tensor, clip_grad_norm: float, plan: StepPlan) -> None:
    """Fill in what follows from the sums, and update unless it forbids that. The host reads none of it here."""
    loss = stats.channel_nats.sum() / stats.channel_counts.sum().clamp(min=1.0)
    core = _core_loss(stats.row_nats, stats.row_counts)
    for part, value in ((stats.loss, loss), (stats.core_loss, core), (stats.grad_norm, norm)):
        part.copy_(value)
    if plan.is_rerun:
        state.weights.zero_gradients()
        return
    state.wait_for_copy()
    overflowed = ~(torch.isfinite(loss) & torch.isfinite(norm))
    refused = overflowed
    if plan.limits is not None:
        limits = plan.limits
        refused = refused | ((loss > limits.loss) & (core > limits.core_loss))
        refused = refused | ((norm > limits.grad_norm) & ~(loss - core > limits.excess)) | (loss < limits.loss_low)
    stats.refused.copy_(refused)
    scale = (clip_grad_norm / norm).clamp(max=1.0) if clip_grad_norm > 0 else torch.ones_like(norm)
    if state.loss_scale is not None:
        scale = scale / state.loss_scale.scale
        state.loss_scale.after(overflowed, refused)
    update(state, plan, scale, refused)
    for _, router in routers(state.model):
        router.balance(stats.expert_loads[router.number], refused)


def update(state: TrainState, plan: StepPlan, scale: Tensor, refused: Tensor) -> None:
    """Update with the gradient times `scale`, unless `refused` (both on the device); then set the gradient to zero."""
    wide = torch.promote_types(state.weights.dtype, torch.float32)
    state.optimizer.set_learning_rate(plan.lr, plan.weight_decay_share, plan.momentum)
    state.optimizer.step(torch.where(refused, 1.0, scale).to(wide), refused)
    if not state.optimizer.writes_weights:
        state.weights.publish_masters()
    if not state.optimizer.clears_gradients:
        state.weights.zero_gradients()


def _step_key(seed: int, step: int, rank: int) -> int:
    """A hash to 64 bits, because torch's CPU generator uses only the lower 32."""
    text = f"{seed}/{step}" if rank == 0 else f"{seed}/{step}/{rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
