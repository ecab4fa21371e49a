"""JSON in and out: orjson where it is installed, the standard library where it is not (a bare GPU image).

Both write UTF-8, and null for NaN and the infinities, which neither reads. `loads` is for lines by the million;
`loads_strict`, for the small files that decide something, also refuses a name that stands twice in an object.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
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


def append_line(path: Path, value: Any) -> None:
    """Add a line to a file of JSON lines, on disk at once; one that was cut off before it stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        file.write((b"\n" if torn else b"") + json.dumps(value).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none without the file. A line that was cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [value for value in found if isinstance(value, dict)]


LONGEST_NUMBER = 40  # Digits. Hugging Face writes 10^30 where it means "no limit".
DEEPEST = 100


def loads_strict(data: bytes) -> Any:
    """Parse one JSON value; ValueError also for double names, numbers beyond any use, lone surrogates, deep nesting."""
    try:
        value = json.loads(
            data.decode("utf-8-sig"),  # editors on Windows write a byte order mark
            object_pairs_hook=_object_of_once,
            parse_constant=_refuse,
            parse_float=_finite_float,
            parse_int=_short_int,
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    if b"\\u" in data:  # half a character can be neither printed nor written
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds a lone surrogate") from None
    _refuse_depth(value)
    return value


def dumps_exact(value: Any, indent: int | None = 1) -> bytes:
    """JSON for checkpoints, which `loads_exact` reads back: integers of any length, and a number that JSON cannot hold
    as the text that `float()` reads ("nan", "inf"). TypeError for values that JSON cannot hold."""
    text = json.dumps(plain(value, str), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode() + b"\n"


def loads_exact(data: bytes, what: str) -> Any:
    """The value of such a text; BadInputError for anything else, a pickle for example."""
    try:
        return json.loads(data, parse_constant=_refuse, parse_float=_finite_float, object_pairs_hook=_object_of_once)
    except (ValueError, RecursionError) as error:
        from zero2all.common.errors import BadInputError  # the writer of metrics loads little

        raise BadInputError(f"{what} cannot be read as JSON ({error}).") from error


def _object_of_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: the object, or ValueError where a name stands twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:80]!r} is listed twice in one object")
    return found


def _finite_float(text: str) -> float:
    """For `parse_float`: the number, or ValueError where it is too large for one (1e999)."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:LONGEST_NUMBER]} is too large")
    return number


def _short_int(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number has {len(text):,} digits")
    return int(text)


def _refuse_depth(value: Any) -> None:
    level = [[value]]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def _dumps(value: Any, **style: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, **style)
    except ValueError:  # a NaN or an infinity somewhere: rare enough to look for it only now
        text = json.dumps(plain(value, lambda _: None, any_key=True), ensure_ascii=False, allow_nan=False, **style)
    return text.encode() + b"\n"


def plain(value: Any, non_finite: Callable[[float], Any], any_key: bool = False) -> Any:
    """The same value with `non_finite(number)` for every number that JSON cannot hold. TypeError for a key that is no
    text, which json would make one, unless `any_key`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else non_finite(value)
    if isinstance(value, dict):
        strange = [key for key in value if not isinstance(key, str)]
        if strange and not any_key:
            raise TypeError(f"JSON keys are strings, not {strange[0]!r}")
        return {key: plain(item, non_finite, any_key) for key, item in value.items()}
    return [plain(item, non_finite, any_key) for item in value] if isinstance(value, list | tuple) else value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
