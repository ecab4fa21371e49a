"""Where a run reports: metric rows and events for the run's folder, lines and a progress bar for the terminal.

Only rank 0 has metrics and a terminal. A terminal that is gone never ends a run.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero2all.common import progress
from zero2all.estimate.flops import compute_mfu, flops_per_token, recomputed_flops_per_token
from zero2all.model.config import ParameterKind
from zero2all.packed.loader import Batch
from zero2all.parallel.parameter_table import trained_table
from zero2all.parallel.world import World
from zero2all.track.writer import MetricsWriter
from zero2all.train.context import RunContext
from zero2all.train.hooks import Hook, is_multiple
from zero2all.train.state import TrainState
from zero2all.train.step_stats import PendingStep, StepResult
from zero2all.train.step_timer import TimeOfDay, bubble_share, mark_now, seconds_between
from zero2all.train.train_step import StepPlan


class RunLog:
    """The log of one process. Rows and events carry the current step."""

    _bar: progress.Bar
    _shown_tokens: int

    def __init__(
        self,
        context: RunContext,
        state: TrainState,
        metrics: MetricsWriter | None = None,
        say: Callable[[str], None] = progress.say,
    ) -> None:
        self._state, self._world, self._metrics, self._say = state, context.world, metrics, say
        self.steps = StepReports(context, state, metrics)
        self.has_metrics = metrics is not None
        """Whether this process, rank 0, writes them."""

    def values(self, values: Mapping[str, Any]) -> None:
        """One row of metrics."""
        if self._metrics is not None:
            self._metrics.log(values, self._state.step, self._state.tokens)

    def event(self, kind: str, data: dict[str, Any], step: int | None = None) -> None:
        """One event, of this step unless another is named."""
        if self._metrics is not None:
            self._metrics.event(kind, self._state.step if step is None else step, data)

    def say(self, *lines: str) -> None:
        """Lines for the person who watches."""
        for line in lines:
            with suppress(OSError):
                self._say(line)

    def warn(self, problem: str, advice: str = "") -> None:
        """A warning as an event and on the terminal; `advice` is added on the terminal only."""
        self.event("warning", {"problem": problem})
        self.say(problem + advice)

    def warn_from_any_rank(self, problem: str) -> None:
        """The same from any process: those without metrics print it, too."""
        self.event("warning", {"problem": problem})
        progress.say(problem if self._world.size == 1 else f"rank {self._world.rank}: {problem}")

    @contextmanager
    def progress_bar(self, total_tokens: int) -> Iterator[None]:
        """Show a bar while the block runs."""
        self._shown_tokens, quiet = self._state.tokens, not self._world.is_first
        with progress.progress("train", total_tokens, "tok", done=self._shown_tokens, quiet=quiet) as self._bar:
            yield

    def show_progress(self, tokens: int, note: str) -> None:
        """Move the bar to `tokens`."""
        with suppress(OSError):
            self._bar.advance(tokens - self._shown_tokens, note=note)
        self._shown_tokens = tokens

    def set_total(self, total_tokens: int) -> None:
        """The run ends elsewhere than expected."""
        with suppress(OSError):
            self._bar.set_total(total_tokens)


def balance_values(loads: np.ndarray, dense_layers: int) -> dict[str, float]:
    """How evenly tokens are spread over experts; `loads` (blocks with experts, experts). Of each block the largest load
    over the mean, 1 in the best case; the largest of these; and the share of experts that got no token."""
    largest = loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1e-9)
    values = {f"experts/largest_load/{layer}": float(share) for layer, share in enumerate(largest, dense_layers)}
    return {"experts/largest_load": float(largest.max()), "experts/idle": float((loads == 0).mean())} | values


class StepReports:
    """Turns results into rows and keeps the last; only rank 0 has `metrics`."""

    def __init__(self, context: RunContext, state: TrainState, metrics: MetricsWriter | None) -> None:
        self._context, self._state, self._metrics = context, state, metrics
        self.last: StepResult | None = None
        self.first_at: float | None = None
        """When the first step of this attempt was read, in seconds since the epoch."""
        self.end_pause()
        self._time_of_day = TimeOfDay(self._before, time.time())
        self._bytes_per_token = self._bytes_per_token_by_channel()
        seq_len = context.config.data.seq_len
        self._flops = flops_per_token(context.config.model, seq_len)["causal"] * state.tokens
        """FLOPs of the model so far, causal convention; tokens before this attempt count at data.seq_len."""

    def end_pause(self) -> None:
        """The next step's time begins now, or on a GPU when its queue is empty."""
        self._before = mark_now(self._context.world.device)

    def report(self, result: StepResult, wait_seconds: float) -> float:
        """Log a step; called in the order of steps. Returns the seconds that it waited for data."""
        config = self._context.config
        self.last = result
        self.first_at = self.first_at or time.time()
        # By the device's clock, so that it does not matter when the host reads the step.
        seconds, self._before = seconds_between(self._before, result.ended), result.ended
        ended_at = self._time_of_day.of(result.ended, result.ended_between)
        tokens = result.tokens[1] - result.tokens[0]
        self._flops += flops_per_token(config.model, self._seq_len(result))["causal"] * tokens
        is_last = result.step == self._state.last_step
        due = result.step % config.track.log_every_steps == 0
        if self._metrics is not None and (is_last or due or not result.updated):
            self._metrics.log(self._values(result, seconds, wait_seconds), result.step, result.tokens[1], ended_at)
        return min(wait_seconds, max(0.0, seconds - sum(result.seconds.values())))

    def by_channel(self, result: StepResult) -> dict[str, float]:
        """The loss of each channel that had a sample."""
        pairs = zip(self._state.data.channels, result.channel_losses, strict=True)
        return {channel: loss for channel, loss in pairs if loss is not None}

    def _values(self, result: StepResult, seconds: float, wait_seconds: float) -> dict[str, float]:
        context, config = self._context, self._context.config
        tokens = result.tokens[1] - result.tokens[0]
        speed = tokens / seconds if seconds else math.inf
        values = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens_per_second": speed,
            "time/step": seconds,
        }
        values |= {f"time/{part}": spent for part, spent in result.seconds.items()}
        if "bubble" in result.seconds:
            values["pipeline/bubble"] = bubble_share(result.seconds)
        # Between two steps; waiting of the host while a GPU was still busy does not count.
        between = max(0.0, seconds - sum(result.seconds.values()))
        values["time/data_wait"] = min(wait_seconds, between)
        values["time/other"] = between - values["time/data_wait"]
        for channel, loss in self.by_channel(result).items():
            values[f"loss/{channel}"] = loss
            values[f"bpb/{channel}"] = loss / math.log(2) / self._bytes_per_token[channel]
        if context.objective is not None:
            values |= context.objective.report(dict(zip(context.objective.metrics, result.numbers, strict=True)))
        if result.expert_loads is not None:
            values |= balance_values(result.expert_loads, config.model.moe.dense_layers)
        seq_len = self._seq_len(result)
        needed = flops_per_token(config.model, seq_len)
        processes = context.world.size * config.groups
        speed, device = speed / processes, context.environment["device"]
        # Of each process, causal convention; also where the peak, and so MFU, is unknown.
        values["tflops"] = needed["causal"] * speed / 1e12
        values |= {f"mfu/{name}": share for name, share in compute_mfu(needed, speed, device).items()}
        train = config.train
        if train.recompute != "none":
            again = recomputed_flops_per_token(
                config.model, seq_len, train.recompute, train.recompute_every, self._state.model.ops.footprints
            )
            spent = {name: needed[name] + again[name] for name in needed}
            values |= {f"hfu/{name}": share for name, share in compute_mfu(spent, speed, device).items()}
        values["flops"] = self._flops
        if context.world.device.type == "cuda":
            values["memory/allocated"] = torch.cuda.memory_allocated(context.world.device)
            values["memory/peak"] = torch.cuda.max_memory_allocated(context.world.device)
            values["memory/reserved"] = torch.cuda.memory_reserved(context.world.device)
        return values

    def _seq_len(self, result: StepResult) -> int:
        return self._state.data.segment_at(max(0, result.tokens[1] - 1)).seq_len

    def _bytes_per_token_by_channel(self) -> dict[str, float]:
        found = {}
        for channel in self._state.data.channels:
            splits = [split for split in self._state.data.splits if split.channel == channel]
            total = max(1, sum(split.tokens for split in splits))
            found[channel] = sum(split.bytes_per_token * split.tokens for split in splits) / total
        return found


MOST_SAMPLED_VALUES = 1 << 16
"""Of one parameter, for its update ratio."""


class UpdateRatios(Hook):
    """How far a step moves the weights, every `track.update_ratios_every_steps`.

    The length of the update over that of the weights, per kind of parameter: about 1e-3 is healthy for matrices under
    AdamW. Computed from every n-th value before and after the update; the result stays on the device.
    """

    def __init__(self, state: TrainState, world: World, log: RunLog, every_steps: int = 1) -> None:
        self._state, self._world, self._log, self._every_steps = state, world, log, every_steps
        self._before: dict[ParameterKind, Tensor] | None = None
        self._kinds = {one.name: one.kind for one in trained_table(state.model.config, state.model.lora)}

    def before_step(self, _batch: Batch, _plan: StepPlan) -> None:
        """Keep a sample of the weights when the next step is due."""
        self._before = self._samples() if is_multiple(self._state.step + 1, self._every_steps) else None

    def after_step(self, _pending: PendingStep) -> None:
        """Compare and log `update_ratio/<kind>`, where it is due. Called by every process."""
        if self._before is not None:
            self._log.values(self.ratios())

    @torch.no_grad()
    def ratios(self) -> dict[str, Tensor]:
        """How far the weights have moved since the sample was taken; nothing without one."""
        before, self._before = self._before, None
        if before is None:
            return {}
        now = self._samples()
        kinds = sorted(set(self._kinds.values()))  # also those of other stages
        sums = torch.zeros(len(kinds), 2, dtype=torch.float64, device=self._world.device)
        for at, kind in enumerate(kinds):
            if kind in now:
                moved = (now[kind] - before[kind]).square().sum()
                sums[at] = torch.stack((moved, before[kind].square().sum()))
        moved, lengths = self._world.mesh.world.sum(sums).unbind(1)
        ratios = (moved / lengths.clamp(min=1e-30)).sqrt()
        return {f"update_ratio/{kind}": ratio for kind, ratio in zip(kinds, ratios, strict=True)}

    @torch.no_grad()
    def _samples(self) -> dict[ParameterKind, Tensor]:
        samples = self._state.weights.master_samples(MOST_SAMPLED_VALUES)
        found: dict[ParameterKind, list[Tensor]] = {}
        for name, values in samples.items():
            found.setdefault(self._kinds[name], []).append(values.double())
        return {kind: torch.cat(parts) for kind, parts in found.items()}
