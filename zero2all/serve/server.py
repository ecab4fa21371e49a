"""Listening, and the end.

The first signal (Ctrl-C, SIGTERM, SIGHUP) lets what runs finish for the time of grace; new requests are refused with
503, and /health says `draining`. Then the rest is cancelled: clients get what was written, with the finish `cancelled`.
The second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from zero2all.common import jsonio
from zero2all.common.errors import UserError
from zero2all.common.progress import say
from zero2all.common.signals import stop_signals_to
from zero2all.infer.boundary import opening_id
from zero2all.infer.engine import PromptTooLongError
from zero2all.infer.load import LoadedModel
from zero2all.infer.service import ServiceEndedError
from zero2all.infer.text import Piece, engine_request
from zero2all.infer.tools import TOOLS, call_of, run_call
from zero2all.serve import wire
from zero2all.serve.answers import Answer, Bell, ChatAnswer, CompletionAnswer, EmbeddingAnswer, Generations, by_choice
from zero2all.serve.metrics import Metrics
from zero2all.serve.model import READY, ServedModel, ending
from zero2all.serve.wire import Call, RefusedError, chat_call, completion_call, read_fields, spelled
from zero2all.track.access import Gate, GuardedService, address, is_loopback, listen
from zero2all.track.http_server import CONTENT_TYPES, BoundedServer, ServerLimits, body_of, page_routes

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
    origins: Sequence[str] = ()  # other sites whose pages may ask (CORS)
    limits: ServerLimits = field(default_factory=ServerLimits)


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
        app = make_app(model, options.host, self.token, options.allowed_hosts, self._life, options.origins)
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


# The routes: OpenAI's, the state of the server, and the page.


WEB = Path(__file__).parent / "web"
BOARD_WEB = WEB.parents[1] / "track" / "web"
SHARED_WITH_BOARD = ("before.js", "dom.js", "format.js", "icon.svg", "style.css")
Read = Callable[[Any, LoadedModel, int], Call]
MAX_BODY_BYTES = 4_000_000
SMALL_BODY_BYTES = 8_000
SLOW_WORDS = (b"response_format", b"grammar", b"\\u")  # any word may be hidden in escapes
NO_STORE = {"Cache-Control": "no-store"}
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def make_app(
    model: ServedModel,
    host: str = "127.0.0.1",
    token: str | None = None,
    allowed_hosts: Iterable[str] = (),
    lifespan: Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]] | None = None,
    origins: Iterable[str] = (),
) -> Starlette:
    """The whole server as an ASGI application."""
    api, files = _ModelApi(model), page_files()
    routes = [
        Route("/health", api.health),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model_of_name),
        Route("/v1/stats", api.stats),
        Route("/metrics", api.metrics_page),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        Route("/v1/tools/{name}", api.tool, methods=["POST"]),
        *page_routes(files, [name for name in files if name.endswith(".js") and name != "/web/before.js"]),
    ]
    door = GuardedService("server", "z2a serve", lambda _, status, message: _refusal(RefusedError(status, message)))
    gate = Middleware(Gate, host=host, token=token, allowed_hosts=list(allowed_hosts), door=door, origins=origins)
    handlers: Mapping[Any, Any] = {RefusedError: _refused, HTTPException: _no_route, Exception: _failed}
    return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers, lifespan=lifespan)


def page_files() -> dict[str, Path]:
    """Address -> file, for everything the page is made of; the board's look and helpers are the board's files."""
    own = [path for path in sorted(WEB.iterdir()) if path.suffix in CONTENT_TYPES]
    shared = [BOARD_WEB / name for name in SHARED_WITH_BOARD]
    return {"/": WEB / "index.html", **{f"/web/{path.name}": path for path in [*shared, *own]}}


class _ModelApi:
    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.bell: Bell | None = None
        self.metrics = Metrics()

    async def health(self, _: Request) -> Response:
        """200 where a request would be taken, else 503; for those who watch over servers."""
        stats = self.model.stats()
        facts = {name: stats[name] for name in ("status", "running", "waiting")}
        return _json(facts, 200 if stats["status"] == READY else 503)

    async def stats(self, _: Request) -> Response:
        return _json(self.model.stats())

    async def metrics_page(self, _: Request) -> Response:
        """For Prometheus."""
        return Response(self.metrics.page(self.model.stats()), headers=NO_STORE, media_type="text/plain; version=0.0.4")

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text, as vLLM gives them."""
        fields = read_fields(parsed(await read_body(request)), wire.TOKENIZE_FIELDS, "prompt")
        tokenizer, engine = self.model.loaded.tokenizer, self.model.service.engine
        ids = await run_in_threadpool(tokenizer.encode_text, fields["prompt"])
        ids = [opening_id(tokenizer), *ids] if fields.get("add_special_tokens", True) else ids
        return _json({"tokens": ids, "count": len(ids), "max_model_len": engine.max_len})

    async def detokenize(self, request: Request) -> Response:
        """The text of ids; control tokens by their names."""
        fields = read_fields(parsed(await read_body(request)), wire.DETOKENIZE_FIELDS, "tokens")
        return _json({"prompt": spelled(fields["tokens"][0], self.model.loaded, "tokens", skip_control=False)})

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self.model.facts()]})

    async def model_of_name(self, request: Request) -> Response:
        self.model.require_name(request.path_params["name"])
        return _json(self.model.facts())

    async def tool(self, request: Request) -> Response:
        """A function of ours, for the page: the body has its arguments."""
        call = call_of(request.path_params["name"], parsed(await read_body(request)))
        if call is None:
            raise RefusedError(400, "The arguments of a function have to be a JSON object.")
        return _json({"content": run_call(call, TOOLS)})

    async def completions(self, request: Request) -> ASGIApp:
        return await self._answer(request, completion_call, CompletionAnswer)

    async def chat_completions(self, request: Request) -> ASGIApp:
        return await self._answer(request, chat_call, ChatAnswer)

    async def embeddings(self, request: Request) -> ASGIApp:
        def read(body: Any, loaded: LoadedModel, _max_len: int) -> Call:
            engine = self.model.service.engine
            call = wire.embedding_call(body, loaded.model.config.hidden_size)
            for place, each in enumerate(call.requests):  # all are checked before the first is computed
                try:
                    call.requests[place] = dataclasses.replace(each, prompt=engine_request(engine, each).ids)
                except UserError as error:
                    error.args = (f"input[{place}]: {error}",)
                    raise
            return dataclasses.replace(call, at_once=engine.max_batch)

        return await self._answer(request, read, EmbeddingAnswer)

    async def _answer(self, request: Request, read: Read, form: type[Answer]) -> ASGIApp:
        body = await read_body(request)
        service, loaded = self.model.require_free(), self.model.loaded
        self.bell = self.bell or Bell(asyncio.get_running_loop())
        bell = self.bell

        def hand_in() -> _Reply:
            call = read(parsed(body), loaded, service.engine.max_len)
            self.model.require_name(call.model)
            generations = Generations(service, call, bell, self.metrics)
            generations.submit()
            return _Reply(form(call, self.model.name, loaded.tokenizer, generations.prompt_tokens), generations)

        try:
            # Long prompts and grammars take a while, and the loop has others to serve.
            is_quick = len(body) < SMALL_BODY_BYTES and not any(word in body for word in SLOW_WORDS)
            return hand_in() if is_quick else await run_in_threadpool(hand_in)
        except ServiceEndedError:
            raise ending() from None
        except PromptTooLongError as error:
            raise RefusedError(400, str(error), code="context_length_exceeded") from None
        except UserError as error:
            raise RefusedError(400, str(error)) from None


class _Reply:
    """Sends what the engine writes, as it comes or at its end. A client that leaves takes its request with it."""

    def __init__(self, answer: Answer, generations: Generations) -> None:
        self.answer, self.generations = answer, generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this one answer."""
        send_all = self._send_stream(send) if self.answer.call.stream else self._send_whole(scope, receive, send)
        work, gone = asyncio.ensure_future(send_all), asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            self.generations.cancel()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            pieces = by_choice(await self.generations.whole())
        except ServiceEndedError:
            raise ending() from None
        for piece in pieces.values():
            _require_success(piece)
        await _json(self.answer.whole(pieces))(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        has_begun = False
        try:
            async for portion in self.generations.portions():
                events = b""
                for index, piece in by_choice(portion).items():
                    _require_success(piece)
                    events += _event(self.answer.chunk(index, piece))
                if not has_begun:  # only now: a request that fails at once gets a status that says so
                    has_begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                await send({"type": "http.response.body", "body": events, "more_body": True})
            last = _event(self.answer.usage_chunk()) if self.answer.call.include_usage else b""
            await send({"type": "http.response.body", "body": last + b"data: [DONE]\n\n"})
        except RefusedError as error:
            if not has_begun:
                raise
            await send({"type": "http.response.body", "body": _event(error.body())})


async def read_body(request: Request) -> bytes:
    """The body, which has to be JSON. What its headers rule out is refused before it is read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(
            415, f"The body is `{kind[:100]}`; send JSON, with the header Content-Type: application/json."
        )
    return await body_of(request, MAX_BODY_BYTES, RefusedError)


def parsed(body: bytes) -> Any:
    """The JSON of a body."""
    try:
        return jsonio.loads_strict(body)
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"The body is not UTF-8: byte {error.start:,} is part of no character.") from None
    except ValueError as error:
        raise RefusedError(400, f"The body is not JSON: {error}.") from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _require_success(piece: Piece) -> None:
    if piece.finish == "grammar":
        raise RefusedError(400, piece.error, code="grammar_error")
    if piece.finish == "error":
        raise RefusedError(500, piece.error, code="engine_error")


def _event(value: Any) -> bytes:
    return b"data: " + jsonio.dumps_line(value) + b"\n"


def _json(value: Any, status: int = 200, headers: Mapping[str, str] = NO_STORE) -> Response:
    return Response(jsonio.dumps_line(value), status, headers, media_type="application/json")


def _refusal(error: RefusedError) -> Response:
    return _json(error.body(), error.status, {**NO_STORE, **error.headers})


async def _refused(_: Request, error: RefusedError) -> Response:
    return _refusal(error)


async def _no_route(request: Request, error: HTTPException) -> Response:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        words = f"{request.method} is not for {request.url.path}; use {allowed}."
    else:
        words = (
            f"There is nothing at {request.url.path[:200]}. The routes of the API begin with /v1, such as /v1/models."
        )
    response = _refusal(RefusedError(error.status_code, words))
    response.headers.update(error.headers or {})
    return response


async def _failed(_: Request, error: Exception) -> Response:
    """A bug of ours: the client learns its kind, the terminal shows the traceback."""
    return _refusal(RefusedError(500, f"The server failed on this request ({type(error).__name__}). See its terminal."))
