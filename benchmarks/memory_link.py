"""A link between groups of one process, with the behaviour of the real one (`zero2all.parallel.group_link`), also for a
group that is lost and comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

from zero2all.parallel.group_link import GroupLink


class Hub:
    """The groups of one process. `lose` and `restore` play a group that dies and comes back."""

    def __init__(self, groups: int) -> None:
        self.changed = threading.Condition()
        self.live = set(range(groups))
        self.offers: dict[tuple[int, int], dict[int, bytes]] = {}
        self.sets: dict[tuple[int, int], list[int]] = {}
        self.states: dict[int, tuple[int, bytes]] = {}
        self.behind: set[int] = set()
        self.links = [cast(GroupLink, MemoryLink(self, group, groups)) for group in range(groups)]

    def lose(self, group: int) -> None:
        """The group no longer takes part."""
        with self.changed:
            self.live.discard(group)
            self.changed.notify_all()

    def restore(self, group: int) -> None:
        """It is back, and must adopt the state of the others."""
        with self.changed:
            self.behind.add(group)


class MemoryLink:
    """The link of one group of a `Hub`."""

    def __init__(self, hub: Hub, group: int, groups: int) -> None:
        self._hub, self.group, self.groups = hub, group, groups
        self.sent_bytes = self.received_bytes = 0
        self.history = ""

    def offer(self, number: int, fragment: int, payload: bytes | memoryview, /) -> None:
        """See `GroupLink`."""
        with self._hub.changed:
            self._hub.offers.setdefault((number, fragment), {})[self.group] = bytes(payload)
            self.sent_bytes += len(payload) * (self.groups - 1)
            self._hub.changed.notify_all()

    def collect(self, number: int, fragment: int, /) -> dict[int, bytes]:
        """See `GroupLink`."""
        hub, key = self._hub, (number, fragment)
        with hub.changed:
            hub.changed.wait_for(lambda: key in hub.sets or hub.live <= set(hub.offers[key]))
            members = hub.sets.setdefault(key, sorted(hub.live))
            found = {group: hub.offers[key][group] for group in members}
            for old in [each for each in hub.offers if each[0] < number - 1]:
                del hub.offers[old]
        self.received_bytes += sum(len(payload) for group, payload in found.items() if group != self.group)
        return found

    def behind(self) -> int | None:
        """See `GroupLink`."""
        if self.group not in self._hub.behind:
            return None
        return max((number for number, _ in self._hub.states.values()), default=None)

    def adopt(self) -> tuple[int, bytes]:
        """See `GroupLink`."""
        with self._hub.changed:
            found = self._hub.states[min(self._hub.live)]
            self._hub.states.clear()
            self._hub.behind.discard(self.group)
            self._hub.live.add(self.group)
        return found

    def serve_state(self, number: int, state: Callable[[], bytes], /) -> None:
        """See `GroupLink`."""
        if self._hub.behind:
            self._hub.states[self.group] = (number, state())

    def serve_last(self, _label: int, _state: Callable[[], bytes], /) -> bool:
        """All groups end together."""
        return False

    def close(self) -> None:
        """See `GroupLink`."""
        self._hub.lose(self.group)
