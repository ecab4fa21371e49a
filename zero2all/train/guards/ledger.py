"""Which data a run skips: a record that survives rollbacks and crashes.

Positions are tokens in the run's order. A step whose global batch overlaps a recorded range is skipped: the step and
the position advance, nothing is computed. So the position still follows from the step alone, and which steps are
skipped depends on this record only. It is `<run>/incidents/skipped.json`, written before a decision is carried out.
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
    """One decision: tokens `first` to `end`, without `end`, are skipped."""

    first: int
    end: int
    decided_at_step: int
    kind: str  # of the finding that led to it
    action: Literal["refuse", "window", "rollback"]
    """refuse: one refused step; rollback: a range, after a rollback; window: a range, without a checkpoint for one."""
    reason: str
    to_step: int | None = None  # the step a rollback went back to


class SkipLedger:
    """The decisions, in the order in which they were made. Ranges may overlap: each keeps its reason."""

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
            raise ValueError(f"tokens {entry.first} to {entry.end} are not a range")
        if entry not in self._entries:
            self._entries.append(entry)

    def forget_after(self, step: int) -> bool:
        """Drop what was decided after `step` and since the last rollback: it was judged with a bad state. Returns
        whether there was something."""
        kept = len(self._entries)
        while kept and self._entries[kept - 1].decided_at_step > step and self._entries[kept - 1].action != "rollback":
            kept -= 1
        has_dropped = kept < len(self._entries)
        del self._entries[kept:]
        return has_dropped

    def skips(self, first: int, end: int) -> bool:
        """Whether a global batch of tokens `first` to `end` is skipped."""
        return any(entry.first < end and first < entry.end for entry in self._entries)

    def abandons(self, checkpoint_step: int, ledger_then: SkipLedger) -> bool:
        """Whether a later rollback has abandoned this checkpoint; `ledger_then` is the ledger in it. It would otherwise
        be resumed on the abandoned branch, where the run crashed between the decision and the rollback."""
        return any(
            entry.to_step is not None and entry.to_step < checkpoint_step and entry not in ledger_then.entries
            for entry in self._entries
        )

    def tokens(self) -> int:
        """Tokens skipped, each counted once."""
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
        """From the values of `state`."""
        problems: list[Problem] = []
        entries = [build(Skipped, entry, "skipped", problems) for entry in state]
        if problems:
            raise ValueError(str(problems[0]))
        return SkipLedger(entries)

    def merge(self, other: SkipLedger) -> None:
        """Add the decisions of `other`."""
        for entry in other.entries:
            self.add(entry)

    def save(self, folder: Path) -> None:
        """Write the record to `folder`, durably."""
        write_json(folder / LEDGER_FILE, {"format": 1, "skipped": self.state()})

    @staticmethod
    def load(folder: Path) -> SkipLedger:
        """The record in `folder`, empty where there is none. DamagedLedgerError when it cannot be read."""
        path = folder / LEDGER_FILE
        try:
            values = jsonio.loads(read_regular(path, LARGEST_JSON_BYTES))
            if values["format"] != 1:
                raise ValueError(f"format {values['format']}, expected 1")
            return SkipLedger.from_state(values["skipped"])
        except FileNotFoundError:
            return SkipLedger()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise DamagedLedgerError(f"{path} is not a readable record of skipped data ({error}).") from error


class DamagedLedgerError(BadInputError):
    """The record cannot be read and must be rebuilt: without it the run would read the skipped data."""


def rebuilt_ledger(folder: Path, in_checkpoint: Iterable[Mapping[str, Any]]) -> SkipLedger:
    """The record rebuilt from the checkpoint that the run continues from and from later incident pages, in their order.

    No bad data comes back this way: data of later decisions is still to come, and where its page is lost, judged again.
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
    """Copy an unreadable record for inspection. It stays in place until the new one replaces it: a kill in between must
    not leave a run without a record."""
    write_atomic(path.with_name(f"{path.name}.damaged"), path.read_bytes() if path.is_file() else b"")
