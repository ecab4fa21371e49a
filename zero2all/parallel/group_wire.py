"""Sockets between the processes of two groups: frames, channels that outlive a broken connection, one port per machine.

A *channel* leads to one other process. It has one or several TCP streams; a payload is cut into chunks, and each stream
takes the next chunk when it is free. A chunk counts as delivered only when the other side has acknowledged the whole
payload: what a broken stream had sent is sent again, and a payload may arrive twice.

A machine has one listening port. The process that listens reads nothing from a connection that has not proved that it
knows the secret of the run (`common.connections`); then a greeting says which process of the machine is meant, and the
socket is handed to that one (`SCM_RIGHTS` over a Unix socket). Nothing is unpickled: messages are JSON, every frame has
a crc32c, a payload has the size that the receiver knows beforehand (`Expected`), and memory is taken only for what has
come. Bytes that are no frame of this link end the connection, and the log names where they came from.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import ipaddress
import json
import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c

from zero2all.common.connections import NotOfThisRunError, dial, listen, read_message, split_address
from zero2all.common.errors import UsageError
from zero2all.common.files import private_folder
from zero2all.common.progress import say
from zero2all.parallel.config import SlowLinkConfig
from zero2all.parallel.network import interface_to

Key = tuple[int, int]
"""Round and fragment."""
MESSAGE, PAYLOAD, STATE = range(3)
HEADER = struct.Struct("!4sBIIHIQQI")  # mark, kind, number, fragment, group, era, offset, total, length; then a crc32c
MARK = b"z2af"
CHUNK_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 22
HEAD_BYTES = 1 << 20
"""Of a state, at most."""
GREETING_BYTES = 4096
ANSWER_SECONDS = 10.0
SILENT_SECONDS = 20.0
"""A control channel on which nothing came for so long is lost; something is sent every second."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 0.5
MOST_UNFINISHED = 64
"""Payloads of a channel of which a part has come. A group sends one at a time, and again what was lost."""
SAY_AGAIN_SECONDS = 60.0


class RefusalError(Exception):
    """The other side listens, but is not the one that was meant."""


class TwiceError(RefusalError):
    """Another process with the number of this group is connected there, and alive. Its address, and this one's."""


class Greeting(NamedTuple):
    """Which process dials, and which one it means."""

    run: str
    life: str  # differs between two processes with the same number
    group: int
    rank: int
    to: int  # group
    to_rank: int
    stream: int


def read_greeting(message: dict[str, Any]) -> Greeting:
    """The greeting in a message; ValueError for anything else."""
    shape = {name: str if name in ("run", "life") else int for name in Greeting._fields}
    return Greeting(**{name: checked(message, shape)[name] for name in shape})


def checked(message: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The message, if it has this shape; else ValueError."""
    if not _fits(message, shape):
        raise ValueError("a message that no process of a group sends")
    return message


def _fits(value: Any, shape: Any) -> bool:
    """Shapes: {name: shape}, where "name?" may be null; [shape] for any number; (shape, shape); else a type."""
    if isinstance(shape, dict):
        found = value if isinstance(value, dict) else {}
        return all(
            _fits(found.get(name.rstrip("?")), each) or (name.endswith("?") and found.get(name[:-1]) is None)
            for name, each in shape.items()
        )
    if isinstance(shape, list | tuple):
        many = shape if isinstance(shape, tuple) else shape * len(value) if isinstance(value, list | tuple) else ()
        return isinstance(value, list | tuple) and len(value) == len(many) and all(map(_fits, value, many))
    return type(value) is shape and (shape is not int or abs(value) < 1 << 32)


class Item(NamedTuple):
    """What a payload is: its kind, round, fragment, and the group and era it came from (see `group_mind`)."""

    kind: int
    key: Key
    group: int
    era: int


@dataclass(frozen=True)
class Expected:
    """What a rank knows of payloads before they come: all groups make them alike."""

    payload_bytes: Sequence[int]
    """By fragment."""
    state_bytes: int
    fault: Callable[[int | None, bytes], str]
    """What is wrong with the values of a payload, by its fragment (None: of a state); empty: nothing."""

    def size_fault(self, item: Item, total: int) -> str:
        """What is wrong with the size of a payload or state."""
        sizes = {PAYLOAD: self.payload_bytes, STATE: [self.state_bytes]}.get(item.kind, [])
        if item.key[1] >= len(sizes):
            raise ValueError("a payload that no group has")
        least = sizes[item.key[1]]
        is_right = least <= total <= least + (HEAD_BYTES if item.kind == STATE else 0)
        return "" if is_right else f"it has {total} bytes instead of {least}"


class Channel:
    """Messages and payloads to and from one other process."""

    def __init__(
        self,
        name: str,
        on_message: Callable[[dict[str, Any]], None],
        on_change: Callable[[bool], None],
        on_payload: Callable[[Item, bytes, str], None] = lambda _item, _payload, _fault: None,
        expected: Expected | None = None,
        silent_seconds: float | None = None,
    ) -> None:
        """`name`: whose process it leads to. `on_change`: the first stream is there, or the last is lost; called, as
        the others, in a thread of this channel. `on_payload` gets it, or nothing and why it was refused. `expected`:
        None if it carries messages alone. `silent_seconds`: a stream on which nothing comes for so long is lost."""
        self.name, self._on_message, self._on_payload, self._on_change = name, on_message, on_payload, on_change
        self._expected, self._silent_seconds = expected, silent_seconds
        self.changed = threading.Condition()
        self._telling, self._told_up = threading.Lock(), False
        self.streams: dict[int, socket.socket] = {}
        self.closed = False
        self.heard_at = 0.0  # when the last chunk of a payload came
        self.spoke_at = 0.0  # when the last message came
        self.life, self.peer = "", ""  # the process that is connected, and its address
        self.sent_bytes = self.received_bytes = 0  # of payloads, again sent ones included
        self._messages: deque[bytes] = deque()
        self._sending: set[int] = set()
        self._chunks: deque[tuple[Item, int]] = deque()
        self._unacknowledged: dict[Item, memoryview] = {}
        self._sent: dict[int, list[tuple[Item, int]]] = {}  # by stream
        self._arriving: dict[Item, dict[int, bytes]] = {}  # chunks by their offset
        self._said_at = -SAY_AGAIN_SECONDS

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

    def forget(self, before_round: int) -> None:
        """Drop payloads of rounds before this one, on their way out or in."""
        with self.changed:
            for held in (self._unacknowledged, self._arriving):
                for item in [item for item in held if item.kind == PAYLOAD and item.key[0] < before_round]:
                    del held[item]

    def attach(self, stream: int, connection: socket.socket, life: str = "", peer: str = "") -> None:
        """Use a connected socket as this stream, in place of an earlier one. `life`: which process dialled it, `peer`:
        from where."""
        self.life, self.peer, self.spoke_at = life, peer, time.monotonic()
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

    def disconnect(self) -> None:
        """End all streams; the other process, if it lives, dials again."""
        with self.changed:
            for stream, connection in list(self.streams.items()):
                self._detach(stream, connection)
        self._tell_change()

    def close(self, seconds: float = 0.0) -> None:
        """End the channel; wait at most so long until everything is acknowledged."""
        with self.changed:
            self.changed.wait_for(
                lambda: not self.streams or not (self._unacknowledged or self._messages or self._sending), seconds
            )
            self.closed = True
            self.changed.notify_all()
        self.disconnect()

    def _run(self, work: Callable[[int, socket.socket], None], stream: int, connection: socket.socket) -> None:
        try:
            work(stream, connection)
        except OSError:
            pass  # a lost connection
        except Exception as error:  # bytes that no process of a group sends
            if time.monotonic() > self._said_at + SAY_AGAIN_SECONDS:
                self._said_at = time.monotonic()
                say(f"z2a: {self.name}: the connection with {self.peer} was ended: {error or type(error).__name__}.")
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
            is_chunk = (
                offset % CHUNK_BYTES == 0 and length == min(CHUNK_BYTES, total - offset) and (length or not offset)
            )
            if mark != MARK or (length > MESSAGE_BYTES if kind == MESSAGE else not is_chunk):
                raise ValueError("bytes that are no frame of this link")
            if length > len(space):
                space = bytearray(length)
            _receive(connection, memoryview(space)[:length])
            body = bytes(memoryview(space)[:length])
            if _crc(bytes(head[: HEADER.size]), body) != int.from_bytes(head[HEADER.size :], "big"):
                raise ValueError("a damaged frame")
            if kind == MESSAGE:
                self._take_message(read_message(body))
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
        """Keep a chunk, hand over the payload when it is whole. Nothing is kept of one that has not the right size."""
        if self._expected is None:
            raise ValueError("a payload on a connection that carries none")
        with self.changed:
            self.heard_at = time.monotonic()
            self.received_bytes += len(body)
            whole, fault = b"", self._expected.size_fault(item, total)
            if not fault:
                if item not in self._arriving and len(self._arriving) >= MOST_UNFINISHED:
                    del self._arriving[next(iter(self._arriving))]
                chunks = self._arriving.setdefault(item, {})
                chunks[offset] = body
                if len(chunks) < -(-max(1, total) // CHUNK_BYTES):
                    return
                whole = b"".join(chunks[each] for each in sorted(chunks))
                del self._arriving[item]
        self._on_payload(item, whole, fault)
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


def dial_process(address: str, secret: bytes, greeting: Greeting) -> tuple[socket.socket, str]:
    """A connection to the process that the greeting names, and its address."""
    try:
        connection = dial(split_address(address), secret, greeting._asdict(), ANSWER_SECONDS)
    except NotOfThisRunError as error:
        raise RefusalError(f"{error}.") from error
    try:
        answer = connection.receive(ANSWER_SECONDS, GREETING_BYTES)
        if twice := answer.get("twice"):
            raise TwiceError(str(twice[0]), str(twice[1]))
        if answer.get("refused"):
            raise RefusalError(str(answer["refused"]))
    except BaseException:
        connection.close()
        raise
    return connection.socket, connection.address


def keep_connected(
    channel: Channel,
    stream: int,
    connect: Callable[[], tuple[socket.socket, str]],
    on_refusal: Callable[[RefusalError], None],
) -> None:
    """In a thread: connect this stream, and again whenever it is lost, until the channel is closed."""

    def work() -> None:
        pause = FIRST_PAUSE_SECONDS
        while not channel.closed:
            began = time.monotonic()
            try:
                connection, peer = connect()
                channel.attach(stream, connection, peer=peer)
                with channel.changed:
                    channel.changed.wait_for(lambda: channel.closed or stream not in channel.streams)
            except RefusalError as error:
                on_refusal(error)
            except (OSError, ValueError, TypeError, LookupError):
                pass  # nobody is there yet, or not one of ours
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS) if time.monotonic() < began + 1.0 else FIRST_PAUSE_SECONDS
            time.sleep(pause * random.uniform(0.5, 1.0))

    threading.Thread(target=work, daemon=True, name="group-link-dial").start()


def inner_folder(run: str, group: int, port: int, secret: bytes) -> Path:
    """Folder of the Unix sockets by which the processes of a machine hand connections to each other. Nobody else knows
    its name beforehand, so nobody can make it first."""
    name = "z2a-" + hmac.digest(secret, f"{os.getuid()} {run} {group} {port}".encode(), "sha256").hex()[:16]
    folder = Path(tempfile.gettempdir())
    folder = (folder if len(str(folder)) < 60 else Path("/tmp")) / name  # a Unix socket's path has at most 107 bytes
    try:
        private_folder(folder)
    except OSError as error:
        reason = error.strerror
        raise UsageError(f"{folder} cannot hold the sockets of this run ({reason}). Remove it.") from error
    return folder


def hand_over(folder: Path, connection: socket.socket, greeting: Greeting) -> None:
    """Give a connection to another process of this machine; OSError if it does not listen yet."""
    with connection, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
        inner.settimeout(ANSWER_SECONDS)
        inner.connect(str(folder / f"{greeting.to_rank}.sock"))
        socket.send_fds(inner, [json.dumps(greeting._asdict()).encode()], [connection.fileno()])


def dial_neighbour(folder: Path, greeting: Greeting) -> tuple[socket.socket, str]:
    """A connection to another process of this machine."""
    ours, theirs = socket.socketpair()
    try:
        hand_over(folder, theirs, greeting)
    except OSError:
        ours.close()
        raise
    return ours, "this machine"


class Inbox:
    """Takes the connections that are handed to this process."""

    def __init__(self, folder: Path, rank: int, take: Callable[[Greeting, socket.socket], None]) -> None:
        """`take` gets greeting and connection, in a thread of the inbox."""
        self._take = take
        self._alive = os.open(folder / f"{rank}.lock", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._alive)
            raise UsageError(
                f"This group is already running on this machine: another process has its rank {rank} (its sockets are "
                f"in {folder}). Stop it first, or give this one its own number, with --group or Z2A_GROUP."
            ) from error
        path = folder / f"{rank}.sock"
        self._files = (path, folder / f"{rank}.lock")
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True, name="group-link-accept").start()

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            connection = None
            try:
                with self._listener.accept()[0] as inner:
                    inner.settimeout(ANSWER_SECONDS)
                    text, descriptors, _, _ = socket.recv_fds(inner, GREETING_BYTES, 1)
                connection = socket.socket(fileno=descriptors[0])
                self._take(read_greeting(read_message(text)), connection)
            except Exception:  # it ends this connection, and no other
                if connection is not None:
                    connection.close()
                time.sleep(0.01)  # out of descriptors, for example

    def close(self) -> None:
        """Take no more. The last one of this machine removes the folder."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._alive >= 0:
            for path in self._files:
                path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()
            os.close(self._alive)
            self._alive = -1


def listen_for_groups(config: SlowLinkConfig, group: int, own: str) -> socket.socket:
    """The port of this machine: at parallel.slow_link.bind, else at `own`, its address in parallel.slow_link.groups."""
    host, port = split_address(config.bind or own)
    address = host if config.bind else _address_here(host)
    if address is None:
        other = split_address(next(each for each in config.groups if own not in each.split(",")).split(",")[0])[0]
        here = interface_to(other)
        raise UsageError(
            f"parallel.slow_link.groups: the others reach group {group} at {own}, which is not an address of this "
            f"machine. If that port is forwarded to it, say where it listens, with one of its own addresses: "
            f"--parallel.slow_link.bind {here.address if here else '10.0.0.5'}:{port}"
        )
    try:
        return listen(address, [port])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} is in use, so group {group} cannot wait there for the others. Is group {group} "
                f"already running on this machine? Then give this one its own number, with --group or "
                f"Z2A_GROUP. If not, choose another port in parallel.slow_link.groups, or in "
                f"parallel.slow_link.bind."
            ) from error
        raise UsageError(
            f"parallel.slow_link.bind: this machine cannot listen on {host}:{port} ({error.strerror or error}). Give "
            f"the address of one of its interfaces, or 0.0.0.0 for all of them."
        ) from error


def _address_here(host: str) -> str | None:
    """The address of this machine that a name stands for; None: there is none. Its own name often stands for the
    loopback, where nobody else could reach it."""
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
                probe.bind(place)
                address = str(place[0])
                if host in (address, "localhost") or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                    return address
    return None
