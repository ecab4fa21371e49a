"""Ends a run when one of the shards it reads turns out to be damaged; see `zero2all.packed.background`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero2all.common.errors import BadInputError, PreemptedError
from zero2all.packed.background import ShardCheck, checking_shards
from zero2all.train.run_log import RunLog
from zero2all.train.setup import Prepared


class ShardDamage:
    """The check of everything this run reads, in the background."""

    def __init__(self, prepared: Prepared, log: RunLog) -> None:
        self._prepared, self._log = prepared, log
        self._check = ShardCheck()
        self._first_step = 0

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check while the block runs."""
        prepared, world = self._prepared, self._prepared.world
        if not prepared.config.data.verify_shards or prepared.state.step == prepared.last_step:
            yield
            return
        self._first_step = prepared.state.step
        splits = [*prepared.data.splits, *prepared.valid]
        seq_lens = {segment.seq_len for segment in prepared.data.segments if prepared.data.packing == "best_fit"}
        warn = self._log.warn_from_any_rank
        with checking_shards(splits, sorted(seq_lens), warn, world.rank, world.size) as self._check:
            yield

    @property
    def is_found(self) -> bool:
        """Whether this process has found a damaged shard."""
        return self._check.damage is not None

    def stop_if_found(self) -> None:
        """End the run in all processes if one of them found a damaged shard. The state is not saved, because it may
        have been trained on the damage."""
        world, name, step = self._prepared.world, self._prepared.config.train.name, self._prepared.state.step
        found = [damage for damage in world.gather(self._check.damage) if damage is not None]
        if not found:
            return
        self._log.event("damaged_shard", {"problems": found})
        text = (
            f"{found[0]}. Training of `{name}` was stopped at step {step}, which was not saved. `z2a pack` writes the "
            f"file again; then run the same command to continue. What was trained since step {self._first_step}, where "
            f"this start began, may have read the damage: to keep none of it, first delete the checkpoints after that "
            f"step."
        )
        raise BadInputError(text) if world.is_first else PreemptedError(text)  # one process reports it for all
