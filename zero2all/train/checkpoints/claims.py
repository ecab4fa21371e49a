"""Claims: which checkpoints other processes are reading, one reader to a checkpoint.

`<run>/checkpoints/claims/step-00001000.json` is a lock (`common.lock`) that a process holds while it judges that
checkpoint. Retention does not delete a claimed checkpoint, and readers on several machines share the work. The claim of
a dead reader holds nothing: retention ignores it, and the next reader takes it over. A reader that was suspended and
lost its claim finds out from `is_held` before it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zero2all.common.lock import HEARTBEAT_SECONDS, STALE_SECONDS, Holder, Lock, TakenError, hold, is_dead, read_holder
from zero2all.train.checkpoints.layout import FOLDER_NAME, checkpoint_folder, checkpoints_folder, step_of

CLAIMS_FOLDER = "claims"


@contextmanager
def claim_step(
    run: Path, step: int, stale_seconds: float = STALE_SECONDS, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> Iterator[Lock | None]:
    """Hold the claim on the checkpoint of a step; None when another process holds it."""
    path = checkpoints_folder(run) / CLAIMS_FOLDER / f"{checkpoint_folder(run, step).name}.json"
    path.parent.mkdir(exist_ok=True)

    def judge(holder: Holder, has_flock: bool) -> None:
        if not is_dead(path, holder, has_flock, stale_seconds):
            raise TakenError(holder)

    with ExitStack() as stack:
        try:
            claim: Lock | None = stack.enter_context(hold(path, judge, heartbeat_seconds))
        except TakenError:
            claim = None
        yield claim


def claimed_steps(run: Path, stale_seconds: float = STALE_SECONDS) -> set[int]:
    """The steps whose checkpoints are being read."""
    found = set()
    for path in (checkpoints_folder(run) / CLAIMS_FOLDER).glob("*.json"):
        try:
            if FOLDER_NAME.fullmatch(path.stem) and not is_dead(path, read_holder(path), stale_seconds=stale_seconds):
                found.add(step_of(path.with_suffix("")))
        except FileNotFoundError:  # released in between
            continue
    return found
