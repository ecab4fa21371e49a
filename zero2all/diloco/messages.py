"""What groups tell each other: dataclasses, sent as JSON and checked before they are used."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, NamedTuple

LARGEST_NUMBER = 1 << 32


class Key(NamedTuple):
    """What is exchanged: in ascending order, the same in all groups."""

    number: int
    fragment: int


class GroupEra(NamedTuple):
    """A group in one of its eras: it begins a new one when it starts, and when it adopts a state."""

    group: int
    era: int


class Payload(NamedTuple):
    """Whose payload, for which key."""

    key: Key
    member: GroupEra


@dataclass(frozen=True)
class Record:
    """A decision: whose payloads are used for a key."""

    key: Key
    before: str
    """The chain that it extends."""
    members: tuple[GroupEra, ...]


class History(NamedTuple):
    """All decisions that led to a group's outer weights: groups with the same chain have the same weights."""

    chain: str = ""
    weight: int = 0  # payloads that went in
    last: Key = Key(-1, -1)

    def after(self, record: Record) -> History:
        """The history with one more decision."""
        text = json.dumps([self.chain, record.key, record.members])
        chain = hashlib.sha256(text.encode()).hexdigest()[:16]
        return History(chain, self.weight + len(record.members), record.key)

    def text(self) -> str:
        """What a checkpoint keeps."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> History:
        """From a checkpoint; empty: there was none."""
        return parse(cls, json.loads(text)) if text else cls()


@dataclass(frozen=True)
class Hello:
    """The first message: what must be equal in all groups."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Bye:
    """The group has finished."""


@dataclass(frozen=True)
class StateRequest:
    """A group that cannot follow asks another one for its state."""

    id: int
    server: GroupEra


@dataclass(frozen=True)
class Offer:
    """The history of a requested state that is on its way."""

    id: int
    history: History
    recent: tuple[Record, ...]
    term: int
    coordinator: int


@dataclass(frozen=True)
class Status:
    """Everything a group knows that others need; sent after every change and every second."""

    history: History
    era: int
    recent: tuple[Record, ...]
    term: int
    coordinator: int
    is_running: bool
    is_lost: bool
    connected: tuple[GroupEra, ...]
    waits_for: Key | None
    """The key that training has come to and that is not decided."""
    here: tuple[Payload, ...]
    """Payloads that the group has, of keys that are not decided."""
    unusable: tuple[Payload, ...]
    receives: bool
    """Whether parts of payloads come in."""
    request: StateRequest | None
    offers: tuple[Offer, ...]


@dataclass(frozen=True)
class Delivered:
    """To the sender of a payload: all of it has come. Kind, key and member as in the frames (`transport.Item`)."""

    kind: int
    key: Key
    member: GroupEra


KINDS: tuple[type, ...] = (Hello, Bye, Status, Delivered)


def write(message: Any) -> bytes:
    """A message as JSON."""
    return json.dumps({"is": type(message).__name__, **dataclasses.asdict(message)}).encode()


def read(values: dict[str, Any]) -> Any:
    """The message that a JSON object holds; ValueError for anything else."""
    for kind in KINDS:
        if values.get("is") == kind.__name__:
            return parse(kind, {name: value for name, value in values.items() if name != "is"})
    raise ValueError("a message that no process of a group sends")


def parse(kind: Any, value: Any) -> Any:
    """A value as this type, from what JSON makes of it; ValueError where it is something else."""
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else parse(parts[0], value)
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(parse(parts[0], each) for each in value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        fields = _fields(kind)
        if fields.keys() == value.keys():
            return kind(**{name: parse(fields[name], each) for name, each in value.items()})
    elif hasattr(kind, "_fields") and isinstance(value, list) and len(value) == len(kind._fields):
        return kind(*(parse(each, one) for each, one in zip(_fields(kind).values(), value, strict=True)))
    elif type(value) is (typing.get_origin(kind) or kind) and not (kind is int and abs(value) >= LARGEST_NUMBER):
        return value
    raise ValueError("a message that no process of a group sends")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
