"""`corpus/quarantine/<source>.jsonl`: every damaged item with file, place, reason and the beginning of what is there.

The list appears whole at the end of its source; a source without damage has no such file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from zero2all.common import jsonio
from zero2all.common.files import PARTIAL_MARK, fsync_folder
from zero2all.corpus.readers import EXCERPT_CHARS, Damaged

QUARANTINE_NAME = "quarantine"


class Quarantine:
    """The list of one source. Use it as a context; without `commit` nothing is left behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.firsts: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._partial = path.with_name(f"{path.name}{PARTIAL_MARK}{os.getpid()}")
        self._file: BinaryIO | None = None

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def add(self, gid: int, file_name: str, damaged: Damaged) -> None:
        """List one item."""
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = open(self._partial, "wb")  # noqa: SIM115 - closed in __exit__ and commit
        line = {
            "gid": gid,
            "file": file_name,
            "place": damaged.place,
            "reason": damaged.reason,
            "detail": damaged.detail,
            "ends_file": damaged.ends_file,
            "excerpt": damaged.excerpt[:EXCERPT_CHARS],
        }
        self._file.write(jsonio.dumps_line({key: _encodable(value) for key, value in line.items()}))
        self.counts[damaged.reason] = self.counts.get(damaged.reason, 0) + 1
        self.firsts.setdefault(damaged.reason, f"{file_name}, {damaged.place}: {damaged.detail}")

    def commit(self) -> None:
        """Put the list in its place, or remove the one of an earlier build when there is nothing to list."""
        if self._file is None:
            self.path.unlink(missing_ok=True)
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._partial.replace(self.path)
        fsync_folder(self.path.parent)

    def in_words(self) -> str:
        """Counts by reason, each with its first place."""
        return "; ".join(
            f"{self.counts[reason]:,} {reason} (first in {first})" for reason, first in self.firsts.items()
        )


def _encodable(value: Any) -> Any:
    return value.encode("utf-8", errors="replace").decode() if isinstance(value, str) else value
