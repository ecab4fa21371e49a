"""The engine in a thread of its own: requests from many threads, answers by callback.

The thread owns the engine. Others put orders into a queue; the thread takes them between two steps.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from zero2all.common.errors import UserError
from zero2all.infer.engine import EngineSettings
from zero2all.infer.job import Job
from zero2all.infer.load import LoadedModel
from zero2all.infer.spread import make_engine
from zero2all.infer.text import Piece, TextJob, TextRequest, engine_request

Deliver = Callable[[Piece], None]
RATE_SECONDS = 5.0
"""Tokens per second are counted over this long."""


@dataclass(eq=False)
class Ticket:
    """A request that was taken."""

    request: TextRequest
    deliver: Deliver
    prompt_tokens: int
    job: TextJob | None = None


@dataclass(frozen=True)
class Stats:
    """What the engine is doing."""

    running: int
    waiting: int
    generated_tokens: int
    tokens_per_second: float
    cache_blocks: int
    cache_blocks_free: int


class Service:
    """An engine that many threads may use."""

    def __init__(self, loaded: LoadedModel, settings: EngineSettings | None = None) -> None:
        self.loaded = loaded
        self.engine = make_engine(loaded, settings)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[Job, Ticket] = {}
        self._unfinished: set[Ticket] = set()  # these and what the engine's thread has not taken yet
        self._gate = threading.Lock()  # nothing is taken after the end
        self._rates: deque[tuple[float, int]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="z2a-engine", daemon=True)
        self._thread.start()

    def submit(self, request: TextRequest, deliver: Deliver) -> Ticket:
        """Take a request; `deliver` gets its pieces, in the engine's thread. A request that cannot be served raises a
        UserError here and now."""
        # Here and not in the engine's thread: a long prompt takes a while, and the others' answers go on.
        prepared = engine_request(self.engine, request)
        ticket = Ticket(request, deliver, prepared.prompt_tokens)

        def start() -> None:
            try:
                ticket.job = TextJob(self.engine, request, prepared)
            except Exception as error:
                self._unfinished.discard(ticket)
                deliver(Piece("", finish="error", error=f"The engine failed: {_reason(error)}"))
                return
            self._tickets[ticket.job.job] = ticket

        with self._gate:
            if self._is_closed or not self._thread.is_alive():
                raise ServiceEndedError("The engine has ended; no request can be taken any more.")
            self._unfinished.add(ticket)
            self._orders.put(start)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request; its last piece says `cancelled`. Nothing happens if it has ended."""

        def stop() -> None:
            if ticket.job is not None and not ticket.job.is_done:
                self.engine.cancel(ticket.job.job)
                self._deliver(ticket)

        self._orders.put(stop)

    def stream(self, request: TextRequest) -> Iterator[Piece]:
        """The pieces of one request; closing the iterator cancels it."""
        pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        ticket = self.submit(request, pieces.put)
        finish: str | None = None
        try:
            while finish is None:
                piece = pieces.get()
                finish = piece.finish
                yield piece
        finally:
            if finish is None:
                self.cancel(ticket)

    @property
    def stats(self) -> Stats:
        """What the engine is doing."""
        engine, now = self.engine, time.monotonic()
        recent = [(moment, count) for moment, count in list(self._rates) if now - moment < RATE_SECONDS]
        rate = (engine.generated - recent[0][1]) / (now - recent[0][0]) if recent and now > recent[0][0] else 0.0
        free, waiting = engine.pool.free, len(engine.waiting) + self._orders.qsize()
        return Stats(len(engine.running), waiting, engine.generated, rate, engine.pool.total, free)

    def close(self, wait_seconds: float = 0.0) -> None:
        """Wait for what runs, at most this long, then cancel the rest and end the thread."""
        deadline = time.monotonic() + wait_seconds
        while self._unfinished and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._gate:
            self._is_closed = True
            self._orders.put(None)
        self._thread.join()
        self.engine.grammars.close()

    # In the engine's thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._take_orders():
            try:
                grown = self.engine.step()
            except Exception as error:  # one bad pass must not end the service: those that were in it are told
                self._fail_all(error)
                continue
            now = time.monotonic()
            if not self._rates or now - self._rates[-1][0] > 0.1:
                self._rates.append((now, self.engine.generated))
                while now - self._rates[0][0] > RATE_SECONDS:
                    self._rates.popleft()
            for job in dict.fromkeys(grown):
                if (ticket := self._tickets.get(job)) is not None:
                    self._deliver(ticket)
        for ticket in list(self._tickets.values()):
            assert ticket.job is not None
            self.engine.cancel(ticket.job.job)
            self._deliver(ticket)

    def _take_orders(self) -> bool:
        """Carry out what others asked for; wait for it when there is nothing else to do. False: end."""
        while True:
            try:
                order = self._orders.get(block=self.engine.is_idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _deliver(self, ticket: Ticket) -> None:
        assert ticket.job is not None
        while (piece := ticket.job.read()) is not None:
            if piece.finish is not None:
                self._forget(ticket)
            try:
                ticket.deliver(piece)
            except Exception:  # the one who asked is gone: its request goes too, the others stay
                self.engine.cancel(ticket.job.job)

    def _fail_all(self, error: Exception) -> None:
        for ticket in list(self._tickets.values()):
            assert ticket.job is not None
            self.engine.cancel(ticket.job.job)
            ticket.job.is_done = True
            self._forget(ticket)
            with suppress(Exception):  # the one who asked is gone
                ticket.deliver(Piece("", finish="error", error=f"The engine failed: {_reason(error)}"))
        self.engine.reset()

    def _forget(self, ticket: Ticket) -> None:
        assert ticket.job is not None
        self._tickets.pop(ticket.job.job, None)
        self._unfinished.discard(ticket)


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class ServiceEndedError(UserError):
    """A request came after the end."""
