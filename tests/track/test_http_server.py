"""A server stays reachable and says little, whatever its clients do; its gate knows whom it lets through."""

import asyncio
import contextlib
import http.client
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.processes import Z2A
from tests.waiting import wait_until
from zero2all.common.errors import UsageError
from zero2all.track import http_server
from zero2all.track.access import Gate, listen
from zero2all.track.http_server import BoundedServer, ServerLimits, body_of

HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: localh"
LATE = b"GET /late HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_BODY = b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf"
WAIT = 60  # for a hang


class Small:
    def __init__(self, limits: ServerLimits) -> None:
        self.goes_on, self.streams_ended = threading.Event(), 0
        answers = (self.health, self.body, self.late, self.endless)
        app = Starlette(routes=[Route(f"/{each.__name__}", each, methods=["GET", "POST"]) for each in answers])
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.server = BoundedServer(app, limits, 1)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()

    async def health(self, _: Request) -> Response:
        return PlainTextResponse("ready")

    async def body(self, request: Request) -> Response:
        return PlainTextResponse(await body_of(request, 1000, HTTPException))

    def late(self, _: Request) -> Response:
        self.goes_on.wait(WAIT)
        return PlainTextResponse("late")

    async def endless(self, _: Request) -> Response:
        async def pieces() -> Any:
            try:
                while True:
                    yield b"x" * 100_000
                    await asyncio.sleep(0)
            finally:
                self.streams_ended += 1

        return StreamingResponse(pieces())

    def connect(self, sent: bytes, source: str = "127.0.0.1") -> socket.socket:
        connection = socket.create_connection(self.socket.getsockname(), WAIT, (source, 0))
        connection.sendall(sent)
        return connection

    def hold(self, *sent: bytes) -> list[socket.socket]:
        """Connections that the server has, with what was sent."""
        wait_until(lambda: not self.server.bounds.connections)
        held = [self.connect(each) for each in sent]
        at_work = sum(each != HALF_HEAD for each in sent)
        bounds = self.server.bounds
        wait_until(lambda: (len(bounds.tasks), len(bounds.connections)) == (at_work, len(sent)))
        return held

    def ask(self, source: str = "127.0.0.1") -> int:
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        with self.connect(request, source) as it:
            return int(it.recv(1000).split()[1])


@pytest.fixture
def small() -> Iterator[Callable[..., Small]]:
    started: list[Small] = []

    def start(**limits: Any) -> Small:
        started.append(Small(ServerLimits(**limits)))
        assert started[-1].ask() == 200
        return started[-1]

    yield start
    for each in started:
        each.goes_on.set()
        each.server.should_exit = True
        each.thread.join(WAIT)


def is_closed(connection: socket.socket) -> bool:
    if not select.select([connection], [], [], 0)[0]:
        return False
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_half_a_head_ends_however_slowly_it_grows_and_a_long_answer_does_not(small, capfd):
    server = small(head_seconds=0.3)
    answer, still, dripping = server.hold(LATE, HALF_HEAD, HALF_HEAD)

    def drip() -> bool:
        with contextlib.suppress(OSError):
            dripping.sendall(b"x")
        return is_closed(dripping)

    wait_until(drip)
    wait_until(lambda: is_closed(still))
    assert not is_closed(answer)
    server.goes_on.set()
    assert answer.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: is_closed(answer))  # it was kept for another request, and none came
    assert re.fullmatch(r"z2a: ended \d connections? whose client stopped halfway: .*\n", capfd.readouterr().err)


def test_one_too_many_closes_the_connection_that_waits_longest_for_its_client(small):
    server = small(connections=4)
    answer, body, head = server.hold(LATE, HALF_BODY, HALF_HEAD)
    assert (server.ask(), [is_closed(each) for each in (answer, body, head)]) == (200, [False, True, False])
    assert server.ask() == 200
    assert not is_closed(answer)


def test_an_address_with_its_share_of_connections_does_not_shut_out_another(small):
    server = small(connections=8)
    held = server.hold(*[LATE] * 6)
    assert (server.ask(), server.ask(source="127.0.0.2")) == (503, 200)
    assert not any(is_closed(each) for each in held)


def test_a_client_that_never_reads_is_let_go_and_one_that_reads_slowly_is_not(small):
    server = small(stalled_seconds=0.7)
    never_reads, reads = (server.connect(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(2))
    while server.streams_ended == 0:
        assert reads.recv(300_000)
        time.sleep(0.05)
    assert reads.recv(300_000)
    assert server.streams_ended == 1
    never_reads.close()


def test_bodies_have_a_limit_of_size_and_time(small, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.2)
    server = small()
    chunks = b"POST /body HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001
    for sent, status in ((HALF_BODY, b"408"), (HALF_BODY.replace(b"100", b"1001"), b"413"), (chunks, b"413")):
        with server.connect(sent) as connection:
            assert connection.recv(100).split()[1] == status


def test_a_board_with_few_file_descriptors_answers_while_many_half_heads_are_open(start, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
    board = start("board", tmp_path, "--port", 0, code=limit + Z2A)
    board.wait_until(lambda: "Ctrl-C" in board.text())
    port, held = int(re.findall(r":(\d+)/", board.text())[0]), []
    for _ in range(300):
        held.append(socket.create_connection(("127.0.0.1", port)))
        with contextlib.suppress(ConnectionError):
            held[-1].sendall(HALF_HEAD)
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    client.request("GET", "/health")
    assert client.getresponse().status == 200
    board.wait_until(lambda: "closed or refused" in board.text())
    for each in held:
        each.close()
    board.signal(signal.SIGTERM)
    board.wait()
    assert len(board.text().splitlines()) == 2


def test_what_cannot_be_accepted_is_counted_and_said_once(small, capfd):
    bounds = small().server.bounds
    for _ in range(2):
        bounds.on_loop_error(None, {"exception": OSError(24, "Too many open files"), "socket": None})
    wait_until(lambda: "not accepted" in bounds._said)
    assert re.fullmatch(r"z2a: could not accept \d connections?: .*`ulimit -n`\.\n", capfd.readouterr().err)


def behind_a_gate(token: str | None = None) -> TestClient:
    async def answer(_):
        return PlainTextResponse("inside")

    gate = Middleware(Gate, host="127.0.0.1", token=token, allowed_hosts=["proxy.example"])
    routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/", "/health")]
    return TestClient(Starlette(routes=routes, middleware=[gate]), base_url="http://127.0.0.1:6107")


def test_another_site_is_known_by_its_origin():
    for origin, status in (
        ("http://evil.example", 403),
        ("http://localhost:3000", 403),  # another program of this machine
        ("http://127.0.0.1:6107.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://127.0.0.1:6107", 200),
        ("https://proxy.example", 200),
    ):
        assert behind_a_gate().post("/", headers={"Origin": origin}).status_code == status, origin
    own = {"Origin": "null", "Sec-Fetch-Site": "same-origin"}  # a browser that says so is believed without an origin
    assert behind_a_gate().post("/", headers=own).status_code == 200


def test_a_wrong_token_is_told_from_none_and_open_paths_need_none():
    client = behind_a_gate("right")
    assert "token is wrong" not in client.get("/").text
    for wrong in (client.get("/?token=left"), client.get("/", headers={"Authorization": "Bearer left"})):
        assert wrong.status_code == 401
        assert "token is wrong" in wrong.text
    assert client.get("/health").text == "inside"
    assert client.get("/health", headers={"Origin": "http://evil.example"}).status_code == 403
    headers = {"Host": "z2a-serve.default.svc.cluster.local:6107"}
    assert client.get("/health", headers=headers).text == "inside"
    assert client.get("/", headers=headers).status_code == 421


def test_an_address_that_this_machine_does_not_have_is_named_as_the_mistake():
    with pytest.raises(UsageError, match=r"`--host 192\.0\.2\.1` is not an address of this machine") as refusal:
        listen("192.0.2.1", 0, 6107)
    assert "--port" not in str(refusal.value)
