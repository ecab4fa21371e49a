"""What a hostile or broken program may send: bytes and messages, from a stored seed."""

import json
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from zero2all.common.connections import Connection, Message

SEED = 20261118
COUNTS = [2_000, pytest.param(100_000, marks=pytest.mark.chaos)]
"""Cases of a fuzzer: in `make test`, in `make chaos`."""
ODD: list[Any] = [
    *(None, True, False, 0, -1, -2, 1, 2**31, 2**63, -(2**63), 2**64, 10**30, 1.5, float("nan"), float("inf"), -0.0),
    *("", "x", "\x00", "二", "\ud800", "../../etc/passwd", "x" * 5000, [], {}, [[]], [None] * 50, {"": {"": []}}),
]


def hostile_bytes(rng: random.Random, good: bytes) -> bytes:
    """Cut, flipped, repeated, swapped, replaced, or something else altogether."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0:
                del data[place:]
            case 1 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 2:
                data[place:place] = rng.randbytes(rng.choice((1, 4, 64, 1000)))
            case 3:
                data[place:place] = data[: rng.randrange(len(data) + 1)]
            case 4:
                data[place : place + 4] = rng.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff"))
            case 5:
                data = bytearray(rng.randbytes(rng.randrange(200)))
            case 6:
                data[place:place] = rng.choice(
                    (b"[" * 2000, b'{"a":' * 2000, b"\n" * 9, b'"\\ud800"', b"1e999", b"NaN")
                )
    return bytes(data)


def hostile_value(rng: random.Random, good: Any) -> Any:
    """The value with a part exchanged, left out or added."""
    if rng.random() < 0.15 or not isinstance(good, dict | list) or not good:
        return rng.choice(ODD)
    if isinstance(good, dict):
        key = rng.choice(list(good))
        choice = rng.randrange(4)
        if choice == 0:
            return {name: value for name, value in good.items() if name != key}
        if choice == 1:
            return {**good, rng.choice(["", "do", "extra", "step"]): rng.choice(ODD)}
        return {**good, key: hostile_value(rng, good[key])}
    place = rng.randrange(len(good))
    if rng.random() < 0.3:
        return [*good[:place], *good[place + 1 :]]
    return [*good[:place], hostile_value(rng, good[place]), *good[place + 1 :]]


def framed(message: Any) -> bytes:
    """As `Connection.send` writes it; not only objects."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + text


def conversations(count: int, good: Sequence[Sequence[Message]]) -> Iterator[tuple[Any, bytes]]:
    """(hello, the bytes after it) of `count` conversations, each near one of the good ones."""
    rng = random.Random(SEED)
    for _ in range(count):
        hello, *rest = [json.loads(json.dumps(each)) for each in rng.choice(good)]
        where = rng.randrange(3)
        if where == 0:
            hello = hostile_value(rng, hello)
        elif where == 1:
            rest = [hostile_value(rng, each) for each in rest]
        data = b"".join(map(framed, rest))
        yield hello, hostile_bytes(rng, data) if where == 2 else data


def play(take: Callable[[Connection], None], hello: Any, data: bytes) -> bytes:
    """What the handler answered. A hello that is no object is refused before a handler sees it."""
    if not isinstance(hello, dict):
        return b""
    theirs, ours = socket.socketpair()
    with theirs, ours:
        ours.settimeout(5)
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        take(Connection(theirs, "127.0.0.1:1", hello))
        theirs.close()
        answer = b""
        with suppress(ConnectionResetError):  # it did not read all
            while piece := ours.recv(1 << 16):
                answer += piece
        return answer
