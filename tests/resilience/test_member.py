"""A machine at the rendezvous address of a run, when something else is there."""

from __future__ import annotations

import http.server
import socket
import threading

import pytest

from zero2all.common.errors import UsageError
from zero2all.resilience import member
from zero2all.resilience.config import ResilienceConfig
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
