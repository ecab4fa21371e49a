"""Values as bytes to send, and back. Every receiver decodes the same values, to the last bit.

| format | bytes |
|---|---|
| float32 | 4 a value |
| bf16 | 2 a value |
| int8 | 1 a value, and a float32 scale for every block of 1024 |
| int4 | half a byte a value, and the same scales |

Of int8 and int4 the sender keeps what was lost and adds it to what it sends next (error feedback).
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = {"float32": 32, "bf16": 16, "int8": 8, "int4": 4}
LARGEST_BITS = 0x5D5E0B6B
"""Of the float32 1e18: no value that training gives comes near it, and sums of smaller ones are finite."""
BLOCK_VALUES = 1024
"""Values that share one float32 scale in int8 and int4."""


def keeps_error(form: str) -> bool:
    """Whether the sender adds what was lost to what it sends next."""
    return form in ("int8", "int4")


def encode(values: Tensor, form: str) -> bytes:
    """Values (n,), float32, as bytes."""
    if form == "float32":
        return _raw(values)
    if form == "bf16":
        return _raw(values.bfloat16().view(torch.int16))
    most = 127 if form == "int8" else 7
    blocks = _rows(values, BLOCK_VALUES)
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=1) / most
    whole = (blocks / scales.clamp(min=1e-38).unsqueeze(1)).round_().clamp_(-most, most).view(-1)[: values.numel()]
    if form == "int8":
        return _raw(scales) + _raw(whole.to(torch.int8))
    nibbles = _padded(whole.add_(8).to(torch.uint8), 2)
    return _raw(scales) + _raw(nibbles[0::2] | nibbles[1::2] << 4)


def decode(payload: bytes | memoryview, count: int, form: str, device: torch.device | None = None) -> Tensor:
    """The `count` values of a payload, float32, on a device (None: the CPU)."""
    if form == "float32":
        return _read(payload, torch.float32).to(device)
    if form == "bf16":
        return _read(payload, torch.int16).to(device).view(torch.bfloat16).float()
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
        floats = count if form == "float32" else -(-count // BLOCK_VALUES)
        bits, most = np.frombuffer(payload[: 4 * floats], "<u4") & 0x7FFFFFFF, LARGEST_BITS
    return not bits.size or int(bits.max()) <= most


def _pairs(device: torch.device | None) -> Tensor:
    """(256, 2): the two values of a byte, the first in its lower half."""
    byte = torch.arange(256, device=device)
    return torch.stack(((byte & 15) - 8, (byte >> 4) - 8), dim=1).float()


def payload_bytes(count: int, form: str) -> int:
    """Bytes of a payload of `count` values."""
    bits = BITS[form]
    return -(-count * bits // 8) + (4 * -(-count // BLOCK_VALUES) if bits < 16 else 0)


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
