"""What the engine writes for one HTTP request: from the engine's thread into the event loop.

The engine must not wait for clients, and a loop that is woken for every token of every client takes the interpreter
from the engine's thread. So pieces are left in a queue, and all streams that have news are woken together, every
`PERIOD_SECONDS`, less often where they are many; the first piece and the end of a text wake their own at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from zero2all.infer.service import Service, ServiceEndedError, Ticket
from zero2all.infer.text import Piece
from zero2all.serve.wire import Call

PERIOD_SECONDS = 0.05
STREAMS_A_PERIOD = 12
"""Streams that are woken in a period; for twice as many the period is twice as long, up to four times."""


class Bell:
    """Wakes streams of one event loop, many at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[asyncio.Event] = deque()
        self._is_set = False
        self._seconds = PERIOD_SECONDS

    def ring(self, event: asyncio.Event) -> None:
        """Set `event` with the next ringing. From the engine's thread."""
        self._waiting.append(event)
        if not self._is_set:
            self._is_set = True
            self.call(self._set)

    def call(self, note: Callable[[], None]) -> None:
        """Call `note` in the loop, now. From the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waited
            self.loop.call_soon_threadsafe(note)

    def _set(self) -> None:
        self.loop.call_later(self._seconds, self._ring)

    def _ring(self) -> None:
        self._is_set = False  # before the events are taken: what comes after that sets the bell again
        events = {self._waiting.popleft() for _ in range(len(self._waiting))}
        self._seconds = PERIOD_SECONDS * min(4.0, max(1.0, len(events) / STREAMS_A_PERIOD))
        for event in events:
            event.set()


class Generations:
    """The choices of one request while they are written. For the event loop, but for `_deliver`."""

    def __init__(self, service: Service, call: Call, bell: Bell) -> None:
        self._service, self._requests, self._bell = service, call.requests, bell
        self._arrived: deque[tuple[int, Piece]] = deque()
        self._news, self._ended = asyncio.Event(), asyncio.Event()
        self._is_noted = not call.stream  # without a stream only the end matters
        self._has_begun = False
        self._left = len(call.requests)
        self._tickets: list[Ticket] = []

    def submit(self) -> None:
        """Hand all of them in; where one is refused, none runs."""
        try:
            for index, request in enumerate(self._requests):
                self._tickets.append(self._service.submit(request, partial(self._deliver, index)))
        except BaseException:
            self.cancel()
            raise

    @property
    def prompt_tokens(self) -> list[int]:
        """How many tokens the prompt of each choice has."""
        return [ticket.prompt_tokens for ticket in self._tickets]

    def cancel(self) -> None:
        """Take what is not finished out of the engine."""
        if not self._left:
            return
        with contextlib.suppress(ServiceEndedError):
            for ticket in self._tickets:
                self._service.cancel(ticket)

    async def whole(self) -> list[tuple[int, Piece]]:
        """Everything, once all choices are finished."""
        await self._ended.wait()
        return list(self._arrived)

    async def portions(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """What has come since the last portion, until all choices are finished."""
        left = len(self._requests)
        while left:
            await self._news.wait()
            self._news.clear()
            self._is_noted = False  # before the queue is read: what comes after that is noted again
            portion = [self._arrived.popleft() for _ in range(len(self._arrived))]
            left -= sum(piece.finish is not None for _, piece in portion)
            if portion:
                yield portion

    def _deliver(self, index: int, piece: Piece) -> None:
        """Called in the engine's thread."""
        self._arrived.append((index, piece))
        if piece.finish is not None:
            self._left -= 1
        if not self._left:
            self._bell.call(self._all_ended)
        elif not self._is_noted:
            self._is_noted = True
            if self._has_begun:
                self._bell.ring(self._news)
            else:
                self._has_begun = True
                self._bell.call(self._news.set)

    def _all_ended(self) -> None:
        self._ended.set()
        self._news.set()


def merged(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one choice that follow one another, as one."""
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    choices = tuple(choice for piece in pieces for choice in piece.choices)
    text = "".join(piece.text for piece in pieces)
    return Piece(text, tokens, choices, last.finish, last.error, last.usage)


def by_choice(portion: Sequence[tuple[int, Piece]]) -> dict[int, Piece]:
    """The pieces of each choice, joined."""
    found: dict[int, list[Piece]] = {}
    for index, piece in portion:
        found.setdefault(index, []).append(piece)
    return {index: merged(pieces) for index, pieces in sorted(found.items())}
