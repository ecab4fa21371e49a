"""Where a server of ours listens, and the gate in front of every route: who may use it. The board, and `z2a serve`.

A browser carries requests to 127.0.0.1 for any web page, so: the Host header must name this machine (no DNS
rebinding), requests that another site makes a browser send are refused, and once it listens beyond loopback,
every request needs the random token: once in the printed address, from then on in a cookie. A Content-Security-Policy
allows scripts, styles and connections of this origin only, and nothing inline.
"""

import errno
import hmac
import ipaddress
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zero2all.common.errors import UsageError

PORTS_TRIED = 20
COOKIE = "z2a"
OPEN_PATHS = frozenset({"/health"})
"""For those who watch over servers: they have no token, and may know the server by any name."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def listen(host: str, port: int | None, first_port: int) -> socket.socket:
    """A socket that listens there; without a port, on the first free one from `first_port` on. 0 is any."""
    tries = range(first_port, first_port + PORTS_TRIED) if port is None else [port]
    for each in tries:
        try:
            family = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM)[0][0]
            listening = socket.socket(family, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, each))
            listening.listen(128)
            return listening
        except socket.gaierror as error:
            raise _wrong_address(host, error) from None
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise _wrong_address(host, error) from None
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            raise UsageError(
                f"Cannot listen on {host} port {each}: {error.strerror}. Choose another --port, or leave it out."
            ) from None
    raise UsageError(f"The ports {tries[0]} to {tries[-1]} are all in use. Choose a free one with --port.")


def _wrong_address(host: str, error: OSError) -> UsageError:
    return UsageError(
        f"`--host {host}` is not an address of this machine ({error.strerror}). Use one of its addresses, 127.0.0.1 "
        f"for this machine only, or 0.0.0.0 for all addresses."
    )


def address(host: str, listening: socket.socket) -> str:
    """What to open in a browser, for a socket that listens on `host`."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{listening.getsockname()[1]}/"


def is_loopback(host: str) -> bool:
    """Whether listening on `host` reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without its port, in lower case; "" when it is not one."""
    header = header.strip().lower()
    if header.startswith("["):
        name, bracket, rest = header[1:].partition("]")
        return name if bracket and (not rest or rest.startswith(":")) else ""
    return header.partition(":")[0].rstrip(".")


def plain_refusal(_: Scope, status: int, message: str) -> Response:
    """A refusal for people."""
    return PlainTextResponse(message, status_code=status)


@dataclass(frozen=True)
class GuardedService:
    """What stands behind a gate, for its refusals."""

    name: str = "board"
    verb: str = "z2a board"
    refuse: Callable[[Scope, int, str], Response] = plain_refusal


class Gate:
    """ASGI middleware that lets through only what is meant for this server."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        token: str | None,
        allowed_hosts: Iterable[str] = (),
        door: GuardedService = GuardedService(),  # noqa: B008 (it is frozen)
        origins: Iterable[str] = (),
    ) -> None:
        """`origins`: other sites whose pages may ask (CORS); they need the token as everybody does."""
        self.app = app
        self.token = token
        self.door = door
        self.origins = frozenset(origins)
        self.proxies = {name.lower() for name in allowed_hosts}  # they may hand on another Host than the browser's
        self.names = {*LOOPBACK_NAMES, *self.proxies}
        self.allows_addresses = not is_loopback(host)  # a rebound name cannot look like an address
        if self.allows_addresses:
            self.names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, redirect or pass on, and put the headers on whatever is answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        headers = dict(HEADERS)
        if (origin := Headers(scope=scope).get("origin")) in self.origins:
            headers |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                extra = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in known)]
            await send(message)

        refusal = self._answer_instead(scope)
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _answer_instead(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] == "OPTIONS" and headers.get("origin") in self.origins:  # a browser asks whether it may
            allowed = {"Access-Control-Allow-Headers": "authorization, content-type, *"}
            return Response(status_code=204, headers=allowed)
        is_open = scope["path"] in OPEN_PATHS
        if not is_open and not self._is_our_name(host_name(headers.get("host", ""))):
            return self.door.refuse(
                scope,
                421,
                f"This {self.door.name} answers only to the names of its own machine. Open it as "
                f"http://127.0.0.1:PORT, or start it with --allow-host NAME.",
            )
        if self._is_of_another_site(headers):
            return self.door.refuse(scope, 403, "Requests from other sites are refused.")
        if self.token is None or is_open:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if self._is_token(dict(query).get("token", "")):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            path = "/" + scope["path"].lstrip("/\\")  # cannot be read as another host (`//evil.example`)
            response = RedirectResponse(f"{path}{'?' + rest if rest else ''}", status_code=303)
            response.set_cookie(
                _cookie_name(scope), self.token, httponly=True, samesite="strict", max_age=30 * 24 * 3600
            )
            return response
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        cookie = cookie_parser(headers.get("cookie", "")).get(_cookie_name(scope), "")
        if self._is_token(cookie) or self._is_token(bearer):
            return None
        needed = (
            f"This {self.door.name} needs its token: open the whole address that `{self.door.verb}` printed, with "
            f"?token=… at its end, or send the header `Authorization: Bearer TOKEN`."
        )
        is_wrong = bool(bearer or cookie or "token" in dict(query))
        return self.door.refuse(scope, 401, f"The token is wrong. {needed}" if is_wrong else needed)

    def _is_of_another_site(self, headers: Headers) -> bool:
        """Whether the browser says that another site sent the request. Following a link to us is fine; programs say
        nothing."""
        site = headers.get("sec-fetch-site")
        if headers.get("origin") in self.origins:
            return False
        if site == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return True
        origin = headers.get("origin")
        if origin is None or site == "same-origin":
            return False
        place = origin.partition("://")[2].lower()
        return place != headers.get("host", "").strip().lower() and host_name(place) not in self.proxies

    def _is_our_name(self, name: str) -> bool:
        try:
            return name in self.names or (self.allows_addresses and bool(ipaddress.ip_address(name)))
        except ValueError:
            return False

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _cookie_name(scope: Scope) -> str:
    """Cookies know no ports, and one machine may have several servers: the port is part of the name."""
    return f"{COOKIE}_{scope['server'][1] if scope.get('server') else 0}"
