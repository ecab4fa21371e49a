"""How the groups agree whose payloads are used: the part of rank 0.

For every key (round, fragment) the groups decide a *record*: whose payloads are used (`set`), and who takes part in the
next decision (`members`). Records form a chain of hashes. Groups with the same chain have the same outer weights. A
member is a pair (group, era): a group has a new era when it starts and when it adopts a state. Rank 0 of each group
sends its *status* to the others, in order, after every change and every second; no other message decides.
1. The lowest member that has come to a key leads. It proposes a record with the payloads that all its ranks have, after
   it has waited `wait_seconds` for those it lacks. It gives way to the proposal of a lower member.
2. A group accepts a proposal that extends its chain when all its ranks have the payloads; what it lacks it gets from
   the proposer. It then accepts no other one while that group is connected and proposes the same.
3. The proposer decides when every living member has accepted. A member counts as dead only if its connection has been
   lost for `wait_seconds`, if it has another era, if it said goodbye, or if it asks for a state (then it leaves).
4. Who sees a decision after its chain makes the same one. If the proposer dies, the next leader proposes what it has
   accepted itself.
5. A group that comes back adopts a state and follows. It becomes a member by a record, once it is in step and connected
   to all members.

Why there is no fork, if every member that counts as dead is dead: say p decides D after chain c. Then every living
member of c has accepted D (3). While p lives they accept nothing else (2), and get D from p (4). When p is dead, only a
living member can propose after c, and each of them has accepted D, so it proposes D (4). A group that came back is no
member of c, so it does not propose, and p need not wait for it (5). So all living groups decide D, whomever p reached.
With two groups it is the same: p decides alone only if the other one is dead.

A payload of the wrong size, or with values that are not finite, is as one that never came. A rank says `have` only of
what it can use, and only what all ranks of a group have is proposed (1) or accepted (2): so a set names nothing that
one who decides it cannot use. All ranks look at the same bits in the same way; where a group sends different bits to
two others, the one that cannot use its own gets those of the proposer. `bad` only ends the wait of (1).

The condition cannot be dropped: with two groups "dead" and "cut off" look alike, and both have to go on. After a
partition the chains differ. They can also differ when all members die at once and groups that had only followed them go
on. Then the group whose chain counts fewer contributions adopts the state of the other (equal: that with the higher
number), so that neither a small part of a partition wins, nor group 0 when it was restarted from an old checkpoint. A
group that cannot follow (its training is rounds late, or went back) adopts, too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from zero2all.common.connections import NotOfThisRunError, dial, split_address
from zero2all.common.errors import AbsentGroupsError, PeerFailureError, UsageError
from zero2all.common.language import message
from zero2all.common.progress import say
from zero2all.parallel.config import SlowLinkConfig
from zero2all.parallel.group_wire import SILENT_SECONDS, Channel, Key, checked

Status = dict[str, Any]
Members = list[list[int]]
ROUNDS_KEPT = 2
"""How many rounds back a group can still follow the decisions of the others without adopting their state."""
STATUS_SECONDS = 1.0
LAST_WORD_SECONDS = 0.5
LOOK_SECONDS, NOTICE_SECONDS, AGAIN_SECONDS = 1.0, 10.0, 60.0
"""While a group waits for another: pause between two looks why it does not come, and when that is said."""


LOOKS = {"looks": True}
"""The hello of a process that only wants to know who listens."""


KEY = (int, int)
MEMBERS = [KEY]
RECORD = {"key": KEY, "before": str, "set": MEMBERS, "members": MEMBERS}
STATUS = {"chain": str, "weight": int, "last": KEY, "recent": [RECORD], "era": int, "members": MEMBERS}
STATUS |= {"running": bool, "lost": bool, "connected": MEMBERS, "next?": KEY, "reach": KEY}
STATUS |= {"want?": {"server": int, "era": int, "id": int}, "proposal?": RECORD, "accepted?": RECORD}
HEAD = {"to": int, "id": int, "label": int, "history": (str, int, KEY), "recent": [RECORD], "members": MEMBERS}
"""Of a state that one group gives to another."""


class Link:
    """What a rank and, in rank 0, its `Mind` both know (`group_link.GroupLink`)."""

    def __init__(self, config: SlowLinkConfig, group: int, ranks: int, facts: Any, secret: bytes) -> None:
        self.config, self.group, self.ranks, self.facts, self.secret = config, group, ranks, facts, secret
        self.groups, self.closed, self.changed = len(config.groups), False, threading.Condition()
        self.problem: UsageError | PeerFailureError | None = None
        self.outcomes: dict[Key, dict[str, Any]] = {}  # decided, and not yet collected
        self.inner: dict[int, Channel] = {}  # to ranks of this group
        self.data: dict[int, Channel] = {}  # to this rank in other groups
        self.is_stopped: Callable[[], bool] = lambda: False

    def obey(self, message: dict[str, Any]) -> None:
        """Take a message of rank 0."""
        raise NotImplementedError

    def is_far(self, key: Key) -> bool:
        """Training has so many rounds to collect before this key that it will adopt a state first."""
        return bool(self.outcomes) and not self.will_adopt and key[0] > min(self.outcomes)[0] + ROUNDS_KEPT

    @property
    def will_adopt(self) -> bool:
        """Training will collect a state to adopt."""
        return any(outcome["state"] for outcome in self.outcomes.values())


class Mind:
    """What rank 0 of a group knows and decides. All methods hold the lock of the link."""

    def __init__(self, link: Link, history: str) -> None:
        self.link, self.changed = link, link.changed
        self.chain: str
        self.weight: int  # contributions that the chain counts
        self.last: list[int]  # the last key
        self.chain, self.weight, self.last = json.loads(history) if history else ("", 0, [-1, -1])
        self.era = random.getrandbits(31)
        self.members: Members = []  # who decides the next record
        self.recent: list[Status] = []  # the last records
        self.heard: dict[int, Status] = {}  # the last status of every connected group
        self.lost_at: dict[int, float] = {}  # when the connection to a group was lost
        self.mine: list[Key] = []  # keys that training has come to, and that are not decided
        self.since: dict[Key, float] = {}
        self.reach: Key = (-1, -1)
        self.has: dict[Key, dict[tuple[int, int], set[int]]] = {}  # which ranks of this group have a payload
        self.bad: dict[Key, set[tuple[int, int]]] = {}  # payloads that cannot be used
        self.proposal: Status | None = None
        self.accepted: Status | None = None
        self.want: Status | None = None
        self.states: dict[int, dict[int, Status]] = {}
        self.served: set[int] = set()
        self.gone: set[str] = set()  # chains at which a payload could no longer be had
        self.is_lost = self.is_running = False
        self._reasons: list[str] = []  # why groups are missing at the start
        self._alike: set[int] = set()
        self._ids = itertools.count(random.getrandbits(31))  # of the states that it asks for
        self._asked_at = self._lacks_since = self._sent_at = 0.0
        self._sent: Status = {}
        self.control = {
            group: Channel(
                f"group {group}",
                partial(self._hear, group),
                partial(self._on_change, group),
                silent_seconds=SILENT_SECONDS,
            )
            for group in range(link.groups)
            if group != link.group
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
            elif message["do"] == "bad":
                self.bad.setdefault(_key(message), set()).add((message["group"], message["era"]))
            elif message["do"] == "state" and "problem" in message["head"]:
                if self.want and self.want["id"] == message["head"]["id"]:
                    self.link.problem = PeerFailureError(message["head"]["problem"])
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
                from zero2all.parallel.rendezvous import differences  # needs torch

                self.link.problem = UsageError(
                    f"Group {group} differs from group {self.link.group}: "
                    f"{differences(self.link.facts, message['facts'])}. Nothing was started. Start all groups with the "
                    f"same config and version of zero2all, and copy the packed data of one to all others if `data` "
                    f"(its fingerprint) differs."
                )
            elif message["do"] == "bye":
                self.heard.pop(group, None)
                self._alike.discard(group)
                self.lost_at[group] = -math.inf  # nobody waits for it
            elif message["do"] == "status" and group in self._alike:
                self.heard[group] = checked(message, STATUS)
            self.changed.notify_all()

    def _on_change(self, group: int, is_up: bool) -> None:
        with self.changed:
            if is_up:
                self.lost_at[group] = time.monotonic()  # until its status comes
                self.control[group].post({"do": "hello", "facts": self.link.facts})
                self.control[group].post(self._status())
            else:
                if self.heard.pop(group, None):
                    self.lost_at[group] = time.monotonic()
                self._alike.discard(group)
            self.changed.notify_all()

    def lose(self, group: int) -> None:
        """Another process has come for this group: all ranks end their connections to the one before."""
        with self.changed:
            self._tell_ranks({"do": "lose", "group": group})

    def leave(self) -> None:
        """Training has ended: the others need not wait."""
        with self.changed:
            self._tell_groups({"do": "bye"})

    # ---- starting

    def start(self, seconds: float) -> None:
        """Wait for the ranks of this group and for the other groups; let all ranks start, or fail."""
        for work in (self._run, self._look_for_missing):
            threading.Thread(target=work, daemon=True, name="group-link-mind").start()
        deadline = time.monotonic() + seconds
        with self.changed:
            while not self.is_running and self.link.problem is None and not self.link.is_stopped():
                if self._is_ready():  # as long as it takes to get a state, while the group that has it is there
                    deadline = max(deadline, time.monotonic() + seconds)
                elif time.monotonic() > deadline:
                    self.link.problem = self._absence(seconds)
                self.changed.wait(0.2)
            problem = self.link.problem
            if problem:
                self._tell_ranks({"do": "start", "problem": [type(problem).__name__, str(problem)], "key": None})
        if problem:
            time.sleep(LAST_WORD_SECONDS)  # so that the other groups see what differs, too

    def _absence(self, seconds: float) -> PeerFailureError:
        """Who did not come in time."""
        absent = [str(rank) for rank, channel in self.link.inner.items() if not channel.is_up]
        if absent:
            return PeerFailureError(
                f"These ranks of group {self.link.group} did not join within parallel.join_seconds ({seconds:g} "
                f"s): {', '.join(absent)}. Look for their errors."
            )
        names = ", ".join(f"{group} ({self.link.config.groups[group]})" for group in self._missing())
        lines = [
            f"These groups of {self.link.groups} did not join within parallel.join_seconds ({seconds:g} s): "
            f"{names}. Look for their errors, and check that their addresses in parallel.slow_link.groups are "
            f"right and that no firewall blocks the port.",
            *self._reasons,
        ]
        if self.weight:
            lines.append(
                "If they have finished the run, start them again, too: they give their final weights to this group. Or "
                "copy their run folder."
            )
        return AbsentGroupsError(" ".join(lines))

    def _look_for_missing(self) -> None:
        """In a thread, until the start: find out why other groups do not come, and say it after a while."""
        say_at = time.monotonic() + NOTICE_SECONDS
        while True:
            with self.changed:
                is_over = lambda: self.is_running or self.link.problem or self.link.closed  # noqa: E731
                if self.changed.wait_for(is_over, LOOK_SECONDS):
                    return
                missing = self._missing()
            self._reasons = [self._why_missing(group) for group in missing]  # no lock: a name may take seconds
            if self._reasons and time.monotonic() > say_at:
                say_at = time.monotonic() + AGAIN_SECONDS
                say(f"z2a: waiting for other groups. {' '.join(self._reasons)}")

    def _why_missing(self, group: int) -> str:
        from zero2all.parallel.rendezvous import why_not_reached  # needs torch

        own, address = self.link.group, self.link.config.groups[group].partition(",")[0]
        if group in self.heard:
            return message(f"Group {group} at {address} is here, but has not met all other groups.")
        try:
            dial(split_address(address), self.link.secret, LOOKS, LOOK_SECONDS).close()
            why = ""
        except NotOfThisRunError as error:
            why = str(error)
        except OSError:
            why = why_not_reached(*split_address(address), f"group {group}")
        if why:
            return message(f"Group {group} cannot be reached at {address}: {why}.")
        if group < own:
            return message(f"At {address} something answers, but not as group {group} does: the port is wrong.")
        here = self.link.config.groups[own]
        why = f"a firewall blocks the way to {here}, it has another address for group {own}, or the port is wrong"
        return message(f"Group {group} at {address} can be reached, but has not connected to group {own}: {why}.")

    def _is_ready(self) -> bool:
        return all(channel.is_up for channel in self.link.inner.values()) and not self._missing()

    def _begin(self) -> None:
        """When all are there: run, from the state of another group where this one is behind."""
        if not self._is_ready() or self.link.problem is not None:
            return
        state = None
        if self._choose_server() is not None:
            if (state := self._whole_state()) is None:
                return
            self._continue_from(state)
        else:
            begun = [each for each in self.heard.values() if each["running"] and each["chain"] == self.chain]
            all_here = [[self.link.group, self.era], *([group, each["era"]] for group, each in self.heard.items())]
            self.members = begun[0]["members"] if begun else sorted(all_here)
        self.lost_at = {group: time.monotonic() for group in self.control} | self.lost_at
        self.is_running = True
        self._tell_ranks({"do": "start", "problem": None, "key": None, "state": state, "era": self.era})

    def _missing(self) -> list[int]:
        """Groups that have not come, or have not met all others; none if one of the others runs already."""
        if any(status["running"] for status in self.heard.values()):
            return []
        absent = [group for group in self.control if group not in self.heard]
        return absent or [group for group, each in self.heard.items() if len(each["connected"]) < len(self.control)]

    # ---- deciding

    def _run(self) -> None:
        with self.changed:
            while not self.link.closed:
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
        status = {"do": "status", "chain": self.chain, "weight": self.weight, "last": self.last, "recent": self.recent}
        status |= {"era": self.era, "members": self.members, "running": self.is_running, "lost": self.is_lost}
        status |= {"connected": sorted([group, each["era"]] for group, each in self.heard.items())}
        status |= {"next": self.mine[0] if self.mine else None, "reach": self.reach, "want": self.want}
        return status | {"proposal": self.proposal, "accepted": self.accepted}

    def _look(self) -> None:
        key = self.mine[0] if self.mine else None
        if not self.is_running:
            self._begin()
        elif self.link.will_adopt:
            return  # what is decided now might take the place of the state
        elif self._choose_server() is not None:
            # It leaves, for good: the others no longer wait for its acceptance.
            self.proposal, self.members = None, [member for member in self.members if member[0] != self.link.group]
            if key is not None and (state := self._whole_state()):
                self._continue_from(state)
                self._tell_ranks({"do": "outcome", "key": key, "state": state, "set": [], "serve": [], "era": self.era})
        elif (found := self._heard_record()) is not None:
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
                must = status["running"] and (theirs > best or not status["lost"])
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
            self.want = {"server": server, "era": eras[server], "id": next(self._ids)}
        return int(self.want["server"])

    def _is_behind_us(self, status: Status) -> bool:
        return any(step["before"] == status["chain"] for step in self.recent)

    def _whole_state(self) -> Status | None:
        """The head of the wanted state, when all ranks have it."""
        heads = self.states.get(self.want["id"], {}) if self.want else {}
        return heads[0] if len(heads) == self.link.ranks else None

    def _continue_from(self, head: Status) -> None:
        """This group's history is now that of the state it adopts."""
        self.chain, self.weight, self.last = head["history"]
        self.recent, self.members, self.reach = head["recent"], head["members"], (self.last[0], self.last[1])
        self.mine, self.proposal, self.accepted, self.want, self.is_lost = [], None, None, None, False
        self.era = random.getrandbits(31)
        self.states.clear()

    def _heard_record(self) -> tuple[Status, int, bool] | None:
        """What another group has decided after our chain, or proposes; which group; whether it is decided."""
        for group, status in self.heard.items():
            for record in status["recent"]:
                if record["before"] == self.chain:
                    return record, group, True
        found = None
        for group, status in sorted(self.heard.items()):
            record = status["proposal"]
            if record and record["before"] == self.chain and (not self.mine or _key(record) == self.mine[0]):
                if self.accepted == {**record, "by": group}:
                    return record, group, False
                if found is None and (group < self.link.group or not self.proposal):
                    found = record, group, False
        return found

    def _follow(self, record: Status, source: int, is_decided: bool) -> None:
        key = _key(record)
        lacking = [member for member in record["set"] if not self._is_here(key, *member)]
        if self.link.is_far(key):
            self.is_lost = True  # payloads up to the state need not be kept, and nobody waits for this group
        elif lacking:
            if time.monotonic() > self._asked_at + STATUS_SECONDS or not self._asked_at:
                self._asked_at = time.monotonic()
                self._lacks_since = self._lacks_since or self._asked_at
                self._tell_ranks({"do": "need", "key": key, "set": lacking, "source": source})
        elif is_decided:
            self._decide(record)
        else:
            self.proposal, self.accepted = None, {**record, "by": source}

    def _is_here(self, key: Key, group: int, era: int) -> bool:
        return len(self.has.get(key, {}).get((group, era), ())) == self.link.ranks

    def _voters(self) -> set[int]:
        """The living members of our chain; if there are none, all that are in step."""
        now, wait = time.monotonic(), self.link.config.wait_seconds
        # Who is no member may not have met them all: it gives them time after the last loss of any connection.
        last_loss = -math.inf if [self.link.group, self.era] in self.members else max(self.lost_at.values())
        found = set()
        for group, era in self.members:
            status = self.heard.get(group)
            if group == self.link.group:
                is_alive = era == self.era
            elif status is None:
                lost_at = self.lost_at.get(group, -math.inf)
                is_alive = lost_at > -math.inf and now < max(lost_at, last_loss) + wait
            else:
                is_alive = status["era"] == era and not status["want"]
            found |= {group} if is_alive else set()
        return found or {self.link.group, *(group for group in self.heard if self._is_in_step(group))}

    def _is_in_step(self, group: int) -> bool:
        status = self.heard[group]
        return status["running"] and not status["want"] and status["chain"] == self.chain

    def _lead(self, key: Key) -> None:
        """If no lower member is to be waited for: propose a record, and decide it when all have accepted it."""
        is_late = time.monotonic() > self.since[key] + self.link.config.wait_seconds
        voters = self._voters()
        if self.link.group not in voters:
            return
        for group in [each for each in voters if each < self.link.group and self.proposal is None]:
            status = self.heard.get(group)
            if status is None or (_leads(group, status) and (not is_late or tuple(status["reach"]) >= key)):
                return
        record = self.accepted or self.proposal or self._new_record(key, voters)
        if record is None:
            return
        self.proposal = {name: record[name] for name in ("key", "before", "set", "members")}
        self.accepted = None
        wanted = {**self.proposal, "by": self.link.group}
        if all(self.heard.get(group, {}).get("accepted") == wanted for group in voters - {self.link.group}):
            self._decide(self.proposal)

    def _new_record(self, key: Key, voters: set[int]) -> Status | None:
        """A record of the payloads that are here; None: some are waited for."""
        now, wait, own = time.monotonic(), self.link.config.wait_seconds, self.link.group
        eras = {group: era for group, era in self.members if group in voters} | {own: self.era}
        for group, status in self.heard.items():
            if self._is_in_step(group) or (self._is_behind_us(status) and status["running"] and not status["want"]):
                eras[group] = status["era"]
        here = [[group, era] for group, era in sorted(eras.items()) if self._is_here(key, group, era)]
        awaited = set(eras) - {group for group, _ in here}
        if (own, self.era) not in self.has.get(key, {}):
            awaited.discard(own)  # it adopted a state, and offers nothing
        awaited -= {group for group, era in eras.items() if (group, era) in self.bad.get(key, ())}
        if any(now < max(self.since[key], self._payload_came(group, key)) + wait for group in awaited):
            return None
        members = [[own, self.era]]
        for group in sorted(self.heard, key=lambda each: each not in voters):  # those that are members first
            member, status = [group, self.heard[group]["era"]], self.heard[group]
            is_met = all(
                each in status["connected"] and (each[0] == own or member in self.heard[each[0]]["connected"])
                for each in members
            )
            if group in voters or (self._is_in_step(group) and is_met):
                members.append(member)
        return {"key": list(key), "before": self.chain, "set": here, "members": sorted(members)}

    def _payload_came(self, group: int, key: Key) -> float:
        """When a part of the payload of a connected group came last: a slow link is not a late group."""
        is_sending = group in self.heard and tuple(self.heard[group]["reach"]) >= key
        return self.link.data[group].heard_at if is_sending else 0.0

    def _decide(self, record: Status) -> None:
        key, members = _key(record), record["set"]
        text = json.dumps([self.chain, key, members, record["members"]])
        self.chain, self.members = hashlib.sha256(text.encode()).hexdigest()[:16], record["members"]
        self.weight += len(members)
        self.last, self.is_lost = list(key), False
        self.recent = [each for each in [*self.recent, record] if each["key"][0] >= key[0] - ROUNDS_KEPT]
        self.mine = [each for each in self.mine if each > key]
        self.has = {each: ranks for each, ranks in self.has.items() if each > key}
        self.bad = {each: members for each, members in self.bad.items() if each > key}
        self.since = {each: moment for each, moment in self.since.items() if each > key}
        self.proposal, self.accepted, self._asked_at, self._lacks_since = None, None, 0.0, 0.0
        outcome = {"do": "outcome", "key": key, "set": members, "state": None, "era": self.era}
        self._tell_ranks({**outcome, "serve": self._to_serve()})

    def _to_serve(self) -> list[Status]:
        """The heads of the states that other groups want from this one."""
        found = []
        for group, status in self.heard.items():
            want = status["want"]
            if want and want["server"] == self.link.group and want["id"] not in self.served:
                self.served.add(want["id"])
                head = {"to": group, "id": want["id"], "history": [self.chain, self.weight, self.last]}
                found.append({**head, "recent": self.recent, "members": self.members})
        return found

    def serve_late(self) -> None:
        """Training is complete: let the ranks serve groups that want a state; end when none of those here will."""
        with self.changed:
            is_last = not any(
                (status["want"] or {}).get("server") == self.link.group
                or (not status["running"] and status["chain"] != self.chain)
                for status in self.heard.values()
            )
            self._tell_ranks({"do": "serve", "serve": self._to_serve(), "is_last": is_last})

    def _tell_ranks(self, message: Status) -> None:
        message = {**message, "last": self.last, "history": self.history}
        for channel in self.link.inner.values():
            channel.post(message)
        self.link.obey(message)


def _leads(group: int, status: Status) -> bool:
    """Whether a group takes itself for a member."""
    return [group, status["era"]] in status["members"]


def _key(message: Status) -> Key:
    return message["key"][0], message["key"][1]
