"""The link between groups: payloads of every round go to all groups, and all groups use the same ones.

A *group* is an ordinary run of some processes on one or more machines. Groups share no process group of torch: rank r
of a group talks to rank r of every other group over sockets of its own (`group_wire`), and a group that is lost, late
or restarted never stops the others.

How they agree is said in `group_mind`. A late group gets the payloads too, and makes the same update without its own
part. Within a group rank 0 decides, and the other ranks learn it from rank 0. What changes the course of training (the
set, a state to adopt, a state to serve) takes effect in `collect` of a named key, so it is the same on all ranks.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from zero2all.common.connections import Connection, Door, address_of, read_message, split_address
from zero2all.common.errors import AbsentGroupsError, PeerFailureError, PreemptedError, UsageError, for_all_ranks
from zero2all.common.progress import say
from zero2all.parallel.config import SlowLinkConfig
from zero2all.parallel.group_mind import HEAD, LOOKS, ROUNDS_KEPT, Link, Mind
from zero2all.parallel.group_wire import (
    PAYLOAD,
    STATE,
    Channel,
    Expected,
    Greeting,
    Inbox,
    Item,
    Key,
    RefusalError,
    TwiceError,
    checked,
    dial_neighbour,
    dial_process,
    hand_over,
    inner_folder,
    keep_connected,
    listen_for_groups,
    read_greeting,
)

GROUP_VARIABLE, OLD_GROUP_VARIABLE = "Z2A_GROUP", "ZERO2ALL_GROUP"
"""The number of this group, where neither the config nor the command line says it."""
OF_THIS_MACHINE = (
    "parallel.slow_link.group",
    "parallel.slow_link.bind",
    "parallel.offload_folder",
    "parallel.cpu_threads",
    "parallel.device",
)
"""Settings that may differ between groups."""
CONTROL, INNER = -1, -2
"""Stream numbers of connections between the ranks 0 of two groups, and between a rank and rank 0 of its group."""
LAST_WORD_SECONDS = 5.0
ALIVE_SECONDS = 5.0
"""A group that has said nothing for so long may be replaced by another process; a status comes every second."""
TWICE_SECONDS = 8.0
"""How long a process may be refused because another one has its place: longer than a dead one counts as alive."""
MOST_KEYS, MOST_ERAS, MOST_STATES = 64, 4, 4
"""Payloads that are kept at a time: of so many keys, for each of so many lives of a group; and states."""
Member = tuple[int, int]
"""Group and era."""


def own_group(config: SlowLinkConfig) -> int:
    """The number of this group, from the config or the environment."""
    named = os.environ.get(GROUP_VARIABLE) or os.environ.get(OLD_GROUP_VARIABLE)
    asked = named if config.group is None else str(config.group)
    last = len(config.groups) - 1
    if asked is None or not asked.isdigit() or int(asked) > last:
        own = "this one has no number" if asked is None else f"the number of this one is {asked}"
        text = (
            f"parallel.slow_link.groups has {len(config.groups)} groups, and {own}. Give a number from 0 to {last}: "
            f"`z2a train --group N`, parallel.slow_link.group, or {GROUP_VARIABLE}."
        )
        raise for_all_ranks(UsageError(text))
    return int(asked)


def link_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in all groups, of what must be equal in all processes of one."""
    return {name: value for name, value in settings.items() if name not in OF_THIS_MACHINE}


class GroupLink(Link):
    """The link of one rank. All groups offer and collect the same keys, in ascending order."""

    def __init__(
        self,
        config: SlowLinkConfig,
        run: str,
        rank: int,
        ranks: int,
        facts: Mapping[str, Any],
        join_seconds: float,
        secret: bytes,
        expected: Expected,
        history: str = "",
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Join the other groups: all ranks of a group call this. `facts` must be equal in all groups (`link_facts`),
        and `secret`: who does not know it is not heard. `expected`: of the payloads of this rank. `history`: what
        `self.history` was when the state was saved from which this group continues. `is_stopped`: whether a signal has
        come, which ends the waiting (PreemptedError)."""
        super().__init__(config, own_group(config), ranks, json.loads(json.dumps(facts, default=str)), secret)
        self.rank, self.is_stopped = rank, is_stopped
        machines = [entry.split(",") for entry in config.groups]
        self._per_machine = -(-ranks // len(machines[0]))
        self._run, self._expected = run, expected
        self._life = f"{random.SystemRandom().getrandbits(64):x}"
        self._refused_at: float | None = None  # when it was refused first, because of another process
        self._twice: set[str] = set()  # processes that were refused here
        self._payloads: dict[Key, dict[Member, bytes]] = {}
        self._asked: set[Item] = set()  # payloads of one group that another one was asked for
        self._faulty: set[int] = set()  # groups whose last payload could not be used
        self._decided: Key = (-1, -1)  # the last key of this rank
        self._era = 0
        self._to_serve: list[dict[str, Any]] = []
        self._is_last = False
        self._states: dict[int, bytes] = {}
        self._behind: dict[str, Any] | None = None
        self._started: dict[str, Any] | None = None
        self.history = history
        for group in (each for each in range(self.groups) if each != self.group):
            hear, take = partial(self._hear, group), partial(self._take_payload, group)
            self.data[group] = Channel(f"group {group}", hear, lambda _up: None, take, expected)
        self._mind = Mind(self, history) if rank == 0 else None
        own = machines[self.group][rank // self._per_machine]
        self._folder = inner_folder(run, self.group, split_address(own)[1], secret)
        for other in range(1, ranks) if rank == 0 else ([0] if rank else []):
            name = f"rank {other} of this group"
            self.inner[other] = Channel(name, partial(self._hear_inner, other), partial(self._inner_up, other))
        self._door: Door | None = None
        if rank % self._per_machine == 0:
            self._door = Door(listen_for_groups(config, self.group, own), secret, self._admit, f"group {self.group}")
        self._inbox = Inbox(self._folder, rank, self._take_connection)
        for group in range(self.group):  # the higher-numbered group dials
            address = machines[group][rank // self._per_machine]
            for stream in range(CONTROL if self._mind else 0, config.streams):
                channel = self._mind.control[group] if self._mind and stream == CONTROL else self.data[group]
                connect = partial(dial_process, address, secret, self._greeting(group, rank, stream))
                keep_connected(channel, stream, connect, partial(self._refuse, group))
        try:
            self._join(join_seconds, machines[self.group][0])
        except BaseException:
            self.close()
            raise

    # ---- what training calls

    def offer(self, round: int, fragment: int, payload: bytes | memoryview) -> None:  # noqa: A002
        """Hand over this group's payload; it is sent in the background. A group that has just adopted a state may
        collect a key without having offered it."""
        key, kept = (round, fragment), payload if isinstance(payload, bytes) else bytes(payload)
        own = (self.group, self._era)
        with self.changed:
            self._payloads.setdefault(key, {})[own] = kept
            is_late = key <= self._decided
        fault = self._expected.size_fault(Item(PAYLOAD, key, *own), len(kept)) or self._expected.fault(fragment, kept)
        for channel in self.data.values():
            channel.forget(round - ROUNDS_KEPT)
            if not is_late:
                channel.send(Item(PAYLOAD, key, *own), kept)
        self._report(Item(PAYLOAD, key, *own), fault)
        self._come_to(key)

    def collect(self, round: int, fragment: int) -> dict[int, bytes]:  # noqa: A002
        """Wait for the payloads of this key, by group: the same set in every group that is connected. This group's own
        is not among them if it came too late. After it `behind` may say that there is a state to adopt."""
        key = (round, fragment)
        self._come_to(key)
        with self.changed:
            self.changed.wait_for(lambda: key in self.outcomes or self.problem or self.closed)
            if key not in self.outcomes:
                raise self.problem or PeerFailureError("The link between the groups was closed while a round waited.")
            outcome = self.outcomes.pop(key)
            held = self._payloads.get(key, {})
            self.history = outcome["history"]
            if outcome["state"]:
                self._behind, own = outcome["state"], held.get((self.group, self._era))
                self._era = outcome["era"]
                for old in [each for each in self.outcomes if each <= (outcome["last"][0], outcome["last"][1])]:
                    del self.outcomes[old]  # training goes on after the state
                return {} if own is None else {self.group: own}
            self._to_serve.extend(outcome["serve"])
            return {group: held[group, era] for group, era in outcome["set"]}

    def behind(self) -> int | None:
        """The round of a state that this group must adopt, because the others went on without it. Changes only in
        `collect` and at the start; equal on all ranks of the group."""
        return None if self._behind is None else int(self._behind["label"])

    def adopt(self) -> tuple[int, bytes]:
        """Round and outer state of a group that is in step, as given to its `serve_state`: replace the outer weights
        and momentum of this rank by it, drop what was offered and not collected, and go on from that round."""
        assert self._behind is not None, "adopt() only where behind() gives a round"
        head, self._behind = self._behind, None
        state = self._states.pop(head["id"])
        self._states = {each: later for each, later in self._states.items() if each > head["id"]}
        return head["label"], state

    def serve_state(self, round: int, state: Callable[[], bytes]) -> None:  # noqa: A002
        """Call this after every update of the outer weights. If another group waits for the outer state, `state` is
        called, now, and the result is sent in the background; it stands for all keys collected so far."""
        waiting, self._to_serve = self._to_serve, []
        for head in waiting:
            text = json.dumps({**head, "label": round}).encode()
            payload = len(text).to_bytes(4, "big") + text + state()
            self.data[head["to"]].send(Item(STATE, (head["id"], 0), self.group, 0), payload)

    def serve_last(self, label: int, state: Callable[[], bytes]) -> bool:
        """Call this when training is complete, again while it gives True: groups that are behind get the state."""
        if self._mind:
            self._mind.serve_late()
        with self.changed:
            is_over = lambda: self._is_last or self.closed or self.problem or self.is_stopped()  # noqa: E731
            self.changed.wait_for(lambda: self._to_serve or is_over(), 0.2)
            goes_on = not is_over()
        self.serve_state(label, state)
        return goes_on

    @property
    def sent_bytes(self) -> int:
        """Bytes of payloads sent, again sent ones included."""
        return sum(channel.sent_bytes for channel in self.data.values())

    @property
    def received_bytes(self) -> int:
        """Bytes of payloads received."""
        return sum(channel.received_bytes for channel in self.data.values())

    def close(self) -> None:
        """Leave; payloads on their way to connected groups are still sent, for a few seconds."""
        deadline = time.monotonic() + LAST_WORD_SECONDS
        if self._mind:
            self._mind.leave()
        control = self._mind.control if self._mind else {}
        for channel in (*self.data.values(), *self.inner.values(), *control.values()):
            channel.close(max(0.0, deadline - time.monotonic()))
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for listener in (self._door, self._inbox):
            if listener is not None:
                listener.close()

    # ---- joining

    def _greeting(self, group: int, to_rank: int, stream: int) -> Greeting:
        return Greeting(self._run, self._life, self.group, self.rank, group, to_rank, stream)

    def _admit(self, connection: Connection) -> None:
        """In the process that listens for its machine: hand a connection to the process that it is for."""
        if connection.hello == LOOKS:
            connection.close()
            return
        greeting = read_greeting(connection.hello)
        place = (greeting.group, greeting.rank, greeting.to_rank, greeting.stream)
        if (greeting.run, greeting.to) != (self._run, self.group) or place not in self._greetings_here():
            here = f"Group {self.group} of the run {self._run!r} listens there"
            connection.send({"refused": f"{here}, not group {greeting.to} of {greeting.run!r}."})
            raise ValueError("a greeting that is not for a process on this machine")
        with suppress(OSError):  # that process is not there yet
            hand_over(self._folder, connection.socket, greeting)

    def _greetings_here(self) -> set[tuple[int, int, int, int]]:
        """Group, rank, rank here and stream of all connections that come to this machine from others."""
        first = self.rank // self._per_machine * self._per_machine
        here = range(first, min(first + self._per_machine, self.ranks))
        streams = {(rank, stream) for rank in here for stream in range(0 if rank else CONTROL, self.config.streams)}
        found = {
            (group, rank, rank, stream) for group in range(self.group + 1, self.groups) for rank, stream in streams
        }
        return found | {(self.group, rank, 0, INNER) for rank in range(self.ranks) if 0 in here and rank not in here}

    def _take_connection(self, greeting: Greeting, connected: socket.socket) -> None:
        """A connection that somebody dialled, and that has proved itself, or one of this machine."""
        is_inner, is_near = greeting.stream == INNER, connected.family == socket.AF_UNIX
        channel = self.inner[greeting.rank] if is_inner else self.data[greeting.group]
        if self._mind and greeting.stream == CONTROL:
            channel = self._mind.control[greeting.group]
        address = "this machine" if is_near else address_of(connected)
        if refusal := self._refusal(greeting, channel, address):
            Connection(connected, address).send(refusal)
            connected.close()
            return
        if not is_near:
            Connection(connected, address).send({})
        if self._mind and greeting.stream == CONTROL and channel.life not in ("", greeting.life):
            self._mind.lose(greeting.group)
        channel.attach(greeting.stream, connected, greeting.life, address)

    def _refusal(self, greeting: Greeting, channel: Channel, address: str) -> dict[str, Any] | None:
        """The answer, if another process has the place of this one, and lives. Rank 0 knows whether it does, and tells
        the other ranks when it does not (`Mind.lose`): by itself none of them gives a place to another process."""
        if self._mind is None or greeting.stream == INNER:
            if channel.is_up and channel.life != greeting.life:
                raise ConnectionError("its place is not free yet")  # without an answer: it dials again
            return None
        channel = self._mind.control[greeting.group]
        is_alive = channel.is_up and time.monotonic() < channel.spoke_at + ALIVE_SECONDS
        if not is_alive or channel.life == greeting.life:
            return None
        if greeting.life not in self._twice and len(self._twice) < MOST_KEYS:
            self._twice.add(greeting.life)
            say(
                f"z2a: group {greeting.group} came twice: from {channel.peer} and from {address}. The second one is "
                f"refused."
            )
        return {"twice": [channel.peer, address]}

    def _refuse(self, group: int, error: RefusalError) -> None:
        """A process that has died without a word keeps its place for some seconds."""
        with self.changed:
            if isinstance(error, TwiceError):
                other, own = error.args
                self._refused_at = self._refused_at or time.monotonic()
                if time.monotonic() > self._refused_at + TWICE_SECONDS:
                    self.problem = self.problem or UsageError(
                        f"Group {self.group} came twice: group {group} sees it at {other}, and this one at {own}. Stop "
                        f"one of them, or give this one its own number, with --group or {GROUP_VARIABLE}."
                    )
            elif self._started is None and (self._mind or group == self.group):
                self.problem = UsageError(f"Group {group} of parallel.slow_link.groups: {error} Nothing was started.")
            self.changed.notify_all()

    def _join(self, seconds: float, first_machine: str) -> None:
        """Until rank 0 has said that all may start."""
        if self._mind:
            self._mind.start(seconds)
        else:
            greeting, deadline = self._greeting(self.group, 0, INNER), time.monotonic() + seconds
            connect = partial(dial_process, first_machine, self.secret, greeting)
            if self.rank < self._per_machine:  # rank 0 is on this machine
                connect = partial(dial_neighbour, self._folder, greeting)
            keep_connected(self.inner[0], INNER, connect, partial(self._refuse, self.group))
            with self.changed:  # as long as it takes to get a state; if rank 0 ends, that is a problem
                while not (self._started or self.problem or self.is_stopped()):
                    if time.monotonic() > deadline and not self.inner[0].is_up:
                        self.problem = PeerFailureError(
                            f"Rank {self.rank} of group {self.group} did not find rank 0 of its group."
                        )
                    self.changed.wait(0.2)
        if self._started is None and self.is_stopped():
            raise PreemptedError("Stopped while it waited for the other groups. Run the same command to continue.")
        if self.problem:
            raise self.problem
        self._begin()

    def _begin(self) -> None:
        assert self._started is not None, "rank 0 says either"
        self.history, self._behind, self._era = (self._started[name] for name in ("history", "state", "era"))

    def _inner_up(self, other: int, up: bool) -> None:
        with self.changed:
            if not up and not self.closed and self.problem is None:
                self.problem = PeerFailureError(
                    f"Rank {other} of group {self.group} has ended while the groups exchanged a round. If it printed "
                    f"an error, that is the cause."
                )
            self.changed.notify_all()

    # ---- messages

    def _come_to(self, key: Key) -> None:
        if self._mind:
            self._mind.come_to(key)

    def _tell_rank0(self, message: dict[str, Any]) -> None:
        if self._mind:
            self._mind.hear_rank(self.rank, message)
        else:
            self.inner[0].post(message)

    def _hear_inner(self, other: int, message: dict[str, Any]) -> None:
        if self._mind:
            self._mind.hear_rank(other, message)
        else:
            self.obey(message)

    def obey(self, message: dict[str, Any]) -> None:
        """What rank 0 of this group says to all its ranks, itself included."""
        with self.changed:
            if message["do"] == "start":
                self._started = message
                if message["problem"]:
                    kind, text = message["problem"]
                    kinds = {each.__name__: each for each in (UsageError, AbsentGroupsError)}
                    self.problem = for_all_ranks(kinds.get(kind, PeerFailureError)(text))
            elif message["do"] == "need":
                key = (message["key"][0], message["key"][1])
                for group, era in message["set"]:
                    if (group, era) not in self._payloads.get(key, {}):
                        self._asked.add(Item(PAYLOAD, key, group, era))
                        self.data[message["source"]].post({"do": "fetch", "key": key, "group": group, "era": era})
            elif message["do"] == "serve":
                self._to_serve.extend(message["serve"])
                self._is_last = message["is_last"]
            elif message["do"] == "lose":
                self.data[message["group"]].disconnect()
            else:
                self.outcomes[message["key"][0], message["key"][1]] = message
                # The payloads of the last key are kept for a group that lacks some of them.
                for key in [key for key in self._payloads if key <= self._decided and key not in self.outcomes]:
                    del self._payloads[key]
                self._asked = {item for item in self._asked if item.key in self._payloads or item.key > self._decided}
            if message["do"] != "need":
                self._decided = (message["last"][0], message["last"][1])
            self.changed.notify_all()

    def _hear(self, group: int, message: dict[str, Any]) -> None:
        """A message of this rank in another group."""
        key = (message["key"][0], message["key"][1])
        with self.changed:
            payload = self._payloads.get(key, {}).get((message["group"], message["era"]))
        if message["do"] == "fetch" and payload is not None:
            self.data[group].send(Item(PAYLOAD, key, message["group"], message["era"]), payload)
        elif message["do"] == "fetch":
            self.data[group].post({**message, "do": "gone"})
        elif payload is None:
            self._tell_rank0(message)

    def _take_payload(self, sender: int, item: Item, payload: bytes, fault: str) -> None:
        if item.kind == STATE:
            self._take_state(sender, item, payload, fault)
            return
        fault = fault or self._expected.fault(item.key[1], payload)
        with self.changed:
            is_asked = item.group == sender or item in self._asked
            if not is_asked or self.is_far(item.key) or (item.key <= self._decided and item.key not in self.outcomes):
                return
            held = self._payloads.setdefault(item.key, {})
            if not fault and len(held) < MOST_ERAS * self.groups:
                held.setdefault((item.group, item.era), payload)
            if len(self._payloads) > MOST_KEYS:
                del self._payloads[max(self._payloads)]
        self._report(item, fault)

    def _report(self, item: Item, fault: str) -> None:
        """Tell rank 0 that a payload is here, or that it cannot be used. All ranks of all groups look at the same bytes
        in the same way, so a group whose payload has a fault is left out of that round everywhere."""
        if fault and item.group not in self._faulty:
            where = "this group" if item.group == self.group else f"group {item.group} ({self.data[item.group].peer})"
            say(
                f"z2a: the payload of {where} for round {item.key[0]}, fragment {item.key[1]}, is not used: {fault}. "
                f"The others go on without it."
            )
        (self._faulty.add if fault else self._faulty.discard)(item.group)
        self._tell_rank0({"do": "bad" if fault else "have", "key": item.key, "group": item.group, "era": item.era})

    def _take_state(self, sender: int, item: Item, payload: bytes, fault: str) -> None:
        at = max(0, len(payload) - self._expected.state_bytes)
        if not (fault := fault or self._expected.fault(None, payload[at:])):
            head = checked(read_message(payload[4:at]), HEAD)
            with self.changed:
                self._states[head["id"]] = payload[at:]
                while len(self._states) > MOST_STATES:
                    del self._states[next(iter(self._states))]
        else:
            why = (
                f"Group {sender} ({self.data[sender].peer}) gave its outer state to this group, which cannot use it: "
                f"{fault}. Look for the cause there, and start both again from an earlier checkpoint."
            )
            head = {"id": item.key[0], "problem": why}
        self._tell_rank0({"do": "state", "head": head})
