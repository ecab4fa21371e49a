"""Connections between the processes of a run. Each side proves that it knows the secret of the run before the other
reads anything else from it.

    listener                                            dialer
    "z2a 2\\n", 32 random bytes                 ->  <-    "z2a 2\\n"
                                                <-      32 random bytes, HMAC-SHA256(secret, "dialer", door, both)
    HMAC-SHA256(secret, "listener", door, both) ->
                                                <-      hello: a JSON object
    messages in both directions: 4 bytes of length, then a JSON object

The proof names the door that is meant ("group 1", "coordinator"). So who listens where a dialer knocks cannot pass its
challenge on to another door, or to a door of the dialer itself, and come in with the answer.

Nothing is encrypted, and what follows the proof is not signed: who can change packets on their way needs a tunnel
against them (SECURITY.md). A door holds few connections that have not proved themselves, each for a few seconds, and
gives up one of them, at random, for a new one, so that idle or hostile ones neither fill memory nor keep the run's own
out. Whatever goes wrong in one connection ends that connection only.
"""

import errno
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from zero2all.common.progress import say
from zero2all.common.secret import SHARE_ONE

MAGIC = b"z2a 2\n"
NONCE_BYTES = PROOF_BYTES = 32
PROOF_SECONDS = 5.0
"""For the proof and the hello together."""
HELLO_BYTES = 1 << 14
MESSAGE_BYTES = 1 << 22
MOST_UNPROVED, MOST_UNPROVED_OF_ADDRESS = 256, 64
SAY_AGAIN_SECONDS, MOST_SAID = 60.0, 20
"""An address is named once a minute, and in all so many addresses."""
BACKLOG = 1024
MOST_SHOWN = 2000
"""Characters of another machine's words."""

Message = dict[str, Any]


class NotOfThisRunError(ConnectionError):
    """The other side has another secret, or is no z2a process at all."""


class OtherSecretError(NotOfThisRunError):
    """The other side is a z2a process with another secret."""


class Connection:
    """A connected socket whose other side belongs to the run; `hello` is what the dialer said first."""

    def __init__(self, connected: socket.socket, address: str, hello: Message | None = None) -> None:
        self.socket, self.address, self.hello = connected, address, hello or {}
        self._sends = threading.Lock()
        self._piece = bytearray()

    def send(self, message: Message) -> None:
        """One message, whole, from any thread."""
        text = json.dumps(message).encode()
        if len(text) > MESSAGE_BYTES:
            raise ValueError(f"a message of {len(text)} bytes; at most {MESSAGE_BYTES} are read")
        with self._sends:
            self.socket.sendall(len(text).to_bytes(4, "big") + text)

    def receive(self, seconds: float | None = None, most_bytes: int = MESSAGE_BYTES) -> Message:
        """The next message. TimeoutError after `seconds`: call again, nothing is lost. Bytes after it stay unread."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._fill(4, deadline)
        length = int.from_bytes(self._piece[:4], "big")
        if length > most_bytes:
            raise ValueError(f"a message of {length} bytes was announced; at most {most_bytes} are read")
        self._fill(4 + length, deadline)
        text, self._piece = bytes(self._piece[4:]), bytearray()
        return read_message(text)

    def close(self) -> None:
        """End it; a thread that reads from it wakes."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _fill(self, count: int, deadline: float | None) -> None:
        while len(self._piece) < count:
            self.socket.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            self._piece += read_some(self.socket, count - len(self._piece))


def read_message(text: bytes) -> Message:
    """A JSON object; ValueError for anything else."""
    try:
        message = json.loads(text)
    except RecursionError as error:
        raise ValueError("a message that is nested too deep") from error
    if not isinstance(message, dict):
        raise ValueError("a message that is no JSON object")
    return message


def printable(text: object) -> str:
    """What another machine said, for a terminal: without control characters, and not long."""
    return "".join(each if each.isprintable() else "?" for each in str(text)[:MOST_SHOWN])


def read_some(connected: socket.socket, most_bytes: int) -> bytes:
    """At least one byte; ConnectionError at the end."""
    if not (piece := connected.recv(min(most_bytes, 1 << 20))):
        raise ConnectionError("the other side has closed the connection")
    return piece


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPV6]:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def address_of(connected: socket.socket) -> str:
    """Of the other side, as it is seen here."""
    host, port = connected.getpeername()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, ports: Iterable[int] = (0,)) -> socket.socket:
    """A listening socket at this address of the machine, on the first of `ports` that is free (0: any)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken = error
    raise taken or OSError(errno.EADDRINUSE, "no port was given")


def dial(
    address: tuple[str, int], secret: bytes, door: str, hello: Message, seconds: float = PROOF_SECONDS
) -> Connection:
    """Connect, prove, greet. `door`: the name of the `ConnectionListener` that is meant. NotOfThisRunError: the other
    side has another secret, or is another listener. OSError: nobody answers."""
    deadline = time.monotonic() + seconds
    connected = socket.create_connection(address, seconds)
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.sendall(MAGIC)  # a web server that waits for a request answers this line, and is known at once
        start = _read(connected, len(MAGIC) + NONCE_BYTES, deadline)
        if not start.startswith(MAGIC):
            raise NotOfThisRunError("something answers there, but it is not a z2a process: the port is wrong")
        nonces = start[len(MAGIC) :] + secrets.token_bytes(NONCE_BYTES)
        connected.sendall(nonces[NONCE_BYTES:] + _proof(secret, "dialer", door, nonces))
        if not hmac.compare_digest(_read(connected, PROOF_BYTES, deadline), _proof(secret, "listener", door, nonces)):
            raise OtherSecretError(f"the other side has another secret; {SHARE_ONE}")
        connection = Connection(connected, address_of(connected))
        connection.send(hello)
        connected.settimeout(None)
        return connection
    except TimeoutError:
        connected.close()
        raise TimeoutError("it accepts connections, but is silent: it hangs, or the port is wrong") from None
    except BaseException:
        connected.close()
        raise


class ConnectionListener:
    """Accepts connections at a listening socket, in threads, until it is closed."""

    def __init__(self, listener: socket.socket, secret: bytes, take: Callable[[Connection], None], name: str) -> None:
        """`take` gets each connection that has proved itself, in a thread of its own, and closes it. `name`: what
        listens here; dialers must mean it, and the log says it."""
        if not secret:
            raise ValueError("no secret")
        self._listener, self._secret, self._take, self._name = listener, secret, take, name
        self._lock = threading.Lock()
        self._unproved: list[tuple[str, socket.socket]] = []
        self._said: dict[str, float] = {}
        threading.Thread(target=self._accept, name=f"z2a-{name}", daemon=True).start()

    def close(self) -> None:
        """Listen no more; connections that were taken go on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for _, connected in self._unproved:
                _shut(connected)

    def _accept(self) -> None:
        while True:
            try:
                connected, place = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # out of descriptors, for example
                continue
            with self._lock:
                same = [one for one in self._unproved if one[0] == place[0]]
                crowd = same if len(same) >= MOST_UNPROVED_OF_ADDRESS else self._unproved
                if crowd is same or len(crowd) >= MOST_UNPROVED:
                    given_up = secrets.choice(crowd)  # the oldest would be the one whose way is long
                    _shut(given_up[1])
                    self._unproved.remove(given_up)
                self._unproved.append((place[0], connected))
            try:
                threading.Thread(target=self._greet, args=(connected, place[0]), daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget(connected, place[0])
                connected.close()

    def _greet(self, connected: socket.socket, host: str) -> None:
        try:
            try:
                connection = self._prove(connected)
            finally:
                self._forget(connected, host)
        except Exception as error:
            connected.close()
            self._say(host, f"z2a: {self._name}: a connection from {host} was refused: {_reason(error)}.")
            return
        try:
            self._take(connection)
        except ConnectionError:  # the other side has ended it
            connection.close()
        except Exception as error:
            connection.close()
            self._say(host, f"z2a: {self._name}: a connection from {host} was ended: {_reason(error)}.")

    def _prove(self, connected: socket.socket) -> Connection:
        deadline = time.monotonic() + PROOF_SECONDS
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(PROOF_SECONDS)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connected.sendall(MAGIC + nonce)
        if _read(connected, len(MAGIC), deadline) != MAGIC:
            raise NotOfThisRunError("it is not a z2a process")
        said = _read(connected, NONCE_BYTES + PROOF_BYTES, deadline)
        nonces = nonce + said[:NONCE_BYTES]
        if not hmac.compare_digest(said[NONCE_BYTES:], _proof(self._secret, "dialer", self._name, nonces)):
            connected.sendall(bytes(PROOF_BYTES))  # so that an honest dialer can say what is wrong
            raise NotOfThisRunError(f"it does not know the secret of this run; {SHARE_ONE}")
        connected.sendall(_proof(self._secret, "listener", self._name, nonces))
        connection = Connection(connected, address_of(connected))
        connection.hello = connection.receive(max(0.001, deadline - time.monotonic()), HELLO_BYTES)
        connected.settimeout(None)
        return connection

    def _forget(self, connected: socket.socket, host: str) -> None:
        with self._lock, suppress(ValueError):  # it was given up for a new one
            self._unproved.remove((host, connected))

    def _say(self, host: str, text: str) -> None:
        """Once a minute for each address, and of few addresses, so that nobody fills the log."""
        if self._listener.fileno() < 0:
            return
        now = time.monotonic()
        with self._lock:
            self._said = {each: when for each, when in self._said.items() if now < when + SAY_AGAIN_SECONDS}
            if host in self._said or len(self._said) >= MOST_SAID:
                return
            self._said[host] = now
        say(text)


def is_of_this_user(near: socket.socket) -> bool:
    """Whether the other end of an IPv4 connection on this machine is a process of the same user; true where the system
    does not say. Other users reach loopback, too."""
    rows: list[list[str]] = []
    for name in ("tcp", "tcp6"):  # a socket for IPv6 can connect to an address of IPv4
        with suppress(OSError):
            rows += [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [
        f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
        for host, port in (near.getpeername(), near.getsockname())
    ]
    own = str(os.geteuid())
    return not rows or any(
        row[1].endswith(ends[0]) and row[2].endswith(ends[1]) and row[7] == own and row[9] != "0" for row in rows
    )  # one that was closed has no inode, and counts as root's


def join(one: socket.socket, other: socket.socket) -> None:
    """Pass on the bytes of each to the other, until one of them ends."""
    with suppress(OSError):  # no TCP
        for end in (one, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_copy, args=(other, one), daemon=True)
    back.start()
    _copy(one, other)
    back.join()
    one.close()
    other.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    for end in (source, target):
        _shut(end)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _shut(connected: socket.socket) -> None:
    """Wake who reads from it; that one closes it."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _read(connected: socket.socket, count: int, deadline: float) -> bytes:
    found = b""
    while len(found) < count:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        found += read_some(connected, count - len(found))
        if time.monotonic() > deadline:
            raise TimeoutError("it was too slow")
    return found


def _proof(secret: bytes, role: str, door: str, nonces: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + f"{role} {door}\0".encode() + nonces, "sha256")
