"""Listening, and the end.

The first signal (Ctrl-C, SIGTERM, SIGHUP) lets what runs finish for the time of grace; new requests are refused with
503, and /health says `draining`. Then the rest is cancelled: clients get what was written, with the finish `cancelled`.
The second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from starlette.applications import Starlette

from zero2all.common.progress import say
from zero2all.common.signals import stop_signals_to
from zero2all.serve.app import make_app
from zero2all.serve.model import ServedModel
from zero2all.track.access import address, is_loopback, listen
from zero2all.track.http_server import BoundedServer, Limits

DEFAULT_PORT = 6107
INTERRUPTED = 130
POLL_SECONDS = 0.05
SECONDS_TO_SEND_THE_REST = 2


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, to whom to answer, and how to end."""

    host: str = "127.0.0.1"
    port: int | None = None  # None: the first free one from DEFAULT_PORT on. 0: any.
    needs_token: bool = False  # on loopback too: for machines that others also work on
    token: str | None = None  # None: a random one, where one is needed
    allowed_hosts: Sequence[str] = ()
    grace_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)


class ModelServer:
    """A server that is listening; `serve` answers until it is stopped."""

    def __init__(
        self, model: ServedModel, options: ServeOptions, when_ready: Callable[[], None] = lambda: None
    ) -> None:
        self.model, self.options, self._when_ready = model, options, when_ready
        needs_token = options.needs_token or not is_loopback(options.host) or options.token is not None
        self.token = (options.token or secrets.token_urlsafe(24)) if needs_token else None
        self.socket = listen(options.host, options.port, DEFAULT_PORT)
        self.url = address(options.host, self.socket)
        app = make_app(model, options.host, self.token, options.allowed_hosts, self._life)
        self._server = _Server(app, options.limits, SECONDS_TO_SEND_THE_REST)
        self._is_ending = self._was_signalled = False
        self._problem: Exception | None = None

    @property
    def page(self) -> str:
        """The address of the page, with the token where one is needed."""
        return self.url + (f"?token={self.token}" if self.token else "")

    def serve(self) -> None:
        """Load the model and answer until `stop` or a signal. What went wrong while loading is raised here."""
        with stop_signals_to(self._on_signal):
            self._server.run(sockets=[self.socket])
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """What the first signal does; may be called from another thread."""
        self.model.drain()
        self._is_ending = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_ending:
            os._exit(INTERRUPTED)
        self._was_signalled = True
        self.stop()

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        threading.Thread(target=self._load, name="z2a-load", daemon=True).start()
        watch = asyncio.ensure_future(self._watch())
        yield
        watch.cancel()

    def _load(self) -> None:
        try:
            self.model.open()
        except Exception as error:
            self._problem = error
            self.stop()
        else:
            self._when_ready()

    async def _watch(self) -> None:
        """Wait for the order to end, then end: first the engine, whose last pieces go out, then the server."""
        while not self._is_ending:
            await asyncio.sleep(POLL_SECONDS)
        if self._was_signalled:  # said here: a signal may come in the middle of another print
            say(self._farewell())
        await asyncio.to_thread(self.model.close, self.options.grace_seconds)
        self._server.should_exit = True

    def _farewell(self) -> str:
        stats = self.model.stats()
        left = stats["running"] + stats["waiting"]
        if not left:
            return "No request is running: the server ends."
        counted = "1 request" if left == 1 else f"{left} requests"
        return f"Finishing {counted}, up to {self.options.grace_seconds:g} s; Ctrl-C again ends at once."


class _Server(BoundedServer):
    """Signals are ours: uvicorn would cut off what runs, and raise them again at its end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
