"""`corpus/quarantine/<source>.jsonl`: every damaged item with file, place, reason and the beginning of what is there.

Ingest lists the damaged items of each segment. A source without damage has no such file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.files import atomic_file
from zero2all.common.language import translate as t
from zero2all.corpus.readers import Damaged
from zero2all.corpus.record import make_gid
from zero2all.corpus.segments import QUARANTINED_NAME, Segment, first_ordinals

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


def write_quarantine(path: Path, segments: Sequence[Segment], source_number: int) -> str:
    """Put the list of a source together, or remove the old one when there is nothing to list.

    Returns the counts by reason in words, each with its first place.
    """
    counts: Counter[str] = Counter()
    firsts: dict[str, str] = {}
    if not any(segment.state["tally"]["quarantined"] for segment in segments):
        path.unlink(missing_ok=True)
        return ""
    with atomic_file(path) as out:
        for segment, first_ordinal in zip(segments, first_ordinals(segments), strict=True):
            with open(segment.folder / QUARANTINED_NAME, "rb") as file:
                for line in map(jsonio.loads, file):
                    counts[line["reason"]] += 1
                    firsts.setdefault(line["reason"], f"{line['file']}, {line['place']}: {line['detail']}")
                    line["gid"] = make_gid(source_number, first_ordinal + line["gid"])
                    out.write(jsonio.dumps_line(line))
    return "; ".join(t(f"{counts[reason]:,} {reason} (first in {first})") for reason, first in firsts.items())
