"""`z2a board`: open the folders and hosts that were named, and serve the page until it is stopped.

Listening on loopback is the default and needs no token. Anything wider prints an address with a random token in it,
which is the only way in.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette

from zero2all.common.errors import BadInputError, UsageError
from zero2all.track.access import address, is_loopback, listen
from zero2all.track.api import make_app
from zero2all.track.chart_library import MISSING, has_charts
from zero2all.track.columns import user_cache
from zero2all.track.http_server import BoundedServer, ServerLimits
from zero2all.track.library import Root, RunLibrary
from zero2all.track.ssh import SCHEME, is_address

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
