"""JSON in and out: orjson where it is installed, the standard library where it is not (a bare GPU image).

Both write UTF-8 without escaping to ASCII, so a Chinese corpus stays readable with `less`. JSON has no NaN and no
infinities: both write them as null, and neither reads them.
"""

from __future__ import annotations

import json
import math
from typing import Any

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]


def dumps_line(value: Any) -> bytes:
    """One compact JSON value followed by a newline."""
    if orjson is not None:
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
    return _dumps(value, separators=(",", ":"))


def dumps_pretty(value: Any) -> bytes:
    """Indented JSON for files that people open: manifests, reports, results."""
    return _dumps(value, indent=2)


def loads(data: bytes | str) -> Any:
    """Parse one JSON value; raises ValueError on damage with either library."""
    return json.loads(data, parse_constant=_refuse) if orjson is None else orjson.loads(data)


def _dumps(value: Any, **style: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, **style)
    except ValueError:  # a NaN or an infinity somewhere: rare enough to look for it only now
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, **style)
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    """The same value with null for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
