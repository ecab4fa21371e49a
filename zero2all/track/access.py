"""The gate in front of every route: who may use the board.

A browser carries requests to 127.0.0.1 for any web page, so: the Host header must name this machine (no DNS
rebinding), requests that another site makes a browser send are refused, and once the board listens beyond loopback,
every request needs the random token: once in the printed address, from then on in a cookie. A Content-Security-Policy
allows scripts, styles and connections of this origin only, and nothing inline.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "z2a_board"
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


class Gate:
    """ASGI middleware that lets through only what is meant for this board."""

    def __init__(self, app: ASGIApp, host: str, token: str | None, allowed_hosts: Iterable[str] = ()) -> None:
        self.app = app
        self.token = token
        self.names = {*LOOPBACK_NAMES, *(name.lower() for name in allowed_hosts)}
        self.allows_addresses = not is_loopback(host)  # a rebound name cannot look like an address
        if self.allows_addresses:
            self.names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, redirect or pass on, and put the headers on whatever is answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in known)]
            await send(message)

        refusal = self._answer_instead(scope)
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _answer_instead(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._is_our_name(host_name(headers.get("host", ""))):
            return PlainTextResponse(
                "This board answers to the names of its own machine only. Open it as http://127.0.0.1:PORT, or start "
                "it with --allow-host NAME.",
                status_code=421,
            )
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Requests made by other sites are refused.", status_code=403)
        if self.token is None:
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
        return PlainTextResponse(
            "This board needs its token: open the whole address that `z2a board` printed, with ?token=… at its end.",
            status_code=401,
        )

    def _is_our_name(self, name: str) -> bool:
        try:
            return name in self.names or (self.allows_addresses and bool(ipaddress.ip_address(name)))
        except ValueError:
            return False

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _cookie_name(scope: Scope) -> str:
    """Cookies know no ports, and one machine may have several boards: the port is part of the name."""
    return f"{COOKIE}_{scope['server'][1] if scope.get('server') else 0}"
