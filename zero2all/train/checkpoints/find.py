"""The newest complete checkpoint, found by all ranks together.

Each rank checks the bytes of its share of the files, and a checkpoint is valid only when all ranks found theirs intact,
so every rank starts from the same one. A damaged one is reported and, by the holder of the run's lock, set aside. A run
that has committed a checkpoint and has no intact one left stops: starting over silently would be the worst outcome.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, LostRunError, for_all_ranks
from zero2all.common.language import translate as t
from zero2all.common.peers import Peers
from zero2all.track.writer import METRICS_FOLDER
from zero2all.train.checkpoints.layout import (
    DAMAGED,
    checkpoint_folder,
    checkpoints_folder,
    latest_noted,
    list_checkpoints,
    step_of,
)
from zero2all.train.checkpoints.load import Checkpoint, OtherModelError, check_bytes, read_checkpoint
from zero2all.train.checkpoints.manifest import OtherVersionError
from zero2all.train.checkpoints.retention import to_damaged
from zero2all.train.checkpoints.run_lock import Fence, no_fence

Say = Callable[[str], None]
Open = Callable[[Path, Peers], Checkpoint]
"""Opens a checkpoint; BadInputError where it is damaged."""


def say_aloud(text: str) -> None:
    """Print one notice at once."""
    print(t(text), flush=True)


def open_at(run: Path, step: int, peers: Peers) -> Checkpoint:
    """The checkpoint of one step; every rank calls it."""
    folder = checkpoint_folder(run, step)
    if not folder.is_dir():
        steps = sorted(step_of(path) for path in list_checkpoints(run))
        raise BadInputError(f"The run {run.name} has no checkpoint at step {step}; it has {steps or 'none'}.")
    return open_together(folder, peers)


def open_together(folder: Path, peers: Peers) -> Checkpoint:
    """Open a checkpoint, each rank checking its share of the bytes; all of them raise when one finds damage. They load
    it together too."""
    problem, is_other_version, found = None, False, None
    try:
        found = read_checkpoint(folder)
        check_bytes(found, found.files[peers.rank :: peers.size])
    except BadInputError as error:
        problem, is_other_version = str(error), isinstance(error, OtherVersionError)
    for other_problem, other_version in peers.gather([problem, is_other_version]):
        if other_problem is not None:
            raise for_all_ranks((OtherVersionError if other_version else BadInputError)(other_problem))
    assert found is not None, "a rank without a problem has read it"
    return replace(found, peers=peers)


def find_newest(
    run: Path, peers: Peers, fence: Fence | None, say: Say = say_aloud, opened: Open = open_together
) -> Checkpoint | None:
    """The newest intact checkpoint; None when the run never committed one. Every rank calls it. With the `fence` of the
    run's lock damaged ones go to `checkpoints/damaged/`; without it, nothing is changed."""
    steps = peers.gather([step_of(folder) for folder in list_checkpoints(run)] if peers.is_first else [])[0]
    damaged = []
    for step in steps:
        try:
            found = opened(checkpoint_folder(run, step), peers)
        except (OtherVersionError, OtherModelError):
            raise
        except BadInputError as error:
            damaged.append(str(error))
            if peers.is_first:
                move_damaged(checkpoint_folder(run, step), str(error), fence, say)
            continue
        hint = latest_noted(run)
        if peers.is_first and not damaged and hint is not None and hint > step:
            say(f"The checkpoint of step {hint} was saved, but is missing now. Step {step} is the newest.")
        return found
    _stop_unless_new(run, peers, damaged)
    return None


def newest_checkpoint(run: Path, set_aside: bool = False, opened: Open = open_together) -> Checkpoint | None:
    """`find_newest` for one process: tools that read a run."""
    return find_newest(run, Peers(), no_fence if set_aside else None, opened=opened)


def move_damaged(folder: Path, reason: str, fence: Fence | None, say: Say) -> None:
    """Move a checkpoint to `checkpoints/damaged/`, where there is the `fence` of the run's lock, and say it."""
    try:
        if fence is not None:
            fence()
            to_damaged(folder, reason)
            say(f"Moved a damaged checkpoint to checkpoints/damaged: {reason}")
            return
    except (OSError, LostRunError):  # reading must work on a read-only disk
        pass
    say(f"Skipped a damaged checkpoint: {reason}")


def _stop_unless_new(run: Path, peers: Peers, damaged: list[str]) -> None:
    reason = "; ".join(damaged)
    if not reason and (checkpoints_folder(run) / DAMAGED).exists():
        reason = "all of them were damaged and moved away before"
    hint = latest_noted(run)
    if not reason and hint is not None:
        reason = f"step {hint} was saved, but {checkpoints_folder(run)} no longer contains it"
    logged = None if reason or not peers.is_first else _latest_logged(run)
    if logged is not None:
        reason = f"the metrics say that step {logged} was saved, but {checkpoints_folder(run)} is empty"
    reason = next((each for each in peers.gather(reason) if each), "")
    if reason:
        problem = BadInputError(
            f"No checkpoint of {run} is intact: {reason}. Restore the folder, start over with --fresh, which deletes "
            f"the rest of this run, or start a new run with another --train.name."
        )
        raise for_all_ranks(problem)


def _latest_logged(run: Path) -> int | None:
    """The last saved step according to the run's metrics, for runs whose checkpoints are all missing."""
    latest = None
    for path in sorted((run / METRICS_FOLDER).glob("*.jsonl")):
        with suppress(OSError), open(path, "rb") as file:
            for line in file:
                if b'"checkpoint"' not in line:
                    continue
                with suppress(ValueError, TypeError, KeyError, AttributeError):
                    row = jsonio.loads(line)
                    if row["kind"] == "checkpoint" and row["data"].get("folder"):
                        latest = max(int(row["step"]), latest or 0)
    return latest
