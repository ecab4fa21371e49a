"""`corpus/quarantine/<source>.jsonl`: every damaged item with file, place, reason and the beginning of what is there.

Ingest lists the damaged items of each segment; the list of a source is put together when all of it has been read, and
appears whole. A source without damage has no such file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common import jsonio
from zero2all.common.files import atomic_file
from zero2all.corpus.record import make_gid

if TYPE_CHECKING:
    from zero2all.corpus.readers import Damaged
    from zero2all.corpus.segments import Segment

QUARANTINE_NAME = "quarantine"
EXCERPT_CHARS = 200


def quarantine_line(item: int, file_name: str, damaged: Damaged) -> bytes:
    """One damaged item as ingest lists it; `item` is its position in the segment."""
    line = {
        "gid": item,
        "file": file_name,
        "place": damaged.place,
        "reason": damaged.reason,
        "detail": damaged.detail,
        "ends_file": damaged.ends_file,
        "excerpt": damaged.excerpt[:EXCERPT_CHARS],
    }
    return jsonio.dumps_line(encodable(line))


def encodable(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without lone surrogates, which JSON cannot hold."""
    return {
        key: value.encode("utf-8", errors="replace").decode() if isinstance(value, str) else value
        for key, value in values.items()
    }


class Quarantine:
    """The list of one source."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.firsts: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def write(self, segments: Sequence[Segment], source_number: int) -> None:
        """Put the list together, or remove the one of an earlier build when there is nothing to list."""
        if not any(segment.state["tally"]["quarantined"] for segment in segments):
            self.path.unlink(missing_ok=True)
            return
        with atomic_file(self.path) as file:
            for line in self._lines(segments):
                self.counts[line["reason"]] = self.counts.get(line["reason"], 0) + 1
                self.firsts.setdefault(line["reason"], f"{line['file']}, {line['place']}: {line['detail']}")
                file.write(jsonio.dumps_line({**line, "gid": make_gid(source_number, line["gid"])}))

    def in_words(self) -> str:
        """Counts by reason, each with its first place."""
        return "; ".join(
            f"{self.counts[reason]:,} {reason} (first in {first})" for reason, first in self.firsts.items()
        )

    @staticmethod
    def _lines(segments: Sequence[Segment]) -> Iterator[dict[str, Any]]:
        from zero2all.corpus.segments import QUARANTINED_NAME

        before = 0
        for segment in segments:
            if segment.state["tally"]["quarantined"]:
                with open(segment.folder / QUARANTINED_NAME, "rb") as file:
                    for text in file:
                        line = jsonio.loads(text)
                        line["gid"] += before
                        yield line
            before += segment.items
