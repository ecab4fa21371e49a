"""What the ranks of a run tell each other: small values, as JSON.

torch's object collectives send pickles, and a pickle from a socket is code; these send bytes of JSON over a gloo group.
Tuples come back as lists, and floats exactly, NaN and the infinities too. A process alone (without a group) gets its
own value back in the same form.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from zero2all.common.errors import BadInputError, for_all_ranks

LARGEST_BYTES = 64 << 20
"""Of one value. The largest is the list of a rank's boxes in a checkpoint, of about 100 bytes each."""


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, on all ranks. Raises when one has died or does not answer in time."""
    own = torch.frombuffer(_bytes(value), dtype=torch.uint8)
    if group is None:
        return [_value(own, 0)]
    size = dist.get_world_size(group)
    announced = torch.zeros(size, dtype=torch.int64)
    dist.all_gather(list(announced.split(1)), torch.tensor([own.numel()]), group=group)
    lengths = [_checked(length, rank) for rank, length in enumerate(announced.tolist())]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: own.numel()] = own
    texts = torch.empty(size, max(lengths), dtype=torch.uint8)
    dist.all_gather(list(texts), padded, group=group)
    return [_value(text[:length], rank) for rank, (text, length) in enumerate(zip(texts, lengths, strict=True))]


def broadcast(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The value of rank 0, on all ranks; the same errors."""
    if group is None:
        return gather(value, None)[0]
    text = torch.frombuffer(_bytes(value if dist.get_rank(group) == 0 else None), dtype=torch.uint8)
    announced = torch.tensor([text.numel()])
    dist.broadcast(announced, group=group, group_src=0)
    length = _checked(int(announced), 0)
    if dist.get_rank(group) != 0:
        text = torch.empty(length, dtype=torch.uint8)
    dist.broadcast(text, group=group, group_src=0)
    return _value(text, 0)


def _checked(length: int, rank: int) -> int:
    """A length that a rank announced, before so much is allocated for it."""
    if 0 < length <= LARGEST_BYTES:
        return length
    problem = BadInputError(
        f"Rank {rank} announced a value of {length:,} bytes; ranks send each other at most {LARGEST_BYTES:,}. Check "
        f"that every machine runs the same version of zero2all, and that nobody else can reach the ports of the run."
    )
    raise for_all_ranks(problem)


def _bytes(value: Any) -> bytearray:
    _refuse_other_keys(value)
    return bytearray(json.dumps(value).encode())


def _value(text: torch.Tensor, rank: int) -> Any:
    try:
        return json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        problem = BadInputError(f"What rank {rank} sent cannot be read as JSON ({error}).")
        raise for_all_ranks(problem) from error


def _refuse_other_keys(value: Any) -> None:
    """json would turn a number that is a key into a text."""
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise TypeError(f"JSON keys are strings, not {next(key for key in value if not isinstance(key, str))!r}")
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _refuse_other_keys(each)
