"""One big JSON array, in constant memory and at the speed of orjson.

A compiled scan finds where each element starts and ends; orjson parses the slices. The same scan, run once over a
file, finds where units can begin. An element that is not JSON costs itself: when its brackets and quotes do not match,
reading goes on at the next object that starts with the same key as the first one of the array did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.corpus.readers import kernels
from zero2all.corpus.readers.items import ItemOrigin, Items, RawRow, ReaderLimits, too_large
from zero2all.corpus.readers.lines import HEAD_KEPT, LARGE_BYTES, has_too_many_values, parse_record
from zero2all.corpus.readers.streams import Stream

READ_BYTES = 1 << 20
ELEMENTS_AT_ONCE = 4096
BLANKS_SEEN = 200
KEY_MATCH_BYTES = 1024
"""A key with the blanks around it is looked for in this many bytes."""


class Elements(NamedTuple):
    """Some elements that follow one another: data[start - base : end - base] each."""

    data: bytearray
    """Belongs to the scan: it changes when the next event is asked for."""
    base: int
    spans: list[list[int]]


class Lost(NamedTuple):
    """Bytes between elements that cannot be read."""

    start: int
    end: int
    """Where reading goes on."""
    at: int
    """Where the error stands."""
    reason: str
    detail: str
    head: bytes
    ends_file: bool


class ArrayPart(NamedTuple):
    """What a stream holds of an array."""

    first_key: str | None
    """Of the first object of the array: where reading goes on behind damage."""
    is_last: bool = True
    """The array must end in this stream."""
    is_inside: bool = False
    """The stream begins behind the array's opening bracket."""


def read_json_array(stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int, part: ArrayPart) -> Items:
    """The elements from position `at`, where the stream stands."""
    loads: Callable[[Any], Any] = jsonio.loads
    for event in _ArrayScan(stream, limits, at, part).events():
        if isinstance(event, Lost):
            start, end, at, reason, detail, head, ends_file = event
            if reason == "too_large":
                yield too_large(origin, start, end - start, limits.max_record_bytes, head)
            else:
                lost = replace(origin.damaged(start, end, reason, detail, end - start, head), place=origin.place(at))
                yield lost.to_the_end() if ends_file else lost
            continue
        data, base, spans = event
        for start, end in spans:
            value: Any = None
            if end - start < LARGE_BYTES:
                with suppress(ValueError):
                    value = loads(data[start - base : end - base])
            elif not has_too_many_values(data, start - base, end - base):
                with suppress(ValueError):
                    value = loads(memoryview(data)[start - base : end - base])  # not copied: it may be 32 MB
            if type(value) is dict:
                yield RawRow(value, origin, start, end)
            else:
                item = parse_record(bytes(data[start - base : end - base]), "utf-8", origin, start, end, strings=True)
                if item is not None:
                    yield item
        del event, data, value  # the scan goes on, and what it has given may be large


def array_borders(stream: Stream, limits: ReaderLimits, at: int, first_key: str | None, unit_bytes: int) -> list[int]:
    """Where units of about `unit_bytes` can begin; the stream starts at byte `at` of its file.

    These are starts of elements behind a good element. Behind an error they also lie behind the byte that showed it:
    the reader of the unit before must see that byte to find the same elements.
    """
    borders: list[int] = []
    target = unit_bytes
    after_good = False
    for event in _ArrayScan(stream, limits, at, ArrayPart(first_key)).events():
        if isinstance(event, Lost):
            after_good = False
            target = max(target, event.at + 1)
            continue
        for start, _ in event.spans if event.spans[-1][0] >= target else ():
            if start >= target and after_good:
                borders.append(start)
                target = start + unit_bytes
            after_good = True
        after_good = True
    return borders


class _ArrayScan:
    """One pass. `data` holds the bytes from `base` on; an element in progress stays in it up to the size limit."""

    def __init__(self, stream: Stream, limits: ReaderLimits, at: int, part: ArrayPart) -> None:
        self.stream, self.limit, self.part, first_key = stream, limits.max_record_bytes, part, part.first_key
        self.data, self.base = bytearray(), at
        self.position = 0
        key = rb'(?:[^"\\]|\\.){1,100}'
        if first_key is not None and len(first_key.encode()) < KEY_MATCH_BYTES // 2:
            key = re.escape(first_key.encode())
        self.next_object = re.compile(rb'\{\s{0,100}"' + key + rb'"\s{0,100}:')
        self.state = kernels.new_array_state(kernels.VALUE)
        self.stack = np.zeros(kernels.MAX_DEPTH, dtype=np.uint8)
        self.out = np.zeros((ELEMENTS_AT_ONCE, 2), dtype=np.int64)
        self.large_head = b""
        """Beginning of the element in progress, once it is too large to be kept."""

    @property
    def offset(self) -> int:
        """Where the scan stands."""
        return self.base + self.position

    @property
    def element_start(self) -> int | None:
        """Where the element in progress began."""
        depth, expect = self.state[kernels.DEPTH], self.state[kernels.EXPECT]
        inside = depth > 0 or expect in (kernels.STRING, kernels.SCALAR)
        return int(self.state[kernels.START]) if inside else None

    def events(self) -> Iterator[Elements | Lost]:
        """Elements in batches, and what lies between them and cannot be read."""
        if not self.part.is_inside and not (yield from self._open()):
            return
        while True:
            self.position, count = kernels.scan_elements(
                np.frombuffer(self.data, dtype=np.uint8), self.position, self.base, self.state, self.stack, self.out
            )
            if count:
                yield from self._elements(self.out[:count].tolist())
            status = self.state[kernels.STATUS]
            if status == kernels.MORE:
                if not self._more():
                    yield from self._at_end_of_data()
                    return
            elif status == kernels.END:
                if not (yield from self._behind_the_end()):
                    return
            elif status == kernels.ERROR:
                start = self.element_start
                at = self.offset
                char = bytes(self.data[self.position : self.position + 1])
                detail = f"unexpected {char!r}"[1:]
                if not (yield from self._recover(at if start is None else start, at, "invalid_json", detail)):
                    return

    def _open(self) -> Generator[Lost, None, bool]:
        """Pass over the bracket the array starts with."""
        while not self.data.strip() and self._more():
            self.position = len(self.data) - len(self.data.lstrip())
        if self.data[self.position : self.position + 1] == b"[":
            self.position += 1
            return True
        yield self._lost(self.offset, self.offset, "invalid_json", "no array starts here", ends_file=True)
        return False

    def _more(self) -> bool:
        """Take in the next chunk and drop what has been scanned."""
        start = self.element_start
        keep = self.position
        if start is not None and not self.large_head:
            keep = start - self.base
            if self.offset - start > self.limit:
                self.large_head = bytes(self.data[keep : keep + HEAD_KEPT])
                keep = self.position
        more = self.stream.read(READ_BYTES)
        if more:
            self._let_go(keep)
            self.data += more
        return bool(more)

    def _let_go(self, size: int) -> None:
        del self.data[:size]
        self.base += size
        self.position -= size

    def _elements(self, spans: list[list[int]]) -> Iterator[Elements | Lost]:
        good: list[list[int]] = []
        for span in spans:
            start, end = span
            if end - start <= self.limit:
                good.append(span)
                continue
            if good:
                yield Elements(self.data, self.base, good)
                good = []
            at = start - self.base
            head = self.large_head or bytes(self.data[at : min(end - self.base, at + HEAD_KEPT)])
            self.large_head = b""
            yield Lost(start, end, start, "too_large", "", head, False)
        if good:
            yield Elements(self.data, self.base, good)

    def _head_at(self, start: int) -> bytes:
        """The beginning of what starts there."""
        head, self.large_head = self.large_head, b""
        at = max(start - self.base, 0)
        return head or bytes(self.data[at : at + HEAD_KEPT])

    def _lost(self, start: int, at: int, reason: str, detail: str, ends_file: bool) -> Lost:
        """What lies between `start` and where the scan stands now."""
        head = self._head_at(start)
        return Lost(start, self.offset, at, reason, detail, head[: self.offset - start], ends_file)

    def _at_end_of_data(self) -> Iterator[Lost]:
        start = self.element_start
        broken = self.stream.broken
        if broken is not None:
            yield self._lost(self.offset if start is None else start, self.offset, broken.reason, broken.detail, True)
        elif start is not None:
            yield self._lost(start, self.offset, "cut_off", "the file ends inside an item", True)
        elif self.part.is_last:
            yield self._lost(self.offset, self.offset, "cut_off", "the file ends before the end of the array", True)

    def _behind_the_end(self) -> Generator[Lost, None, bool]:
        """Whether there is more to read behind the end of the array, which should be the end of the file."""
        while True:
            rest = self.data[self.position :].lstrip()
            self.position = len(self.data) - len(rest)
            if rest:
                detail = "something follows the end of the array"
                return (yield from self._recover(self.offset, self.offset, "trailing_data", detail))
            if not self._more():
                if self.stream.broken is not None:
                    yield from self._at_end_of_data()
                return False

    def _recover(self, start: int, at: int, reason: str, detail: str) -> Generator[Lost, None, bool]:
        """Go to the next object that looks like an element; returns whether there is one.

        The search starts right behind the beginning of the damaged element, unless that is too large to be kept.
        """
        first = at if start == at or at - start > self.limit else start + 1
        head = self._head_at(start)
        self.state[:] = kernels.new_array_state(kernels.VALUE)
        self.position = first - self.base
        while True:
            for match in self.next_object.finditer(self.data, self.position):
                look_from = max(first - self.base, match.start() - BLANKS_SEEN, 0)
                before = self.data[look_from : match.start()].rstrip(b" \r\n\t")[-1:]
                if before != b":":  # the value of a key lies deeper inside
                    self.position = match.start()
                    yield Lost(start, self.offset, at, reason, detail, head[: self.offset - start], False)
                    return True
            self.position = max(self.position, len(self.data) - KEY_MATCH_BYTES)
            self._let_go(max(self.position - KEY_MATCH_BYTES, 0))
            more = self.stream.read(READ_BYTES)
            if not more:
                self.position = len(self.data)
                yield Lost(start, self.offset, at, reason, detail, head, True)
                return False
            self.data += more
            head += more[: max(HEAD_KEPT - len(head), 0)]
