"""What the outer optimizer needs of a link between groups (`zero2all.parallel.group_link`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Link(Protocol):
    """One per process: rank r of a group talks to rank r of every other group."""

    group: int
    groups: int
    history: str
    """Which rounds were made, as a hash; kept in checkpoints, so that a group knows whether it is in step."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of payloads so far."""

    @property
    def received_bytes(self) -> int:
        """Bytes of payloads so far."""

    def offer(self, number: int, fragment: int, payload: bytes | memoryview, /) -> None:
        """Hand over the payload of this group; returns at once."""

    def collect(self, number: int, fragment: int, /) -> dict[int, bytes]:
        """Wait for the payloads, by group; the same set of groups in every group."""

    def behind(self) -> int | None:
        """A round that this group must adopt, because the others went on without it; None: in step."""

    def adopt(self) -> tuple[int, bytes]:
        """Round and outer state of a group that is in step."""

    def serve_state(self, number: int, state: Callable[[], bytes], /) -> None:
        """After every update: called for the outer state, if a group that comes back waits for it."""

    def serve_last(self, label: int, state: Callable[[], bytes], /) -> bool:
        """The same when training is complete; True: call it again, for a group that has not got it yet."""

    def close(self) -> None:
        """End all connections."""
