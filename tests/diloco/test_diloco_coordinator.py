"""How groups agree, in a world without sockets, threads and clocks: many random orders of kills and delays."""

import hashlib
import heapq
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from zero2all.diloco import coordinator
from zero2all.diloco.config import DilocoConfig
from zero2all.diloco.coordinator import RoundCoordinator
from zero2all.diloco.messages import GroupEra, History, Key, Payload, Record, StateRequest
from zero2all.diloco.transport import PAYLOAD, STATE, PayloadId

WAIT_SECONDS = 1.0
STALL_SECONDS = 90.0
WORLD = None
NEW = (0, b"", History())  # number, state and history of a group that has no checkpoint


class Channel:
    """As `transport.Channel`: messages in order, payloads in any order and again after a lost connection."""

    def __init__(self, _name, on_message, on_change, on_payload=None):
        self.on_message, self.on_payload, self.on_change = on_message, on_payload, on_change
        self.life = self.peer = None
        self.connection = self.busy_until = 0
        self.last_chunk_at = 0.0
        self.unacknowledged = {}

    @property
    def is_up(self):
        return self.connection != 0

    def post(self, message):
        if self.is_up:
            self.busy_until = max(self.busy_until, WORLD.now + WORLD.delay())
            self._bring(self.busy_until, lambda peer: peer.on_message(message))

    def send(self, item, payload):
        self.unacknowledged[item] = payload
        if self.is_up:
            self._bring(WORLD.now + WORLD.delay(), lambda peer: peer.take(item, payload))

    def _bring(self, moment, deliver):
        peer, connection = self.peer, self.connection
        WORLD.at(moment, lambda: peer.connection == connection and (deliver(peer), peer.life.wake()))

    def take(self, item, payload):
        self.last_chunk_at = WORLD.now
        self.on_payload(item, payload)
        self._bring(WORLD.now + WORLD.delay(), lambda peer: peer.unacknowledged.pop(item, None))

    def forget(self, before):
        self.unacknowledged = {item: each for item, each in self.unacknowledged.items() if item.key.number >= before}

    def attach(self, peer, connection):
        self.drop(self.connection)
        self.peer, self.connection, self.busy_until = peer, connection, 0
        self.on_change(True)
        for item, payload in list(self.unacknowledged.items()):
            self.send(item, payload)

    def drop(self, connection):
        if self.is_up and self.connection == connection:
            self.connection = 0
            self.on_change(False)


class Life:
    """One process of a group, from its start until it is killed."""

    def __init__(self, group, saved):
        self.number, self.state, history = saved
        self.group, self.is_alive, self.rows, self.saved, self.has_look = group, True, [], saved, False
        config = DilocoConfig(WORLD.addresses, group, wait_seconds=WAIT_SECONDS)
        self.coordinator = RoundCoordinator(config, {}, history)
        self.control, groups = self.coordinator.control, range(len(WORLD.addresses))
        others = [other for other in groups if other != group]
        self.data = {other: Channel("", None, lambda _: None, partial(self.take, other)) for other in others}
        self.coordinator.last_chunk_at = lambda other: self.data[other].last_chunk_at
        self.coordinator.life = self
        for channel in (*self.data.values(), *self.control.values()):
            channel.life = self
        self.training, self.ready = self.train(), lambda: self.coordinator.is_running
        self.tick()

    def take(self, sender, item, payload):
        if item.kind == STATE:
            self.coordinator.state_came(sender, item.key.number, payload, "")
        else:
            is_usable = not payload.startswith(b"bad")
            self.coordinator.payload_came(Payload(item.key, item.member), payload, is_usable)

    def train(self):
        """As the loop of training does it: yields seconds to wait, or what to wait for."""
        own, state = self.coordinator, None
        yield lambda: own.is_running
        state = own.first_state
        while True:
            if state is not None:
                self.number, self.state = int.from_bytes(state[:4], "big"), state[4:]
                self.rows = []
            yield WORLD.chance.choice([0.02, 0.02, 0.02, 0.3]) if WORLD.chance.random() > 0.01 else 4.0
            key = Key(self.number, 0)
            word = "bad" if WORLD.chance.random() < 0.03 else f"  {self.group}"
            item = PayloadId(PAYLOAD, key, GroupEra(self.group, own.era))
            payload = f"{word} {self.number:6}".encode()
            for channel in self.data.values():
                channel.forget(key.number - 2)
                if key > own.history.last:
                    channel.send(item, payload)
            self.take(self.group, item, payload)
            own.training_came_to(key)
            yield lambda: key in own.outcomes  # noqa: B023
            outcome, found = own.collect(key)
            state = outcome.state
            if state is None:
                assert not any(each.startswith(b"bad") for each in found.values()), "a payload that cannot be used"
                self.state = hashlib.sha256(self.state + b"".join(found[each] for each in sorted(found))).digest()
                self.number += 1
                for request, group in own.requests.items():
                    mine = self.number.to_bytes(4, "big") + self.state
                    self.data[group].send(PayloadId(STATE, Key(request, 0), GroupEra(self.group, 0)), mine)
                own.requests.clear()
                self.rows.append((key.number, sorted(found), self.state))
                if WORLD.chance.random() < 0.2:
                    self.saved = (self.number, self.state, outcome.history)  # a checkpoint

    def wake(self):
        if self.is_alive and not self.has_look:
            self.has_look = True
            WORLD.at(WORLD.now + WORLD.delay() / 4, self.look)

    def look(self):
        self.has_look = False
        if self.is_alive:
            if not self.coordinator.is_running and not self.coordinator.missing():
                self.coordinator.begin()
            self.coordinator.act()
            if self.ready is not None and self.ready():
                self.go_on()

    def go_on(self):
        if self.is_alive:
            found = next(self.training)
            self.ready = found if callable(found) else None
            if self.ready is None:
                WORLD.at(WORLD.now + found, self.go_on)
            self.wake()

    def tick(self):
        if self.is_alive:
            self.wake()
            WORLD.at(WORLD.now + 0.2, self.tick)


class World:
    """Events in the order of their moments."""

    def __init__(self, seed, groups):
        self.chance, self.now, self.events, self.count = random.Random(seed), 0.0, [], 0
        self.addresses, self.lives, self.decided = [f"a:{group + 1}" for group in range(groups)], {}, {}
        self.slowness = self.chance.choice([0.01, 0.1, 0.5])
        self.connections = 0

    def delay(self):
        return self.slowness * self.chance.random() ** 3

    def at(self, moment, event):
        self.count += 1
        heapq.heappush(self.events, (moment, self.count, event))

    def run_until(self, is_so):
        deadline = self.now + STALL_SECONDS
        while not is_so():
            assert self.now < deadline, "it stalls"
            self.pass_seconds(0.05)

    def pass_seconds(self, seconds):
        moment = self.now + seconds
        while self.events and self.events[0][0] < moment:
            self.now, _, event = heapq.heappop(self.events)
            event()
        self.now = moment

    def start(self, group, saved=NEW):
        self.lives[group] = life = Life(group, saved)
        for other in self.lives.values():
            if other is not life:
                self.meet(life, other, self.chance.choice([0.1, 0.7]))

    def pairs(self, one, other):
        return [(one.data[other.group], other.data[one.group]), (one.control[other.group], other.control[one.group])]

    def meet(self, one, other, longest):
        def join(near, far):
            if one.is_alive and other.is_alive:
                self.connections += 1
                near.attach(far, self.connections)
                far.attach(near, self.connections)

        for near, far in self.pairs(one, other):
            self.at(self.now + longest * self.chance.random(), lambda near=near, far=far: join(near, far))

    def cut(self, one, other):
        """Each side notices at a moment of its own."""
        for pair in self.pairs(one, other):
            for end in pair:
                self.at(self.now + self.delay(), lambda end=end, number=end.connection: end.drop(number))

    def kill(self, group):
        life = self.lives.pop(group)
        life.is_alive = False
        for other in self.lives.values():
            self.cut(life, other)
        return life

    def blip(self):
        """A connection between two groups that live is lost, and there again before they count each other as dead."""
        one, other = self.chance.sample(sorted(self.lives.values(), key=lambda life: life.group), 2)
        if all(channel.is_up for pair in self.pairs(one, other) for channel in pair):
            self.cut(one, other)
            self.at(self.now + self.slowness, lambda: self.meet(one, other, 0.3))

    def check(self, coordinator, record):
        """What the head of `coordinator` says, when a group decides: nobody that is there has decided otherwise."""
        earlier = self.decided.setdefault(record.before, [])
        for first, life, era in earlier:
            if first != record:
                is_there = life.is_alive and life.coordinator.era == era
                assert not (is_there and coordinator.control[life.group].is_up), (first, record)
        earlier.append((record, coordinator.life, coordinator.era))


@pytest.fixture
def worlds(monkeypatch):
    decide = RoundCoordinator._decide

    def checked(one, record):
        WORLD.check(one, record)
        decide(one, record)

    monkeypatch.setattr(RoundCoordinator, "_decide", checked)
    monkeypatch.setattr(coordinator, "Channel", Channel)
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(monotonic=lambda: WORLD.now))

    def make(seed, groups):
        global WORLD
        random.seed(seed)  # eras
        WORLD = World(seed, groups)
        for group in range(groups):
            WORLD.start(group)
        return WORLD

    return make


def are_in_step(world, rounds):
    """All groups have been in so many rounds since they started or adopted a state, and have the same state in one."""
    lives = world.lives.values()
    if any(sum(len(row[1]) == len(lives) for row in life.rows) < rounds for life in lives):
        return False
    number = min(life.rows[-1][0] for life in lives)
    return len({str(row) for life in lives for row in life.rows if row[0] == number}) == 1


def kill_in_turn(world):
    """One after the other, each when all are in step again."""
    for _ in range(4):
        world.run_until(lambda: are_in_step(world, 3))
        world.pass_seconds(world.chance.random() / 4)
        group = world.chance.randrange(len(world.addresses))
        life = world.kill(group)
        world.pass_seconds(world.chance.choice([0.0, 0.5, 2.0]))
        world.start(group, life.saved if world.chance.random() < 0.5 else NEW)


def kill_at_any_time(world):
    """Also before the last one is back, all of them, and with lost connections between."""
    dead = {}
    for _ in range(8):
        world.pass_seconds(world.chance.random() * 3)
        if len(world.lives) > 1:
            world.blip()
        group = world.chance.randrange(len(world.addresses))
        if group in dead:
            world.start(group, dead.pop(group))
        else:
            dead[group] = world.kill(group).saved
    for group, saved in dead.items():
        world.start(group, saved)


def goes_on_without(life, others):
    """Whether its last rounds were done without any of these groups."""
    rows = life.rows[-5:]
    return len(rows) == 5 and not any(other.group in row[1] for row in rows for other in others)


def part(world):
    """The groups cannot reach each other for a while: each side goes on, and all are in step again when it heals."""
    for _ in range(2):
        world.run_until(lambda: are_in_step(world, 3))
        alone, *others = [world.lives[group] for group in range(len(world.addresses))]
        for other in others:
            world.cut(alone, other)
        world.run_until(partial(goes_on_without, alone, others))
        world.run_until(partial(goes_on_without, others[0], [alone]))
        for other in others:
            world.meet(alone, other, 0.3)


SEEDS = {2: range(6), 3: range(4), 4: range(3)}  # in `make test`, by the number of groups; in `make chaos` 40 of each


@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("play", [kill_in_turn, kill_at_any_time, part])
@pytest.mark.parametrize("seeds", [None, pytest.param(range(40), marks=pytest.mark.chaos)], ids=["few", "many"])
def test_no_order_of_kills_and_delays_makes_a_fork_or_a_stall(worlds, groups, play, seeds):
    for seed in seeds or SEEDS[groups]:
        world = worlds(seed, groups)
        try:
            play(world)
            world.run_until(lambda: are_in_step(world, 5))  # noqa: B023
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_state_is_given_as_it_is_after_the_round_in_which_it_was_asked_for():
    own = RoundCoordinator(DilocoConfig(["a:1", "b:1"], 0), {}, History())
    own.is_running = True
    member, keys = GroupEra(0, own.era), [Key(1, 0), Key(3, 0)]
    for key in keys:  # both are decided before training collects the first
        if key == keys[1]:
            own.statuses[1] = replace(own.status(), era=7, request=StateRequest(5, member))
        own.payload_came(Payload(key, member), b"", True)
        own.training_came_to(key)
        own.act()
    asked = []
    for key in keys:
        own.collect(key)
        asked.append(dict(own.requests))
    assert (asked, [(offer.id, offer.history) for offer in own.status().offers]) == ([{}, {5: 1}], [(5, own.history)])


def test_a_record_that_cannot_come_next_is_not_followed_and_a_state_counts_only_from_the_group_asked():
    coordinator = RoundCoordinator(DilocoConfig(["a:1", "b:1"], 0), {}, History())
    sound = {"before": "", "key": Key(0, 0), "members": (GroupEra(0, 0), GroupEra(1, 0))}
    assert coordinator._may_follow(Record(**sound))
    for odd in (
        {"key": Key(2**32 - 1, 0)},  # no later round would ever count
        {"key": Key(-1, -1)},
        {"before": "another chain"},
        {"members": (GroupEra(1, 0), GroupEra(1, 0))},
        {"members": (GroupEra(2, 0),)},
    ):
        assert not coordinator._may_follow(Record(**{**sound, **odd})), odd
    coordinator = RoundCoordinator(DilocoConfig(["a:1", "b:1", "c:1"], 0), {}, History())
    coordinator._request = StateRequest(7, GroupEra(1, 0))
    coordinator.state_came(2, 7, b"of a group that was not asked", "")
    coordinator.state_came(1, 8, b"that was not asked for", "")
    assert coordinator._states == {}
    coordinator.state_came(1, 7, b"state", "")
    assert coordinator._states == {7: b"state"}
