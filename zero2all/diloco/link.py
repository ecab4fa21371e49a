"""The link between groups: payloads of every round go to all groups, and all groups use the same ones.

A *group* is an ordinary run of some processes on one or more machines; its rank 0 has this link (`ranks` joins the
other ranks to it). Groups share no process group of torch, and a group that is lost, late or restarted never stops the
others. Whose payloads are used is decided in `coordinator`. A late group gets the payloads too, and makes the same
update without its own.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero2all.common.connections import Connection, ConnectionListener, NotOfThisRunError, dial, split_address
from zero2all.common.errors import AbsentGroupsError, PreemptedError, UsageError, for_all_ranks
from zero2all.common.language import message
from zero2all.common.progress import say
from zero2all.diloco import transport
from zero2all.diloco.config import DilocoConfig
from zero2all.diloco.coordinator import KEPT_NUMBERS, RoundCoordinator
from zero2all.diloco.messages import GroupEra, History, Key, Payload, parse

GROUP_VARIABLE = "Z2A_GROUP"
"""The number of this group, where neither the config nor the command line says it."""
OF_THIS_MACHINE = ("diloco.group", "diloco.bind", "parallel.offload_folder", "parallel.cpu_threads", "parallel.device")
"""Settings that may differ between groups."""
CONTROL = -1
"""The stream of messages; payloads take those from 0."""
LAST_WORD_SECONDS = 5.0
ALIVE_SECONDS = 5.0
"""A group that has said nothing for so long may be replaced by another process; a status comes every second."""
DUPLICATE_SECONDS = 8.0
"""How long a process may be refused because another one has its place: longer than a dead one counts as alive."""
MOST_REFUSED = 64
"""Duplicates that are named in the log."""


def own_group(config: DilocoConfig) -> int:
    """The number of this group, from the config or the environment."""
    asked = os.environ.get(GROUP_VARIABLE) if config.group is None else str(config.group)
    last = len(config.groups) - 1
    if asked is None or not asked.isdigit() or int(asked) > last:
        own = "this one has no number" if asked is None else f"the number of this one is {asked}"
        text = (
            f"diloco.groups has {len(config.groups)} groups, and {own}. Give a number from 0 to {last}: "
            f"`z2a train --group N`, diloco.group, or {GROUP_VARIABLE}."
        )
        raise for_all_ranks(UsageError(text))
    return int(asked)


def link_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in all groups, of what must be equal in all processes of one."""
    return {name: value for name, value in settings.items() if name not in OF_THIS_MACHINE}


@dataclass(frozen=True)
class Membership:
    """What a group must know to join the others."""

    config: DilocoConfig
    """With the number of the group."""
    run: str
    facts: Mapping[str, Any]
    """What must be equal in all groups (`link_facts`), as JSON has it."""
    secret: bytes
    """Who does not know it is not heard."""
    expected: transport.Expected
    join_seconds: float = 300.0
    history: str = ""
    """What `GroupLink.history` was when the state was saved from which this group continues."""
    is_stopped: Callable[[], bool] = lambda: False
    """Whether a signal has come, which ends the waiting."""


class GroupLink:
    """The link of one group. All groups offer and collect the same keys, in ascending order."""

    def __init__(self, me: Membership) -> None:
        """Join the other groups; PreemptedError on a signal, UsageError where groups do not fit together."""
        config, history = me.config, History.read(me.history)
        self._me, self._coordinator = me, RoundCoordinator(config, me.facts, history)
        self.group = self._coordinator.group
        self.history = me.history
        self._life = f"{random.SystemRandom().getrandbits(64):x}"
        self._refused_at: float | None = None  # when it was refused first, because of another process
        self._refused: set[str] = set()  # processes that were refused here
        self._faulty: set[int] = set()  # groups whose last payload could not be used
        self._state: bytes | None = None
        self._is_over = False
        self.data = {
            group: transport.Channel(
                f"group {group}", lambda _: None, lambda _: None, partial(self._take_payload, group), me.expected
            )
            for group in self._coordinator.control
        }
        self._coordinator.last_chunk_at = lambda group: self.data[group].last_chunk_at
        self._door = ConnectionListener(
            transport.listen_for_groups(config, self.group), me.secret, self._admit, f"group {self.group}"
        )
        for group in range(self.group):  # the higher-numbered group dials
            for stream in range(CONTROL, config.streams):
                greeting = transport.Greeting(me.run, self._life, self.group, group, stream)
                connect = partial(transport.dial_group, config.groups[group], me.secret, greeting)
                transport.keep_connected(
                    self._channel(group, stream), stream, connect, partial(self._on_refusal, group)
                )
        threading.Thread(target=self._coordinator.run, daemon=True, name="diloco-coordinator").start()
        try:
            wait_for_groups(self._coordinator, me.secret, me.join_seconds, me.is_stopped)
            if self._coordinator.failure is not None:
                raise self._coordinator.failure
            if not self._coordinator.is_running:
                raise PreemptedError("Stopped while it waited for the other groups. Run the same command to continue.")
        except BaseException:
            self.close()
            raise
        self.history, self._state = self._coordinator.history.text(), self._coordinator.first_state

    def offer(self, key: Key, payload: bytes) -> None:
        """Hand over this group's payload; it is sent in the background."""
        coordinator = self._coordinator
        item = transport.PayloadId(transport.PAYLOAD, key, GroupEra(self.group, coordinator.era))
        for channel in self.data.values():
            channel.forget(key.number - KEPT_NUMBERS)
            if key > coordinator.history.last:  # else it is late
                channel.send(item, payload)
        self._judge(item, payload, self._me.expected.size_fault(item, len(payload)))
        coordinator.training_came_to(key)

    def collect(self, key: Key) -> dict[int, bytes]:
        """Wait for the payloads of this key, by group: the same set in every group that is connected. This group's own
        is not among them if it came too late. After it `is_behind` may say that there is a state to adopt."""
        self._coordinator.training_came_to(key)
        outcome, found = self._coordinator.collect(key)
        self.history, self._state = outcome.history.text(), outcome.state
        return found

    @property
    def is_behind(self) -> bool:
        """Whether this group must adopt a state, because the others went on without it. Changes only in `collect` and
        at the start."""
        return self._state is not None

    def adopt(self) -> bytes:
        """The outer state of a group that is in step, as given to its `serve`: go on from it."""
        assert self._state is not None, "adopt() only where the group is behind"
        state, self._state = self._state, None
        return state

    @property
    def is_asked(self) -> bool:
        """Whether other groups wait for the outer state of this one."""
        return bool(self._coordinator.requests)

    def serve(self, state: bytes) -> None:
        """Give the outer state, as it is after all keys collected so far, to the groups that wait for it."""
        with self._coordinator.changed:
            requests, self._coordinator.requests = self._coordinator.requests, {}
        for number, group in requests.items():
            self.data[group].send(transport.PayloadId(transport.STATE, Key(number, 0), GroupEra(self.group, 0)), state)

    def stays(self) -> bool:
        """Call this when training is complete, again while it gives True: groups that are behind may ask for the
        state."""
        coordinator = self._coordinator
        if not coordinator.serves_late() or coordinator.is_closed or coordinator.failure or self._me.is_stopped():
            return False
        with coordinator.changed:
            coordinator.changed.wait_for(lambda: coordinator.requests, 0.2)
        return True

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
        self._coordinator.leave()
        for channel in (*self.data.values(), *self._coordinator.control.values()):
            channel.close(max(0.0, deadline - time.monotonic()))
        self._door.close()

    def _channel(self, group: int, stream: int) -> transport.Channel:
        return self._coordinator.control[group] if stream == CONTROL else self.data[group]

    def _admit(self, connection: Connection) -> None:
        """A connection from another group, which has proved itself."""
        if connection.hello == LOOKS:
            connection.close()
            return
        greeting, run = parse(transport.Greeting, connection.hello), self._me.run
        is_known = greeting.group in range(self.group + 1, self._me.config.count)
        is_meant = (greeting.run, greeting.to) == (run, self.group)
        if not (is_known and is_meant and greeting.stream in range(CONTROL, self._me.config.streams)):
            here = f"Group {self.group} of the run {run!r} listens there"
            connection.send({"refused": f"{here}, not group {greeting.to} of {greeting.run!r}."})
            raise ValueError("a greeting that is not for this group")
        control = self._coordinator.control[greeting.group]
        is_alive = control.is_up and time.monotonic() < control.last_message_at + ALIVE_SECONDS
        if is_alive and control.life != greeting.life:
            self._refuse_duplicate(greeting, control.peer, connection)
            return
        if greeting.stream == CONTROL and control.life != greeting.life:  # end the connections to the one before
            self.data[greeting.group].disconnect()
            control.disconnect()
        elif greeting.stream != CONTROL and not (control.is_up and control.life == greeting.life):
            raise ConnectionError("its first stream is not here yet")  # without an answer: it dials again
        connection.send({})
        channel = self._channel(greeting.group, greeting.stream)
        channel.attach(greeting.stream, connection.socket, greeting.life, connection.address)

    def _refuse_duplicate(self, greeting: transport.Greeting, first: str, connection: Connection) -> None:
        if greeting.life not in self._refused and len(self._refused) < MOST_REFUSED:
            self._refused.add(greeting.life)
            say(
                f"z2a: group {greeting.group} connected twice: from {first} and from {connection.address}. The second "
                f"one is refused."
            )
        with suppress(OSError):
            connection.send({"duplicate": [first, connection.address]})
        connection.close()

    def _on_refusal(self, group: int, error: transport.RefusalError) -> None:
        """A duplicate is an error only after some seconds: the connection of a process that crashed stays open for a
        while."""
        coordinator = self._coordinator
        if isinstance(error, transport.DuplicateError):
            other, own = error.args
            self._refused_at = self._refused_at or time.monotonic()
            if time.monotonic() > self._refused_at + DUPLICATE_SECONDS:
                coordinator.fail(
                    UsageError(
                        f"Group {self.group} connected twice: group {group} sees it at {other}, and this one at {own}. "
                        f"Stop one of them, or give this one its own number, with --group or {GROUP_VARIABLE}."
                    )
                )
        elif not coordinator.is_running:
            coordinator.fail(UsageError(f"Group {group} of diloco.groups: {error} Nothing was started."))

    def _take_payload(self, sender: int, item: transport.PayloadId, payload: bytes, fault: str) -> None:
        if item.kind == transport.STATE:
            if fault := fault or self._me.expected.fault(None, payload):
                fault = (
                    f"Group {sender} ({self.data[sender].peer}) gave its outer state to this group, which cannot use "
                    f"it: {fault}. Look for the cause there, and start both again from an earlier checkpoint."
                )
            self._coordinator.state_came(sender, item.key.number, payload, fault)
        elif item.member.group == sender:
            self._judge(item, payload, fault)

    def _judge(self, item: transport.PayloadId, payload: bytes, fault: str) -> None:
        """Whether a payload can be used. All groups look at the same bytes in the same way, so a group whose payload
        has a fault is left out of that round everywhere."""
        group, (number, fragment) = item.member.group, item.key
        fault = fault or self._me.expected.fault(fragment, payload)
        if fault and group not in self._faulty:
            where = "this group" if group == self.group else f"group {group} ({self.data[group].peer})"
            say(
                f"z2a: the payload of {where} for round {number}, fragment {fragment}, is not used: {fault}. The "
                f"others go on without it."
            )
        (self._faulty.add if fault else self._faulty.discard)(group)
        self._coordinator.payload_came(Payload(item.key, item.member), payload, not fault)


LOOK_SECONDS, NOTICE_SECONDS, AGAIN_SECONDS = 1.0, 10.0, 60.0
"""While a group waits for another: pause between two looks why it does not come, and when that is said."""
REASON_SECONDS = 0.5
"""After a failed start: so that the other groups see what differs, too."""
LOOKS = {"looks": True}
"""The hello of a process that only wants to know who listens."""


def wait_for_groups(
    coordinator: RoundCoordinator, secret: bytes, seconds: float, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the coordinator runs or has failed, or a signal comes."""
    reasons: list[str] = []
    threading.Thread(target=_look_for_missing, args=(coordinator, secret, reasons), daemon=True).start()
    deadline = time.monotonic() + seconds
    with coordinator.changed:
        while not _is_over(coordinator) and not is_stopped():
            if not coordinator.missing():
                coordinator.begin()
                # As long as it takes to get a state, while the group that has it is there.
                deadline = max(deadline, time.monotonic() + seconds)
            elif time.monotonic() > deadline:
                coordinator.fail(_absence(coordinator, seconds, reasons))
            coordinator.changed.wait(0.2)
    if coordinator.failure is not None:
        time.sleep(REASON_SECONDS)


def _is_over(coordinator: RoundCoordinator) -> bool:
    return coordinator.is_running or coordinator.failure is not None or coordinator.is_closed


def _absence(coordinator: RoundCoordinator, seconds: float, reasons: list[str]) -> AbsentGroupsError:
    """Who did not come in time."""
    config = coordinator.config
    names = ", ".join(f"{group} ({config.groups[group]})" for group in coordinator.missing())
    lines = [
        f"These groups of {config.count} did not join within parallel.join_seconds ({seconds:g} s): {names}. Look for "
        f"their errors, and check that their addresses in diloco.groups are right and that no firewall blocks the "
        f"port.",
        *reasons,
    ]
    if coordinator.history.weight:
        lines.append(
            "If they have finished the run, start them again, too: they give their final weights to this group. Or "
            "copy their run folder."
        )
    return AbsentGroupsError(" ".join(lines))


def _look_for_missing(coordinator: RoundCoordinator, secret: bytes, reasons: list[str]) -> None:
    """In a thread: find out why other groups do not come, and say it after a while."""
    say_at = time.monotonic() + NOTICE_SECONDS
    while True:
        with coordinator.changed:
            if coordinator.changed.wait_for(lambda: _is_over(coordinator), LOOK_SECONDS):
                return
            missing = coordinator.missing()
        reasons[:] = [_why_missing(coordinator, group, secret) for group in missing]  # no lock: a name may take seconds
        if reasons and time.monotonic() > say_at:
            say_at = time.monotonic() + AGAIN_SECONDS
            say(f"z2a: waiting for other groups. {' '.join(reasons)}")


def _why_missing(coordinator: RoundCoordinator, group: int, secret: bytes) -> str:
    from zero2all.parallel.rendezvous import why_not_reached  # needs torch

    own, address = coordinator.group, coordinator.config.groups[group]
    if group in coordinator.statuses:
        return message(f"Group {group} at {address} is here, but has not met all other groups.")
    try:
        dial(split_address(address), secret, f"group {group}", LOOKS, LOOK_SECONDS).close()
        why = ""
    except NotOfThisRunError as error:
        why = str(error)
    except OSError:
        why = why_not_reached(*split_address(address), f"group {group}")
    if why:
        return message(f"Group {group} cannot be reached at {address}: {why}.")
    if group < own:
        return message(f"At {address} something answers, but not as group {group} does: the port is wrong.")
    here = coordinator.config.groups[own]
    why = f"a firewall blocks the way to {here}, it has another address for group {own}, or the port is wrong"
    return message(f"Group {group} at {address} can be reached, but has not connected to group {own}: {why}.")
