"""Which weights are sent when.

A fragment is sent once in every H steps (a round). `streaming` cuts the model into fragments of a few blocks, taken at
equal distances (block i of n fragments belongs to fragment i % n), and one more with embedding, head and last norm;
they are sent one after the other over the H steps. `diloco` sends the whole model at the last step of a round.

    round k, fragment f of F:   after step  k H + (f + 1) H // F
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from zero2all.diloco.config import DilocoConfig

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
    """When fragments are sent."""

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


def make_clock(config: DilocoConfig, layers: int, last_step: int | None = None) -> Clock:
    """The clock of a scheme, for a model of `layers` blocks."""
    streams = config.scheme == "streaming"
    return Clock(config.every, config.fragments(layers), config.tau if streams else 0, last_step)


def names_by_fragment(names: Iterable[str], fragments: int) -> list[list[str]]:
    """The parameters of each fragment."""
    found: list[list[str]] = [[] for _ in range(fragments)]
    for name in names:
        block = _BLOCK.match(name)
        found[int(block[1]) % (fragments - 1) if block and fragments > 1 else -1].append(name)
    return found
