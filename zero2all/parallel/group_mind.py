"""How the groups agree whose payloads are used: the part of rank 0 (the rules are in `group_link`).

Everything follows from the statuses of the connected groups, looked at again after every change (`_look`). A *member*
is a pair (group, era): a group gets a new era when it starts and when it adopts a state, so a payload that it made
before is never taken for one that it made after.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from zero2all.common.errors import PeerFailureError, UsageError
from zero2all.parallel.config import SlowLinkConfig
from zero2all.parallel.group_wire import SILENT_SECONDS, Channel, Item, Key

Status = dict[str, Any]
Members = list[list[int]]
ROUNDS_KEPT = 2
"""How many rounds back a group can still follow the decisions of the others without adopting their state."""
STATUS_SECONDS = 1.0
LAST_WORD_SECONDS = 0.5


def no_payload(_item: Item, _payload: bytes) -> None:
    """Channels for messages alone."""
    raise OSError("this connection carries no payloads")


class Link(Protocol):
    """The link of rank 0, as far as it is used here (`group_link.GroupLink`)."""

    group: int
    groups: int
    ranks: int
    config: SlowLinkConfig
    facts: Any
    closed: bool
    changed: threading.Condition
    problem: UsageError | PeerFailureError | None
    outcomes: dict[Key, dict[str, Any]]
    inner: dict[int, Channel]
    data: dict[int, Channel]

    def obey(self, message: dict[str, Any]) -> None:
        """Take a message of rank 0."""

    def is_far(self, key: Key) -> bool:
        """Training is too far behind this key."""

    @property
    def will_adopt(self) -> bool:
        """Training will collect a state to adopt."""


class Mind:
    """What rank 0 of a group knows and decides. All methods hold the lock of the link."""

    def __init__(self, link: Link, history: str) -> None:
        self.link, self.changed = link, link.changed
        self.chain: str
        self.weight: int  # contributions that the chain counts
        self.last: list[int]  # the last key
        self.chain, self.weight, self.last = json.loads(history) if history else ("", 0, [-1, -1])
        self.era = random.getrandbits(31)
        self.recent: list[Status] = []
        self.heard: dict[int, Status] = {}  # the last status of every connected group
        self.eras: dict[int, int] = {}
        self.expected = {group for group in range(link.groups) if group != link.group}
        """Groups that are waited for even while they are not connected: those of the last set."""
        self.mine: list[Key] = []  # keys that training has come to, and that are not decided
        self.since: dict[Key, float] = {}
        self.reach: Key = (-1, -1)
        self.has: dict[Key, dict[tuple[int, int], set[int]]] = {}  # which ranks of this group have a payload
        self.proposal: Status | None = None
        self.accepted: Status | None = None
        self.want: Status | None = None
        self.states: dict[int, dict[int, Status]] = {}
        self.served: set[int] = set()
        self.gone: set[str] = set()  # chains at which a payload could no longer be had
        self.is_lost = self.is_running = False
        self._alike: set[int] = set()
        self._asked_at = self._lacks_since = self._sent_at = self._proposed_at = 0.0
        self._sent: Status = {}
        self.control = {
            group: Channel(partial(self._hear, group), no_payload, partial(self._on_change, group), SILENT_SECONDS)
            for group in self.expected
        }

    @property
    def history(self) -> str:
        """The chain, the contributions it counts and the last key; what a checkpoint keeps."""
        return json.dumps([self.chain, self.weight, self.last])

    # ---- what it hears

    def come_to(self, key: Key) -> None:
        """Training offers or collects this key."""
        with self.changed:
            if key in self.link.outcomes or key in self.mine or self.link.will_adopt:
                return
            self.is_lost |= key <= tuple(self.last)
            self.mine.append(key)
            self.since[key] = time.monotonic()
            self.reach = max(self.reach, key)
            self.changed.notify_all()

    def hear_rank(self, rank: int, message: Status) -> None:
        """A message of a rank of this group."""
        with self.changed:
            if message["do"] == "have":
                holders = self.has.setdefault(_key(message), {}).setdefault((message["group"], message["era"]), set())
                holders.add(rank)
            elif message["do"] == "state":
                self.states.setdefault(message["head"]["id"], {})[rank] = message["head"]
            elif (
                message["group"] not in self.heard
                or time.monotonic() > self._lacks_since + self.link.config.wait_seconds
            ):
                self.gone.add(self.chain)
            self.changed.notify_all()

    def _hear(self, group: int, message: Status) -> None:
        """A message of rank 0 of another group."""
        with self.changed:
            if message["do"] == "hello" and message["facts"] == self.link.facts:
                self._alike.add(group)
            elif message["do"] == "hello" and not self.is_running:
                from zero2all.parallel.meet import differences  # needs torch

                self.link.problem = UsageError(
                    f"Group {group} differs from group {self.link.group}: "
                    f"{differences(self.link.facts, message['facts'])}. Nothing was started. Start all groups with the "
                    f"same config and version of zero2all."
                )
            elif message["do"] == "bye":
                self.expected.discard(group)
            elif message["do"] == "status" and group in self._alike:
                self.heard[group] = message
                self.eras[group] = message["era"]
            self.changed.notify_all()

    def _on_change(self, group: int, is_up: bool) -> None:
        with self.changed:
            if is_up:
                self.control[group].post({"do": "hello", "facts": self.link.facts})
                self.control[group].post(self._status())
            else:
                self.heard.pop(group, None)
                self._alike.discard(group)
            self.changed.notify_all()

    def leave(self) -> None:
        """Training has ended: the others need not wait."""
        with self.changed:
            self._tell_groups({"do": "bye"})

    # ---- starting

    def start(self, seconds: float) -> None:
        """Wait for the ranks of this group and for the other groups; let all ranks start, or fail."""
        threading.Thread(target=self._run, daemon=True, name="group-link-mind").start()
        deadline = time.monotonic() + seconds
        with self.changed:
            self._wait(lambda: all(channel.is_up for channel in self.link.inner.values()), deadline)
            self._wait(lambda: not self._missing(), deadline)
            absent = [str(rank) for rank, channel in self.link.inner.items() if not channel.is_up]
            if self.link.problem is None and absent:
                self.link.problem = PeerFailureError(
                    f"These ranks of group {self.link.group} did not join within parallel.join_seconds ({seconds:g} "
                    f"s): {', '.join(absent)}. Look for their errors."
                )
            elif self.link.problem is None and self._missing():
                names = ", ".join(f"{group} ({self.link.config.groups[group]})" for group in self._missing())
                self.link.problem = PeerFailureError(
                    f"These groups of {self.link.groups} did not join within parallel.join_seconds ({seconds:g} s): "
                    f"{names}. Look for their errors, and check that their addresses in parallel.slow_link.groups are "
                    f"right and that no firewall blocks the port."
                )
            state = None
            while self.link.problem is None and self._choose_server() is not None:
                if state := self._whole_state():
                    break
                self.changed.wait(0.2)
            if state:
                self._continue_from(state)
            problem = self.link.problem
            self.is_running = problem is None
            message = {"do": "start", "problem": problem and [type(problem).__name__, str(problem)], "key": None}
            self._tell_ranks({**message, "state": state, "era": self.era, "history": self.history})
        if problem:
            time.sleep(LAST_WORD_SECONDS)  # so that the other groups see what differs, too

    def _wait(self, is_over: Callable[[], bool], deadline: float) -> None:
        self.changed.wait_for(lambda: self.link.problem is not None or is_over(), max(0.0, deadline - time.monotonic()))

    def _missing(self) -> list[int]:
        """Groups that have not come; nobody is waited for if one of the others runs already."""
        is_begun = any(status["running"] for status in self.heard.values())
        return [] if is_begun else [group for group in self.control if group not in self.heard]

    # ---- deciding

    def _run(self) -> None:
        with self.changed:
            while not self.link.closed:
                if self.is_running:
                    self._look()
                self._send_status()
                self.changed.wait(0.2)

    def _send_status(self) -> None:
        status = self._status()
        if status != self._sent or time.monotonic() > self._sent_at + STATUS_SECONDS:
            self._sent, self._sent_at = status, time.monotonic()
            self._tell_groups(status)

    def _tell_groups(self, message: Status) -> None:
        for channel in self.control.values():
            if channel.is_up:
                channel.post(message)

    def _status(self) -> Status:
        status = {"chain": self.chain, "weight": self.weight, "last": self.last, "recent": self.recent, "era": self.era}
        status |= {"next": self.mine[0] if self.mine else None, "reach": self.reach, "want": self.want}
        status |= {"proposal": self.proposal, "accepted": self.accepted, "running": self.is_running}
        copy: Status = json.loads(json.dumps({"do": "status", "connected": sorted(self.heard), **status}))
        return copy

    def _look(self) -> None:
        key = self.mine[0] if self.mine else None
        if self.link.will_adopt:
            return  # what is decided now might take the place of the state
        if self._choose_server() is not None:
            if key is not None and (state := self._whole_state()):
                self._continue_from(state)
                self._tell_ranks({"do": "outcome", "key": key, "state": state, "set": [], "serve": [], "era": self.era})
        elif (found := self._heard_step()) is not None:
            self._follow(*found)
        elif key is not None:
            self._lead(key)

    def _choose_server(self) -> int | None:
        """The group whose state this one must adopt; None: it is in step, or nobody is there who is."""
        key, best = self.mine[0] if self.mine else None, (self.weight, -self.link.group)
        servers = []
        for group, status in self.heard.items():
            theirs = (status["weight"], -group)
            following = next((step for step in status["recent"] if step["before"] == self.chain), None)
            if status["want"]:
                must = False
            elif not self.is_running:
                must = status["chain"] != self.chain and theirs > best
            elif self.is_lost:
                must = True
            elif status["chain"] == self.chain:  # two checkpoints without a history
                must = key is not None and status["next"] is not None and tuple(status["next"]) > key
            elif following is not None:
                must = self.chain in self.gone or (key is not None and _key(following) != key)
            else:
                must = not self._is_behind_us(status) and theirs > best
            if must:
                servers.append(theirs)
        if not servers:
            self.want = None
            return None
        eras = {-number: self.heard[-number]["era"] for _, number in servers}
        if self.want is None or eras.get(self.want["server"]) != self.want["era"]:
            server = -max(servers)[1]  # kept while it can serve: the heaviest may be another one after every round
            self.want = {"server": server, "era": eras[server], "id": random.getrandbits(31)}
        return int(self.want["server"])

    def _is_behind_us(self, status: Status) -> bool:
        return any(step["before"] == status["chain"] for step in self.recent)

    def _whole_state(self) -> Status | None:
        """The head of the wanted state, when all ranks have it."""
        heads = self.states.get(self.want["id"], {}) if self.want else {}
        return heads[0] if len(heads) == self.link.ranks else None

    def _continue_from(self, head: Status) -> None:
        """This group's history is now that of the state it adopts."""
        self.chain, self.weight, self.last = json.loads(head["history"])
        self.recent, self.reach = head["recent"], (self.last[0], self.last[1])
        self.mine, self.proposal, self.accepted, self.want, self.is_lost = [], None, None, None, False
        self.era = random.getrandbits(31)
        self.states.clear()

    def _heard_step(self) -> tuple[Key, Members, int, bool] | None:
        """Key, set and source of what another group has decided after our chain, or proposes; whether it is decided."""
        for group, status in self.heard.items():
            for step in status["recent"]:
                if step["before"] == self.chain:
                    return _key(step), step["set"], group, True
        for group, status in sorted(self.heard.items()):
            step = status["proposal"]
            if step and step["before"] == self.chain and (not self.mine or _key(step) == self.mine[0]):
                return (_key(step), step["set"], group, False) if group < self.link.group or not self.proposal else None
        return None

    def _follow(self, key: Key, members: Members, source: int, is_decided: bool) -> None:
        if self.link.is_far(key):
            return  # payloads up to the state need not be kept
        lacking = [member for member in members if not self._is_here(key, *member)]
        if lacking:
            if time.monotonic() > self._asked_at + STATUS_SECONDS or not self._asked_at:
                self._asked_at = time.monotonic()
                self._lacks_since = self._lacks_since or self._asked_at
                self._tell_ranks({"do": "need", "key": key, "set": lacking, "source": source})
        elif is_decided:
            self._decide(key, members)
        else:
            self.proposal, self.accepted = None, {"key": key, "before": self.chain, "set": members, "by": source}

    def _is_here(self, key: Key, group: int, era: int) -> bool:
        return len(self.has.get(key, {}).get((group, era), ())) == self.link.ranks

    def _lead(self, key: Key) -> None:
        """If no lower-numbered group is to be waited for: propose a set, and decide it when all have accepted."""
        now, wait, since = time.monotonic(), self.link.config.wait_seconds, self.since[key]
        is_late = now > since + wait
        peers = {
            group: status
            for group, status in self.heard.items()
            if not status["want"] and (status["chain"] == self.chain or self._is_behind_us(status))
        }
        unheard = self.expected - set(self.heard)
        # Not once it has proposed: a lower-numbered group that comes now accepts that, and waits for the decision.
        for group in range(self.link.group) if self.proposal is None else ():
            if (group in peers and (not is_late or tuple(peers[group]["reach"]) >= key)) or (
                group in unheard and not is_late
            ):
                return
        known = self.accepted or self.proposal
        if known is None:
            eras = {group: self.eras.get(group, -1) for group in peers.keys() | unheard} | {self.link.group: self.era}
            here = [[group, era] for group, era in sorted(eras.items()) if self._is_here(key, group, era)]
            awaited = set(eras) - {group for group, _ in here}
            if (self.link.group, self.era) not in self.has.get(key, {}):
                awaited.discard(self.link.group)  # it adopted a state, and offers nothing
            if any(now < max(since, self._payload_came(group, key)) + wait for group in awaited):
                return
            known = {"set": here}
        if self.proposal is None:
            self._proposed_at = now
        self.proposal = {"key": key, "before": self.chain, "set": known["set"]}
        self.accepted = None
        wanted = {"by": self.link.group, **json.loads(json.dumps(self.proposal))}
        for status in peers.values():  # those with our chain have time to see the proposal, however late it is
            until = self._proposed_at + 2 * wait if status["chain"] == self.chain else since + wait
            if status["accepted"] != wanted and now < until:
                return
        self._decide(key, known["set"])

    def _payload_came(self, group: int, key: Key) -> float:
        """When a part of the payload of a connected group came last: a slow link is not a late group."""
        is_sending = group in self.heard and tuple(self.heard[group]["reach"]) >= key
        return self.link.data[group].heard_at if is_sending else 0.0

    def _decide(self, key: Key, members: Members) -> None:
        before = self.chain
        self.chain = hashlib.sha256(json.dumps([before, key, members]).encode()).hexdigest()[:16]
        self.weight += len(members)
        self.last = list(key)
        step = {"key": list(key), "before": before, "set": members}
        self.recent = [each for each in [*self.recent, step] if each["key"][0] >= key[0] - ROUNDS_KEPT]
        self.expected = {group for group, _ in members} - {self.link.group}
        self.mine = [each for each in self.mine if each > key]
        self.has = {each: ranks for each, ranks in self.has.items() if each > key}
        self.since = {each: moment for each, moment in self.since.items() if each > key}
        self.proposal, self.accepted, self._asked_at, self._lacks_since = None, None, 0.0, 0.0
        serve = []
        for group, status in self.heard.items():
            want = status["want"]
            if want and want["server"] == self.link.group and want["id"] not in self.served:
                self.served.add(want["id"])
                serve.append({"to": group, "id": want["id"], "history": self.history, "recent": self.recent})
        self._tell_ranks({"do": "outcome", "key": key, "set": members, "state": None, "serve": serve, "era": self.era})

    def _tell_ranks(self, message: Status) -> None:
        message = {**message, "last": self.last, "history": self.history}
        for channel in self.link.inner.values():
            channel.post(message)
        self.link.obey(message)


def _key(message: Status) -> Key:
    return message["key"][0], message["key"][1]
