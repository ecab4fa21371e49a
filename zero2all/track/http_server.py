"""uvicorn with bounds: how long a client may take, and how many connections there may be. The board, and `z2a serve`.

uvicorn waits for the head of a request without end and takes any number of connections, so whoever opens sockets and
sends half a head holds every file descriptor of the process, before a token is asked for. Here a connection ends when
its client takes too long to send a head or to read an answer, and there is a cap, for each address too. Beyond it the
oldest connection goes whose client owes us something; where none does, the new one is refused with 503. What was ended
is counted, and said at most once a minute.
"""

from __future__ import annotations

import asyncio
import hashlib
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from zero2all.common.progress import counted, say

BODY_SECONDS = 60.0
SECONDS_BETWEEN_NOTES = 60.0
ACCEPTED_AT_ONCE = 8  # asyncio takes as many as its backlog before any of them can be counted
WAITING_TO_BE_ACCEPTED = 1024
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class ServerLimits:
    """What one server grants its clients."""

    head_seconds: float = 15.0  # for the head of a request; longer than uvicorn keeps an idle connection (5 s)
    stalled_seconds: float = 60.0  # without a client taking anything of what is waiting for it
    connections: int | None = None  # None: from `ulimit -n`

    @property
    def most(self) -> int:
        """How many connections there may be; the rest of the file descriptors is for files."""
        if self.connections is not None:
            return self.connections
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return 4096 if files == resource.RLIM_INFINITY else max(8, min(4096, files - max(64, files // 4)))


class BoundedServer(uvicorn.Server):
    """A server that stays reachable, whatever its clients leave half done."""

    def __init__(self, app: ASGIApp, limits: ServerLimits, grace_seconds: int) -> None:
        settings = uvicorn.Config(
            app,
            loop="asyncio",
            http=_Connection,
            ws="none",
            log_level="error",  # a client can cause any number of warnings
            access_log=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=grace_seconds,
        )
        super().__init__(settings)
        self.server_state = self.bounds = _Bounds(limits)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and count what cannot be accepted."""
        asyncio.get_running_loop().set_exception_handler(self.bounds.on_loop_error)
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(WAITING_TO_BE_ACCEPTED)

    async def on_tick(self, counter: int) -> bool:
        """Once a second: end what takes too long."""
        if counter % 10 == 0:
            self.bounds.sweep()
        return await super().on_tick(counter)


class _Bounds(ServerState):
    """The connections of a server, and what had to be ended of them."""

    def __init__(self, limits: ServerLimits) -> None:
        super().__init__()
        self.limits, self.most = limits, limits.most
        self.most_of_one_client = self.most * 3 // 4
        self.by_age: dict[_Connection, None] = {}  # the one that waits longest for its client comes first
        self.of_host: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._said: dict[str, float] = {}

    def add(self, new: _Connection) -> bool:
        """Count a connection. Where there are too many, another has to go; False: none can, so it is the new one."""
        self.of_host[new.host] += 1
        is_over = self.of_host[new.host] > self.most_of_one_client
        oldest = None
        if is_over or len(self.connections) > self.most:
            self.ended["crowded"] += 1
            crowd = (each for each in self.by_age if each.host == new.host or not is_over)
            oldest = next((each for each in crowd if each.is_waiting and not each.transport.is_closing()), None)
            if oldest is None:
                return False
            oldest.transport.abort()
        self.by_age[new] = None
        return True

    def sweep(self) -> None:
        """End what takes too long, and say what was ended."""
        now = time.monotonic()
        for each in list(self.by_age):
            if each.is_late(now, self.limits):
                self.ended["late"] += bool(each.conn.trailing_data[0] or each.transport.get_write_buffer_size())
                each.transport.abort()
        if many := self._to_say("late", now):
            say(
                f"z2a: ended {many} whose client stopped halfway: no complete request within "
                f"{self.limits.head_seconds:g} seconds, or nothing read for {self.limits.stalled_seconds:g} seconds."
            )
        if many := self._to_say("crowded", now):
            say(
                f"z2a: closed or refused {many}: at most {self.most} are open at once, and "
                f"{self.most_of_one_client} from one address. A higher `ulimit -n` allows more."
            )
        if many := self._to_say("not accepted", now):
            say(f"z2a: could not accept {many}: there are no free file descriptors. Start with a higher `ulimit -n`.")

    def _to_say(self, kind: str, now: float) -> str | None:
        if not self.ended[kind] or now - self._said.get(kind, -SECONDS_BETWEEN_NOTES) < SECONDS_BETWEEN_NOTES:
            return None
        self._said[kind] = now
        return counted(self.ended.pop(kind), "connection")

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count what asyncio could not accept, once for each time it tries; it would print a traceback for each."""
        if isinstance(context.get("exception"), OSError) and "socket" in context:
            self.ended["not accepted"] += 1
        else:
            loop.default_exception_handler(context)


class _Connection(H11Protocol):
    """One connection, and since when it waits for its client."""

    server_state: _Bounds

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.since = self.last_taken = time.monotonic()

    @property
    def is_between_requests(self) -> bool:
        """Whether the next that must come is the head of a request."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        """Whether its client has something to send: a head, or the rest of a body."""
        return self.is_between_requests or self.cycle.more_body

    @property
    def host(self) -> str:
        """The address it comes from."""
        return self.client[0] if self.client else ""

    def is_late(self, now: float, limits: ServerLimits) -> bool:
        """Whether its client has had its time. Looked at once a second."""
        if self.transport.get_write_buffer_size():  # what it reads comes before what it sends
            self.since = now
            return now - self.last_taken > limits.stalled_seconds
        self.last_taken = now
        return self.is_between_requests and now - self.since > limits.head_seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or refuse it."""
        super().connection_made(transport)
        if not self.server_state.add(self):
            transport.write(REFUSAL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """It counts no more."""
        super().connection_lost(exc)
        self.server_state.by_age.pop(self, None)
        self.server_state.of_host -= Counter({self.host: 1})  # an address without connections is forgotten

    def on_response_complete(self) -> None:
        """Start the clock for the next request's head."""
        self.since = time.monotonic()
        self.server_state.by_age[self] = self.server_state.by_age.pop(self, None)
        super().on_response_complete()

    def resume_writing(self) -> None:
        """The client has taken most of what was waiting."""
        self.last_taken = time.monotonic()
        super().resume_writing()


async def body_of(request: Request, most_bytes: int, refuse: Callable[[int, str], Exception]) -> bytes:
    """The body of a request, within its bounds of size and time; else an error with the HTTP status."""

    def too_large(size: str) -> Exception:
        return refuse(413, f"The body has {size} bytes; at most {most_bytes:,} are taken. Send less at a time.")

    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > most_bytes:
        raise too_large(f"{int(announced[:20]):,}")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:  # it came in chunks, without its length
                    raise too_large(f"more than {most_bytes:,}")
    except ClientDisconnect:
        raise refuse(400, "The client closed the connection before its body was complete.") from None
    except TimeoutError:
        raise refuse(408, f"The body did not arrive within {BODY_SECONDS:.0f} seconds.") from None
    return bytes(body)


# The files of a page as routes. They are looked up in a table made at the start: no path comes from a request.


CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_routes(files: Mapping[str, Path], modules: Iterable[str]) -> list[Route]:
    """A route for each address; the browser is told to fetch `modules` with the page."""
    # all modules at once, instead of one wave of requests per level of imports
    preload = ", ".join(f"<{module}>; rel=modulepreload" for module in modules)
    return [Route(address, _file_route(file, preload)) for address, file in files.items()]


def _file_route(path: Path, preload: str) -> Callable[[Request], Any]:
    known: tuple[int, bytes, str] = (-1, b"", "")

    async def respond(request: Request) -> Response:
        nonlocal known
        try:
            changed = path.stat().st_mtime_ns
            if changed != known[0]:
                content = path.read_bytes()
                known = (changed, content, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        except OSError:
            return PlainTextResponse("This file of the page is missing.", status_code=404)
        _, content, tag = known
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if path.suffix == ".html" and preload:
            headers["Link"] = preload
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=CONTENT_TYPES[path.suffix])

    return respond
