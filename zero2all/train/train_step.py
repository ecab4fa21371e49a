"""One optimizer step: forward and backward over this process's micro-batches, reduce, check, update.

The gradient is that of the mean loss over all tokens of the global batch that count (all of them, unless rows are
padded, prompts masked or shards quarantined), whatever the micro-batch and the number of processes; the loss of each
channel and of each row comes from the same forward pass.

On a GPU the host only queues work. Whether the update is made is decided on the device, by limits known before the
step. The results come back as `PendingStep`, whose figures are copied in the background, so that reading them a step
later does not wait.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zero2all.common.fault import fault_point
from zero2all.config import RunConfig
from zero2all.model.moe import routers
from zero2all.model.z2all import PipelineStage
from zero2all.packed.loader import Batch, rank_rows
from zero2all.parallel.context import own_tokens, places_of
from zero2all.parallel.world import World
from zero2all.train.guards.detector import Limits
from zero2all.train.state import TrainState

PARTS = ("collate", "forward", "loss", "backward", "reduce", "optimizer")
"""Of every step; that of a pipeline also has "bubble", the waits for other stages."""

Mark = torch.cuda.Event | float
"""A point in time: an event in the stream of a GPU, or a reading of the host's clock."""
HEAD = 6
"""Figures before those of channels and rows: loss, norm, update refused, stop requested, folder news, core loss."""
CORE_SHARE = 0.75
"""Of the rows of a step, the lowest: those of its core loss."""


MOST_MARKS = 1_000_000


class StepTimer:
    """Where the time of a step goes: its parts, in the order in which they end.

    On a GPU the marks are events in the stream: nothing waits for them, and they are read long after the step. Parts
    are measured back to back, so they add up to the step; of a part that the host prepared while the device was busy,
    only the time that the device waited is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.number: int = _recent[-1].number + 1 if _recent else 0
        _recent.append(self)
        self._marks: list[tuple[str, Mark]] = []
        self.mark("")

    def mark(self, part: str) -> None:
        """`part` ends here; it began at the mark before."""
        self._marks.append((part, mark_now(self._device)))

    def unfinished(self) -> tuple[int, str] | None:
        """How many marks the device has passed, and the part that ends at the next one; None: all."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the thread that asks would use the first GPU
        for place, (part, mark) in enumerate(self._marks):
            if not isinstance(mark, float) and not mark.query():
                return MOST_MARKS * self.number + place, part
        return None

    @property
    def end(self) -> Mark:
        """The last mark."""
        return self._marks[-1][1]

    def seconds(self) -> dict[str, float]:
        """Seconds of each part; on a GPU only once the last mark has been passed."""
        found = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            found[part] = found.get(part, 0.0) + seconds_between(before, after)
        return found


_recent: deque[StepTimer] = deque(maxlen=2)
"""The host is at most one step ahead of the device."""


def unfinished_part() -> tuple[int, str] | None:
    """The first part of the last steps that the device has not finished, and a number that grows with its progress;
    None: all are finished, or there is no GPU. Asked when a process hangs, from another thread."""
    return next((found for timer in tuple(_recent) if (found := timer.unfinished()) is not None), None)


def mark_now(device: torch.device) -> Mark:
    """The end of all work queued so far; on a CPU, now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(before: Mark, after: Mark) -> float:
    """Between two marks of one device that have both been passed."""
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event), "marks are of one kind"
    assert isinstance(after, torch.cuda.Event), "marks are of one kind"
    return before.elapsed_time(after) / 1e3


def bubble_share(seconds: Mapping[str, float]) -> float:
    """The share of the passes of a step that this process of a pipeline waited for others. Rank 0 has the first stage,
    which begins first and ends last, so that it sees the whole bubble."""
    parts = [seconds[name] for name in ("collate", "forward", "loss", "backward", "bubble")]
    return parts[-1] / max(sum(parts), 1e-9)


class TimeOfDay:
    """When marks were passed, by the host's clock, which knows a span: after the last kernel of a step was queued and
    before the step was read. Within it the device's clock decides, from the last mark that the span corrected."""

    def __init__(self, mark: Mark, at: float) -> None:
        """`at`: about when `mark` was passed."""
        self._known = mark, at

    def of(self, mark: Mark, span: tuple[float, float]) -> float:
        """When `mark`, which must be later than all marks before, was passed. Seconds since the epoch."""
        before, at = self._known
        counted = at + seconds_between(before, mark)
        found = min(max(counted, span[0]), span[1])
        if found != counted:
            self._known = mark, found
        return found


@dataclass(frozen=True)
class StepPlan:
    """What is decided about a step before it begins."""

    lr: float
    limits: Limits | None = None
    """Beyond these limits the device refuses the update; None: it refuses only what is not finite."""
    row_weights: Tensor | None = None
    """(rows of this process,) the weight of each row, where shards are quarantined."""
    stop_requested: bool = False
    """Whether this process was asked to stop; the others learn it from the figures."""
    folder_news: bool = False
    """Whether this process, rank 0, found something in the run's folder; the others learn it from the figures."""
    pace: tuple[float, float] = (0.0, 0.0)
    """Seconds of this process in a step before (`stragglers`); the others learn them from the figures."""
    decay_share: float = 1.0
    """Of the weight decay (`optim.decay_schedule`)."""
    momentum: float | None = None
    """Of Muon, by its schedule; None: optim.momentum."""
    is_rehearsal: bool = False
    """Compute everything but the update: the same step follows."""


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same in every process."""

    step: int  # steps made, this one included
    tokens: tuple[int, int]  # tokens of the run before and after this step
    loss: float  # mean nats per token over the global batch
    channel_losses: list[float | None]
    """The same per channel; None for a channel that had no sample in this step."""
    core_loss: float  # mean nats per token of the rows without the highest quarter
    grad_norm: float  # L2 norm of the gradient before clipping
    lr: float
    updated: bool  # False when the update was refused: not finite, or beyond the limits
    stop_requested: bool  # whether any process was asked to stop
    folder_news: bool  # whether rank 0 found something in the run's folder
    row_nats: np.ndarray  # summed loss of each row of the global batch
    row_counts: np.ndarray  # summed token weights of each row
    seconds: dict[str, float]  # time of each part
    ended: Mark  # when it ended
    ended_between: tuple[float, float]
    """Earliest and latest time at which it ended, by the host's clock, in seconds since the epoch."""
    expert_loads: np.ndarray | None = None  # (blocks with experts, experts) tokens that each expert got
    paces: np.ndarray | None = None  # (ranks, 2) the `pace` of each; None: one process


@dataclass(frozen=True)
class PendingStep:
    """A step whose figures may still be on their way from the device."""

    step: int
    tokens: tuple[int, int]
    lr: float
    channels: int
    rows: int
    experts: int
    ranks: int
    figures: Tensor
    """On the host: HEAD figures, nats and counts per channel, nats and counts per row of the global batch, of several
    processes two for each (`StepPlan.pace`), tokens per expert of each block with experts."""
    arrived: torch.cuda.Event | None
    timer: StepTimer
    queued_at: float
    """When the host had queued all of it, in seconds since the epoch; on a CPU it has ended then."""

    def result(self) -> StepResult:
        """Wait for the figures, where they have not arrived yet."""
        between = (self.queued_at, self.queued_at)
        if self.arrived is not None:
            was_over = self.arrived.query()
            self.arrived.synchronize()
            now = time.time()
            between = (self.queued_at if was_over else now, now)
        figures = self.figures.numpy()
        loss, norm, refused, stop, news, core_loss = figures[:HEAD].tolist()
        sizes = (self.channels, self.channels, self.rows, self.rows, 2 * self.ranks if self.ranks > 1 else 0)
        nats, counts, row_nats, row_counts, paces, loads = np.split(figures[HEAD:], np.cumsum(sizes))
        channel_losses = [float(total / count) if count else None for total, count in zip(nats, counts, strict=True)]
        return StepResult(
            step=self.step,
            tokens=self.tokens,
            loss=loss,
            channel_losses=channel_losses,
            core_loss=core_loss,
            grad_norm=norm,
            lr=self.lr,
            updated=not refused,
            stop_requested=bool(stop),
            folder_news=bool(news),
            row_nats=row_nats,
            row_counts=row_counts,
            seconds=self.timer.seconds(),
            ended=self.timer.end,
            ended_between=between,
            expert_loads=loads.reshape(-1, self.experts) if self.experts else None,
            paces=paces.reshape(-1, 2) if self.ranks > 1 else None,
        )


def train_step(
    state: TrainState, batch: Batch, channels: int, config: RunConfig, world: World, plan: StepPlan
) -> PendingStep:
    """Advance `state` by one step on `batch`."""
    timer = StepTimer(world.device)
    # Dropout depends on (seed, step, rank) alone, so a resumed run needs no stored random state.
    rank = (config.parallel.slow_link.group or 0) * world.size + world.rank
    torch.manual_seed(_step_key(config.train.seed, state.step, rank))
    for _, router in routers(state.model):
        router.load.zero_()
    if state.weights.powersgd is not None:
        state.weights.powersgd.is_rehearsal = plan.is_rehearsal
    figures = _forward_backward(state, batch, channels, config, world, plan, timer)
    if not world.mesh.reports:
        figures[HEAD:].zero_()
    if world.size > 1:
        paces = torch.zeros(world.size, 2, dtype=torch.float64, device=world.device)
        for place, seconds in enumerate(plan.pace):
            paces[world.rank, place].fill_(seconds)
        figures = torch.cat([figures, paces.view(-1)])
    if config.model.moe.experts:  # counted where the tokens are: on every tensor rank, and in every stage
        figures = torch.cat([figures, _expert_loads(state)])
    figures[1] = state.weights.squared_norm_share()
    world.mesh.world.sum(figures)
    norm = figures[1].sqrt()
    if state.loss_scale is not None:
        norm = norm / state.loss_scale.scale
    timer.mark("reduce")
    fault_point("update", state.step + 1)
    _judge_and_update(state, figures, norm, channels, batch.global_rows, config, plan)
    timer.mark("optimizer")

    before = state.tokens
    rows = batch.global_rows
    if not plan.is_rehearsal:
        state.step += 1
        state.tokens += rows * (batch.tokens.shape[1] - 1)
    facts = (state.step, (before, state.tokens), plan.lr, channels, rows, config.model.moe.experts, world.size)
    if world.device.type != "cuda":
        return PendingStep(*facts, figures, None, timer, time.time())
    host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
    host.copy_(figures, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return PendingStep(*facts, host, arrived, timer, time.time())


def _forward_backward(
    state: TrainState, batch: Batch, channels: int, config: RunConfig, world: World, plan: StepPlan, timer: StepTimer
) -> Tensor:
    """Accumulate the gradient; returns the figures, still only of this process's tokens, in float64."""
    device, wide = world.device, torch.promote_types(state.weights.dtype, torch.float32)
    tokens = torch.as_tensor(batch.tokens)
    masked = batch.document_ids is not None and config.data.document_mask
    document_ids = torch.as_tensor(batch.document_ids) if masked else None
    channel_of = torch.as_tensor(batch.channels).to(device, non_blocking=True)
    own_rows, seq_len = tokens.shape[0], tokens.shape[1] - 1
    rows = batch.global_rows
    place = config.parallel.batch_place(world.mesh.batch.rank, world.mesh.batch.size)
    first_row, real_rows, _ = rank_rows(rows, *place)
    places = places_of(config.model, config.parallel, world.mesh, seq_len, device)
    counts = own_tokens(_counts(batch, plan, wide, device), places)  # (B, T)
    counted = world.mesh.loss.sum(counts.sum(dtype=torch.float64)).clamp(min=1.0)
    figures = torch.zeros(HEAD + 2 * channels + 2 * rows, dtype=torch.float64, device=device)
    figures[3].fill_(plan.stop_requested)  # an assignment would copy the number and wait for the copy
    figures[4].fill_(plan.folder_news)
    nats_at, counts_at = HEAD, HEAD + channels
    row_nats = torch.zeros(own_rows, dtype=torch.float64, device=device)
    micro = micro_rows(config, state.micro_batch_samples, seq_len)
    passes = [slice(first, min(first + micro, own_rows)) for first in range(0, own_rows, micro)]

    def to_device(here: slice) -> tuple[Tensor, Tensor]:
        ids = tokens[here].to(device, non_blocking=True)  # (B, T + 1)
        return ids, (counts[here] / counted).to(wide)

    def forward(
        here: slice, ids: Tensor, shares: Tensor, stage: PipelineStage | None = None, x: Tensor | None = None
    ) -> Tensor:
        """What to call backward on; of a stage that is not the last: what the next one gets."""
        documents = None if document_ids is None else document_ids[here, :-1].to(device, non_blocking=True)
        timer.mark("collate")
        here_ids = own_tokens(ids[:, :-1], places)
        hidden: Tensor = state.model(here_ids, document_ids=documents, places=places, stage=stage, x=x)
        timer.mark("forward")
        if stage is not None and not stage.is_last:
            return hidden
        targets = own_tokens(ids[:, 1:], places)
        total, losses = state.model.head_loss(hidden, targets, shares, config.train.z_loss)
        row_nats[here] = (losses * counts[here]).sum(dim=1, dtype=torch.float64)
        timer.mark("loss")
        return total if state.loss_scale is None else total * state.loss_scale.scale

    for here in passes if state.pipeline is None else ():
        is_last = here.stop == own_rows
        state.weights.begin_pass(is_last)
        ids, shares = to_device(here)
        # A pass that communicates cannot be captured, and a graph is of one shape.
        is_shorter = len(passes) > 1 and here.stop - here.start < micro
        if state.cuda_graph is not None and not is_shorter and not (is_last and state.weights.communicates):
            timer.mark("collate")
            losses = state.cuda_graph(ids, shares)  # also forward and loss: nothing can be measured inside
            row_nats[here] = (losses * counts[here]).sum(dim=1, dtype=torch.float64)
        else:
            forward(here, ids, shares).backward()
        state.weights.end_pass()
        timer.mark("backward")
    if state.pipeline is not None:
        state.weights.begin_pass(False)
        state.pipeline.run(
            [here.stop - here.start for here in passes],
            seq_len,
            lambda stage, number, x: forward(passes[number], *to_device(passes[number]), stage, x),
            lambda: state.weights.begin_pass(True),
            timer.mark,
        )
        state.weights.end_pass()
        timer.mark("backward")
    row_counts = counts.sum(dim=1, dtype=torch.float64)
    figures[nats_at : nats_at + channels] = _by_channel(row_nats, channel_of, channels)
    figures[counts_at : counts_at + channels] = _by_channel(row_counts, channel_of, channels)
    row_at = HEAD + 2 * channels + first_row
    figures[row_at : row_at + real_rows] = row_nats[:real_rows]
    figures[row_at + rows : row_at + rows + real_rows] = row_counts[:real_rows]
    return figures


def _by_channel(of_rows: Tensor, channel_of: Tensor, channels: int) -> Tensor:
    """Sums over the rows of each channel. index_add_ on a GPU would add them in a different order each time."""
    is_of = torch.arange(channels, device=of_rows.device).unsqueeze(1) == channel_of  # (channels, rows)
    return torch.where(is_of, of_rows, 0.0).sum(dim=1)


def micro_rows(config: RunConfig, micro_batch_samples: int, seq_len: int) -> int:
    """Rows of one pass. A stage with longer sequences keeps the tokens of a pass, so that it needs no more memory."""
    return max(1, micro_batch_samples * config.data.seq_len // seq_len)


def _counts(batch: Batch, plan: StepPlan, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weight of each target in the loss, (B, T)."""
    shape = (batch.tokens.shape[0], batch.tokens.shape[1] - 1)
    if batch.weights is None:
        counts = torch.ones(shape, dtype=dtype, device=device)
    else:
        counts = torch.as_tensor(batch.weights).to(device, dtype=dtype, non_blocking=True)
    if plan.row_weights is not None:
        # A copy from pageable memory waits for everything that is queued on the GPU.
        rows = plan.row_weights.pin_memory() if device.type == "cuda" else plan.row_weights
        counts = counts * rows.to(device, dtype=dtype, non_blocking=True).unsqueeze(1)
    return counts


def _core_loss(nats: Tensor, counts: Tensor) -> Tensor:
    """The mean loss of the lowest rows, CORE_SHARE of them and at least one, of their sums (rows,)."""
    lowest = torch.argsort(nats / counts.clamp(min=1.0), stable=True)[: max(1, int(CORE_SHARE * len(nats)))]
    return nats[lowest].sum() / counts[lowest].sum().clamp(min=1.0)


def _judge_and_update(
    state: TrainState, figures: Tensor, norm: Tensor, channels: int, rows: int, config: RunConfig, plan: StepPlan
) -> None:
    """Fill in the head of the figures and update, unless they forbid it. The host reads none of them here."""
    nats, counts = figures[HEAD : HEAD + channels].sum(), figures[HEAD + channels : HEAD + 2 * channels].sum()
    loss = nats / counts.clamp(min=1.0)
    first_row = HEAD + 2 * channels
    core = _core_loss(figures[first_row : first_row + rows], figures[first_row + rows : first_row + 2 * rows])
    figures[5] = core
    if plan.is_rehearsal:
        state.weights.zero_gradients()
        figures[0], figures[1] = loss, norm
        return
    state.wait_copied()
    overflowed = ~(torch.isfinite(loss) & torch.isfinite(norm))
    refused = overflowed
    if plan.limits is not None:
        limits = plan.limits
        refused = refused | ((loss > limits.loss) & (core > limits.core_loss))
        refused = refused | ((norm > limits.grad_norm) & ~(loss - core > limits.excess)) | (loss < limits.loss_low)
    longest = config.optim.clip_grad_norm
    scale = (longest / norm).clamp(max=1.0) if longest > 0 else torch.ones_like(norm)
    if state.loss_scale is not None:
        scale = scale / state.loss_scale.scale
        state.loss_scale.after(overflowed, refused)
    update(state, plan, scale, refused)
    if state.weights.powersgd is not None:
        state.weights.powersgd.forget_errors(refused)
    _balance(state, figures, refused)
    figures[0], figures[1] = loss, norm
    figures[2] = refused


def _expert_loads(state: TrainState) -> Tensor:
    """How often each expert was chosen in the passes of this process: float64, for all blocks with experts one after
    the other; those of other pipeline stages are zero."""
    config = state.model.config
    loads = torch.zeros(config.expert_layers, config.moe.experts, dtype=torch.float64, device=state.model.cos.device)
    for _, router in routers(state.model):
        loads[router.number] = router.load
    return loads.view(-1)


def _balance(state: TrainState, figures: Tensor, refused: Tensor) -> None:
    """Move the biases of the routers by the loads of the whole step, which are the last of the figures."""
    config = state.model.config
    if config.expert_layers:
        loads = figures[-config.expert_layers * config.moe.experts :].view(config.expert_layers, -1)
        for _, router in routers(state.model):
            router.balance(loads[router.number], refused)


def update(state: TrainState, plan: StepPlan, scale: Tensor, refused: Tensor) -> None:
    """Update with the gradient times `scale`, unless `refused` (both on the device); then set the gradient to zero."""
    wide = torch.promote_types(state.weights.dtype, torch.float32)
    state.optimizer.set_learning_rate(plan.lr, plan.decay_share, plan.momentum)
    state.optimizer.step(torch.where(refused, 1.0, scale).to(wide), refused)
    if not state.optimizer.writes_weights:
        state.weights.publish_masters()
    if not state.optimizer.clears_gradients:
        state.weights.zero_gradients()


def _step_key(seed: int, step: int, rank: int) -> int:
    """A hash to 64 bits, because torch's CPU generator uses only the lower 32."""
    text = f"{seed}/{step}" if rank == 0 else f"{seed}/{step}/{rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
