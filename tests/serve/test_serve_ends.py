"""Ends: clients that leave, limits, tokens, loading, and the end of the server itself."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from zero2all.common.errors import BadInputError
from zero2all.infer.engine import EngineSettings
from zero2all.serve.model import ServedModel
from zero2all.serve.server import ModelServer, ServeOptions
from zero2all.track import http_server
from zero2all.track.http_server import ServerLimits

from .conftest import Served, held, serving
from .test_serve_refusals import COMPLETIONS, ask, refused

LONG: Any = {"model": "tiny", "prompt": "The capital of", "temperature": 0, "max_tokens": 4000}
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def send(served: Served, connection: socket.socket, body: dict[str, Any]) -> None:
    """Ask over a plain socket, and wait until the engine is at work."""
    raw = json.dumps(body).encode()
    connection.sendall(f"{HEAD}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    served.wait_until(lambda: served.model.stats()["running"] > 0)


@pytest.mark.parametrize("fields", [{"stream": False}, {"stream": True, "n": 3}])
def test_a_client_that_leaves_takes_its_request_with_it(served, fields):
    before = served.model.stats()["cache"]
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        send(served, connection, {**LONG, **fields})
    served.wait_until(lambda: served.model.stats()["running"] == 0)
    assert served.model.stats()["cache"]["free"] == before["free"]


def test_a_client_that_leaves_before_its_body_is_complete_is_no_error_of_ours(served, caplog):
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(f'{HEAD}Content-Length: 100\r\n\r\n{{"prompt": '.encode())
    assert ask(served, "GET", "/health")[0] == 200
    assert not caplog.records


def test_a_body_that_does_not_come_is_408_and_one_that_is_too_large_is_413_before_it_comes(served, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.2)
    for size, status in ((100, b"408"), (100_000_000, b"413")):
        with socket.create_connection(("127.0.0.1", served.port), timeout=300) as connection:
            connection.sendall(f"{HEAD}Content-Length: {size}\r\n\r\n".encode())
            assert connection.recv(100).split()[1] == status


def test_a_stream_that_nobody_reads_is_cancelled(loaded):
    many = {**LONG, "stream": True, "n": 8, "logprobs": 20}
    options = ServeOptions(port=0, grace_seconds=0, limits=ServerLimits(stalled_seconds=0.5))
    with serving(loaded, options) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # full after a few tokens
        connection.connect(("127.0.0.1", served.port))
        send(served, connection, many)
        served.wait_until(lambda: served.model.stats()["running"] == 0)
        assert 0 < served.model.stats()["generated_tokens"] < many["n"] * many["max_tokens"]


def test_too_many_waiting_are_429_and_the_first_come_is_the_first_served(loaded):
    with serving(loaded, settings=EngineSettings(max_batch=1), max_waiting=2) as served, served.client() as client:
        order: list[int] = []

        def short(number: int) -> None:
            with served.client() as own:
                own.completions.create(model="tiny", prompt=f"{number}", max_tokens=2 + 50 * number)
            order.append(number)

        with client.completions.create(**LONG, stream=True) as stream:
            next(iter(stream))
            threads = [threading.Thread(target=short, args=(number,)) for number in range(2)]
            with held(served):
                for count, thread in enumerate(threads, 1):
                    thread.start()
                    served.wait_until(lambda count=count: served.model.stats()["waiting"] == count)
                with pytest.raises(openai.RateLimitError, match="2 requests are waiting"):
                    client.completions.create(model="tiny", prompt="a")
        for thread in threads:
            thread.join(120)
        assert order == [0, 1]


def test_beyond_loopback_everything_needs_the_token_and_any_other_address_makes_one(loaded):
    options = ServeOptions(port=0, grace_seconds=0, token="a-token-of-the-test")
    with serving(loaded, options) as served:
        for path in ("/", "/v1/models", "/v1/stats"):
            assert ask(served, "GET", path)[0] == 401
        assert ask(served, "GET", "/health")[0] == 200
        assert refused(served, COMPLETIONS, {"prompt": "a"}, 401)["type"] == "authentication_error"
        with served.client("wrong") as client, pytest.raises(openai.AuthenticationError, match="token is wrong"):
            client.models.list()
        with served.client("a-token-of-the-test") as client:
            assert client.models.list().data[0].id == "tiny"
    for host, has_token in (("127.0.0.1", False), ("0.0.0.0", True)):
        server = ModelServer(ServedModel(lambda: loaded), ServeOptions(host, 0))
        server.socket.close()
        assert (server.token is not None) is has_token
        assert ("?token=" in server.page) is has_token


def test_while_the_model_is_loaded_requests_are_told_to_come_back(loaded):
    goes_on = threading.Event()
    model = ServedModel(lambda: (goes_on.wait(120), loaded)[1])
    served = Served(model, ServeOptions(port=0, grace_seconds=0), until="loading")
    assert ask(served, "GET", "/health") == (503, {"status": "loading", "running": 0, "waiting": 0})
    status, answer = ask(served, "GET", "/v1/models")
    assert (status, answer["error"]["code"]) == (503, "loading")
    assert refused(served, COMPLETIONS, {"prompt": "a"}, 503)["code"] == "loading"
    goes_on.set()
    served.wait_until(lambda: ask(served, "GET", "/health")[0] == 200)
    served.server.stop()
    served.thread.join(120)
    assert not served.thread.is_alive()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason():
    def load() -> Any:
        raise BadInputError("The folder is empty.")

    server = ModelServer(ServedModel(load), ServeOptions(port=0))
    # In a thread: where a browser is open for other tests, this one has an event loop of its own already.
    with ThreadPoolExecutor(1) as thread, pytest.raises(BadInputError, match="The folder is empty"):
        thread.submit(server.serve).result(timeout=300)


def test_a_pass_that_fails_is_500_and_the_next_request_is_served(loaded):
    """Real damage: the cache is taken away for a moment."""
    with serving(loaded) as served, served.client() as client:
        forward = served.model.service.engine.forward
        blocks, forward.blocks = forward.blocks, None
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="The engine failed"):
                client.completions.create(model="tiny", prompt="a", stream=stream)
        forward.blocks = blocks
        assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens == 2


def test_draining_lets_what_runs_finish_and_refuses_the_rest(loaded):
    with serving(loaded, ServeOptions(port=0, grace_seconds=120)) as served, served.client() as client:
        stream = client.completions.create(**{**LONG, "max_tokens": 400}, stream=True)
        next(iter(stream))
        with held(served):
            served.server.stop()
            assert ask(served, "GET", "/health")[1]["status"] == "draining"
            assert refused(served, COMPLETIONS, {"prompt": "a"}, 503)["code"] == "draining"
        assert list(stream)[-1].choices[0].finish_reason == "length"
        served.thread.join(120)
        assert not served.thread.is_alive()


def test_after_the_time_of_grace_the_rest_is_cancelled_with_what_was_written(loaded):
    with serving(loaded, ServeOptions(port=0, grace_seconds=0)) as served, served.client() as client:
        stream = client.completions.create(**LONG, stream=True)
        chunks = [next(iter(stream))]
        served.server.stop()
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "cancelled"
        assert "".join(chunk.choices[0].text for chunk in chunks)
