"""What may be logged, and how it is written: numbers, tensors, nested data and pictures -> JSON and PNG.

The caller's side takes a copy without waiting for the device; the writer's thread turns it into JSON. Only the
standard library is used.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Mapping
from typing import Any

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COLORS = {1: 0, 3: 2, 4: 6}  # values per pixel -> the color type of a PNG: grey, RGB, RGB with alpha


class Picture:
    """The bytes of a PNG, or pixels that still have to become one."""

    def __init__(self, content: bytes, width: int, height: int, values_per_pixel: int | None) -> None:
        self.content = content
        self.width = width
        self.height = height
        self.values_per_pixel = values_per_pixel  # none when `content` is a PNG already

    def png(self) -> bytes:
        """The picture as a PNG: three chunks, no filter, compressed by zlib."""
        if self.values_per_pixel is None:
            return self.content
        row_bytes = self.width * self.values_per_pixel
        rows = [b"\0" + self.content[at : at + row_bytes] for at in range(0, len(self.content), row_bytes)]
        color = PNG_COLORS[self.values_per_pixel]
        size = self.width.to_bytes(4) + self.height.to_bytes(4) + bytes((8, color, 0, 0, 0))
        chunks = ((b"IHDR", size), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
        return PNG_SIGNATURE + b"".join(
            len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4) for kind, data in chunks
        )


def picture_of(image: Any) -> Picture:
    """A copy of the picture as it is now."""
    if isinstance(image, bytes | bytearray):
        content = bytes(image)
        if not content.startswith(PNG_SIGNATURE) or len(content) < 33:
            raise ValueError("these bytes are not a PNG; pass the bytes of one, or an array of pixels")
        return Picture(content, int.from_bytes(content[16:20]), int.from_bytes(content[20:24]), None)
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
    pixels = memoryview(image)
    shape = pixels.shape or ()
    if pixels.format != "B" or len(shape) not in (2, 3) or 0 in shape or (*shape, 1)[2] not in PNG_COLORS:
        raise ValueError(
            f"an image has bytes (uint8) and the shape height x width x 1, 3 or 4; this has format {pixels.format!r} "
            f"and shape {shape}"
        )
    return Picture(pixels.tobytes(), shape[1], shape[0], (*shape, 1)[2])


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


def json_numbers(numbers: Any) -> list[float | str]:
    """A list or array of numbers as JSON holds them."""
    return [json_number(number) for number in (numbers.tolist() if hasattr(numbers, "tolist") else numbers)]


def utf8_text(value: Any) -> str:
    """UTF-8 text, whatever comes; lone surrogates are escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()
