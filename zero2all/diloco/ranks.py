"""The ranks of a group as one: rank 0 has the link to the other groups, the other ranks give it what they send, and get
from it what is theirs. Every method is called by all ranks of the group, in the same order."""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zero2all.common.peers import Peers
from zero2all.diloco.compress import is_sound, payload_bytes
from zero2all.diloco.link import GroupLink
from zero2all.diloco.messages import Key
from zero2all.diloco.transport import Expected


@dataclass(frozen=True)
class Layout:
    """What the payloads and the state of one rank consist of."""

    compress: str
    pieces: list[list[int]]
    """By fragment: how many values are compressed at once."""
    state: list[int]
    """Values of float32, likewise."""
    groups: int

    @property
    def head(self) -> struct.Struct:
        """How a state begins: step, tokens, and for every group the steps that are missing."""
        return struct.Struct(f"<qq{self.groups}d")

    def size(self, fragment: int | None) -> int:
        """Bytes of the payload of a fragment; None: of the state."""
        if fragment is None:
            return self.head.size + 4 * sum(self.state)
        return sum(payload_bytes(count, self.compress) for count in self.pieces[fragment])

    def is_sound(self, fragment: int | None, data: bytes | memoryview) -> bool:
        """Whether all values of a payload, or of a state, can be used."""
        whole, form, counts, at = memoryview(data), self.compress, self.state, 0
        if fragment is None:
            head, form, at = self.head.unpack_from(whole), "float32", self.head.size
            if not all(math.isfinite(value) and value >= 0 for value in head):
                return False
        else:
            counts = self.pieces[fragment]
        for count in counts:
            size = payload_bytes(count, form)
            if not is_sound(whole[at : at + size], count, form):
                return False
            at += size
        return True


def expected_of(layouts: Sequence[Layout]) -> Expected:
    """What the link knows of payloads and states before they come: those of all ranks, one after the other."""

    def fault(fragment: int | None, data: bytes) -> str:
        parts = _split(data, [layout.size(fragment) for layout in layouts])
        if all(layout.is_sound(fragment, part) for layout, part in zip(layouts, parts, strict=True)):
            return ""
        return "it holds values that are not finite, or larger than 1e18"

    fragments = range(len(layouts[0].pieces))
    sizes = [sum(layout.size(fragment) for layout in layouts) for fragment in fragments]
    return Expected(sizes, sum(layout.size(None) for layout in layouts), fault)


class RankLink:
    """The link of a group, for one of its ranks."""

    def __init__(self, peers: Peers, layouts: Sequence[Layout], link: GroupLink | None) -> None:
        """`peers`: the ranks of the group, over a gloo group that nothing else uses. `layouts`: of all ranks. `link`:
        in rank 0."""
        self._peers, self._layouts, self._link = peers, layouts, link
        self.is_behind = False
        """Whether the group must adopt a state, because the others went on without it."""
        self.history = ""
        self._is_asked = False
        self._refresh()

    def exchange(self, key: Key, payload: bytes) -> dict[int, bytes]:
        """Send this group's payload, and wait for those that are used, by group."""
        sizes = [layout.size(key.fragment) for layout in self._layouts]
        whole, found = self._gather(payload, sizes), {}

        def work() -> None:
            assert self._link is not None, "rank 0 has it"
            self._link.offer(key, whole)
            found.update(self._link.collect(key))

        self._peers.run_on_rank0(work)
        self._refresh()
        groups = self._peers.broadcast(sorted(found))
        return {group: self._scatter(found.get(group, b""), sizes) for group in groups}

    def adopt(self) -> bytes:
        """The outer state of a group that is in step: go on from it."""
        self.is_behind = False
        return self._scatter(b"" if self._link is None else self._link.adopt(), self._state_sizes)

    def serve(self, state: Callable[[], bytes]) -> None:
        """Call this after every update: if another group waits for the outer state, `state` is called, now."""
        if not self._is_asked:
            return
        self._is_asked = False
        whole = self._gather(state(), self._state_sizes)
        if self._link is not None:
            self._link.serve(whole)

    def stays(self, state: Callable[[], bytes]) -> bool:
        """Call this when training is complete, again while it gives True: groups that are behind get the state."""
        goes_on = self._peers.run_on_rank0(lambda: self._link is not None and self._link.stays())
        self._refresh()
        self.serve(state)
        return bool(goes_on)

    @property
    def link(self) -> GroupLink | None:
        """In rank 0."""
        return self._link

    @property
    def _state_sizes(self) -> list[int]:
        return [layout.size(None) for layout in self._layouts]

    def _refresh(self) -> None:
        """Learn from rank 0 what has changed."""
        link = self._link
        own: Any = None if link is None else [link.is_behind, link.history, link.is_asked]
        self.is_behind, self.history, self._is_asked = self._peers.broadcast(own)

    def _gather(self, data: bytes, sizes: Sequence[int]) -> bytes:
        """What all ranks have, one after the other, in rank 0."""
        control, parts = self._peers.control, [data]
        if self._peers.rank and data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), group=control, group_dst=0)
        for rank in range(1, len(sizes)) if self._peers.is_first else ():
            part = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                dist.recv(part, group=control, group_src=rank)
            parts.append(part.numpy().tobytes())
        return b"".join(parts)

    def _scatter(self, whole: bytes, sizes: Sequence[int]) -> bytes:
        """The part of this rank of what rank 0 has."""
        control, rank = self._peers.control, self._peers.rank
        if rank:
            own = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                dist.recv(own, group=control, group_src=0)
            return own.numpy().tobytes()
        parts = list(_split(whole, sizes))
        for other, part in enumerate(parts[1:], 1):
            if sizes[other]:
                dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), group=control, group_dst=other)
        return bytes(parts[0])

    def close(self) -> None:
        """Leave the other groups."""
        if self._link is not None:
            self._link.close()


def _split(whole: bytes, sizes: Sequence[int]) -> Iterator[memoryview]:
    at = 0
    for size in sizes:
        yield memoryview(whole)[at : at + size]
        at += size
