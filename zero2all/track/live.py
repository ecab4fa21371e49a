"""What a page is told while it is open: one stream of server-sent events per tab.

A message says which runs moved, to which version, and the few facts that are shown live; the page then fetches the ends
of the curves it is drawing. So a stream that broke loses nothing: the new one begins with the present versions, and the
page fetches whatever it lacks. At most 4 messages a second are sent, and none while nothing happens, apart from three
bytes every HEARTBEAT_SECONDS, which keep proxies and tunnels from closing the line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool

from zero2all.common import jsonio
from zero2all.track.library import RunLibrary, UnknownRunError

POLL_SECONDS = 0.1
"""How soon appended bytes are noticed: a stat per metrics file."""
QUIET_POLL_SECONDS = 1.0
"""The same for runs that are not running."""
LEAST_SECONDS_BETWEEN_MESSAGES = 0.25
HEARTBEAT_SECONDS = 30.0
HEARTBEAT = b":\n\n"


async def stream_changes(
    library: RunLibrary,
    boot: str,
    ids: Sequence[str],
    list_version: int,
    is_over: Callable[[], Awaitable[bool]],
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
