"""A machine at the rendezvous address of a run, when something else is there."""

import http.server
import socket
import threading
import time
from contextlib import closing, suppress

import pytest

from tests.hostile import COUNTS, conversations, play
from tests.waiting import wait_until
from zero2all.common.connections import dial, listen
from zero2all.common.errors import UsageError
from zero2all.resilience import member
from zero2all.resilience.config import ResilienceConfig
from zero2all.resilience.coordinator import MachineCoordinator
from zero2all.resilience.member import Member, Rules

SECRET = b"a secret of sixteen bytes or more"


def rules(join_seconds: float = 60.0, secret: bytes = SECRET) -> Rules:
    return Rules("run", 2, 2, lambda _world: True, ResilienceConfig(), join_seconds, has_memory=False, secret=secret)


def order_of(one: Member) -> member.Order:
    return one.next_order(lambda: False, lambda _order: None)


def refusal(port: int, join_seconds: float, secret: bytes = SECRET) -> member.Order:
    """What machine 1 is told where it may not take part."""
    with closing(Member(("127.0.0.1", port), 1, 1, rules(join_seconds, secret))) as one:
        return order_of(one)


@pytest.fixture
def door():
    with listen("127.0.0.1") as found:
        yield found


@pytest.fixture
def coordinator(door):
    with closing(MachineCoordinator(door, rules())) as found:
        yield found


@pytest.fixture
def two(door, coordinator):
    found = [Member(door.getsockname(), 0, 1, rules(), coordinator.close), Member(door.getsockname(), 1, 1, rules())]
    yield found
    for one in reversed(found):
        one.close()


def test_another_program_at_the_port_is_named_at_once():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        order = refusal(server.server_port, 60.0)
        server.shutdown()
    assert order["code"] == UsageError.exit_code
    assert f"Something answers at 127.0.0.1:{server.server_port}, but it is not a z2a machine" in order["text"]


def test_a_port_that_accepts_and_stays_silent_is_said_to_be_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(member, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        order = refusal(server.getsockname()[1], 1.0)
    assert "it accepts connections, but is silent: it hangs, or the port is wrong" in order["text"]


def test_one_with_another_secret_is_told_so_at_once_and_the_run_begins_without_it(door, two, capfd):
    port, begun = door.getsockname()[1], time.monotonic()
    order = refusal(port, 600.0, b"another secret of some length")
    assert time.monotonic() - begun < 10
    assert ([order_of(one)["do"] for one in two], order["code"]) == (["start", "start"], UsageError.exit_code)
    assert f"Machine 0 at 127.0.0.1:{port} has another secret than this machine" in order["text"]
    assert "`z2a launch secret z2a.secret`" in order["text"]
    said = capfd.readouterr().err
    assert said.count("z2a: coordinator: a connection from 127.0.0.1 was refused") == 1
    assert SECRET.decode() not in said + order["text"]


HELLO = {"run": "run", "node": 1, "host": "far", "processes": 1, "token": "t", "process": 1}


def greeting(door, **changed):
    return dial(door.getsockname(), SECRET, "coordinator", {**HELLO, **changed})


@pytest.mark.usefixtures("coordinator")
def test_a_hello_with_wrong_values_ends_that_connection_only(door):
    odd = [{"node": "1"}, {"node": True}, {"processes": 0}, {"processes": 1 << 40}, {"copies": [1, 2]}, {"host": None}]
    for wrong in odd:
        with greeting(door, **wrong) as one, pytest.raises(ConnectionError):
            one.receive(10)
    with greeting(door) as honest:
        assert honest.receive(10) == {"do": "beat"}


def test_a_report_with_wrong_values_ends_that_connection_and_the_attempt(door, coordinator):
    with closing(Member(door.getsockname(), 0, 1, rules(), coordinator.close)) as first, greeting(door) as second:
        assert order_of(first)["do"] == "start"
        second.send({"attempt": 1, "leaves": True, "code": 0})  # no step
        wait_until(lambda: first.wish(has_stepped=False) == "end")


def test_a_rank_reaches_the_store_of_the_attempt_behind_the_proof_only(door, two):
    order, _ = [order_of(one) for one in two]
    with socket.socket(fileno=order["store"]) as store:
        assert store.getsockname()[0] == "127.0.0.1"
        store.settimeout(0.5)
        with socket.create_connection(door.getsockname()) as stranger:
            stranger.sendall(b"\x00\xce\xf7\x85\x3c" + bytes(100))  # as a client of torch's store greets
            with pytest.raises(TimeoutError):
                store.accept()
        with dial(door.getsockname(), SECRET, "coordinator", {"service": "store"}) as rank:
            near, _ = store.accept()
            rank.socket.sendall(b"question")
            assert near.recv(100) == b"question"
            near.sendall(b"answer")
            assert rank.socket.recv(100) == b"answer"
            near.close()


@pytest.mark.parametrize("count", COUNTS)
def test_hostile_messages_of_one_who_knows_the_secret_end_that_connection_only(count, coordinator, capfd):
    hello = {"run": "run", "node": 1, "host": "far", "processes": 1, "token": "a", "process": 7, "copies": ["far", 5]}
    report = {"attempt": 0, "code": 1, "step": 3, "began": 0, "leaves": False}
    failure = {**report, "text": "killed", "error": "", "doubt": 0}
    good = [[hello, {"trains": 0}, report], [hello, failure, {"trains": 1}], [{"service": "store"}]]
    taken = 0
    for said in conversations(count, good):
        with suppress(ValueError, ConnectionError):
            play(coordinator._take, *said)
            taken += 1
    assert 0 < taken < count
    assert coordinator._seats == {}
    assert coordinator._thread.is_alive() or coordinator._is_over
    capfd.readouterr()  # a line for each machine that has gone
