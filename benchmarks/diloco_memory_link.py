"""A link between groups of one process, with the behaviour of the real one (`zero2all.diloco.link`), also for a group
that is lost and comes back."""

from __future__ import annotations

import threading
from typing import cast

from zero2all.common.peers import Peers
from zero2all.diloco.link import GroupLink
from zero2all.diloco.messages import Key
from zero2all.diloco.outer_optimizer import OuterOptimizer
from zero2all.diloco.ranks import RankLink


class Hub:
    """The groups of one process. `lose` and `restore` play a group that dies and comes back."""

    def __init__(self, groups: int) -> None:
        self.changed = threading.Condition()
        self.live = set(range(groups))
        self.offers: dict[Key, dict[int, bytes]] = {}
        self.sets: dict[Key, list[int]] = {}
        self.states: dict[int, bytes] = {}
        self.behind: set[int] = set()
        self.links = [MemoryLink(self, group, groups) for group in range(groups)]

    def connect(self, group: int, outer: OuterOptimizer) -> None:
        """Give the outer optimizer of a group its link."""
        outer.connect(RankLink(Peers(), [outer.layout], cast(GroupLink, self.links[group])))

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
    """The link of one group of a `Hub`; its methods are those of `GroupLink`."""

    def __init__(self, hub: Hub, group: int, groups: int) -> None:
        self._hub, self.group, self.groups = hub, group, groups
        self.sent_bytes = self.received_bytes = 0
        self.history = ""

    def offer(self, key: Key, payload: bytes) -> None:
        """Hand over this group's payload."""
        with self._hub.changed:
            self._hub.offers.setdefault(key, {})[self.group] = payload
            self.sent_bytes += len(payload) * (self.groups - 1)
            self._hub.changed.notify_all()

    def collect(self, key: Key) -> dict[int, bytes]:
        """Those of all groups that are there."""
        hub = self._hub
        with hub.changed:
            hub.changed.wait_for(lambda: key in hub.sets or hub.live <= set(hub.offers[key]))
            members = hub.sets.setdefault(key, sorted(hub.live))
            found = {group: hub.offers[key][group] for group in members}
            for old in [each for each in hub.offers if each.number < key.number - 1]:
                del hub.offers[old]
        self.received_bytes += sum(len(payload) for group, payload in found.items() if group != self.group)
        return found

    @property
    def is_behind(self) -> bool:
        """Whether there is a state to adopt."""
        return self.group in self._hub.behind and bool(self._hub.states)

    def adopt(self) -> bytes:
        """The state of a group that is in step."""
        with self._hub.changed:
            found = self._hub.states[min(self._hub.live)]
            self._hub.states.clear()
            self._hub.behind.discard(self.group)
            self._hub.live.add(self.group)
        return found

    @property
    def is_asked(self) -> bool:
        """Whether another group waits for a state."""
        return bool(self._hub.behind)

    def serve(self, state: bytes) -> None:
        """Give it."""
        self._hub.states[self.group] = state

    def stays(self) -> bool:
        """All groups end together."""
        return False

    def close(self) -> None:
        """Leave."""
        self._hub.lose(self.group)
