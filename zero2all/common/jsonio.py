"""JSON in and out: orjson where it is installed, the standard library where it is not (a bare GPU image).

Both write UTF-8 without escaping to ASCII, so a Chinese corpus stays readable with `less`.
"""

from __future__ import annotations

import json
from typing import Any

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]


def dumps_line(value: Any) -> bytes:
    """One compact JSON value followed by a newline."""
    if orjson is not None:
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def dumps_pretty(value: Any) -> bytes:
    """Indented JSON for files that people open: manifests, reports, results."""
    return json.dumps(value, ensure_ascii=False, indent=2).encode() + b"\n"


def loads(data: bytes | str) -> Any:
    """Parse one JSON value; raises ValueError on damage with either library."""
    return json.loads(data) if orjson is None else orjson.loads(data)
