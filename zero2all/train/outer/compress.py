"""Values as bytes to send, and back. Every receiver decodes the same values, to the last bit.

| format | bytes |
|---|---|
| float32 | 4 a value |
| bf16 | 2 a value |
| int8 | 1 a value, and a float32 scale for every block of 1024 |
| int4 | half a byte a value, and the same scales |
| sparse | of every 4096 values the k largest: 12 bits of place, 2 of value (sign, size) each; a float32 scale |

Of int8, int4 and sparse the sender keeps what was lost and adds it to what it sends next (error feedback).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from zero2all.estimate.slow_link import BLOCK_VALUES, CHUNK_VALUES, part_bytes, sparse_part_bytes
from zero2all.parallel.config import SlowLinkConfig

BITS = {"float32": 32, "bf16": 16, "int8": 8, "int4": 4}
LARGEST_BITS = 0x5D5E0B6B
"""Of the float32 1e18: no value that training gives comes near it, and sums of smaller ones are finite."""
SMALL, LARGE = 0.75, 1.5
"""What the two sizes of a sparse value stand for, in units of the mean size."""


def format_of(config: SlowLinkConfig) -> str:
    """The format that a config sends."""
    return "sparse" if config.scheme == "sparse" else config.compress


def keeps_error(form: str) -> bool:
    """Whether the sender adds what was lost to what it sends next."""
    return form in ("int8", "int4", "sparse")


def encode(values: Tensor, form: str, share: float = 0.0) -> bytes:
    """Values (n,), float32, as bytes; `share`: of values that `sparse` keeps."""
    if form == "float32":
        return _raw(values)
    if form == "bf16":
        return _raw(values.bfloat16().view(torch.int16))
    if form == "sparse":
        return _encode_sparse(values, share)
    most = 127 if form == "int8" else 7
    blocks = _rows(values, BLOCK_VALUES)
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=1) / most
    whole = (blocks / scales.clamp(min=1e-38).unsqueeze(1)).round_().clamp_(-most, most).view(-1)[: values.numel()]
    if form == "int8":
        return _raw(scales) + _raw(whole.to(torch.int8))
    nibbles = _padded(whole.add_(8).to(torch.uint8), 2)
    return _raw(scales) + _raw(nibbles[0::2] | nibbles[1::2] << 4)


def decode(
    payload: bytes | memoryview, count: int, form: str, share: float = 0.0, device: torch.device | None = None
) -> Tensor:
    """The `count` values of a payload, float32, on a device (None: the CPU)."""
    if form == "float32":
        return _read(payload, torch.float32).to(device)
    if form == "bf16":
        return _read(payload, torch.int16).to(device).view(torch.bfloat16).float()
    if form == "sparse":
        return _decode_sparse(payload, count, share).to(device)
    rows = -(-count // BLOCK_VALUES)
    scales, body = _read(payload[: 4 * rows], torch.float32).to(device), payload[4 * rows :]
    if form == "int8":
        whole = _read(body, torch.int8).to(device).float()
    else:
        whole = _pairs(device).index_select(0, _read(body, torch.uint8).to(device).int()).view(-1)[:count]
    return _rows(whole, BLOCK_VALUES).mul_(scales.unsqueeze(1)).view(-1)[:count]


def is_sound(payload: bytes | memoryview, count: int, form: str) -> bool:
    """Whether the `count` values of a payload are finite and none is larger than 1e18. Their bits are compared, as
    integers, so that every group finds the same on every device."""
    if form == "bf16":
        bits, most = np.frombuffer(payload, "<u2") & 0x7FFF, LARGEST_BITS >> 16
    else:
        floats = {"float32": count, "sparse": -(-count // CHUNK_VALUES)}.get(form, -(-count // BLOCK_VALUES))
        bits, most = np.frombuffer(payload[: 4 * floats], "<u4") & 0x7FFFFFFF, LARGEST_BITS
    return not bits.size or int(bits.max()) <= most


def _pairs(device: torch.device | None) -> Tensor:
    """(256, 2): the two values of a byte, the first in its lower half."""
    byte = torch.arange(256, device=device)
    return torch.stack(((byte & 15) - 8, (byte >> 4) - 8), dim=1).float()


def payload_bytes(count: int, form: str, share: float = 0.0) -> int:
    """Bytes of a payload of `count` values."""
    if form == "sparse":
        return sparse_part_bytes(count, kept_values(share))
    return part_bytes(count, BITS[form])


def kept_values(share: float) -> int:
    """How many values of a chunk are sent; of the last, shorter one at most as many as it has."""
    return max(1, round(share * CHUNK_VALUES))


def _chunks(values: Tensor, share: float) -> list[tuple[Tensor, int]]:
    """The full chunks as rows, and the rest, each with the number of values kept of a row."""
    full, kept = values.numel() // CHUNK_VALUES * CHUNK_VALUES, kept_values(share)
    parts = (values[:full].view(-1, CHUNK_VALUES), values[full:].view(1, -1))
    return [(part, min(kept, part.shape[1])) for part in parts if part.numel()]


def _encode_sparse(values: Tensor, share: float) -> bytes:
    """All scales, then all places, then all codes."""
    scales, places, codes = [], [], []
    for rows, kept in _chunks(values, share):
        at = rows.abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
        found = rows.gather(1, at)
        sizes = found.abs()
        scales.append(sizes.mean(dim=1))
        places.append(at.view(-1))
        codes.append(((found < 0).byte() + 2 * (sizes >= scales[-1].unsqueeze(1)).byte()).view(-1))
    if not scales:
        return b""
    packed = _pack_bits(torch.cat(places), 12) + _pack_bits(torch.cat(codes), 2)
    return _raw(torch.cat(scales)) + packed


def _decode_sparse(payload: bytes | memoryview, count: int, share: float) -> Tensor:
    values = torch.zeros(count)
    chunks = _chunks(values, share)
    numbers = [len(rows) * kept for rows, kept in chunks]
    scale_bytes, place_bytes = 4 * sum(len(rows) for rows, _ in chunks), -(-12 * sum(numbers) // 8)
    scales = _read(payload[:scale_bytes], torch.float32)
    places = _unpack_bits(payload[scale_bytes : scale_bytes + place_bytes], 12, sum(numbers)).split(numbers)
    codes = _unpack_bits(payload[scale_bytes + place_bytes :], 2, sum(numbers)).split(numbers)
    for (rows, kept), at, code in zip(chunks, places, codes, strict=True):
        own, scales = scales[: len(rows)], scales[len(rows) :]
        sizes = torch.where(code >= 2, LARGE, SMALL) * torch.where(code % 2 == 1, -1.0, 1.0)
        rows.scatter_(1, at.view(-1, kept), sizes.view(-1, kept) * own.unsqueeze(1))
    return values


def _pack_bits(values: Tensor, bits: int) -> bytes:
    """Integers of so many bits, one after the other."""
    table = values.cpu().numpy().astype("<u2").view(np.uint8).reshape(-1, 2)
    return np.packbits(np.unpackbits(table, axis=1, bitorder="little")[:, :bits], bitorder="little").tobytes()


def _unpack_bits(payload: bytes | memoryview, bits: int, count: int) -> Tensor:
    table = np.zeros((count, 16), np.uint8)
    flat = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")[: count * bits]
    table[:, :bits] = flat.reshape(count, bits)
    return torch.from_numpy(np.packbits(table, axis=1, bitorder="little").view("<u2").astype(np.int64).reshape(-1))


def _rows(values: Tensor, length: int) -> Tensor:
    return _padded(values, length).view(-1, length)


def _padded(values: Tensor, length: int) -> Tensor:
    missing = -values.numel() % length
    return pad(values, (0, missing)) if missing else values


def _raw(values: Tensor) -> bytes:
    return values.contiguous().cpu().numpy().tobytes()


def _read(payload: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    # A copy: bytes cannot be written to, and torch warns of that.
    return torch.frombuffer(bytearray(payload), dtype=dtype) if len(payload) else torch.empty(0, dtype=dtype)
