"""A machine at the rendezvous address of a run, when something else is there."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from zero2all.common.errors import UsageError
from zero2all.resilience import member
from zero2all.resilience.config import ResilienceConfig
from zero2all.resilience.meeting import GREETING, Meeting
from zero2all.resilience.member import Member, Rules


def machine(port: int, join_seconds: float) -> Member:
    rules = Rules("run", 2, 2, lambda _world: True, ResilienceConfig(), join_seconds, has_memory=False)
    return Member(("127.0.0.1", port), 1, 1, rules)


def next_order(one: Member) -> member.Order:
    try:
        return one.next_order(lambda: False, lambda _order: None)
    finally:
        one.close()


def test_another_program_at_the_port_is_named_at_once():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        order = next_order(machine(server.server_port, 60.0))
        server.shutdown()
    assert order["code"] == UsageError.exit_code
    assert f"Something answers at 127.0.0.1:{server.server_port}, but it is not a z2a machine" in order["text"]


def test_a_port_that_accepts_and_stays_silent_is_said_to_be_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(member, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        order = next_order(machine(server.getsockname()[1], 1.5))
    assert "it accepts connections, but is silent: it hangs, or the port is wrong" in order["text"]


def test_the_greeting_of_a_rank_reaches_the_store_in_one_piece():
    """torch's store refuses one that comes in two, and the rank would try again after up to a minute."""
    rules = Rules("run", 2, 2, lambda _world: True, ResilienceConfig(), 60.0, has_memory=False)
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("127.0.0.1", 0)) as door:
        address = door.getsockname()
        meeting = Meeting(door.dup(), store.dup, rules)
        machines = [Member(address, 0, 1, rules, meeting.close), Member(address, 1, 1, rules)]
        for order in [one.next_order(lambda: False, lambda _order: None) for one in machines]:
            assert order["do"] == "start"
        with socket.create_connection(address) as rank, ThreadPoolExecutor(1) as threads:
            rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = threads.submit(lambda: store.accept()[0].recv(100))
            for piece in (GREETING[:1], GREETING[1:]):
                rank.sendall(piece)
                time.sleep(0.2)
            assert found.result(10) == GREETING
        for one in reversed(machines):
            one.close()
