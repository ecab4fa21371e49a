"""Pixels -> PNG with the standard library alone, for the writer's thread."""

from __future__ import annotations

import zlib
from typing import Any

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COLORS = {1: 0, 3: 2, 4: 6}
"""Values per pixel -> the color type of a PNG: grey, RGB, RGB with alpha."""


class Picture:
    """The bytes of a PNG, or pixels that still have to become one."""

    def __init__(self, content: bytes, width: int, height: int, values_per_pixel: int | None) -> None:
        self.content = content
        self.width = width
        self.height = height
        self.values_per_pixel = values_per_pixel
        """None when `content` is a PNG already."""

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


def copy_of(image: Any) -> Picture:
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
    if (
        pixels.format != "B"
        or len(shape) not in (2, 3)
        or 0 in shape
        or (len(shape) == 3 and shape[2] not in PNG_COLORS)
    ):
        raise ValueError(
            f"an image has bytes (uint8) and the shape height x width x 1, 3 or 4; this has format {pixels.format!r} "
            f"and shape {shape}"
        )
    return Picture(pixels.tobytes(), shape[1], shape[0], shape[2] if len(shape) == 3 else 1)
