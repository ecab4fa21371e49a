"""The training run: fetch, step, report, and at named moments validate and save.

Ctrl-C and SIGTERM are asked for at the end of a step: the run saves and exits with code 10, and the same command
continues it. Everything that decides a result is in the config, the data and the checkpoint, so a run that was
killed at any moment ends with the same bits as one that was left alone.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from zero2all.common.errors import PreemptedError
from zero2all.common.progress import progress
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.limits.flops import model_flops_utilisation
from zero2all.packed.loader import LoaderOptions
from zero2all.packed.transfer import batches_on
from zero2all.track.writer import Run
from zero2all.train.checkpoint import discard_folder, prune_checkpoints, save_checkpoint, sweep_checkpoints
from zero2all.train.guards import check_skips
from zero2all.train.lock import LOCK_NAME, run_lock
from zero2all.train.setup import Prepared, prepare, save_run_config
from zero2all.train.step import StepResult, train_step
from zero2all.train.validate import held_out_losses


@dataclass
class TrainSummary:
    """How a run ended."""

    run: str
    step: int
    tokens: int
    seconds: float
    tokens_per_second: float
    loss: float | None
    channel_losses: dict[str, float]
    held_out: dict[str, float] = field(default_factory=dict)


def train(
    config: RunConfig,
    workspace: Workspace,
    fresh: bool = False,
    accept_changes: bool = False,
    say: Callable[[str], None] = print,
) -> TrainSummary:
    """Train `config` to its last step, continuing the run where it stands."""
    run = workspace.run(config.train.name)
    with run_lock(run):
        sweep_checkpoints(run)
        prepared = prepare(config, workspace, accept_changes, fresh)
        if fresh:  # only now, when nothing can be wrong any more
            _clear_run(run)
        for note in prepared.notes:
            say(note)
        save_run_config(prepared.config, run)
        metrics = Run(run, queue_rows=config.track.queue_rows, resumed_from=prepared.state.step or None)
        reason, message = "done", None
        try:
            return _run_steps(prepared, metrics)
        except BaseException as error:
            reason = "preempted" if isinstance(error, PreemptedError) else "failed"
            message = f"{type(error).__name__}: {error}"
            raise
        finally:
            metrics.close(config.track.close_timeout_seconds, reason, message)
            with suppress(OSError):
                for problem in _tracking_problems(metrics):
                    say(problem)


def _run_steps(prepared: Prepared, metrics: Run) -> TrainSummary:
    config, state, data = prepared.config, prepared.state, prepared.data
    last_step = config.train.steps
    metrics.event("start", state.step, {"notes": prepared.notes, "environment": prepared.environment})
    # The position in the data is the tokens seen, so that a changed train.tokens_per_step repeats and skips nothing.
    options = LoaderOptions(
        documents=config.data.document_mask,
        prefetch_steps=config.data.prefetch_steps,
        readers=config.data.readers,
        reader_kind=config.data.reader_kind,
    )
    steps_left = last_step - state.step
    loader = batches_on(prepared.device, data, config.train.tokens_per_step, state.tokens, steps_left, options)
    started = time.perf_counter()
    result: StepResult | None = None
    held_out: dict[str, float] = {}
    tokens_done = state.tokens
    total = tokens_done + max(0, last_step - state.step) * config.train.tokens_per_step
    try:
        with _stop_requests() as stop, progress("train", total=total, unit="tok", done=tokens_done) as bar:
            for batch in loader:
                step_started = time.perf_counter()
                result = train_step(state, batch, len(data.channels), config, prepared.device)
                seconds = time.perf_counter() - step_started + loader.wait_seconds
                done = state.step == last_step
                if done or not result.updated or _due(state.step, config.track.log_every_steps):
                    metrics.log(_step_values(prepared, result, seconds, loader.wait_seconds), state.step, state.tokens)
                if not result.updated:
                    metrics.event("skipped_update", state.step, {"loss": result.loss, "grad_norm": result.grad_norm})
                check_skips(state.step, state.skips_in_a_row, result.loss, result.grad_norm, config.guards)
                with suppress(OSError):  # a terminal that is gone is no reason to stop
                    bar.advance(config.train.tokens_per_step, note=f"step {state.step} loss {result.loss:.3f}")

                if done or _due(state.step, config.eval.every_steps):
                    held_out = held_out_losses(state.model, prepared.valid, config.data, config.eval)
                    metrics.log(held_out, state.step, state.tokens)
                if done or _due(state.step, config.checkpoint.every_steps):
                    _save(prepared, metrics)
                if stop.requested and not done:
                    _preempt(prepared, metrics)
    finally:
        loader.close()
    if result is None:  # the run was finished before
        held_out = held_out_losses(state.model, prepared.valid, config.data, config.eval)
    seconds = time.perf_counter() - started
    metrics.event("finish", state.step, {"tokens": state.tokens, "seconds": seconds})
    return TrainSummary(
        run=config.train.name,
        step=state.step,
        tokens=state.tokens,
        seconds=seconds,
        tokens_per_second=(state.tokens - tokens_done) / seconds if seconds else 0.0,
        loss=result.loss if result else None,
        channel_losses=_by_channel(prepared, result) if result else {},
        held_out=held_out,
    )


def _step_values(prepared: Prepared, result: StepResult, seconds: float, wait_seconds: float) -> dict[str, float]:
    config, data = prepared.config, prepared.data
    speed = config.train.tokens_per_step / seconds
    values = {
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "tokens_per_second": speed,
        "time/step": seconds,
        "time/data_wait": wait_seconds,
    }
    for channel, loss in _by_channel(prepared, result).items():
        splits = [split for split in data.splits if split.channel == channel]
        bytes_per_token = sum(s.bytes_per_token * s.tokens for s in splits) / max(1, sum(s.tokens for s in splits))
        values[f"loss/{channel}"] = loss
        values[f"bpb/{channel}"] = loss / math.log(2) / bytes_per_token
    seq_len = data.segment_at(max(0, prepared.state.tokens - 1)).seq_len
    for convention, share in model_flops_utilisation(
        config.model, seq_len, speed, prepared.environment["device"]
    ).items():
        values[f"mfu/{convention}"] = share
    return values


def _by_channel(prepared: Prepared, result: StepResult) -> dict[str, float]:
    pairs = zip(prepared.data.channels, result.channel_losses, strict=True)
    return {channel: loss for channel, loss in pairs if loss is not None}


def _save(prepared: Prepared, metrics: Run) -> None:
    started = time.perf_counter()
    folder = save_checkpoint(prepared.run, prepared.state, prepared.inputs, prepared.details)
    keep = prepared.config.checkpoint
    prune_checkpoints(prepared.run, keep.keep_last, keep.keep_every_steps)
    data: dict[str, Any] = {"folder": folder.name, "seconds": time.perf_counter() - started}
    metrics.event("checkpoint", prepared.state.step, data)


def _preempt(prepared: Prepared, metrics: Run) -> None:
    """End the run because somebody asked for it, after saving where the config says so."""
    step, name = prepared.state.step, prepared.config.train.name
    saves = prepared.config.resilience.save_on_signal
    if saves:
        _save(prepared, metrics)
    metrics.event("preempted", step, {"saved": saves})
    where = f"saved at step {step}" if saves else "not saved (resilience.save_on_signal is false)"
    raise PreemptedError(f"Training of `{name}` was stopped and {where}. Run the same command again to continue.")


def _tracking_problems(metrics: Run) -> list[str]:
    """What did not reach the metrics files, for the end of the run."""
    problems = [f"metrics: {problem} ({count} times)" for problem, count in metrics.problems.items()]
    if metrics.dropped_rows:
        problems.append(f"metrics: {metrics.dropped_rows} rows were dropped and are missing from {metrics.path}")
    return problems


def _due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _clear_run(run: Path) -> None:
    """Forget a run, except for the lock that is being held."""
    for item in list(run.iterdir()):
        if item.is_dir():
            discard_folder(item)
        elif item.name != LOCK_NAME:
            item.unlink()


class _StopRequest:
    """Set by a signal, read at the end of each step. The second signal is not held back."""

    requested = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        text = f"\n{signal.Signals(number).name}: stopping after this step (again to stop at once)\n"
        with suppress(OSError):  # past Python's buffers, which may be in the middle of a print
            os.write(sys.stderr.fileno(), text.encode())


@contextmanager
def _stop_requests() -> Iterator[_StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request while the block runs; only the main thread may do so."""
    request = _StopRequest()
    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, request) for number in numbers]
    except ValueError:  # not the main thread: whoever started us handles signals
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
