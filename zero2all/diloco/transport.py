"""Sockets between groups: frames, and channels that outlive a broken connection.

A *channel* leads to another group. It has one or several TCP streams; a payload is cut into chunks, and each stream
takes the next chunk when it is free. A chunk counts as delivered only when the other side has acknowledged the whole
payload: what a broken stream had sent is sent again, and a payload may arrive twice.

A group has one listening port, in its rank 0. It reads nothing from a connection that has not proved that it knows the
secret of the run (`common.connections`). Nothing is unpickled: messages are JSON, every frame has a crc32c, a payload
has the size that the receiver knows beforehand (`Expected`), and memory is taken only for what has come. Bytes that are
no frame of this link end the connection, and the log names where they came from.
"""

import errno
import ipaddress
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import google_crc32c

from zero2all.common.connections import NotOfThisRunError, dial, listen, printable, read_message, split_address
from zero2all.common.errors import UsageError
from zero2all.common.progress import say
from zero2all.diloco.config import DilocoConfig
from zero2all.diloco.messages import Delivered, GroupEra, Key, read, write
from zero2all.parallel.network import interface_to

MESSAGE, PAYLOAD, STATE = range(3)
HEADER = struct.Struct("!4sBIIHIQQI")  # mark, kind, number, fragment, group, era, offset, total, length; then a crc32c
MARK = b"z2af"
CHUNK_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 22
GREETING_BYTES = 4096
ANSWER_SECONDS = 10.0
SILENT_SECONDS = 20.0
"""A channel between coordinators on which nothing came for so long is lost; something is sent every second."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 0.5
MOST_UNFINISHED = 64
"""Payloads of a channel of which a part has come. A group sends one at a time, and again what was lost."""
SAY_AGAIN_SECONDS = 60.0


class RefusalError(Exception):
    """The other side listens, but is not the one that was meant."""


class DuplicateError(RefusalError):
    """Another live process with this group's number is connected there. Arguments: its address, and this one's."""


@dataclass(frozen=True)
class Greeting:
    """Which group dials, and which one it means."""

    run: str
    life: str
    """Differs between two processes with the same number."""
    group: int
    to: int
    """The group that is meant."""
    stream: int


class PayloadId(NamedTuple):
    """What a payload is: its kind, its key (of a state: the id of the request), and who sends it."""

    kind: int
    key: Key
    member: GroupEra


@dataclass(frozen=True)
class Expected:
    """What a group knows of payloads before they come: all groups make them alike."""

    payload_bytes: Sequence[int]
    """By fragment."""
    state_bytes: int
    fault: Callable[[int | None, bytes], str]
    """What is wrong with the values of a payload, by its fragment (None: of a state); empty: nothing."""

    def size_fault(self, item: PayloadId, total: int) -> str:
        """What is wrong with the size of a payload or state."""
        sizes = {PAYLOAD: self.payload_bytes, STATE: [self.state_bytes]}.get(item.kind, [])
        if item.key.fragment >= len(sizes):
            raise ValueError("a payload that no group has")
        right = sizes[item.key.fragment]
        return "" if total == right else f"it has {total} bytes instead of {right}"


class Channel:
    """Messages and payloads to and from one other group."""

    def __init__(
        self,
        name: str,
        on_message: Callable[[Any], None],
        on_change: Callable[[bool], None],
        on_payload: Callable[[PayloadId, bytes, str], None] = lambda _item, _payload, _fault: None,
        expected: Expected | None = None,
    ) -> None:
        """`name`: of the group it leads to. `on_change`: the first stream is there, or the last is lost; called, as the
        others, in a thread of this channel. `on_payload` gets it, or nothing and why it was refused. `expected`: None
        if it carries messages alone."""
        self.name = name
        self._on_message, self._on_payload, self._on_change = on_message, on_payload, on_change
        self._expected = expected
        self.silent_seconds: float | None = None
        """A stream on which nothing comes for so long is lost; None: it may be silent."""
        self.changed = threading.Condition()
        self._telling, self._told_up = threading.Lock(), False
        self.streams: dict[int, socket.socket] = {}
        self.closed = False
        self.last_chunk_at = 0.0  # of a payload
        self.last_message_at = 0.0
        self.life, self.peer = "", ""  # the process that is connected, and its address
        self.sent_bytes = self.received_bytes = 0  # of payloads, again sent ones included
        self._messages: deque[bytes] = deque()
        self._sending: set[int] = set()
        self._chunks: deque[tuple[PayloadId, int]] = deque()
        self._unacknowledged: dict[PayloadId, memoryview] = {}
        self._sent: dict[int, list[tuple[PayloadId, int]]] = {}  # by stream
        self._arriving: dict[PayloadId, dict[int, bytes]] = {}  # chunks by their offset
        self._said_at = -SAY_AGAIN_SECONDS

    @property
    def is_up(self) -> bool:
        """Whether at least one stream is connected."""
        return bool(self.streams)

    def post(self, message: Any) -> None:
        """Send a message; lost with the connection."""
        with self.changed:
            self._messages.append(write(message))
            self.changed.notify_all()

    def send(self, item: PayloadId, payload: bytes) -> None:
        """Send a payload, again after every loss of a connection until it has arrived."""
        with self.changed:
            if item in self._unacknowledged:
                return
            _keep_one_state(self._unacknowledged, item)
            self._unacknowledged[item] = memoryview(payload)
            self._chunks.extend((item, offset) for offset in range(0, max(1, len(payload)), CHUNK_BYTES))
            self.changed.notify_all()

    def forget(self, before: int) -> None:
        """Drop payloads whose number is lower, on their way out or in."""
        with self.changed:
            for held in (self._unacknowledged, self._arriving):
                for item in [item for item in held if item.kind == PAYLOAD and item.key.number < before]:
                    del held[item]

    def attach(self, stream: int, connection: socket.socket, life: str = "", peer: str = "") -> None:
        """Use a connected socket as this stream, in place of an earlier one. `life`: which process dialled it, `peer`:
        from where."""
        self.life, self.peer, self.last_message_at = life, peer, time.monotonic()
        connection.settimeout(self.silent_seconds)
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
            threading.Thread(target=self._run, args=(work, stream, connection), daemon=True, name="diloco").start()

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
                    fields = (item.kind, *item.key, *item.member, offset, len(payload))
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
                self._take_message(read(read_message(body)))
            else:
                self._take_chunk(PayloadId(kind, Key(number, fragment), GroupEra(group, era)), offset, total, body)

    def _take_message(self, message: Any) -> None:
        self.last_message_at = time.monotonic()
        if not isinstance(message, Delivered):
            self._on_message(message)
            return
        with self.changed:
            self._unacknowledged.pop(PayloadId(message.kind, message.key, message.member), None)
            for stream, chunks in self._sent.items():
                self._sent[stream] = [chunk for chunk in chunks if chunk[0] in self._unacknowledged]
            self.changed.notify_all()

    def _take_chunk(self, item: PayloadId, offset: int, total: int, body: bytes) -> None:
        """Keep a chunk, hand over the payload when it is whole. Nothing is kept of one that has not the right size."""
        if self._expected is None:
            raise ValueError("a payload on a connection that carries none")
        with self.changed:
            if item.kind == PAYLOAD:
                self.last_chunk_at = time.monotonic()
            self.received_bytes += len(body)
            whole, fault = b"", self._expected.size_fault(item, total)
            if not fault:
                _keep_one_state(self._arriving, item)
                if item not in self._arriving and len(self._arriving) >= MOST_UNFINISHED:
                    del self._arriving[next(iter(self._arriving))]
                chunks = self._arriving.setdefault(item, {})
                chunks[offset] = body
                if len(chunks) < -(-max(1, total) // CHUNK_BYTES):
                    return
                whole = b"".join(chunks[each] for each in sorted(chunks))
                del self._arriving[item]
        self._on_payload(item, whole, fault)
        self.post(Delivered(*item))


def _keep_one_state(held: dict[PayloadId, Any], new: PayloadId) -> None:
    """Drop the states before a new one: a group waits for the one that it asked for last. They are large."""
    if new.kind == STATE:
        for item in [item for item in held if item.kind == STATE and item != new]:
            del held[item]


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
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 4), ("USER_TIMEOUT", 30_000)):
        if hasattr(socket, f"TCP_{name}"):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def dial_group(address: str, secret: bytes, greeting: Greeting) -> tuple[socket.socket, str]:
    """A connection to the group that the greeting names, and its address."""
    try:
        connection = dial(split_address(address), secret, f"group {greeting.to}", asdict(greeting), ANSWER_SECONDS)
    except NotOfThisRunError as error:
        raise RefusalError(f"{error}.") from error
    try:
        answer = connection.receive(ANSWER_SECONDS, GREETING_BYTES)
        if duplicate := answer.get("duplicate"):
            raise DuplicateError(printable(duplicate[0]), printable(duplicate[1]))
        if answer.get("refused"):
            raise RefusalError(printable(answer["refused"]))
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

    threading.Thread(target=work, daemon=True, name="diloco-dial").start()


def listen_for_groups(config: DilocoConfig, group: int) -> socket.socket:
    """The port of this group: at diloco.bind, else at its address in diloco.groups."""
    own = config.groups[group]
    host, port = split_address(config.bind or own)
    address = host if config.bind else _address_here(host)
    if address is None:
        here = interface_to(split_address(config.groups[0 if group else 1])[0])
        raise UsageError(
            f"diloco.groups: the others reach group {group} at {own}, which is not an address of this machine. If that "
            f"port is forwarded to it, say where it listens, with one of its own addresses: "
            f"--diloco.bind {here.address if here else '10.0.0.5'}:{port}"
        )
    try:
        return listen(address, [port])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} is in use, so group {group} cannot wait there for the others. Is group {group} already "
                f"running on this machine? Then give this one its own number, with --group or Z2A_GROUP. If not, "
                f"choose another port in diloco.groups, or in diloco.bind."
            ) from error
        raise UsageError(
            f"diloco.bind: this machine cannot listen on {host}:{port} ({error.strerror or error}). Give the "
            f"address of one of its interfaces, or 0.0.0.0 for all of them."
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
