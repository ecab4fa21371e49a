"""When another process of the run dies or hangs: an end in words, instead of the traceback of an exchange.

A process notices it when an exchange fails: at once where a connection breaks, after `parallel.timeout_seconds` where
the other is only silent. Nothing can be saved then, since a save needs all processes; the checkpoints that are there
stand. The traceback goes into a file of the run, because an exchange can also fail for a bug of ours.

With NCCL the host usually learns nothing: its watchdog ends the process with SIGABRT, of which the command that started
the processes tells (`parallel.launch`).
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
    """Turns a failed exchange in the block into PeerFailureError; any other error passes as it is."""
    try:
        yield
    except Exception as error:
        if world.size == 1 or not is_failed_collective(error):
            raise
        moment = "before the first step" if state is None else f"after step {state.step:,}"
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PeerFailureError(
            f"Rank {world.rank} of {world.size}, {moment} of `{config.train.name}`: another process is gone, or has "
            f"not answered for parallel.timeout_seconds ({config.parallel.timeout_seconds:g} s). If one of them "
            f"printed an error, that is the cause. The checkpoints are whole: end what is left of the run, then run "
            f"the same command again to continue from the newest.\n"
            f"What the exchange said: {said}\n{_keep_traceback(run, world, fence)}"
        ) from error


def _keep_traceback(run: Path, world: World, fence: Fence) -> str:
    """Write the error that is being handled into the run's folder; says where."""
    path = run / f"peer_failure-{world.rank}.txt"
    try:
        fence()
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except (OSError, LostRunError) as problem:
        return f"Its traceback could not be written to {path} ({problem})."
    return f"Its traceback: {path}"
