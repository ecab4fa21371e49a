"""Whoever does not belong to the groups of a run, or sends what none of them sends, harms nobody."""

import json
import random
import re
import socket
import threading
import time
import tracemalloc
from contextlib import suppress
from dataclasses import asdict

import pytest

from tests.diloco.group_worker import PAYLOAD_BYTES, SECRET, STATE_BYTES, do_rounds, expected, membership, payload_of
from tests.diloco.test_diloco_coordinator import worlds  # noqa: F401, a fixture
from tests.diloco.test_diloco_link import Threads, free_ports, settings_of
from tests.hostile import COUNTS, SEED, hostile_value
from tests.waiting import wait_until
from zero2all.common import connections
from zero2all.common.connections import NotOfThisRunError, dial, split_address
from zero2all.common.errors import PeerFailureError, PreemptedError, UsageError
from zero2all.diloco.config import DilocoConfig
from zero2all.diloco.link import CONTROL, GroupLink
from zero2all.diloco.messages import GroupEra, Key, Payload, Record, StateRequest, Status, parse, read, write
from zero2all.diloco.transport import CHUNK_BYTES, HEADER, MARK, MESSAGE, PAYLOAD, STATE, Channel, Greeting, _crc


class Pair:
    """Two groups that do rounds until they are told to end."""

    def __init__(self):
        self.settings, self.logs, self.is_over = settings_of(2), {}, threading.Event()
        self.address = split_address(self.settings[0].groups[0])
        self.threads = Threads(self.settings, self.work)
        wait_until(lambda: all(len(self.logs.get(group, [])) > 1 for group in range(2)))

    def work(self, link):
        log = self.logs.setdefault(link.group, [])
        slow = {number: lambda: time.sleep(0.01) for number in range(1000)} | {20: lambda: self.is_over.wait(60)}
        return do_rounds(link, log.append, 22, slow=slow)

    def ends_unharmed(self):
        self.is_over.set()
        found = self.threads.ends()
        assert isinstance(found[0], bytes), found
        assert found[0] == found[1]
        assert all(row["set"] == [0, 1] for row in self.logs[0])


def greeting_of(**fields):
    return {**asdict(Greeting("test", "a stranger's", 1, 0, 0)), **fields}


def answer_to(address, hello):
    with dial(address, SECRET, "group 0", hello) as connection:
        return connection.receive(10)


def proved(address):
    """A connection that has proved itself and has not said hello."""
    connected = socket.create_connection(address, 10)
    start = connected.recv(1 << 10)
    nonces = start[len(connections.MAGIC) :] + bytes(32)
    connected.sendall(connections.MAGIC + bytes(32) + connections._proof(SECRET, "dialer", "group 0", nonces))
    assert len(connected.recv(32)) == 32
    return connected


def test_who_does_not_know_the_secret_learns_nothing_and_the_log_names_the_address(capfd):
    pair = Pair()
    heard = b""
    silent = socket.create_connection(pair.address)
    strays = (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", json.dumps(greeting_of()).encode(), b"[" * 5000, bytes(64))
    for text in strays:
        with socket.create_connection(pair.address, 10) as stranger, suppress(ConnectionError):
            stranger.sendall(text.ljust(64, b" "))
            while piece := stranger.recv(1 << 10):
                heard += piece
    assert (b"test" in heard, b"seed" in heard) == (False, False)  # the name of the run, and a setting
    with pytest.raises(NotOfThisRunError, match="z2a launch secret"):
        dial(pair.address, b"another secret of some length", "group 0", greeting_of())
    outsider = DilocoConfig([pair.settings[0].groups[0], f"127.0.0.1:{free_ports(1)[0]}"], 1)
    found = Threads([outsider], lambda link: link.adopt(), secret=b"another secret of some length").ends()
    assert isinstance(found[1], UsageError)
    assert re.search("(?s)the other side has another secret.*--secret-file", str(found[1]))
    pair.ends_unharmed()
    silent.close()
    assert capfd.readouterr().err.count("group 0: a connection from 127.0.0.1 was refused") == 1


@pytest.fixture(scope="module")
def lasting_pair():
    pair = Pair()
    yield pair
    pair.ends_unharmed()


def test_a_greeting_that_no_process_of_the_groups_sends_takes_no_place_in_them(lasting_pair):
    for fields in ({"stream": 4}, {"stream": -2}, {"group": 0}, {"group": 2}, {"run": "other"}, {"to": 1}):
        answer = answer_to(lasting_pair.address, greeting_of(**fields))
        assert answer["refused"].startswith("Group 0 of the run 'test' listens there"), fields
    for stream in (CONTROL, 0, 3):
        assert answer_to(lasting_pair.address, greeting_of(stream=stream))["duplicate"]
    wrong = [{"group": "1"}, {"group": True}, {"to": 2**70}, {"more": 1}]
    for hello in ({}, *({**greeting_of(), **fields} for fields in wrong)):
        with dial(lasting_pair.address, SECRET, "group 0", hello) as connection, pytest.raises(ConnectionError):
            connection.receive(10)
    for text in (b'{"life":' + b"[" * 990 + b"]" * 990 + b"}", b"[" * 8000):
        stranger = proved(lasting_pair.address)
        stranger.sendall(len(text).to_bytes(4, "big") + text)
        with suppress(ConnectionError):
            assert stranger.recv(1) == b""
    assert answer_to(lasting_pair.address, greeting_of(to=1))["refused"]  # the port still answers


def frame(kind, key, offset, total, body, group=1, era=0, length=None):
    head = HEADER.pack(MARK, kind, *key, group, era, offset, total, len(body) if length is None else length)
    return head + _crc(head, body).to_bytes(4, "big") + body


def test_a_size_that_is_announced_takes_no_memory_and_its_sender_is_named(capfd):
    """By one who knows the secret, as the data stream of a group that is away."""
    settings = settings_of(2, wait_seconds=0.5)
    is_over = threading.Event()
    threads = Threads(settings[:1], lambda _link: is_over.wait(60), join_seconds=5.0)
    address = split_address(settings[0].groups[0])
    wait_until(lambda: reaches(address))
    tracemalloc.start()
    for kind, total in ((PAYLOAD, 8 << 30), (STATE, 8 << 30), (PAYLOAD, 1 << 36), (STATE, STATE_BYTES + 1)):
        with welcomed(address, CONTROL), welcomed(address, 0) as connection, suppress(ConnectionError):
            for offset in range(0, 8 * CHUNK_BYTES, CHUNK_BYTES):
                connection.socket.sendall(frame(kind, (9999, 0), offset, total, bytes(CHUNK_BYTES)))
            connection.socket.recv(1)  # it is told that nothing more of it is wanted
            connection.socket.sendall(frame(kind, (9999, 9), 0, total, bytes(CHUNK_BYTES)))
            while connection.socket.recv(1 << 12):
                pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    said = capfd.readouterr().err
    assert said.count("z2a: group 1: the connection with 127.0.0.1:") == 1  # ended for the last frame, once a minute
    assert said.count("z2a: the payload of group 1 (127.0.0.1:") == 1
    assert f"for round 9999, fragment 0, is not used: it has {8 << 30} bytes instead of {PAYLOAD_BYTES}." in said
    is_over.set()
    assert isinstance(threads.ends(60)[0], PeerFailureError)  # nobody came as group 1


def welcomed(address, stream):
    """A connection as group 1; the one before it may not be forgotten yet, and then this one is ended."""
    for _ in range(100):
        connection = dial(address, SECRET, "group 0", greeting_of(stream=stream))
        with suppress(ConnectionError):
            assert connection.receive(10) == {}
            return connection
        connection.close()
        time.sleep(0.1)
    raise AssertionError("group 1 was never let in")


def reaches(address):
    with suppress(OSError):
        socket.create_connection(address, 1).close()
        return True
    return False


def test_a_payload_that_cannot_be_used_is_left_out_by_all_ranks_of_all_groups_at_once(capfd):
    """Nobody waits for another one: wait_seconds is longer than the test may take."""
    bad, sets = {2: b"\xff" * PAYLOAD_BYTES, 3: bytes(PAYLOAD_BYTES + 1)}, {}

    def work(link):
        for number in range(5):
            key, payload = Key(number, 0), payload_of(link.group, number)
            link.offer(key, bad.get(number, payload) if link.group == 1 else payload)
            sets.setdefault(link.group, []).append(sorted(link.collect(key)))
        return "done"

    found = Threads(settings_of(3, wait_seconds=300.0), work).ends(120)
    assert set(found.values()) == {"done"}
    assert {str(each) for each in sets.values()} == {str([[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 1, 2]])}
    said = capfd.readouterr().err
    assert said.count("z2a: the payload of group 1 (127.0.0.1:") == 2  # in the other two groups
    assert "z2a: the payload of this group for round 2, fragment 0, is not used: it is bad." in said


def test_a_group_listens_at_its_own_address_only_and_says_what_to_add_where_it_has_none():
    port = free_ports(1)[0]
    link = DilocoConfig([f"127.0.0.3:{port}", f"127.0.0.1:{free_ports(1)[0]}"], 0)
    is_stopped = threading.Event()
    waiting = threading.Thread(target=lambda: suppressed(link, is_stopped.is_set), daemon=True)
    waiting.start()
    wait_until(lambda: reaches(("127.0.0.3", port)))
    assert not reaches(("127.0.0.1", port))
    is_stopped.set()
    waiting.join(30)
    elsewhere = DilocoConfig(["192.0.2.7:29600", "127.0.0.1:29601"], 0)
    with pytest.raises(UsageError, match=r"192\.0\.2\.7:29600, which is not .*diloco\.bind 127\.0\.0\.1:29600$"):
        suppressed(elsewhere, lambda: True)


def suppressed(config, is_stopped):
    with suppress(PreemptedError):
        GroupLink(membership(config, is_stopped=is_stopped, join_seconds=30.0))


DELIVERED = {"is": "Delivered", "kind": 1, "member": [1, 0], "key": [1, 0]}


def random_frames(chance):
    """Frames of which some field is wrong, with the right checksum or not, cut or not."""
    key = (chance.choice([0, 1, 2**32 - 1]), chance.choice([0, 1, 2, 2**32 - 1]))
    kind = chance.choice([MESSAGE, PAYLOAD, STATE, 3, 255])
    if kind == MESSAGE:
        value = json.dumps(hostile_value(chance, DELIVERED)).encode()
        body = chance.choice([value, value, b"[" * chance.randrange(3000), chance.randbytes(20)])
        total, offset = chance.choice([(0, 0), (5, 7)])
    else:
        total = chance.choice([0, 1, PAYLOAD_BYTES, STATE_BYTES, STATE_BYTES + 10, CHUNK_BYTES + 5, 2**33, 2**64 - 1])
        offset = chance.choice([0, 0, 0, 1, CHUNK_BYTES, 2**63])
        body = chance.randbytes(min(total, chance.choice([total, total, 0, 7]), 4000))
    length = chance.choice([None, None, None, 0, 2**32 - 1])
    whole = frame(kind, key, offset, total, body, chance.randrange(4), chance.choice([0, 2**32 - 1]), length)
    if chance.random() < 0.2:
        at = chance.randrange(len(whole))
        whole = whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :]
    return whole[: chance.randrange(len(whole))] if chance.random() < 0.1 else whole


@pytest.mark.parametrize("cases", COUNTS)
def test_no_frames_make_another_error_than_those_that_end_a_connection(cases):
    chance, came = random.Random(SEED), []
    tracemalloc.start()
    tracemalloc.reset_peak()  # another test of this process may have left it running
    channel = Channel("fuzz", lambda _: None, lambda _: None, lambda *each: came.append(each), expected())
    for _ in range(cases):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(b"".join(random_frames(chance) for _ in range(chance.randrange(1, 4))))
            theirs.close()
            with pytest.raises((OSError, ValueError, KeyError, TypeError, IndexError)):
                channel._receive_all(0, ours)
        channel._messages.clear()
        for item, data, fault in came:
            right = STATE_BYTES if item.kind == STATE else PAYLOAD_BYTES
            assert len(data) == (0 if fault else right)
        came.clear()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    assert len(channel._arriving) <= 64


@pytest.mark.parametrize("cases", COUNTS)
def test_no_greeting_or_status_that_passes_the_check_stops_who_reads_it(cases, worlds):  # noqa: F811
    chance, own = random.Random(SEED), worlds(SEED, 3).lives[0].coordinator
    own._alike, own.is_running = {1, 2}, True
    key, member = Key(1, 0), GroupEra(1, 5)
    record = Record(key, own.history.chain, (GroupEra(0, own.era), member))
    status = Status(
        own.history._replace(chain="a"), 5, (record,), 1, 1, True, False, (member,), key,
        (Payload(key, member),), (Payload(Key(2, 0), member),), False, StateRequest(3, GroupEra(0, own.era)), (),
    )  # fmt: skip
    offer = {"id": 7, "history": ["a", 1, [0, 0]], "recent": [asdict(record)], "term": 1, "coordinator": 1}
    good_status = {**json.loads(write(status)), "offers": [offer]}

    def hear(message):
        own._on_message(chance.choice([1, 2]), read(message))
        own.act()
        json.loads(write(own.status()))

    for good, read_it in ((greeting_of(), lambda message: parse(Greeting, message)), (good_status, hear)):
        read_it(json.loads(json.dumps(good)))
        for _ in range(cases // 2):
            bad = hostile_value(chance, json.loads(json.dumps(good)))
            with suppress(ValueError):
                read_it(bad if isinstance(bad, dict) else {"is": bad})
            own._training = [chance.choice([Key(1, 0), Key(2, 1)])] if chance.random() < 0.5 else []
            own._states = {own._request.id: b"\0" * STATE_BYTES} if own._request is not None else {}
            own.outcomes.clear()
