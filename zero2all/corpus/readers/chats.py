"""Chats: rows that are a message each -> rows that are a conversation each, with its messages in the field `messages`.

A column names the conversation of a message; without one a file is a conversation. Messages keep their order, and those
of a conversation need not stand together. A list of messages under another name, or as JSON in a text, is found, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero2all.common import jsonio
from zero2all.corpus.readers.items import Damaged, Items, RawRow

LISTS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "message")
"""What a list of messages is called."""
ROLE_KEYS, TEXT_KEYS = ("role", "from", "speaker", "sender"), ("content", "value", "message", "text")
LOG_KEYS = (
    *("conversation_id", "conversation", "conv_id", "dialog_id", "dialogue_id", "chat_id", "session_id", "thread_id"),
)
"""What the column that names the conversation of a message is called."""
MOST_HELD_CHARS = 1 << 28
"""Of a log, in memory. Where it has more, the conversations so far end, and later messages of them go to quarantine."""


def conversations(items: Items) -> Items:
    """The same items with messages joined: at the end of each file or archive member."""
    held: dict[Any, list[RawRow]] = {}
    ended: set[Any] = set()
    origin, size = None, 0
    for item in items:
        if item.origin is not origin or size > MOST_HELD_CHARS:
            yield from map(_joined, held.values())
            ended = ended.union(held) if item.origin is origin else set()
            origin, size, held = item.origin, 0, {}
        if isinstance(item, Damaged) or item.is_document or not is_message(item.fields):
            yield item if isinstance(item, Damaged) or item.is_document else _listed(item)
        elif (key := log_key(item.fields)) in ended:
            detail = f"{key}: the log is too long for memory, and its messages do not stand together"
            yield item.origin.damaged(item.at, item.end, "conversation_ended", detail, item.raw_bytes)
        else:
            held.setdefault(key, []).append(item)
            size += sum(len(value) for value in item.fields.values() if isinstance(value, str))
    yield from map(_joined, held.values())


def is_message(fields: Mapping[str, Any]) -> bool:
    """Whether a row is one message: who says it, and what."""
    is_said = any(key in fields for key in TEXT_KEYS) and any(fields.get(key) is not None for key in ROLE_KEYS)
    return is_said and messages_in(fields) is None


def log_key(fields: Mapping[str, Any]) -> str | None:
    """Which conversation a message belongs to; None where its file is one."""
    return next((str(fields[key]) for key in LOG_KEYS if fields.get(key) is not None), None)


def messages_in(fields: Mapping[str, Any]) -> tuple[str, list[Mapping[str, Any]]] | None:
    """The list of messages in a row, and its name."""
    for name in LISTS:
        value = fields.get(name)
        if isinstance(value, str) and value.lstrip().startswith("["):  # columns of CSV files hold lists as text
            try:
                value = jsonio.loads(value)
            except ValueError:
                continue
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            return name, value
    return None


def _joined(rows: list[RawRow]) -> RawRow:
    return replace(rows[-1], at=rows[0].at, fields={"messages": [_message(row.fields) for row in rows]})


def _listed(row: RawRow) -> RawRow:
    found = messages_in(row.fields)
    if found is None:
        return row
    rest = {key: value for key, value in row.fields.items() if key != found[0]}
    messages = [_message(each) for each in found[1]]
    if (system := rest.get("system")) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return replace(row, fields={**rest, "messages": messages})


def _message(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its role and text under their usual names."""
    role, text = (next((key for key in keys if fields.get(key) is not None), "") for keys in (ROLE_KEYS, TEXT_KEYS))
    rest = {key: value for key, value in fields.items() if key not in (role, text) and value is not None}
    return {"role": fields.get(role), "content": fields.get(text), **rest}
