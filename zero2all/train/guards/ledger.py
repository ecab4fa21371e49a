"""Which stretches of the data a run leaves out, and why: a record that outlives rollbacks and crashes.

Positions are tokens in the run's order, as everywhere. A step whose global batch touches a recorded stretch is passed
over: the step counter and the position advance, nothing is computed, no weight changes. So the position still follows
from the step alone, the learning rate and the stages stay where they are, and which steps are left out is a function of
this record and of nothing else.

The record lies in `<run>/incidents/skipped.json`, written before a decision is carried out. It does not go back with a
rollback, nor with a crash: a run killed at any moment after a decision leaves out the same data when it is resumed, and
counts the same decisions when it has to make the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import LARGEST_JSON_BYTES, read_regular, write_atomic, write_json
from zero2all.common.schema import Problem, build

LEDGER_FILE = "skipped.json"


@dataclass(frozen=True)
class Skipped:
    """One decision: tokens `first` to `end`, without `end`, are left out."""

    first: int
    end: int
    decided_at_step: int
    kind: str
    """Of the finding that led to it."""
    action: Literal["refuse", "window", "rollback"]
    """refuse: one step, of which the update was not made; rollback: a window, after going back; window: a window where
    there was nothing to go back to."""
    reason: str
    to_step: int | None = None
    """The step a rollback went back to."""


class SkipLedger:
    """The decisions, in the order in which they were made. Stretches may overlap: each keeps its reason."""

    def __init__(self, entries: Iterable[Skipped] = ()) -> None:
        self._entries: list[Skipped] = []
        for entry in entries:
            self.add(entry)

    @property
    def entries(self) -> tuple[Skipped, ...]:
        """Everything recorded."""
        return tuple(self._entries)

    def add(self, entry: Skipped) -> None:
        """Record a decision; recording it twice changes nothing."""
        if not 0 <= entry.first < entry.end:
            raise ValueError(f"tokens {entry.first} to {entry.end} are no stretch")
        if entry not in self._entries:
            self._entries.append(entry)

    def skips(self, first: int, end: int) -> bool:
        """Whether a global batch of tokens `first` to `end` is passed over."""
        return any(entry.first < end and first < entry.end for entry in self._entries)

    def abandons(self, checkpoint_step: int, ledger_then: SkipLedger) -> bool:
        """Whether a rollback has gone back behind a checkpoint that knows nothing of it.

        `ledger_then` is the ledger in that checkpoint. Such a checkpoint is set aside, also when a crash came between
        the decision and its execution; the run would otherwise be resumed where it went wrong.
        """
        return any(
            entry.to_step is not None and entry.to_step < checkpoint_step and entry not in ledger_then.entries
            for entry in self._entries
        )

    def tokens(self) -> int:
        """Tokens left out, each counted once."""
        total = reached = 0
        for first, end in sorted((entry.first, entry.end) for entry in self._entries):
            total += max(0, end - max(first, reached))
            reached = max(reached, end)
        return total

    def state(self) -> list[dict[str, Any]]:
        """As plain values."""
        return [asdict(entry) for entry in self._entries]

    @staticmethod
    def from_state(state: Iterable[Mapping[str, Any]]) -> SkipLedger:
        """The way back."""
        problems: list[Problem] = []
        entries = [build(Skipped, entry, "skipped", problems) for entry in state]
        if problems:
            raise ValueError(str(problems[0]))
        return SkipLedger(entries)

    def merge(self, other: SkipLedger) -> None:
        """Also leave out what `other` does."""
        for entry in other.entries:
            self.add(entry)

    def save(self, folder: Path) -> None:
        """Write the record to `folder`, durably."""
        write_json(folder / LEDGER_FILE, {"format": 1, "skipped": self.state()})

    @staticmethod
    def load(folder: Path) -> SkipLedger:
        """What was recorded in `folder`; nothing where there is no record. DamagedLedgerError when it says nothing."""
        path = folder / LEDGER_FILE
        try:
            values = jsonio.loads(read_regular(path, LARGEST_JSON_BYTES))
            if values["format"] != 1:
                raise ValueError(f"format {values['format']}, expected 1")
            return SkipLedger.from_state(values["skipped"])
        except FileNotFoundError:
            return SkipLedger()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise DamagedLedgerError(f"{path} is no readable record of skipped data ({error}).") from error


class DamagedLedgerError(BadInputError):
    """The record is there and cannot be read: rebuild it. To go on without it would read what was left out."""


def rebuilt_ledger(folder: Path, in_checkpoint: Iterable[Mapping[str, Any]]) -> SkipLedger:
    """The record anew: what the checkpoint that the run goes on from knew, and what incident pages say was decided
    since, in the order in which they were written.

    Nothing poisoned comes back by this. What was decided before the checkpoint is in it; of what was decided after it
    the run comes to the same data again, and where a page is lost too, judges it again.
    """
    ledger = SkipLedger.from_state(in_checkpoint)
    for path in sorted(folder.glob("*-*.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            decided = jsonio.loads(read_regular(path, LARGEST_JSON_BYTES)).get("skipped")
            if decided:
                ledger.merge(SkipLedger.from_state([decided]))
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # a page that is damaged too
    return ledger


def keep_damaged(path: Path) -> None:
    """Copy an unreadable record, for a person to look at. It stays in place until the new one does: a kill in between
    must not leave a run that has none."""
    write_atomic(path.with_name(f"{path.name}.damaged"), path.read_bytes() if path.is_file() else b"")
