"""The engine in its own thread: many callers, cancellation, failure of a pass, the end."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.infer.tiny import tiny_model
from zero2all.common.errors import UsageError
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.sampling import Sampling
from zero2all.infer.service import Service, ServiceEndedError
from zero2all.infer.text import Piece, TextRequest, stream

ANY = Sampling(temperature=1, seed=1)


@pytest.fixture
def service():
    opened = Service(tiny_model(), EngineSettings(max_batch=8))
    yield opened
    opened.close()


def text_of(pieces) -> str:
    return "".join(piece.text for piece in pieces)


def test_many_threads_get_what_each_would_get_alone(service):
    requests = [TextRequest("hello world 中国"[:length], 10, ANY) for length in range(2, 14)] * 2
    with ThreadPoolExecutor(24) as threads:
        found = list(threads.map(lambda request: text_of(service.stream(request)), requests))
    assert found == [text_of(stream(Engine(tiny_model()), request)) for request in requests]
    assert (service.stats.running, service.stats.waiting, service.stats.generated_tokens) == (0, 0, 240)
    assert service.stats.cache_blocks_free == service.stats.cache_blocks


def test_a_cancelled_request_is_told_so_once(service):
    pieces, (begun, cancelled, ended) = [], (threading.Event() for _ in range(3))

    def deliver(piece: Piece) -> None:
        pieces.append(piece)
        begun.set()
        cancelled.wait(300)  # or all 150 tokens may be there before
        if piece.finish is not None:
            ended.set()

    ticket = service.submit(TextRequest("hello", 150, ANY), deliver)
    assert begun.wait(300)
    service.cancel(ticket)
    cancelled.set()
    assert ended.wait(300)
    service.cancel(ticket)
    assert [piece.finish for piece in pieces if piece.finish] == ["cancelled"]


def test_who_leaves_fails_or_asks_for_too_much_frees_what_it_held_and_harms_nobody(service):
    def raises(piece: Piece) -> None:
        raise ConnectionError("gone")

    with pytest.raises(UsageError, match="may have 160"):
        service.submit(TextRequest("a" * 5000), print)
    service.submit(TextRequest("hello", 50, ANY), raises)
    pieces = service.stream(TextRequest("hello", 150, ANY))
    next(pieces)
    pieces.close()
    assert text_of(service.stream(TextRequest("world", 10, ANY)))  # runs after the cancellation was carried out
    assert service.stats.cache_blocks_free == service.stats.cache_blocks


def test_a_pass_that_fails_is_told_to_those_in_it_and_the_next_request_works(service):
    decode, calls = service.engine.forward.decode, itertools.count()

    def fails_once(*given):
        if next(calls) == 2:
            raise RuntimeError("CUDA error: something\nand more")
        return decode(*given)

    service.engine.forward.decode = fails_once
    *_, last = service.stream(TextRequest("hello", 20, ANY))
    assert (last.finish, last.error) == ("error", "The engine failed: CUDA error: something")
    assert text_of(service.stream(TextRequest("hello", 5, ANY)))
    assert service.stats.cache_blocks_free == service.stats.cache_blocks


def test_the_end_waits_for_what_runs_where_asked_and_then_takes_nothing_more():
    for wait, finishes in ({"wait_seconds": 120}, ["length"]), ({}, ["cancelled", "length", "stop"]):
        service, pieces = Service(tiny_model()), []
        service.submit(TextRequest("hello", 20 if wait else 150, ANY), pieces.append)
        service.close(**wait)
        assert pieces[-1].finish in finishes
        with pytest.raises(ServiceEndedError):
            service.submit(TextRequest("hello", 5), print)
