"""When another process of the run dies or hangs: an error message instead of the traceback of a collective.

A process notices it when a collective fails: at once where a connection breaks, after `parallel.timeout_seconds` where
the other does not answer. Nothing can be saved then, because a save needs all processes; existing checkpoints stay
valid. The traceback goes into a file of the run, because a collective can also fail for a bug of ours.

With NCCL there is usually no Python error: its watchdog kills the process with SIGABRT, which the launcher reports
(`parallel.launch`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero2all.common.errors import LostRunError, PeerFailureError
from zero2all.config import RunConfig
from zero2all.parallel.world import World, is_failed_collective
from zero2all.train.checkpoints.run_lock import Fence, no_fence
from zero2all.train.state import TrainState


@contextmanager
def explain_peer_failure(
    config: RunConfig, run: Path, world: World, state: TrainState | None = None, fence: Fence = no_fence
) -> Iterator[None]:
    """Turn a failed collective in the block into PeerFailureError; other errors pass unchanged."""
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
