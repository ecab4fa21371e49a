"""What the ranks of a run tell each other: small values, as JSON.

torch's object collectives send pickles, and a pickle from a socket is code; these send bytes of JSON over a gloo group.
Tuples come back as lists, and floats exactly, NaN and the infinities too. A process alone (without a group) gets its
own value back in the same form.
"""

import datetime
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UserError, error_from, error_values, for_all_ranks

T = TypeVar("T")
LARGEST_BYTES = 64 << 20
"""Of one value. The largest is the list of a rank's boxes in a checkpoint, of about 100 bytes each."""


class Peers:
    """The processes of a gloo group; with `control` None, this process alone. Every method is called by all of them,
    and raises when one has died or does not answer in time."""

    def __init__(self, control: dist.ProcessGroup | None = None) -> None:
        self.control = control
        self.rank = 0 if control is None else dist.get_rank(control)
        self.size = 1 if control is None else dist.get_world_size(control)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides, prints and writes for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""
        if self.control is None:  # the same round trip, so that one process alone shows a value that is not JSON
            return [_value(_bytes(value), 0)]
        own = torch.frombuffer(_bytes(value), dtype=torch.uint8)
        announced = torch.zeros(self.size, dtype=torch.int64)
        dist.all_gather(list(announced.split(1)), torch.tensor([own.numel()]), group=self.control)
        lengths = [_checked(length, rank) for rank, length in enumerate(announced.tolist())]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: own.numel()] = own
        texts = torch.empty(self.size, max(lengths), dtype=torch.uint8)
        dist.all_gather(list(texts), padded, group=self.control)
        rows = zip(texts.numpy(), lengths, strict=True)
        return [_value(row[:length].tobytes(), rank) for rank, (row, length) in enumerate(rows)]

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        if self.control is None:
            return self.gather(value)[0]
        text = torch.frombuffer(_bytes(value if self.is_first else None), dtype=torch.uint8)
        announced = torch.tensor([text.numel()])
        dist.broadcast(announced, group=self.control, group_src=0)
        length = _checked(int(announced), 0)
        text = text if self.is_first else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(text, group=self.control, group_src=0)
        return _value(text.numpy().tobytes(), 0)

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on all ranks; what it raises there is raised on all ranks."""
        result: T | None = None
        problem: Exception | None = None
        if self.is_first:
            try:
                result = work()
            except Exception as error:
                problem = error
        answer: T
        answer, said = self.broadcast([result, None if problem is None else error_values(problem)])
        if said is not None:
            problem = problem or error_from(said)
            raise for_all_ranks(problem) if isinstance(problem, UserError) else problem
        return answer


def open_peers(group: dist.ProcessGroup | None, timeout_seconds: float) -> Peers:
    """Peers over a new gloo group with the ranks of `group`; all of them call this at the same point. For another
    thread: its collectives on the group of the trainer could be matched with the gradients of another rank."""
    if group is None:
        return Peers()
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(
        ranks,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        backend="gloo",
        # A group of all ranks is created by all of them; one of some ranks only by those.
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    return Peers(own)


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
    return bytearray(json.dumps(jsonio.plain(value, float)).encode())


def _value(text: bytes | bytearray, rank: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = BadInputError(f"What rank {rank} sent cannot be read as JSON ({error}).")
        raise for_all_ranks(problem) from error
