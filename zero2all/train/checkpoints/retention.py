"""Which checkpoints are kept, and how the others are moved away or deleted.

The newest `keep_last`, those at multiples of `keep_every_steps`, the one with the lowest held-out loss (`keep_best`),
pinned ones, and those that another process is reading (below). Whatever the settings, at least two that are known to be
intact are kept, and of those before the newest at least one good one: if the rules keep too few, older ones are kept as
well. A folder is renamed before it is deleted, so that a partly deleted checkpoint never has a valid name.

A state that was saved in doubt (the run was just resumed, or updates were refused: `not_good` in its manifest says why)
is not good until `margin_steps` later the run saves without doubt; `proven.json` holds that step. A save in doubt
deletes no good one, and of the others all but the newest `keep_last`.

A claim, `<run>/checkpoints/claims/step-00001000.json`, is a lock (`common.lock`) that a process holds while it judges
that checkpoint, so that readers on several machines share the work. The claim of a dead reader holds nothing: retention
ignores it, and the next reader takes it over. A reader that was suspended and lost its claim finds out from `is_held`
before it writes.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.fault import fault_point
from zero2all.common.files import PARTIAL_MARK, fsync_folder, write_atomic
from zero2all.common.lock import Holder, Lock, TakenError, hold, is_dead, read_holder
from zero2all.train.checkpoints.layout import (
    DAMAGED,
    FOLDER_NAME,
    LAST_SAVED_NAME,
    PINS_NAME,
    PROVEN_NAME,
    WITHDRAWN,
    checkpoint_folder,
    checkpoints_folder,
    list_checkpoints,
    note_latest,
    noted_step,
    read_exact,
    step_of,
)
from zero2all.train.checkpoints.load import read_checkpoint, verified_checkpoint
from zero2all.train.checkpoints.manifest import NOT_GOOD, best_step, read_manifest
from zero2all.train.checkpoints.run_lock import Fence, no_fence

LEAST_VERIFIED = 2
CLAIMS_FOLDER = "claims"


@dataclass(frozen=True)
class Retention:
    """How many checkpoints are kept."""

    keep_last: int = 2  # newest checkpoints that are kept; at least 2
    keep_every_steps: int = 0  # checkpoints at multiples of this are never deleted; 0 turns the rule off
    margin_steps: int = 0  # a save without doubt proves the checkpoints that are at least so much older
    keep_best: bool = False  # whether the one with the lowest held-out loss is kept

    def __post_init__(self) -> None:
        if self.keep_last < LEAST_VERIFIED:
            raise ValueError(f"keep_last is {self.keep_last}; at least {LEAST_VERIFIED} checkpoints must stay")

    def keeps(self, step: int, steps_newest_first: list[int]) -> bool:
        """Whether a step is kept by these rules alone."""
        by_multiple = self.keep_every_steps > 0 and step % self.keep_every_steps == 0
        return by_multiple or step in steps_newest_first[: self.keep_last]

    def most_at_once(self, saved_steps: list[int]) -> int:
        """How many checkpoints a run that saves at these steps has on disk at most, one of them half written."""
        by_multiple = sum(1 for step in saved_steps if self.keep_every_steps and step % self.keep_every_steps == 0)
        return min(len(saved_steps), self.keep_last + by_multiple + self.keep_best + 1)


@dataclass
class VerifiedSteps:
    """The steps whose bytes this process has checked, or written with their checksums."""

    steps: set[int] = field(default_factory=set)

    def is_whole(self, folder: Path) -> bool:
        """Whether a checkpoint is intact; its bytes are read only the first time, its form every time."""
        step = step_of(folder)
        try:
            if step in self.steps:
                read_checkpoint(folder)
            else:
                verified_checkpoint(folder)
                self.steps.add(step)
        except BadInputError:
            self.steps.discard(step)
            return False
        return True


def is_good(folder: Path) -> bool:
    """Whether a rollback may use a checkpoint: its manifest can be read, and it was saved without doubt or proven."""
    try:
        manifest = read_manifest(folder)
    except (BadInputError, OSError):
        return False
    return NOT_GOOD not in manifest or manifest["step"] <= (noted_step(folder.parent / PROVEN_NAME) or 0)


def note_proven(run: Path, at_least: int = 0, at_most: int | None = None) -> None:
    """Note that checkpoints up to the step `at_least` are good; or after `at_most` none is: what comes is yet to be
    proven. Written only where that changes which of them are good. Only for the holder of the run's lock."""
    path = checkpoints_folder(run) / PROVEN_NAME
    noted = noted_step(path) or 0
    if at_most is not None and noted > at_most:
        write_atomic(path, jsonio.dumps_exact({"step": at_most}))
    elif any(noted < step_of(folder) <= at_least and not is_good(folder) for folder in list_checkpoints(run)):
        write_atomic(path, jsonio.dumps_exact({"step": at_least}))


def prune(
    run: Path,
    retention: Retention,
    verified: VerifiedSteps,
    fence: Fence = no_fence,
    in_doubt: bool = False,
    unchecked_since: int | None = None,
) -> list[int]:
    """Delete what need not be kept; returns the deleted steps. Only for the holder of the run's lock. `in_doubt`: the
    newest was saved in doubt. `unchecked_since`: later steps may have read damaged data, so the newest up to this one
    stays."""
    folders = list_checkpoints(run)
    steps = [step_of(folder) for folder in folders]
    pinned = {*pins(run), *[step for step in steps if unchecked_since is not None and step <= unchecked_since][:1]}
    best = best_step(run) if retention.keep_best else None
    pinned |= set() if best is None else {best}
    surplus = [
        folder
        for folder in folders
        if step_of(folder) not in pinned
        and not retention.keeps(step_of(folder), steps)
        and not (in_doubt and is_good(folder))
    ]
    if not surplus:
        return []
    whole = good = 0
    for folder in folders:  # newest first: kept ones count, then the newest of the others
        if whole >= LEAST_VERIFIED and good:
            break
        is_proven = folder != folders[0] and is_good(folder)  # of the newest no step has been computed yet
        if (whole < LEAST_VERIFIED or is_proven) and verified.is_whole(folder):
            whole += 1
            good += is_proven
            if folder in surplus:
                surplus.remove(folder)
    if whole < LEAST_VERIFIED:
        return []
    deleted = []
    for folder in surplus:
        fence()
        if step_of(folder) in claimed_steps(run):  # asked each time: deleting the one before took a while
            continue
        discard(folder)
        verified.steps.discard(step_of(folder))
        deleted.append(step_of(folder))
    return sorted(deleted)


def pins(run: Path) -> dict[int, str]:
    """Pinned steps and why; BadInputError when the file cannot be understood (then nothing may be deleted)."""
    path = checkpoints_folder(run) / PINS_NAME
    try:
        found = read_exact(path)
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict) or not all(key.isdigit() and isinstance(why, str) for key, why in found.items()):
        raise BadInputError(f'{path} must contain steps and reasons, such as {{"1000": "best so far"}}. Correct it.')
    return {int(key): why for key, why in found.items()}


def pin(run: Path, step: int, reason: str) -> None:
    """Keep a step's checkpoint from being deleted."""
    pinned = sorted({**pins(run), step: reason}.items())
    write_atomic(checkpoints_folder(run) / PINS_NAME, jsonio.dumps_exact({str(at): why for at, why in pinned}))


def to_damaged(folder: Path, reason: str) -> Path:
    """Move a damaged checkpoint to `damaged/`, beside earlier ones of the same step; returns its new place."""
    return _move(folder, folder.parent / DAMAGED, reason)


def withdraw_after(run: Path, step: int, reason: str, fence: Fence = no_fence) -> list[int]:
    """Move every checkpoint newer than `step` to `withdrawn/`, for a rollback; returns the steps that were moved. Only
    for the holder of the run's lock, while no save is under way."""
    moved = []
    for folder in list_checkpoints(run):
        if step_of(folder) > step:
            fence()
            _move(folder, folder.parent / WITHDRAWN, reason)
            moved.append(step_of(folder))
    if moved:
        fence()
        left = list_checkpoints(run)
        note_latest(run, step_of(left[0]) if left else None)
    return moved


def discard(folder: Path) -> None:
    """Delete a folder: renamed first, so that a crash leaves no partly deleted folder under its name."""
    doomed = folder.with_name(f"{folder.name}{PARTIAL_MARK}trash")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    fsync_folder(folder.parent)
    fault_point("delete")
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(run: Path) -> list[str]:
    """Remove what killed saves and deletions have left; only for the holder of the run's lock."""
    leftovers = [
        *sorted(checkpoints_folder(run).glob(f"*{PARTIAL_MARK}*")),
        *run.glob(f"{LAST_SAVED_NAME}{PARTIAL_MARK}*"),
    ]
    for leftover in leftovers:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    return [leftover.name for leftover in leftovers]


def _move(folder: Path, place: Path, reason: str) -> Path:
    place.mkdir(exist_ok=True)
    target, number = place / folder.name, 1
    while target.exists() or target.is_symlink():
        number += 1
        target = place / f"{folder.name}-{number}"
    folder.rename(target)
    fsync_folder(place)
    fsync_folder(folder.parent)
    write_atomic(target.with_name(f"{target.name}.txt"), f"{reason}\n".encode())
    return target


@contextmanager
def claim_step(run: Path, step: int) -> Iterator[Lock | None]:
    """Hold the claim on the checkpoint of a step; None when another process holds it."""
    path = checkpoints_folder(run) / CLAIMS_FOLDER / f"{checkpoint_folder(run, step).name}.json"
    path.parent.mkdir(exist_ok=True)

    def judge(holder: Holder, has_flock: bool) -> None:
        if not is_dead(path, holder, has_flock):
            raise TakenError(holder)

    with ExitStack() as stack:
        try:
            claim: Lock | None = stack.enter_context(hold(path, judge))
        except TakenError:
            claim = None
        yield claim


def claimed_steps(run: Path) -> set[int]:
    """The steps whose checkpoints are being read."""
    found = set()
    for path in (checkpoints_folder(run) / CLAIMS_FOLDER).glob("*.json"):
        try:
            if FOLDER_NAME.fullmatch(path.stem) and not is_dead(path, read_holder(path)):
                found.add(step_of(path.with_suffix("")))
        except FileNotFoundError:  # released in between
            continue
    return found
