"""A run from its start to its end: it meets the other processes, locks its folder, prepares, trains, closes files."""

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from zero2all.common.errors import (
    AnomalyError,
    BadInputError,
    LostRunError,
    PeerFailureError,
    PreemptedError,
    UsageError,
    for_all_ranks,
)
from zero2all.common.manifest import fingerprint
from zero2all.common.progress import counted
from zero2all.common.progress import say as log
from zero2all.common.signals import StopRequest, stop_requests, stop_signals_to
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig, config_values, flat_values
from zero2all.parallel.check import check_spread
from zero2all.parallel.device import pick_device, set_memory_settings
from zero2all.parallel.health import HealthRules
from zero2all.parallel.launch import ATTEMPT
from zero2all.parallel.world import World, asked_processes, is_failed_collective, join_world, known_processes
from zero2all.resilience import slots
from zero2all.resilience.heartbeat import ATTEMPT_NUMBER, beat
from zero2all.track.writer import MetricsWriter, has_finished
from zero2all.train.checkpoints.checks import ReplicasDifferError
from zero2all.train.checkpoints.memory import MemoryStore
from zero2all.train.checkpoints.retention import Retention, discard
from zero2all.train.checkpoints.run_lock import LOCK_NAME, Fence, RunLock, behind, hold_run, no_fence
from zero2all.train.checkpoints.store import CheckpointStore, SaveRules
from zero2all.train.context import RunContext
from zero2all.train.guards.documents import Decode
from zero2all.train.hooks.diloco import open_ranks, with_group
from zero2all.train.hooks.reports import RunLog
from zero2all.train.hooks.shard_check import noting_damage, set_damage_aside
from zero2all.train.objective import Objective
from zero2all.train.saved_config import CONFIG_FILE, save_run_config
from zero2all.train.setup import prepare
from zero2all.train.state import TrainState
from zero2all.train.trainer import Trainer, TrainSummary

SHARED_SECONDS = 35.0
"""How long a new file may take to be seen by other machines: NFS believes for 30 s what it knew of a folder."""
MOST_NAMED = 6


def train(
    config: RunConfig,
    workspace: Workspace,
    fresh: bool = False,
    accept_changes: bool = False,
    take_over: bool = False,
    make_decode: Callable[[], Decode] | None = None,
    make_objective: Callable[[RunContext], Objective | None] = lambda _: None,
    say: Callable[[str], None] = log,
    brief: bool = False,
    started: float | None = None,
    until: int | None = None,
    watch: Callable[[int], None] = lambda _step: None,
) -> TrainSummary:
    """Train `config` to its last step, or to the step `until`, continuing the run if it has a checkpoint. The schedule
    is that of the whole run, so that a run may be trained in parts. Called by every process of the run;
    `make_decode` loads the tokenizer's decoder, for the pages that explain incidents; `make_objective` makes what a
    fine-tuned run learns (`finetune.objectives`). `brief` leaves the notes of the start to the metrics. `started`: when
    the command began, for the time to the first loss; None: now. `watch` is told of each step."""
    started = time.time() if started is None else started
    run = workspace.run(config.train.name)
    config = with_group(config)
    with ExitStack() as stack:
        # From here on: a signal that comes during the setup is handled at the end of the first step.
        stop = stack.enter_context(stop_requests())
        world = stack.enter_context(_joined_world(config, stop))
        speak = say if world.is_first else lambda _text: None
        stack.enter_context(_explain_peer_failure(config, run, world))
        store = stack.enter_context(_locked_store(config, run, world, take_over, speak))
        began = time.monotonic()
        for note in () if fresh else set_damage_aside(store, world, accept_changes):
            speak(note)
        stack.enter_context(noting_damage(store))
        context, state = prepare(config, workspace, world, store, accept_changes, fresh)
        prepare_seconds = time.monotonic() - began
        context = replace(context, objective=make_objective(context))
        state.last_step = state.last_step if until is None else min(state.last_step, until)
        has_objective = context.objective is not None
        assert has_objective == config.finetune.has_objective, "the caller hands down finetune.objectives.objective_of"
        if fresh:  # only now, after all checks
            if store.memory is not None:
                store.memory.remove()
            world.run_on_rank0(lambda: _clear_run(run, store.fence))
        for note in () if brief else context.notes:
            speak(note)
        if state.outer is not None:
            try:
                state.outer.connect(open_ranks(context, state, state.outer, stop))
            except PeerFailureError as error:
                if state.step < state.last_step:
                    raise
                speak(f"This group has finished, and goes on without the others. {error}")
            stack.callback(state.outer.close)
        world.run_on_rank0(lambda: behind(store.fence, lambda: save_run_config(context.config, run)))
        metrics = stack.enter_context(_metrics(context, state, speak))
        stack.enter_context(_explain_peer_failure(config, run, world, state, store.fence))
        log = RunLog(context, state, metrics, speak)
        trainer = Trainer(context, state, log, stop, make_decode, brief, watch)
        log.event("prepared", {"seconds": prepare_seconds})
        return trainer.fit(started)


@contextmanager
def _joined_world(config: RunConfig, stop: StopRequest) -> Iterator[World]:
    """All processes of the run, once they have met."""
    beat("start")
    try:
        check_spread(config, known_processes())
    except UsageError as error:
        raise for_all_ranks(error) from None
    set_memory_settings(config.parallel.expandable_segments)
    device = pick_device(config.parallel.device)
    with ExitStack() as stack:
        # While it waits for the other processes no Python runs, and one of them may have been stopped before.
        with stop_signals_to(signal.SIG_DFL) if asked_processes() > 1 else nullcontext():
            if stop.requested:
                raise PreemptedError(
                    "Stopped before the run had started. Nothing was changed. Run the same command to start it."
                )
            facts = flat_values(config_values(config))
            world = stack.enter_context(join_world(device, config.parallel, facts, _health_rules(config)))
        yield world


@contextmanager
def _metrics(context: RunContext, state: TrainState, say: Callable[[str], None]) -> Iterator[MetricsWriter | None]:
    """The metrics files of the run, on rank 0, closed with the reason why the block ended."""
    run, config, metrics = context.run, context.config, None
    # A finished run has nothing to add to its curves: running it again is not a new attempt.
    is_over = state.step >= state.last_step and has_finished(run)
    if context.world.is_first and not is_over:
        rows, resumed_from = config.track.queue_rows, state.step or None
        metrics = MetricsWriter(run, queue_rows=rows, resumed_from=resumed_from, may_write=context.holds_lock)
    reason, message = "done", None
    try:
        yield metrics
    except BaseException as error:
        if isinstance(error, LostRunError) and not (run / CONFIG_FILE).exists():
            error = _gone(run, error)
        beat("end")  # closing files may take longer than a step may
        # A run that stops itself saves nothing, and the next start takes nothing newer than the disk has. Replicas
        # that differ were compared before every save, so that what is in memory is whole.
        if isinstance(error, AnomalyError) and not isinstance(error, ReplicasDifferError) and context.holds_lock():
            slots.forget(run)
        reason = "preempted" if isinstance(error, PreemptedError) else "failed"
        message = f"{type(error).__name__}: {error}"
        raise error
    finally:
        if metrics is not None:
            metrics.close(config.track.close_timeout_seconds, reason, message)
            with suppress(OSError):
                for problem in _tracking_problems(metrics) if context.holds_lock() else ():
                    say(problem)


@contextmanager
def _explain_peer_failure(
    config: RunConfig, run: Path, world: World, state: TrainState | None = None, fence: Fence = no_fence
) -> Iterator[None]:
    """Turn a failed collective in the block into PeerFailureError; other errors pass unchanged. It fails at once if a
    connection breaks, after parallel.timeout_seconds where another process does not answer. Nothing can be saved then,
    because a save needs all processes; existing checkpoints stay valid. The traceback goes into a file of the run,
    because a collective can also fail for a bug of ours. With NCCL there is usually no Python error: its watchdog kills
    the process with SIGABRT, which the launcher reports (`parallel.launch`)."""
    try:
        yield
    except Exception as error:
        if world.size == 1 or not is_failed_collective(error):
            raise
        name, seconds = config.train.name, config.parallel.timeout_seconds
        if state is None:
            moment = f"Rank {world.rank} of {world.size} of `{name}` failed before the first step."
        else:
            moment = f"Rank {world.rank} of {world.size} of `{name}` failed after step {state.step:,}."
        raise PeerFailureError(
            f"{moment} Another process has died, or has not answered within parallel.timeout_seconds ({seconds:g} s). "
            f"If one of them printed an error, that is the cause. What was saved is intact: end the processes that are "
            f"left, if any, and run the same command again. It continues from the newest checkpoint, or starts over if "
            f"there is none.\n"
            f"The error of the collective: {type(error).__name__}: {str(error).partition(chr(10))[0]}\n"
            f"{_keep_traceback(run, world, fence)}"
        ) from error


def _keep_traceback(run: Path, world: World, fence: Fence) -> str:
    """Write the current traceback into the run's folder; returns a sentence with its path."""
    path = run / f"peer_failure-{world.rank}.txt"
    try:
        fence()
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except (OSError, LostRunError) as problem:
        return f"The traceback could not be written to {path} ({problem})."
    return f"The traceback is in {path}."


def _gone(run: Path, error: LostRunError) -> LostRunError:
    """The error of a run whose folder was removed: nobody has taken it over."""
    found = LostRunError(
        f"The folder of the run, {run}, is gone, and its checkpoints with it. This process ends. Restore the folder: "
        f"without it, the same command begins at step 0."
    )
    found.of_all_ranks = error.of_all_ranks
    return found


def _health_rules(config: RunConfig) -> HealthRules | None:
    """How the processes are checked before the run; None: not at this start."""
    settings = config.resilience
    is_again = int(os.environ.get(ATTEMPT_NUMBER, "1")) > 1
    if settings.health_check == "start" or (settings.health_check == "failure" and is_again):
        return HealthRules(settings.exclude_bad, settings.isolate_command)
    return None


@contextmanager
def _locked_store(
    config: RunConfig, run: Path, world: World, take_over: bool, say: Callable[[str], None]
) -> Iterator[CheckpointStore]:
    """The checkpoints of the run, behind the run's lock, which rank 0 holds; the other ranks can check it."""
    with ExitStack() as stack:

        def lock_run() -> tuple[str, list[str]]:
            held.append(stack.enter_context(hold_run(run, take_over, attempt=os.environ.get(ATTEMPT))))
            return held[0].token, held[0].notes

        held: list[RunLock] = []
        token, notes = world.run_on_rank0(lock_run)
        lock = held[0] if held else RunLock(run / LOCK_NAME, token, notes)
        for note in notes:
            say(note)
        require_shared(world, lock)
        keep = config.checkpoint
        store = CheckpointStore(
            run,
            world.control,
            Retention(keep.keep_last, keep.keep_every_steps, config.guards.rollback_margin_steps, keep.keep_best),
            rules=SaveRules(keep.when_busy, peer_timeout_seconds=config.parallel.timeout_seconds),
            fence=lock.check,
            say=say,
        )
        settings = config.resilience
        if settings.memory_steps(keep.every_steps, world.device.type == "cpu"):
            base = None if settings.memory_folder is None else Path(settings.memory_folder)
            store.memory = MemoryStore(run, store.peers, base, fingerprint(config_values(config)), say)
        try:
            for note in world.run_on_rank0(store.sweep):
                say(note)
            yield store
        finally:
            store.close(config.resilience.save_timeout_seconds)


def require_shared(world: World, lock: RunLock) -> None:
    """BadInputError, on all ranks, where one does not see the lock that rank 0 wrote into the run's folder: without a
    shared disk there would be no checkpoint."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not (sees := RunLock(lock.path, lock.token, []).is_held()) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = world.gather((sees, socket.gethostname()))
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(found) if not sees]
    if blind:
        more = ", …" if len(blind) > MOST_NAMED else ""
        raise for_all_ranks(
            BadInputError(
                f"The machines do not share the folder of the run, {lock.path.parent}. Nothing was started. Rank 0 on "
                f"{found[0][1]} has written a file there, and it is not seen by {', '.join(blind[:MOST_NAMED])}{more}. "
                f"Every process writes its part of a checkpoint there. Put the workspace, or its folder runs, on a "
                f"disk that all machines share, such as NFS, or train one group per machine with diloco, "
                f"which needs no shared disk."
            )
        )


def _clear_run(run: Path, fence: Fence) -> None:
    """Delete everything of a run except its lock, which is held."""
    for item in list(run.iterdir()):
        fence()
        if item.is_dir():
            discard(item)
        elif item.name != LOCK_NAME:
            item.unlink()


def _tracking_problems(metrics: MetricsWriter) -> list[str]:
    """What is missing from the metrics files."""
    problems = [f"metrics: {problem} ({counted(count, 'time')})" for problem, count in metrics.problems.items()]
    if metrics.dropped_rows:
        problems.append(f"metrics: {counted(metrics.dropped_rows, 'row')} could not be written to {metrics.path}")
    return problems
