"""Conversations: instruction data, packed as the messages of a chat.

A record is a conversation when its `others.messages` is a list of `{"role": …, "content": …}`, or its
`others.conversations` one of `{"from": …, "value": …}`, as ShareGPT writes it. It becomes

    <|begin_of_text|> <|message_start|> user\\n…text… <|message_end|> … assistant\\n… <|message_end|> <|end_of_text|>

The marks are control ids; role and text are encoded each by itself, so no text can close a message or speak in
another's name. Counted in the loss is what the assistant writes: its text and the mark that ends its message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError, UsageError
from zero2all.tokenizer.chat import LEARNED_ROLE, ROLES, Message, mark_id
from zero2all.tokenizer.load import Tokenizer

OTHER_ROLE_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "function": "tool"}
FORMS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Field of `others` -> what a message calls its role and its text."""


def turns_of(record: Mapping[str, Any], where: str) -> list[Message] | None:
    """The messages of a record; None when it is plain text. `where` names the record if its messages are damaged."""
    others = record.get("others") or {}
    for field, (role_key, text_key) in FORMS.items():
        messages = others.get(field)
        if isinstance(messages, list) and messages and isinstance(messages[0], dict) and role_key in messages[0]:
            places = (f"{where}, others.{field}[{n}]" for n in range(len(messages)))
            return [_turn(message, role_key, text_key, place) for message, place in zip(messages, places, strict=True)]
    return None


def _turn(message: Any, role_key: str, text_key: str, where: str) -> Message:
    role = message.get(role_key) if isinstance(message, dict) else None
    text = message.get(text_key) if isinstance(message, dict) else None
    role = OTHER_ROLE_NAMES.get(str(role), role)
    if role not in ROLES:
        raise BadInputError(
            f"{where}: the role is {role!r}, expected one of {', '.join(ROLES)}. Correct it and build the corpus again."
        )
    if not isinstance(text, str):
        raise BadInputError(
            f"{where}: `{text_key}` is {type(text).__name__}, expected text. Correct it and build the corpus again."
        )
    return Message(str(role), text)


class ConversationLayout:
    """Puts encoded messages between their marks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
        self._end = tokenizer.end_id
        try:
            start, self._message_end = (mark_id(tokenizer, part) for part in ("message_start", "message_end"))
        except UsageError as error:
            raise BadInputError(f"The corpus has conversations. {error}") from error
        self._heads = {role: [start, *tokenizer.encode_text(f"{role}\n")] for role in ROLES}

    def lay_out(self, turns: list[Message], texts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a conversation whose texts are encoded, and 1 for each that counts in the loss."""
        ids: list[Any] = [self._begin]
        counts: list[Any] = [np.zeros(len(self._begin), np.uint8)]
        for turn, text in zip(turns, texts, strict=True):
            head = self._heads[turn.role]
            ids += [head, text, [self._message_end]]
            counts.append(np.zeros(len(head), np.uint8))
            counts.append(np.full(len(text) + 1, turn.role == LEARNED_ROLE, np.uint8))
        ids.append([self._end])
        counts.append(np.zeros(1, np.uint8))
        return np.concatenate([np.asarray(part, np.uint32) for part in ids]), np.concatenate(counts)
