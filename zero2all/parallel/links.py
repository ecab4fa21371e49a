"""Messages between the stages of a pipeline: outputs go to the next process, gradients to the one before."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.parallel.mesh import DENSE, Mesh, coordinates, wait_for


class Link(NamedTuple):
    """One direction between two neighbours; messages arrive in the order in which they were sent."""

    group: dist.ProcessGroup
    peer: int  # its rank among all processes


class Links(NamedTuple):
    """The links of one process; None at the ends of the pipeline."""

    inputs: Link | None
    outputs: Link | None
    gradients_in: Link | None
    gradients_out: Link | None


def make_links(mesh: Mesh, in_circle: bool, device: torch.device, timeout_seconds: float) -> Links:
    """The links of a pipeline; `in_circle`: also from the last process to the first. Every process of the run calls
    this. A message may take `timeout_seconds`. Each link is a group of its own, because NCCL runs what is queued on a
    group in order: a message that waits must not hold up one that goes the other way."""
    pipelines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.sizes.processes):
        place = coordinates(mesh.sizes, rank)
        pipelines.setdefault(tuple(place[name] for name in DENSE if name != "pipeline"), []).append(rank)
    found: dict[str, Link] = {}
    timeout = timedelta(seconds=timeout_seconds)
    for ranks in pipelines.values():
        for before, after in [*pairwise(ranks), *([(ranks[-1], ranks[0])] if in_circle else [])]:
            values, gradients = (dist.new_group([before, after], timeout) for _ in range(2))
            if mesh.place == before:
                found["outputs"], found["gradients_in"] = Link(values, after), Link(gradients, after)
            if mesh.place == after:
                found["inputs"], found["gradients_out"] = Link(values, before), Link(gradients, before)
    links = Links(*(found.get(name) for name in Links._fields))
    _connect(links, mesh.pipeline.rank, device)
    return links


def _connect(links: Links, stage: int, device: torch.device) -> None:
    """Send one number over every link. NCCL joins two processes when they first exchange something, and the host of
    each waits there for the other: in the middle of a schedule both would wait for ever."""
    number = torch.zeros(1, device=device)
    forward = [(links.outputs, dist.send), (links.inputs, dist.recv)]
    backward = [(links.gradients_out, dist.send), (links.gradients_in, dist.recv)]
    for exchanges in (forward, backward):
        # Even stages send first, odd ones receive first, so that no circle of senders waits.
        for link, exchange in exchanges if stage % 2 == 0 else reversed(exchanges):
            if link is not None:
                exchange(number, link.peer, group=link.group)


class Messages:
    """What is on its way to and from this process."""

    def __init__(self, links: Links, dtype: torch.dtype, device: torch.device, mark: Callable[[str], None]) -> None:
        self._links, self._dtype, self._device, self._mark = links, dtype, device, mark
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._awaited: dict[tuple[str, int, int], tuple[dist.Work, Tensor]] = {}

    def send(self, direction: Literal["outputs", "gradients_out"], values: Tensor) -> None:
        """Send to a neighbour, without waiting."""
        assert values.dtype == self._dtype, f"a stage returned {values.dtype}, not {self._dtype}"
        link = getattr(self._links, direction)
        values = values.detach().contiguous()
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        work = dist.isend(values, link.peer, group=link.group)
        assert work is not None, "this process is on the link"
        self._sent.append((work, values))

    def expect(self, direction: Literal["inputs", "gradients_in"], stage: int, micro: int, shape: torch.Size) -> None:
        """Begin to receive a message, unless that was done before. Messages must be expected in their order."""
        if (direction, stage, micro) not in self._awaited:
            link = getattr(self._links, direction)
            values = torch.empty(shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(values, link.peer, group=link.group)
            assert work is not None, "this process is on the link"
            self._awaited[direction, stage, micro] = work, values

    def receive(self, direction: Literal["inputs", "gradients_in"], stage: int, micro: int) -> Tensor:
        """Wait for an expected message (on a GPU: its stream does)."""
        work, values = self._awaited.pop((direction, stage, micro))
        wait_for([work])
        self._mark("bubble")
        return values

    def finish(self) -> None:
        """Wait until everything is sent."""
        wait_for(work for work, _ in self._sent)
        self._sent.clear()
        self._mark("bubble")
