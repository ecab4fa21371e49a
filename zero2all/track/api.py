"""The routes of the board: a page of plain files, and what that page asks for.

Nothing here takes a path from a request. Files of the page are looked up in a table made at the start; runs are looked
up by id among those found.

An open page is told what happens by one stream of server-sent events per tab. A message says which runs have new rows,
their version, and the few facts that are shown live; the page then fetches the ends of the curves it is drawing. So a
stream that broke loses nothing: the new one begins with the present versions, and the page fetches whatever it lacks.

`z2a board` serves it until it is stopped. Listening on loopback is the default and needs no token. Anything wider
prints an address with a random token in it, which is the only way in.
"""

import asyncio
import contextlib
import errno
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_regular
from zero2all.common.html import POLICY, html_page
from zero2all.common.language import translate
from zero2all.track import facts
from zero2all.track.access import Gate, address, is_loopback, listen
from zero2all.track.chart_library import MISSING, has_charts
from zero2all.track.columns import user_cache
from zero2all.track.curves import Curve, Query, curve, pack_curves, read_query
from zero2all.track.export import csv_lines
from zero2all.track.http_server import CONTENT_TYPES, BoundedServer, ServerLimits, body_of, page_routes
from zero2all.track.library import Root, RunLibrary, UnknownRunError
from zero2all.track.ssh import SCHEME, is_address

WEB = Path(__file__).parent / "web"
MODULES = sorted(path.name for path in WEB.glob("*.js") if path.name != "before.js")
MAX_QUERIES = 400
MAX_BODY_BYTES = 1_000_000
MAX_ROWS = 500
MAX_REPORT_BYTES = 5_000_000
POLL_SECONDS = 0.1  # how soon appended bytes are noticed: a stat per metrics file
QUIET_POLL_SECONDS = 1.0  # the same for runs that are not running
LEAST_SECONDS_BETWEEN_MESSAGES = 0.25
HEARTBEAT_SECONDS = 30.0
HEARTBEAT = b":\n\n"
NOT_KEPT = {"Cache-Control": "no-store"}


def make_app(
    library: RunLibrary,
    host: str = "127.0.0.1",
    token: str | None = None,
    allowed_hosts: Iterable[str] = (),
    is_stopping: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The whole board as an ASGI application; mirrors run while it does, and streams end when `is_stopping` says so."""
    api = _BoardApi(library, is_stopping)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        library.start()
        try:
            yield
        finally:
            await run_in_threadpool(library.stop)

    answers = (api.runs, api.run, api.events, api.event, api.config)
    routes = [Route(f"/api/{answer.__name__}", _json_route(answer)) for answer in answers]
    routes += [
        Route("/api/curves", _route(api.curves), methods=["POST"]),
        Route("/api/csv", _route(api.csv)),
        Route("/api/stream", api.stream),
        Route("/studies", _route(api.studies)),
        Route("/health", _health),
        *page_routes(page_files(), [f"/{module}" for module in MODULES]),
    ]
    gate = Middleware(Gate, host=host, token=token, allowed_hosts=list(allowed_hosts))
    return Starlette(routes=routes, middleware=[gate], lifespan=lifespan)


def page_files() -> dict[str, Path]:
    """Address -> file, for everything the page is made of."""
    paths = [path for path in sorted(WEB.rglob("*")) if path.suffix in CONTENT_TYPES]
    return {"/": WEB / "index.html", **{f"/{path.relative_to(WEB).as_posix()}": path for path in paths}}


def study_pages(roots: Iterable[Root]) -> dict[str, Path]:
    """The reports of studies and of a speedrun beside the runs, by the name they are asked for."""
    works = [root.folder.parent if root.folder.name == "runs" else root.folder for root in roots if not root.mirror]
    pages = [path for work in works for path in sorted([*work.glob("studies/*/report.html"), work / "report.html"])]
    return {
        f"{path.parent.name} ({path.parent.parent})": path for path in pages if path.is_file() and not path.is_symlink()
    }


class _BoardApi:
    """The answers; each is called in a thread of its own."""

    def __init__(self, library: RunLibrary, is_stopping: Callable[[], bool]) -> None:
        self.library = library
        self.is_stopping = is_stopping
        self.boot = secrets.token_hex(4)  # tells a page that the versions it remembers mean nothing

    def runs(self, request: Request) -> Any:
        self.library.refresh_list()
        version = self.library.version
        rows, total = self.library.rows(request.query_params.get("q", ""), MAX_ROWS)
        roots = [root.facts() for root in self.library.roots]
        return {"boot": self.boot, "version": version, "roots": roots, "rows": rows, "total": total}

    def studies(self, request: Request, _: bytes) -> Response:
        """The list of reports, or one of them; they hold no script, and may bring their own style."""
        pages, name = study_pages(self.library.roots), request.query_params.get("name")
        if name is None:
            links = (f'<li><a href="studies?name={quote(each)}">{escape(each)}</a></li>' for each in pages)
            empty = translate("no studies yet: z2a sweep, z2a mixture try and z2a speedrun make them")
            page = html_page("z2a", "", [f"<ul>{''.join(links)}</ul>" if pages else f"<p>{escape(empty)}</p>"]).encode()
        elif name in pages:
            try:
                page = read_regular(pages[name], MAX_REPORT_BYTES)
            except OSError as error:  # it is too large, or was deleted meanwhile
                code = 413 if error.errno == errno.EOVERFLOW else 404
                raise HTTPException(code, f"{pages[name]} is not shown: {error.strerror}. Open the file.") from None
        else:
            raise HTTPException(404, f"There is no study {name[:200]!r}.")
        return Response(page, headers={"Content-Security-Policy": POLICY}, media_type=CONTENT_TYPES[".html"])

    def run(self, request: Request) -> Any:
        with self.library.reading(_asked(request, "id")) as run:
            return {"boot": self.boot, "place": self.library.place_of(run.run_id), **facts.run_facts(run)}

    def events(self, request: Request) -> Any:
        axis = read_query({"run": "", "metric": "", "axis": request.query_params.get("axis", "step")}).axis
        with self.library.reading(_asked(request, "id")) as run:
            return facts.marks(run.reader, axis)

    def event(self, request: Request) -> Any:
        with self.library.reading(_asked(request, "id")) as run:
            return facts.event_facts(run.reader, _asked(request, "i"))

    def config(self, request: Request) -> Any:
        with self.library.reading(_asked(request, "id")) as run:
            config = run.reader.config()
            return {"fields": None if config is None else facts.flatten(config)}

    def curves(self, _: Request, body: bytes) -> Response:
        try:
            given = jsonio.loads(body)
        except ValueError as error:
            raise BadInputError(f"The request is not JSON ({error}).") from None
        queries = given.get("queries") if isinstance(given, dict) else None
        if not isinstance(queries, list) or len(queries) > MAX_QUERIES:
            raise BadInputError(f"`queries` is a list of at most {MAX_QUERIES} queries.")
        packed = pack_curves([self._curve(read_query(query)) for query in queries])
        return Response(packed, media_type="application/octet-stream", headers=NOT_KEPT)

    def _curve(self, query: Query) -> Curve:
        base = None
        if query.base is not None:
            with self.library.reading(query.base) as other:
                base = other.reader  # readers may be used from several threads; two locks at once could wait forever
        with self.library.reading(query.run) as run:
            if base is not None or query.after is not None:
                return curve(run.reader, query, base)
            return run.remember(query, lambda: curve(run.reader, query))

    def csv(self, request: Request, _: bytes) -> Response:
        metrics = request.query_params.getlist("metric")
        if not metrics or len(metrics) > MAX_QUERIES:
            raise BadInputError("Name the metrics: ?metric=loss&metric=lr.")
        with self.library.reading(_asked(request, "id")) as run:
            reader = run.reader
        headers = {"Content-Disposition": 'attachment; filename="metrics.csv"', **NOT_KEPT}
        return StreamingResponse(csv_lines(reader, metrics), media_type="text/csv; charset=utf-8", headers=headers)

    async def stream(self, request: Request) -> Response:
        ids = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_QUERIES]
        known = request.query_params.get("list", "0")

        async def is_over() -> bool:
            return self.is_stopping() or await request.is_disconnected()

        changes = stream_changes(self.library, self.boot, ids, int(known) if known.isdecimal() else 0, is_over)
        headers = {**NOT_KEPT, "X-Accel-Buffering": "no"}
        return StreamingResponse(changes, media_type="text/event-stream", headers=headers)


async def stream_changes(
    library: RunLibrary, boot: str, ids: Sequence[str], list_version: int, is_over: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Messages about the runs `ids`, and about the list of runs since `list_version`, until it `is_over`."""
    sent: dict[str, Any] = {}
    sent_roots: Any = None
    next_look = dict.fromkeys(ids, 0.0)
    last_message = 0.0
    last_byte = time.monotonic()
    while not await is_over():
        now = time.monotonic()
        message: dict[str, Any] = {}
        if now - last_message >= LEAST_SECONDS_BETWEEN_MESSAGES:
            due = [run_id for run_id in ids if next_look[run_id] <= now]
            moved, roots = await run_in_threadpool(_look, library, due)
            for run_id, signature in moved.items():
                is_running = signature is not None and signature[1]["state"] == "running"
                next_look[run_id] = now + (POLL_SECONDS if is_running else QUIET_POLL_SECONDS)
                shown = signature and (signature[0], {**signature[1], "message": ""})  # it counts seconds of silence
                if run_id not in sent or sent[run_id] != shown:
                    sent[run_id] = shown
                    message.setdefault("runs", {})[run_id] = (
                        {"gone": True} if signature is None else {"version": signature[0], **signature[1]}
                    )
            if library.version != list_version:
                rows, gone = library.rows_since(list_version)
                list_version = library.version
                message |= {"rows": rows, "gone": gone}
            if roots != sent_roots:
                sent_roots = roots
                message["roots"] = roots
        if message:
            message |= {"boot": boot, "list": list_version}
            yield b"data: " + jsonio.dumps_line(message) + b"\n"
            last_message = last_byte = time.monotonic()
        elif now - last_byte >= HEARTBEAT_SECONDS:
            yield HEARTBEAT
            last_byte = now
        await asyncio.sleep(POLL_SECONDS)


def _look(library: RunLibrary, ids: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Refresh the list and these runs; None stands for a run that was never there."""
    library.refresh_list()
    found: dict[str, Any] = {}
    for run_id in ids:
        try:
            found[run_id] = library.refresh(run_id)
        except UnknownRunError:
            found[run_id] = None
    return found, [root.facts() for root in library.roots]


async def _health(_: Request) -> Response:
    """For those who watch over servers."""
    return _json({"status": "ready"})


def _asked(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise BadInputError(f"`{name}` is missing.")
    return value


def _json(value: Any, status_code: int = 200) -> Response:
    return Response(jsonio.dumps_line(value), status_code, NOT_KEPT, media_type="application/json")


def _route(answer: Callable[[Request, bytes], Response]) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        try:
            body = await body_of(request, MAX_BODY_BYTES, HTTPException)
            return await run_in_threadpool(answer, request, body)
        except HTTPException as error:
            return _json({"error": error.detail}, error.status_code)
        except UnknownRunError as error:
            return _json({"error": f"There is no run {error}. It was moved or deleted."}, 404)
        except BadInputError as error:
            return _json({"error": str(error)}, 400)

    return respond


def _json_route(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
    return _route(lambda request, _: _json(answer(request)))


DEFAULT_PORT = 6106
SECONDS_TO_SEND_THE_REST = 1


@dataclass(frozen=True)
class BoardOptions:
    """Where to listen, and to whom to answer."""

    host: str = "127.0.0.1"
    port: int | None = None  # None: the first free one from DEFAULT_PORT on. 0: any.
    needs_token: bool = False  # ask for a token on loopback too: for machines that others also work on
    allowed_hosts: Sequence[str] = ()
    limits: ServerLimits = field(default_factory=ServerLimits)


class Board:
    """A board that is listening; `serve` answers until it is stopped."""

    def __init__(self, places: Sequence[str], options: BoardOptions, cache: Path | None = None) -> None:
        self.library = RunLibrary(open_roots(places, cache / "mirror" if cache else user_cache("mirror")), cache)
        is_open = not is_loopback(options.host)
        self.token = secrets.token_urlsafe(24) if is_open or options.needs_token else None
        self.app: Starlette = make_app(
            self.library, options.host, self.token, options.allowed_hosts, lambda: self.server.should_exit
        )
        self.socket = listen(options.host, options.port, DEFAULT_PORT)
        self.url = address(options.host, self.socket) + (f"?token={self.token}" if self.token else "")
        self.server = BoundedServer(self.app, options.limits, SECONDS_TO_SEND_THE_REST)

    def serve(self) -> None:
        """Answer until `stop` or Ctrl-C."""
        self.server.run(sockets=[self.socket])

    def stop(self) -> None:
        """Make `serve` return soon; may be called from another thread."""
        self.server.should_exit = True

    def notes(self) -> list[str]:
        """What the person should know, one sentence each."""
        return [] if has_charts() else [MISSING]


def open_roots(places: Sequence[str], mirrors: Path) -> list[Root]:
    """A root per place: a folder, or `ssh://[user@]host/path`, which is copied below `mirrors`."""
    roots = []
    for place in places:
        if is_address(place):
            from zero2all.track.mirror import Mirror

            mirror = Mirror(place, mirrors)
            roots.append(Root(place[len(SCHEME) :], mirror.folder, mirror))
        elif "://" in place:
            raise UsageError(
                f"`{place}` is neither a folder nor an ssh address. Give folders, or ssh://user@host/path/to/runs."
            )
        else:
            folder = Path(place).expanduser()
            if folder.is_file():
                raise BadInputError(f"{folder} is a file. Give a folder with runs, a workspace, or one run's folder.")
            roots.append(Root(str(folder), folder))
    return roots
