"""The files of a page as routes. They are looked up in a table made at the start: no path comes from a request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

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
