"""Who decides whose payloads are used: one coordinator for all groups, in rank 0 of one of them.

For every key (round, fragment) the coordinator makes a *record*: whose payloads are used. Records form a chain of
hashes; groups with the same chain have the same outer weights. Rank 0 of each group runs this code and sends its
*status* to the others, in order, after every change and every second; no other message decides anything.

1. The coordinator decides a key that training in some group has come to. It uses the payloads that every group in step
   has, and waits `wait_seconds` for those that are missing: since training came to the key, since the last part of a
   payload came, and since a connection was lost. A payload of the wrong size, or with values that are not finite, is as
   one that never came, but nobody waits for it.
2. Whoever sees a record after its own chain makes the same update. It has the payloads: that is why they were chosen.
3. If the coordinator is away (its connections are lost for `wait_seconds`, it was restarted, or it asks for a state),
   the group in step with the lowest number takes its place. The others see that by the *term*, which it raises.
4. A group that cannot follow asks another one for its state: it comes back, its training is rounds late, or it lacks a
   payload that does not come. So does the group whose chain counts fewer payloads, where two chains differ.

A coordinator that dies in the middle of a decision leaves no fork: whoever has the record shows it in its status long
before `wait_seconds` have passed, and the next coordinator follows it (2) before it decides. Only a network that is cut
for longer than `wait_seconds` makes two chains: both sides go on, because with two groups "dead" and "cut off" look
alike. When they meet again, 4 makes one of them.
"""

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero2all.common.errors import PeerFailureError, UsageError, UserError
from zero2all.diloco.config import DilocoConfig
from zero2all.diloco.messages import Bye, GroupEra, Hello, History, Key, Offer, Payload, Record, StateRequest, Status
from zero2all.diloco.transport import SILENT_SECONDS, Channel

MOST_PAYLOADS = 64
"""Of each group, that are kept at a time: more than any group needs."""
KEPT_NUMBERS = 2
"""By how much the number of a key may be lower for a group to follow the records since then without a state."""
MOST_SKIPPED = 10_000
"""Rounds between two decisions, at most: nobody waits for a round that training reaches only years later."""
STATUS_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """What training gets for a key: whose payloads are used, or a state to adopt instead."""

    members: tuple[GroupEra, ...]
    history: History
    requests: dict[int, int]
    """Groups that get the state as it is after this key, by request."""
    state: bytes | None = None


class RoundCoordinator:
    """The consensus of one group with the others: it follows the elected coordinator, or is it. All methods hold the
    lock `changed`."""

    def __init__(self, config: DilocoConfig, facts: Mapping[str, Any], history: History) -> None:
        """`facts`: what must be equal in all groups. `history`: where this group goes on."""
        assert config.group is not None, "own_group has found it"
        self.config, self.group, self._facts, self.history = config, config.group, facts, history
        self.changed = threading.Condition()
        self.is_running = self.is_lost = self.is_closed = False
        self.failure: UserError | None = None
        self.era = random.getrandbits(31)
        self.recent: tuple[Record, ...] = ()
        self.term, self.coordinator = 0, 0
        self.payloads: dict[Payload, bytes] = {}
        """Of keys that training has not collected."""
        self.outcomes: dict[Key, Outcome] = {}
        """What is decided, and not yet collected."""
        self.first_state: bytes | None = None
        """What this group begins from, if it was behind."""
        self.requests: dict[int, int] = {}
        """States that training must give to others: by request, the group."""
        self.statuses: dict[int, Status] = {}
        """The last one of every connected group."""
        self.last_chunk_at: Callable[[int], float] = lambda _group: 0.0
        """When a part of a payload of another group came last."""
        self._lost_at: dict[int, float] = {}  # when the connection to a group was lost
        self._alike: set[int] = set()  # groups with the same settings
        self._training: list[Key] = []  # keys that training has come to, and that are not decided
        self._since: dict[Key, float] = {}  # when training in some group came to a key
        self._unusable: set[Payload] = set()
        self._lacks_since = math.inf  # a payload of the next record
        self._request: StateRequest | None = None
        self._request_ids = itertools.count(random.getrandbits(31))
        self._states: dict[int, bytes] = {}  # by request
        self._offers: dict[int, Offer] = {}  # by request: states that this group gives
        self._sent: tuple[Status | None, float] = None, 0.0
        self.control = {
            group: Channel(f"group {group}", partial(self._on_message, group), partial(self._on_up, group))
            for group in range(config.count)
            if group != config.group
        }
        for channel in self.control.values():
            channel.silent_seconds = SILENT_SECONDS

    # ---- what it is told

    def training_came_to(self, key: Key) -> None:
        """Training offers or collects this key."""
        with self.changed:
            if key in self.outcomes or key in self._training or self._will_adopt:
                return
            self.is_lost |= key <= self.history.last
            self._training.append(key)
            self.changed.notify_all()

    def payload_came(self, payload: Payload, data: bytes, is_usable: bool) -> None:
        """A payload is here; one that is late is dropped, and so are those that training will not get to."""
        with self.changed:
            if payload.key <= self.history.last or self._distance(payload.key) > 2 * KEPT_NUMBERS:
                return
            if is_usable:
                self.payloads[payload] = data
                if len(self.payloads) > MOST_PAYLOADS * self.config.count:
                    del self.payloads[max(self.payloads)]
            elif len(self._unusable) < MOST_PAYLOADS * self.config.count:
                self._unusable.add(payload)
            self.changed.notify_all()

    def state_came(self, sender: int, request: int, data: bytes, problem: str) -> None:
        """A state is here, or cannot be used; only the one that was asked for counts, from the group that was asked."""
        with self.changed:
            if self._request is not None and (self._request.id, self._request.server.group) == (request, sender):
                if problem:
                    self.fail(PeerFailureError(problem))
                self._states = {request: data}
            self.changed.notify_all()

    def _on_message(self, group: int, message: Hello | Bye | Status) -> None:
        """A message of another group."""
        with self.changed:
            if isinstance(message, Hello):
                if message.facts == self._facts:
                    self._alike.add(group)
                elif not self.is_running:
                    from zero2all.parallel.rendezvous import differences  # needs torch

                    self.fail(
                        UsageError(
                            f"Group {group} differs from group {self.group}: "
                            f"{differences(self._facts, message.facts)}. Nothing was started. Start all groups with "
                            f"the same config and version of zero2all, and copy the packed data of one to all others "
                            f"if `data` (its fingerprint) differs."
                        )
                    )
            elif isinstance(message, Bye):
                self._forget(group)
                self._lost_at[group] = -math.inf  # nobody waits for it
            elif group in self._alike:
                self.statuses[group] = message
                self.act()  # at once: with the connection the status is forgotten
            self.changed.notify_all()

    def _on_up(self, group: int, is_up: bool) -> None:
        """The connection to another group is there, or lost."""
        with self.changed:
            if is_up:
                self._lost_at[group] = time.monotonic()  # until its status comes
                self.control[group].post(Hello(dict(self._facts)))
                self.control[group].post(self.status())
            else:
                self._forget(group)
            self.changed.notify_all()

    def _forget(self, group: int) -> None:
        if self.statuses.pop(group, None) is not None:
            self._lost_at[group] = time.monotonic()
        self._alike.discard(group)

    def leave(self) -> None:
        """Training has ended: the others need not wait."""
        with self.changed:
            self.is_closed = True
            for channel in self.control.values():
                channel.post(Bye())

    def fail(self, error: UserError) -> None:
        """Training of this group ends with this error."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    # ---- the start

    def missing(self) -> list[int]:
        """Groups that are not connected to all others yet; none if one of the others is already training."""
        if any(status.is_running for status in self.statuses.values()):
            return []
        absent = [group for group in self.control if group not in self.statuses]
        return absent or [group for group, status in self.statuses.items() if len(status.connected) < len(self.control)]

    def begin(self) -> None:
        """When all are there: run, from the state of another group where this one is behind."""
        if self._server() is not None:
            if (offer := self._whole_state()) is None:
                return
            self.first_state = self._continue_from(offer)
        self._lost_at = dict.fromkeys(self.control, time.monotonic()) | self._lost_at
        self.is_running = True

    # ---- the thread

    def run(self) -> None:
        """In a thread, until the link is closed."""
        with self.changed:
            while not self.is_closed:
                self.act()
                self.changed.wait(0.2)

    def act(self) -> None:
        """Follow, decide or adopt; the other groups are told before training is."""
        with self.changed:
            self._look()
            self._send_status()

    def _send_status(self) -> None:
        """To all other groups, if it has changed, and every second."""
        status, (sent, sent_at) = self.status(), self._sent
        if status != sent or time.monotonic() > sent_at + STATUS_SECONDS:
            self._sent = status, time.monotonic()
            for channel in self.control.values():
                if channel.is_up:
                    channel.post(status)

    def status(self) -> Status:
        """What other groups must know of this one."""
        now = time.monotonic()
        return Status(
            history=self.history,
            era=self.era,
            recent=self.recent,
            term=self.term,
            coordinator=self.coordinator,
            is_running=self.is_running,
            is_lost=self.is_lost,
            connected=tuple(sorted(GroupEra(group, status.era) for group, status in self.statuses.items())),
            waits_for=self._training[0] if self._training else None,
            here=tuple(sorted(payload for payload in self.payloads if payload.key > self.history.last)),
            unusable=tuple(sorted(self._unusable)),
            receives=any(now < self.last_chunk_at(group) + 2 * STATUS_SECONDS for group in self.control),
            request=self._request,
            offers=tuple(self._offers.values()),
        )

    def _look(self) -> None:
        if not self.is_running or self._will_adopt:  # what is decided now might take the place of the state
            return
        if self._server() is not None:
            if self._training and (offer := self._whole_state()) is not None:
                key = self._training[0]
                state = self._continue_from(offer)
                self.outcomes = {each: outcome for each, outcome in self.outcomes.items() if each > self.history.last}
                self.outcomes[key] = Outcome((), self.history, {}, state)
                self.changed.notify_all()
            return
        if (record := self._next_record()) is not None:
            self._follow(record)
            return
        self._find_coordinator()
        if self.coordinator == self.group:
            self._lead()

    @property
    def _will_adopt(self) -> bool:
        """Training will collect a state to adopt."""
        return any(outcome.state is not None for outcome in self.outcomes.values())

    def _distance(self, key: Key) -> int:
        """How much training has to collect before this key."""
        return key.number - min(self.outcomes).number if self.outcomes and not self._will_adopt else 0

    def collect(self, key: Key) -> tuple[Outcome, dict[int, bytes]]:
        """Wait for what is decided for a key: the payloads that are used, by group."""
        with self.changed:
            self.changed.wait_for(lambda: key in self.outcomes or self.failure or self.is_closed)
            if key not in self.outcomes:
                raise self.failure or PeerFailureError("The link between the groups was closed while a round waited.")
            outcome = self.outcomes.pop(key)
            self.requests |= outcome.requests
            found = {member.group: self.payloads[Payload(key, member)] for member in outcome.members}
            done, last = [each for each in self.payloads if each.key not in self.outcomes], self.history.last
            for each in done:
                if each.key <= last:
                    del self.payloads[each]
            return outcome, found

    # ---- adopting the state of another group

    def _server(self) -> int | None:
        """The group whose state this one must adopt; None: it is in step, or nobody is there who is. It is kept while
        it can serve: the one with the longest history may be another one after every round."""
        servers = [
            (status.history.weight, -group) for group, status in self.statuses.items() if self._must_adopt(group)
        ]
        if not servers:
            self._request = None
            return None
        members = [GroupEra(-group, self.statuses[-group].era) for _, group in sorted(servers)]
        if self._request is None or self._request.server not in members:
            self._request = StateRequest(next(self._request_ids), members[-1])
        return self._request.server.group

    def _must_adopt(self, group: int) -> bool:
        """Whether this group cannot go on without the state of that one."""
        status, key = self.statuses[group], self._training[0] if self._training else None
        is_ahead = (status.history.weight, -group) > (self.history.weight, -self.group)
        following = self._record_after_ours(status)
        if status.request is not None:
            return False
        if not self.is_running:
            return status.history.chain != self.history.chain and is_ahead
        if self.is_lost:
            return status.is_running and (is_ahead or not status.is_lost)
        if status.history.chain == self.history.chain:  # two checkpoints without a history
            return key is not None and status.waits_for is not None and status.waits_for > key
        if following is not None:
            waits_too_long = time.monotonic() > self._lacks_since + self.config.wait_seconds
            return waits_too_long or (key is not None and following.key != key)
        return is_ahead and not self._is_behind_us(status)

    def _record_after_ours(self, status: Status) -> Record | None:
        return next((record for record in status.recent if self._may_follow(record)), None)

    def _may_follow(self, record: Record) -> bool:
        """Whether a record is a valid next decision, so that a faulty member cannot mislead the others."""
        last, groups = self.history.last, [member.group for member in record.members]
        return (
            record.before == self.history.chain
            and last < record.key
            and record.key.number <= max(last.number, 0) + MOST_SKIPPED
            and len(groups) == len(set(groups))
            and all(0 <= group < self.config.count for group in groups)
        )

    def _is_behind_us(self, status: Status) -> bool:
        return any(record.before == status.history.chain for record in self.recent)

    def _whole_state(self) -> Offer | None:
        """What belongs to the state that was asked for, when it is here."""
        if self._request is None or self._request.id not in self._states:
            return None
        offers = self.statuses[self._request.server.group].offers
        return next((offer for offer in offers if offer.id == self._request.id), None)

    def _continue_from(self, offer: Offer) -> bytes:
        """The history of this group is now that of the state it adopts."""
        state = self._states.pop(offer.id)
        self.history, self.recent = offer.history, offer.recent
        self.term, self.coordinator = offer.term, offer.coordinator
        self.era, self.is_lost, self._request = random.getrandbits(31), False, None
        self._training.clear()
        self._drop_decided()
        return state

    def serves_late(self) -> bool:
        """Training is complete: find who asks for the state; False: none of those that are here will."""
        with self.changed:
            self.requests |= self._new_requests()
            return any(
                (status.request is not None and status.request.server.group == self.group)
                or (not status.is_running and status.history.chain != self.history.chain)
                for status in self.statuses.values()
            )

    def _new_requests(self) -> dict[int, int]:
        """Groups that have asked for the state since the last time."""
        requests = {
            status.request.id: group
            for group, status in self.statuses.items()
            if status.request is not None and status.request.server == GroupEra(self.group, self.era)
        }
        self._offers = {number: offer for number, offer in self._offers.items() if number in requests}
        new = {number: group for number, group in requests.items() if number not in self._offers}
        for number in new:
            self._offers[number] = Offer(number, self.history, self.recent, self.term, self.coordinator)
        return new

    # ---- following

    def _next_record(self) -> Record | None:
        """The decision that comes after our chain, from the coordinator if it has one, else from a group that has
        followed it."""
        for group in sorted(self.statuses, key=lambda group: group != self.coordinator):
            if (record := self._record_after_ours(self.statuses[group])) is not None:
                return record
        return None

    def _follow(self, record: Record) -> None:
        if self._distance(record.key) > KEPT_NUMBERS:
            self.is_lost = True  # training is late: payloads up to the state need not be kept, nobody waits for it
        elif all(Payload(record.key, member) in self.payloads for member in record.members):
            self._decide(record)
        else:
            self._lacks_since = min(self._lacks_since, time.monotonic())

    # ---- deciding

    def _find_coordinator(self) -> None:
        """Believe in the latest term; take the place of a coordinator that is away."""
        in_step = self._in_step()
        best = max([(self.term, -self.coordinator), *((each.term, -each.coordinator) for each in in_step.values())])
        self.term, self.coordinator = best[0], -best[1]
        others = {*in_step, *self._expected()}
        seen_by_others = {member.group for status in in_step.values() for member in status.connected}
        is_cut_off_here = self.coordinator not in self.statuses and self.coordinator in seen_by_others
        if self.coordinator == self.group or self.coordinator in others or is_cut_off_here:
            return
        if self.group < min(others, default=self.config.count):
            self.term, self.coordinator = self.term + 1, self.group

    def _in_step(self) -> dict[int, Status]:
        """The other groups that take part in decisions: those with our chain, or that are about to have it."""
        return {
            group: status
            for group, status in self.statuses.items()
            if status.is_running
            and not status.is_lost
            and status.request is None
            and (status.history.chain == self.history.chain or self._is_behind_us(status))
        }

    def _expected(self) -> set[int]:
        """Groups that may be in step soon: those that are about to begin with our chain, and those whose connection was
        lost a moment ago."""
        begin = {
            group
            for group, status in self.statuses.items()
            if not status.is_running and status.history.chain == self.history.chain
        }
        longest = time.monotonic() - self.config.wait_seconds
        return begin | {group for group, at in self._lost_at.items() if group not in self.statuses and at > longest}

    def _lead(self) -> None:
        """Decide the key that training has come to, here or in another group."""
        in_step = self._in_step()
        waiting = [each.waits_for for each in in_step.values() if each.history.chain == self.history.chain]
        keys = [*self._training[:1], *(key for key in waiting if key is not None and key > self.history.last)]
        if not keys:
            return
        key, own, now = max(keys), GroupEra(self.group, self.era), time.monotonic()
        progress = [self._since.setdefault(key, now), *map(self.last_chunk_at, in_step)]
        progress += [now for status in in_step.values() if status.receives]
        is_over = now > max(progress) + self.config.wait_seconds
        if is_over and Payload(key, own) in self.payloads:  # who does not get even this one cannot follow
            in_step = {group: status for group, status in in_step.items() if Payload(key, own) in status.here}
        groups = [own, *(GroupEra(group, status.era) for group, status in in_step.items())]
        members = [
            member
            for member in groups
            if Payload(key, member) in self.payloads
            and all(Payload(key, member) in status.here for status in in_step.values())
        ]
        awaited = set(groups) - set(members) - self._useless(key, in_step)
        if (awaited or self._expected()) and not is_over:
            return
        self._decide(Record(key, self.history.chain, tuple(sorted(members))))

    def _useless(self, key: Key, in_step: Mapping[int, Status]) -> set[GroupEra]:
        """Members without a usable payload for this key: it was refused, or this group will not send one because it
        adopted a state."""
        unusable = self._unusable.union(*(status.unusable for status in in_step.values()))
        found = {payload.member for payload in unusable if payload.key == key}
        own = GroupEra(self.group, self.era)
        if key in self._training and Payload(key, own) not in self.payloads:
            found.add(own)
        return found

    def _decide(self, record: Record) -> None:
        key = record.key
        self.history, self.is_lost = self.history.after(record), False
        kept = (each for each in (*self.recent, record) if each.key.number >= key.number - KEPT_NUMBERS)
        self.recent = tuple(kept)
        self._drop_decided()
        self.outcomes[key] = Outcome(record.members, self.history, self._new_requests())
        self.changed.notify_all()

    def _drop_decided(self) -> None:
        last = self.history.last
        self._training = [key for key in self._training if key > last]
        self._since = {key: at for key, at in self._since.items() if key > last}
        self._unusable = {payload for payload in self._unusable if payload.key > last}
        self._lacks_since = math.inf
