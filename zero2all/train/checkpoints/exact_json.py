"""JSON that is read back exactly as it was written.

Checkpoints need two things that the ordinary writer does not guarantee: integers of any length come back as integers,
and a number that JSON cannot hold is not turned into null. Such a number is written as the string that `float()`
reads: "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError

LARGEST_BYTES = 256 << 20
"""No JSON file of a checkpoint is larger: an index of a million boxes is about 150 MB."""


def dump(value: Any, indent: int | None = 1) -> bytes:
    """UTF-8 JSON, indented unless `indent` is None; TypeError for values that JSON cannot hold."""
    return json.dumps(_writable(value), ensure_ascii=False, allow_nan=False, indent=indent).encode() + b"\n"


def parse(data: bytes, what: str) -> Any:
    """The value of a JSON text; BadInputError for anything else, a pickle for example."""
    try:
        return json.loads(
            data, parse_constant=_refuse, parse_float=jsonio.finite_float, object_pairs_hook=jsonio.object_of_once
        )
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{what} cannot be read as JSON ({error}).") from error


def read_limited(path: Path) -> bytes:
    """The bytes of a JSON file, after a check of its size."""
    if path.exists() and not path.is_file():
        raise BadInputError(f"{path} is not a regular file.")  # a fifo would never end
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise BadInputError(f"{path} has {size} bytes; no JSON file of a checkpoint has more than {LARGEST_BYTES}.")
    return path.read_bytes()


def read(path: Path) -> Any:
    """The value of a JSON file."""
    return parse(read_limited(path), str(path))


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        strange = [key for key in value if not isinstance(key, str)]
        if strange:
            raise TypeError(f"JSON keys are strings, not {strange[0]!r}")
        return {key: _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list | tuple) else value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
