"""How curves travel to the page: one small JSON heading, then the columns as raw little-endian numbers.

    uint32 length of the heading | heading (JSON, padded with spaces) | columns, each beginning at a multiple of 8

The heading has one entry per curve: its facts, and `columns`, which says for each column its name, type and number of
values, in the order in which they follow. x is float64 (tokens and times need it), all else float32. A band of 1,600
buckets with its smoothed line takes 38 KB, whatever the length of the run, and the page uses it without parsing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.common import jsonio

ALIGNMENT = 8


@dataclass(frozen=True)
class Curve:
    """What is sent about one curve."""

    facts: dict[str, Any]
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)


def pack_curves(curves: Sequence[Curve]) -> bytes:
    """The answer to a request for these curves."""
    heading: list[dict[str, Any]] = []
    blocks: list[bytes] = []
    for curve in curves:
        columns = []
        for name, values in curve.columns.items():
            kind = "f64" if values.dtype == np.float64 else "f32"
            raw = np.ascontiguousarray(values, dtype="<f8" if kind == "f64" else "<f4").tobytes()
            columns.append([name, kind, len(values)])
            blocks.append(raw + bytes(-len(raw) % ALIGNMENT))
        heading.append({**curve.facts, "columns": columns})
    text = jsonio.dumps_line(heading).rstrip(b"\n")
    text += b" " * (-(len(text) + 4) % ALIGNMENT)
    return struct.pack("<I", len(text)) + text + b"".join(blocks)


def unpack_curves(answer: bytes) -> list[Curve]:
    """The other direction, for Python programs that talk to a board."""
    (length,) = struct.unpack_from("<I", answer)
    offset = 4 + length
    curves = []
    for entry in jsonio.loads(answer[4:offset]):
        columns: dict[str, NDArray[Any]] = {}
        for name, kind, count in entry.pop("columns"):
            dtype = np.dtype("<f8" if kind == "f64" else "<f4")
            columns[name] = np.frombuffer(answer, dtype, count, offset)
            offset += count * dtype.itemsize + (-count * dtype.itemsize % ALIGNMENT)
        curves.append(Curve(entry, columns))
    return curves
