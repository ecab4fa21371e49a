"""Sockets between the processes of two groups: frames, channels that outlive a broken connection, one port per machine.

A *channel* leads to one other process. It has one or several TCP streams; a payload is cut into chunks, and each stream
takes the next chunk when it is free. A chunk counts as delivered only when the other side has acknowledged the whole
payload: what a broken stream had sent is sent again, and what arrives twice is dropped.

A machine has one listening port. The process that listens (the *door*) reads a short greeting that says which process
of the machine is meant, and hands the socket to it (`SCM_RIGHTS` over a Unix socket). Whatever does not greet like this
(a port scanner, a browser) is dropped. Nothing is ever unpickled: messages are JSON, every frame has a length limit and
a crc32c.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c

from zero2all.common.errors import UsageError
from zero2all.common.files import private_folder

Key = tuple[int, int]
"""Round and fragment."""
Greeting = dict[str, Any]

MAGIC = b"z2a link 1\n"
MESSAGE, PAYLOAD, STATE = range(3)
HEADER = struct.Struct("!4sBIIHIQQI")  # mark, kind, number, fragment, group, era, offset, total, length; then a crc32c
MARK = b"z2af"
CHUNK_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 22
PAYLOAD_BYTES = 1 << 37
GREETING_BYTES = 4096
GREETING_SECONDS = 5.0
SILENT_SECONDS = 20.0
"""A control channel on which nothing came for so long is lost; something is sent every second."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 0.5
WAITING_ROOM = 64
"""Connections that may be greeting at once; more than that are dropped."""


class RefusalError(Exception):
    """The other side listens, but is not the one that was meant."""


class TwiceError(RefusalError):
    """Another process with the number of this group is connected there, and alive. Its address, and this one's."""


class Item(NamedTuple):
    """What a payload is: its kind, round, fragment, and the group and era it came from (see `group_mind`)."""

    kind: int
    key: Key
    group: int
    era: int


class Channel:
    """Messages and payloads to and from one other process."""

    def __init__(
        self,
        on_message: Callable[[dict[str, Any]], None],
        on_payload: Callable[[Item, bytes], None],
        on_change: Callable[[bool], None],
        silent_seconds: float | None = None,
    ) -> None:
        """`on_change`: the first stream is there, or the last is lost; called, as the others, in a thread of this
        channel. `silent_seconds`: a stream on which nothing comes for so long is lost."""
        self._on_message, self._on_payload, self._on_change = on_message, on_payload, on_change
        self._silent_seconds = silent_seconds
        self.changed = threading.Condition()
        self._telling, self._told_up = threading.Lock(), False
        self.streams: dict[int, socket.socket] = {}
        self.closed = False
        self.heard_at = 0.0  # when the last chunk of a payload came
        self.spoke_at = 0.0  # when the last message came
        self.life, self.peer = "", ""  # the process that is connected, and its address
        self.sent_bytes = self.received_bytes = self.sent_framing = self.received_framing = 0
        self._messages: deque[bytes] = deque()
        self._sending: set[int] = set()
        self._chunks: deque[tuple[Item, int]] = deque()
        self._unacknowledged: dict[Item, memoryview] = {}
        self._sent: dict[int, list[tuple[Item, int]]] = {}  # by stream
        self._arriving: dict[Item, tuple[bytearray, set[int]]] = {}
        self._arrived: set[Item] = set()

    @property
    def is_up(self) -> bool:
        """Whether at least one stream is connected."""
        return bool(self.streams)

    def post(self, message: dict[str, Any]) -> None:
        """Send a message; lost with the connection."""
        with self.changed:
            self._messages.append(json.dumps(message).encode())
            self.changed.notify_all()

    def send(self, item: Item, payload: bytes) -> None:
        """Send a payload, again after every loss of a connection until it has arrived."""
        with self.changed:
            if item in self._unacknowledged:
                return
            self._unacknowledged[item] = memoryview(payload)
            self._chunks.extend((item, offset) for offset in range(0, max(1, len(payload)), CHUNK_BYTES))
            self.changed.notify_all()

    def expect(self, item: Item) -> None:
        """Take this payload again, although it arrived before: it was not kept."""
        with self.changed:
            self._arrived.discard(item)

    def forget(self, before_round: int) -> None:
        """Drop payloads of rounds before this one, on their way out or in."""
        with self.changed:
            for held in (self._unacknowledged, self._arriving):
                for item in [item for item in held if item.kind == PAYLOAD and item.key[0] < before_round]:
                    del held[item]
            self._arrived = {item for item in self._arrived if item.kind == STATE or item.key[0] >= before_round}

    def attach(self, stream: int, connection: socket.socket, life: str = "") -> None:
        """Use a connected socket as this stream, in place of an earlier one. `life`: which process dialled it."""
        self.life, self.peer, self.spoke_at = life, address_of(connection), time.monotonic()
        connection.settimeout(self._silent_seconds)
        _set_options(connection)
        with self.changed:
            if stream in self.streams:  # its process has ended, which was not noticed before the next one came
                self._detach(stream, self.streams[stream])
        self._tell_change()
        with self.changed:
            if self.closed:
                connection.close()
                return
            self.streams[stream] = connection
            self._sent[stream] = []
            self.changed.notify_all()
        self._tell_change()
        for work in (self._send_all, self._receive_all):
            threading.Thread(target=self._run, args=(work, stream, connection), daemon=True, name="group-link").start()

    def close(self, seconds: float = 0.0) -> None:
        """End the channel; wait at most so long until everything is acknowledged."""
        with self.changed:
            self.changed.wait_for(
                lambda: not self.streams or not (self._unacknowledged or self._messages or self._sending), seconds
            )
            self.closed = True
            for stream, connection in list(self.streams.items()):
                self._detach(stream, connection)
            self.changed.notify_all()

    def _run(self, work: Callable[[int, socket.socket], None], stream: int, connection: socket.socket) -> None:
        try:
            with suppress(OSError, ValueError):  # a lost connection, or bytes that are no frame
                work(stream, connection)
        finally:
            with self.changed:
                if self.streams.get(stream) is connection:
                    self._detach(stream, connection)
            self._tell_change()

    def _tell_change(self) -> None:
        """Changes are told one after the other: what is told last is so."""
        with self._telling:
            if self.is_up != self._told_up and not self.closed:
                self._told_up = not self._told_up
                self._on_change(self._told_up)

    def _detach(self, stream: int, connection: socket.socket) -> None:
        """With the lock: forget a stream; what it sent without an acknowledgement is sent again."""
        del self.streams[stream]
        self._sending.discard(stream)
        self._chunks.extendleft(chunk for chunk in self._sent.pop(stream) if chunk[0] in self._unacknowledged)
        if not self.streams:
            self._messages.clear()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        connection.close()
        self.changed.notify_all()

    def _send_all(self, stream: int, connection: socket.socket) -> None:
        def is_current() -> bool:
            return self.streams.get(stream) is connection

        while True:
            with self.changed:
                self._sending.discard(stream)
                self.changed.notify_all()
                self.changed.wait_for(lambda: not is_current() or self._messages or self._chunks)
                if not is_current():
                    return
                if self._messages:
                    body: bytes | memoryview = self._messages.popleft()
                    fields: tuple[int, ...] = (MESSAGE, 0, 0, 0, 0, 0, len(body))
                else:
                    item, offset = self._chunks.popleft()
                    if (payload := self._unacknowledged.get(item)) is None:
                        continue
                    body = payload[offset : offset + CHUNK_BYTES]
                    fields = (item.kind, *item.key, item.group, item.era, offset, len(payload))
                    self._sent[stream].append((item, offset))
                    self.sent_bytes += len(body)
                self.sent_framing += HEADER.size + 4 + (len(body) if fields[0] == MESSAGE else 0)
                self._sending.add(stream)
            head = HEADER.pack(MARK, *fields, len(body))
            connection.sendall(head + _crc(head, bytes(body)).to_bytes(4, "big"))
            connection.sendall(body)

    def _receive_all(self, _stream: int, connection: socket.socket) -> None:
        head = bytearray(HEADER.size + 4)
        space = bytearray(CHUNK_BYTES)
        while True:
            _receive(connection, memoryview(head))
            mark, kind, number, fragment, group, era, offset, total, length = HEADER.unpack_from(head)
            limit = MESSAGE_BYTES if kind == MESSAGE else min(CHUNK_BYTES, total - offset)
            if mark != MARK or kind > STATE or total > PAYLOAD_BYTES or length > limit:
                raise OSError("not a frame of this link")
            if length > len(space):
                space = bytearray(length)
            _receive(connection, memoryview(space)[:length])
            body = bytes(memoryview(space)[:length])
            if _crc(bytes(head[: HEADER.size]), body) != int.from_bytes(head[HEADER.size :], "big"):
                raise OSError("a damaged frame")
            if kind == MESSAGE:
                self.received_framing += len(head) + length
                message = json.loads(body)
                if not isinstance(message, dict):
                    raise OSError("not a message of this link")
                self._take_message(message)
            else:
                self._take_chunk(Item(kind, (number, fragment), group, era), offset, total, body)

    def _take_message(self, message: dict[str, Any]) -> None:
        self.spoke_at = time.monotonic()
        if message.get("do") != "have_all":
            self._on_message(message)
            return
        kind, key, group, era = message["item"]
        with self.changed:
            self._unacknowledged.pop(Item(kind, (key[0], key[1]), group, era), None)
            for stream, chunks in self._sent.items():
                self._sent[stream] = [chunk for chunk in chunks if chunk[0] in self._unacknowledged]
            self.changed.notify_all()

    def _take_chunk(self, item: Item, offset: int, total: int, body: bytes) -> None:
        whole: bytearray | None = None
        with self.changed:
            self.heard_at = time.monotonic()
            self.received_bytes += len(body)
            self.received_framing += HEADER.size + 4
            if item not in self._arrived:
                if item not in self._arriving:
                    self._arriving[item] = (bytearray(total), set())
                buffer, offsets = self._arriving[item]
                if len(buffer) != total or offset % CHUNK_BYTES or len(body) != min(CHUNK_BYTES, total - offset):
                    raise OSError("a chunk that does not fit its payload")
                buffer[offset : offset + len(body)] = body
                offsets.add(offset)
                if len(offsets) < -(-max(1, total) // CHUNK_BYTES):
                    return
                whole = self._arriving.pop(item)[0]
                self._arrived.add(item)
        if whole is not None:
            self._on_payload(item, bytes(whole))
        self.post({"do": "have_all", "item": item})


def _crc(head: bytes, body: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(head), body))


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise OSError("the other side has ended")
        view = view[count:]


def _set_options(connection: socket.socket) -> None:
    """Small messages at once; notice a dead peer on a silent stream within half a minute."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 4), ("USER_TIMEOUT", 30_000)):
        if hasattr(socket, f"TCP_{name}"):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def address_of(connection: socket.socket) -> str:
    """Of the other side, as it is seen here."""
    with suppress(OSError, IndexError, TypeError):
        return "{}:{}".format(*connection.getpeername()[:2])
    return "?"


def split_address(address: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _dial(address: str, greeting: Greeting) -> socket.socket:
    """A connection to the process that the greeting names."""
    connection = socket.create_connection(split_address(address), timeout=GREETING_SECONDS)
    try:
        _write_short(connection, greeting)
        answer = _read_short(connection, time.monotonic() + 2 * GREETING_SECONDS)
        if answer.get("twice"):
            raise TwiceError(*map(str, answer["twice"]))
        if answer.get("refused"):
            raise RefusalError(str(answer["refused"]))
    except BaseException:
        connection.close()
        raise
    return connection


def _write_short(connection: socket.socket, message: Greeting) -> None:
    text = json.dumps(message).encode()
    connection.sendall(MAGIC + len(text).to_bytes(2, "big") + text)


def _read_short(connection: socket.socket, deadline: float) -> Greeting:
    """A greeting or its answer; OSError for anything else, and when it does not come in time."""
    head = _receive_until(connection, len(MAGIC), deadline)
    if head != MAGIC:
        raise OSError("not a greeting of this link")
    length = int.from_bytes(_receive_until(connection, 2, deadline), "big")
    if length > GREETING_BYTES:
        raise OSError("not a greeting of this link")
    text = _receive_until(connection, length, deadline)
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise OSError("not a greeting of this link")
    return answer


def _receive_until(connection: socket.socket, count: int, deadline: float) -> bytes:
    found = b""
    while len(found) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(count - len(found))
        if not piece or time.monotonic() > deadline:
            raise OSError("no whole greeting")
        found += piece
    return found


def keep_dialled(
    channel: Channel, stream: int, address: str, greeting: Greeting, on_refusal: Callable[[RefusalError], None]
) -> None:
    """In a thread: connect this stream, and again whenever it is lost, until the channel is closed."""

    def work() -> None:
        pause = FIRST_PAUSE_SECONDS
        while not channel.closed:
            try:
                connection = _dial(address, {**greeting, "stream": stream})
            except (OSError, ValueError, RefusalError) as error:
                if isinstance(error, RefusalError):
                    on_refusal(error)
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            channel.attach(stream, connection)
            with channel.changed:
                channel.changed.wait_for(lambda: channel.closed or stream not in channel.streams)
            pause = FIRST_PAUSE_SECONDS
            time.sleep(pause)

    threading.Thread(target=work, daemon=True, name="group-link-dial").start()


def inner_folder(run: str, group: int, port: int) -> Path:
    """Folder of the Unix sockets by which the processes of a machine hand connections to each other."""
    name = "z2a-" + hashlib.sha256(f"{os.getuid()} {run} {group} {port}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir())
    folder = (folder if len(str(folder)) < 60 else Path("/tmp")) / name  # a Unix socket's path has at most 107 bytes
    try:
        private_folder(folder)
    except OSError as error:
        reason = error.strerror
        raise UsageError(f"{folder} cannot hold the sockets of this run ({reason}). Remove it.") from error
    return folder


def hand_over(folder: Path, rank: int, connection: socket.socket, greeting: Greeting) -> None:
    """Give a connection to another process of this machine; OSError if it does not listen yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
        inner.settimeout(GREETING_SECONDS)
        inner.connect(str(folder / f"{rank}.sock"))
        socket.send_fds(inner, [json.dumps(greeting).encode()], [connection.fileno()])
    connection.close()


class Inbox:
    """Takes the connections that are handed to this process."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        take: Callable[[Greeting, socket.socket], None],
        holder: Callable[[Greeting, str], str | None] = lambda _greeting, _address: None,
    ) -> None:
        """`take` gets greeting and connection, in a thread of the inbox. `holder`: the address of another process that
        has the place of the one at this address, and lives; then the connection is refused."""
        self._holder = holder
        self._alive = os.open(folder / f"{rank}.lock", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._alive)
            raise UsageError(
                f"This group is already running on this machine: another process has its rank {rank} (its sockets are "
                f"in {folder}). Stop it first, or give this one its own number, with --group or ZERO2ALL_GROUP."
            ) from error
        path = folder / f"{rank}.sock"
        self._files = (path, folder / f"{rank}.lock")
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        _accept_all(self._listener, lambda inner: self._take_one(inner, take))

    def _take_one(self, inner: socket.socket, take: Callable[[Greeting, socket.socket], None]) -> None:
        with inner:
            inner.settimeout(GREETING_SECONDS)
            text, descriptors, _, _ = socket.recv_fds(inner, GREETING_BYTES, 1)
        connection = socket.socket(fileno=descriptors[0])
        greeting = json.loads(text)
        if connection.family != socket.AF_UNIX:
            address = address_of(connection)
            if held_by := self._holder(greeting, address):
                _write_short(connection, {"twice": [held_by, address]})
                connection.close()
                return
            _write_short(connection, {"refused": None})
        take(greeting, connection)

    def close(self) -> None:
        """Take no more. The last one of this machine removes the folder."""
        _stop(self._listener)
        if self._alive >= 0:
            for path in self._files:
                path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()
            os.close(self._alive)
            self._alive = -1


class Door:
    """The listening port of a machine."""

    def __init__(self, address: str, run: str, group: int, folder: Path) -> None:
        self._run, self._group, self._folder = run, group, folder
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"Port {port} is in use, so group {group} cannot wait there for the others. Is group {group} "
                    f"already running on this machine? Then give this one its own number, with --group or "
                    f"ZERO2ALL_GROUP. If not, choose another port in parallel.slow_link.groups, or in "
                    f"parallel.slow_link.bind."
                ) from error
            raise UsageError(
                f"parallel.slow_link.bind: this machine cannot listen on {address} ({error.strerror or error}). Give "
                f"the address of one of its interfaces, or 0.0.0.0 for all of them."
            ) from error
        self._room = threading.Semaphore(WAITING_ROOM)
        _accept_all(self._listener, self._greet_aside)

    def _greet_aside(self, connection: socket.socket) -> None:
        """A slow greeting does not hold up the next connection."""
        if self._room.acquire(blocking=False):
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
        else:
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        try:
            greeting = _read_short(connection, time.monotonic() + GREETING_SECONDS)
            if (greeting["run"], greeting["to"]) == (self._run, self._group):
                hand_over(self._folder, int(greeting["to_rank"]), connection, greeting)
            else:
                here = f"Group {self._group} of the run {self._run!r} listens there"
                _write_short(connection, {"refused": f"{here}, not group {greeting['to']} of {greeting['run']!r}."})
                connection.close()
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()  # it dials again, or was never one of ours
        finally:
            self._room.release()

    def close(self) -> None:
        """Listen no more."""
        _stop(self._listener)


def _accept_all(listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
    """In a thread: give every connection to `take`, until the listener is closed."""

    def work() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0:
                    return
                time.sleep(0.05)  # out of descriptors, for example
                continue
            try:
                take(connection)
            except (OSError, ValueError, IndexError, KeyError, TypeError):
                connection.close()

    threading.Thread(target=work, daemon=True, name="group-link-accept").start()


def _stop(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
