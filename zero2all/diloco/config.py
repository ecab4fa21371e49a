"""The section `diloco`: groups of processes that train one model and exchange weights every H steps, and when."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from zero2all.common.schema import NaturalInt, PositiveFloat, PositiveInt, Problem, Range, ShareBelowOne


@dataclass(frozen=True)
class DilocoConfig:
    """Several groups of processes that train one model over a slow network."""

    groups: list[str] = field(default_factory=list)
    """Address host:port of every group as the others reach it: of the machine of its rank 0. Empty: one group, nothing
    is exchanged."""
    group: NaturalInt | None = None
    """Number of this group, its place in `groups`. null: from `z2a train --group N` or Z2A_GROUP."""
    bind: str | None = None
    """Address host:port on which this machine listens, if it is another one than the others reach (a container with a
    forwarded port). null: its address in `groups`, no other one."""
    streams: PositiveInt = 4
    """TCP connections between two processes; a long link is not filled by one."""
    wait_seconds: PositiveFloat = 60.0
    """How long the other groups wait in a round for one that is late or lost; less than
    resilience.limits.groups."""
    scheme: Literal["diloco", "streaming"] = "streaming"
    """diloco: all weights at once, and training waits for the answer; streaming: some blocks at a time, while training
    goes on."""
    every: PositiveInt = 30
    """Steps between two exchanges of the same weights (H)."""
    compress: Literal["float32", "bf16", "int8", "int4"] = "bf16"
    """How changes are sent; int8 and int4 add what was lost to what is sent next."""
    outer_lr: PositiveFloat = 0.6
    """Learning rate of the outer optimizer."""
    momentum: ShareBelowOne = 0.9
    """Nesterov momentum of the outer optimizer. With 0 and outer_lr 1 the groups take the mean of their weights (local
    SGD)."""
    fragment_layers: PositiveInt = 3
    """streaming: blocks that are sent at once."""
    tau: Annotated[int, Range(minimum=0)] = 1
    """streaming: steps between sending and using the answer."""
    alpha: ShareBelowOne = 0.5
    """streaming: share of the group's own weights in the mixture with the answer."""

    @property
    def count(self) -> int:
        """How many groups train; 1 where there are none."""
        return max(1, len(self.groups))

    def fragments(self, layers: int) -> int:
        """Parts in which a model of `layers` blocks is sent."""
        return -(-layers // self.fragment_layers) + 1 if self.scheme == "streaming" else 1

    def clock(self, layers: int, last_step: int | None) -> Clock:
        """The clock of the scheme, for a model of `layers` blocks."""
        return Clock(self.every, self.fragments(layers), self.tau if self.scheme == "streaming" else 0, last_step)

    def problems(self, place: str) -> list[Problem]:
        """Fields that are valid alone but do not fit together."""
        found = []
        for index, entry in enumerate(self.groups):
            if not _is_address(entry):
                expected = "host:port as the other groups reach it, such as 10.0.0.2:29600"
                found.append(Problem(f"{place}.groups[{index}]", entry, expected))
        if len(set(self.groups)) < len(self.groups):
            found.append(Problem(f"{place}.groups", self.groups, "every address once"))
        if len(self.groups) == 1:
            found.append(Problem(f"{place}.groups", self.groups, "at least two groups, or none"))
        if self.group is not None and self.groups and self.group >= len(self.groups):
            found.append(Problem(f"{place}.group", self.group, f"a number from 0 to {len(self.groups) - 1}"))
        if self.bind is not None and not _is_address(self.bind):
            found.append(Problem(f"{place}.bind", self.bind, "host:port of this machine, such as 10.0.0.5:29600"))
        return found


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and not set(host) & set(" /@,") and port.isascii() and port.isdigit() and 0 < int(port) < 65536


_BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class Due:
    """A fragment to send now. Its number rises with every exchange, also when a finished run is extended: odd numbers
    are scheduled exchanges, even ones the extra exchange at the end."""

    number: int
    fragment: int
    merge_step: int  # after this step its outer weights go into the model
    mixes: bool  # with the weights that the model has by then


@dataclass(frozen=True)
class Clock:
    """When fragments are sent.

    A fragment is sent once in every H steps (a round). `streaming` cuts the model into fragments of a few blocks, taken
    at equal distances (block i of n fragments belongs to fragment i % n), and one more with embedding, head and last
    norm; they are sent one after the other over the H steps. `diloco` sends the whole model at the end of a round.

        round k, fragment f of F:   after step  k H + (f + 1) H // F
    """

    every: int  # steps of a round: H
    fragments: int
    tau: int  # steps between sending a fragment and using the answer
    last_step: int | None = None  # after this step, everything that is not sent then by the clock is sent too

    def due(self, step: int) -> list[Due]:
        """What is sent after `step`."""
        done = (step - 1) // self.every  # rounds
        offsets = [(fragment + 1) * self.every // self.fragments for fragment in range(self.fragments)]
        is_last, now = step == self.last_step, step - done * self.every
        wait = 0 if is_last else self.tau
        found = [
            Due(2 * (done * self.fragments + at) + 1, at, step + wait, wait > 0)
            for at, offset in enumerate(offsets)
            if offset == now
        ]
        if is_last:
            number = 2 * (done * self.fragments + sum(offset <= now for offset in offsets))
            found += [Due(number, at, step, False) for at, offset in enumerate(offsets) if offset != now]
        return found


def names_by_fragment(names: Iterable[str], fragments: int) -> list[list[str]]:
    """The parameters of each fragment."""
    found: list[list[str]] = [[] for _ in range(fragments)]
    for name in names:
        block = _BLOCK.match(name)
        found[int(block[1]) % (fragments - 1) if block and fragments > 1 else -1].append(name)
    return found
