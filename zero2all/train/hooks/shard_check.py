"""A damaged shard ends a run, and nothing that was trained on it comes back.

Shards are checked while the run trains (`packed.verify`), so steps may have read a damaged one before it is found.
`shard_check.json` in the run's folder says since which step that may be: where the first start began whose check was
not finished. The process that finds damage gives up the memory checkpoints of all machines and notes the damage there,
at once; the next start moves the later checkpoints away. So a kill in between changes nothing.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, LostRunError, PreemptedError
from zero2all.common.files import write_json
from zero2all.packed import verify
from zero2all.packed.shard_format import DamagedShardError
from zero2all.parallel.device import local_processes
from zero2all.parallel.world import World
from zero2all.resilience import slots
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.retention import withdraw_after
from zero2all.train.checkpoints.run_lock import Fence
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.context import RunContext
from zero2all.train.hooks.reports import RunLog
from zero2all.train.state import TrainState

NOTE_FILE = "shard_check.json"
FINISH_SECONDS = 10.0
"""How long a run waits at its end for the check of its shards; of small data nothing is left then."""


class ShardCheck:
    """Checks all shards that this run reads, in the background."""

    def __init__(self, context: RunContext, state: TrainState, log: RunLog) -> None:
        self._context, self._state, self._log, self._store = context, state, log, context.store
        self._check, self._since = verify.ShardCheckResult(), 0
        self._is_over = True
        """Whether nothing can be found any more: the check has finished in all processes, or there is none."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Check while the block runs."""
        state, world, data = self._state, self._context.world, self._state.data
        if not self._context.config.data.verify_shards or state.step == state.last_step:
            yield
            return
        self._since, self._is_over = world.run_on_rank0(self._begin), False
        self._store.unchecked_since = self._since
        splits = [*data.splits, *self._context.valid]
        seq_lens = sorted({segment.seq_len for segment in data.segments if data.packing == "best_fit"})
        warn, check = self._log.warn_from_any_rank, verify.checking_shards
        with check(splits, seq_lens, warn, world.rank, world.size, self._give_up) as self._check:
            yield
            if state.step == state.last_step:
                self._check.ended.wait(FINISH_SECONDS)

    def _begin(self) -> int:
        """The step since which nothing is known of the shards."""
        self._store.fence()
        step = self._state.step
        since = min(step, _read(self._context.run).get("since", step))
        write_json(self._context.run / NOTE_FILE, {"since": since})
        return since

    def _give_up(self, damage: str) -> None:
        """Let no later start take what is in memory, or the later checkpoints; called by the thread that found it."""
        _note_damage(self._context.run, self._store.fence, self._since, damage)

    @property
    def is_found(self) -> bool:
        """Whether this process has found a damaged shard."""
        return self._check.damage is not None

    def stop_if_found(self) -> None:
        """End the run in all processes if one of them found a damaged shard. The state is not saved, because it may
        have been trained on the damage."""
        if self._is_over:
            return
        world, name, step = self._context.world, self._context.config.train.name, self._state.step
        damage = self._check.damage
        if damage is not None and world.size > local_processes():  # which of the machines has the file?
            damage = f"Rank {world.rank} on {socket.gethostname()}: {damage}"
        said = world.gather((damage, self._check.finished))
        found = [each for each, _ in said if each is not None]
        if not found:
            self._is_over = all(finished for _, finished in said)
            if self._is_over:
                self._store.unchecked_since = None
                if world.is_first and self._context.holds_lock():
                    (self._context.run / NOTE_FILE).unlink(missing_ok=True)
            elif step == self._state.last_step:
                self._log.warn(
                    "the run ends before all of its shards were checked. Check the rest with `z2a data verify`: if one "
                    "is damaged, the weights were trained on it"
                )
            return
        self._log.event("damaged_shard", {"problems": found})
        text = (
            f"{found[0]}. Training of `{name}` was stopped at step {step}, which was not saved. Run `z2a pack` to "
            f"write the file again (of a fine-tuned run: delete its folder and begin it again), then run the same "
            f"command. It goes back to a checkpoint up to step {self._since}, "
            f"because later steps may have read damaged data."
        )
        raise BadInputError(text) if world.is_first else PreemptedError(text)  # one process reports it for all


def set_damage_aside(store: CheckpointStore, world: World, keep: bool) -> list[str]:
    """At a start: move away the checkpoints that an attempt before may have trained on damaged data; returns notes.
    Where none from before is left, BadInputError, unless a person says to `keep` them."""

    def withdraw() -> list[str]:
        note, run = _read(store.run), store.run
        if "damage" not in note:
            return []
        since, damage = note["since"], note["damage"]
        steps = [step_of(folder) for folder in list_checkpoints(run)]
        is_lost = bool(steps) and min(steps) > since
        if is_lost and not keep:
            raise BadInputError(
                f"All checkpoints of {run.name} are from after step {since}, and may have been trained on damaged data "
                f"({damage}). Start over with --fresh, or continue from them all the same with --accept-changes."
            )
        store.fence()
        slots.forget(run)
        moved = [] if is_lost else withdraw_after(run, since, damage, store.fence)
        write_json(run / NOTE_FILE, {"since": since})
        return [f"back behind step {since}: later steps may have read damaged data ({damage})"] if moved else []

    return world.run_on_rank0(withdraw)


@contextmanager
def noting_damage(store: CheckpointStore) -> Iterator[None]:
    """Note a damaged shard that is found by reading it, before the check has come to it; around a whole run."""
    try:
        yield
    except DamagedShardError as error:
        if "since" in (note := _read(store.run)):
            _note_damage(store.run, store.fence, note["since"], str(error))
        raise


def _note_damage(run: Path, fence: Fence, since: int, damage: str) -> None:
    with suppress(LostRunError, OSError):
        fence()
        slots.forget(run)
        write_json(run / NOTE_FILE, {"since": since, "damage": damage})


def _read(run: Path) -> dict[str, Any]:
    """The note; empty where there is none, or it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        note = jsonio.loads((run / NOTE_FILE).read_bytes())
        return {**note, "since": int(note["since"])} if "since" in note else {}
    return {}
