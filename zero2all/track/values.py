"""What may be logged, and how it is written: numbers, tensors and nested data -> JSON.

The caller's side takes a copy without waiting for the device; the writer's thread turns it into JSON. Only the
standard library is used.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any


def snapshot(value: Any, devices: set[Any]) -> Any:
    """A copy of the value, not waited for. The CUDA devices that are still copying are added to `devices`."""
    if hasattr(value, "full_tensor"):
        raise TypeError("this is a sharded DTensor; log its full_tensor()")
    if not hasattr(value, "detach"):
        return value
    value = value.detach()
    device = getattr(value, "device", None)
    kind = getattr(device, "type", None)
    if kind == "cpu":
        return value.item()
    if kind == "cuda":
        devices.add(device)
        return value.to("cpu", non_blocking=True)
    return value.clone() if hasattr(value, "clone") else value


def copies_done(devices: set[Any]) -> list[Any]:
    """CUDA events right behind the copies; `.item()` would wait for all that was queued since, too."""
    # Only CUDA tensors put a device here, so torch is loaded; importing it for everyone else would take seconds.
    return [sys.modules["torch"].cuda.current_stream(device).record_event() for device in devices]


def json_number(value: Any) -> float | str:
    """A JSON number, or the name of a float that JSON cannot write."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (str, bytes)):
        raise TypeError(f"a metric must be a number, this is {type(value).__name__}")
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def frozen(value: Any, devices: set[Any]) -> Any:
    """A copy of nested `value` that later changes by the caller do not reach; device scalars stay unresolved."""
    if isinstance(value, Mapping):
        return {utf8_text(key): frozen(inner, devices) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [frozen(inner, devices) for inner in value]
    if hasattr(value, "detach"):
        try:
            return snapshot(value, devices)
        except Exception as error:  # several elements, or sharded
            return f"{type(value).__name__}: {error}"
    return value


def plain(value: Any) -> Any:
    """What `_frozen` kept, as JSON can hold it: numbers, text, lists and objects; anything else by its `str`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    try:
        return json_number(value)
    except Exception:
        return utf8_text(value)


def utf8_text(value: Any) -> str:
    """UTF-8 text, whatever comes; lone surrogates are escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()
