"""Chats as ids. A chat is never rendered as one text and then encoded, or a message could contain marks.

    <|begin_of_text|> <|message_start|> user \\n …text… <|message_end|> <|message_start|> assistant \\n …

The marks are control ids, placed by the program; role and text go through `encode_text`, each by itself, so neither can
close a message or open another. `assistant` says which ids a model should learn to write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zero2all.common.errors import UsageError
from zero2all.tokenizer.load import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
LEARNED_ROLE = "assistant"
USUAL_NAMES = {
    "message_start": ("<|message_start|>", "<|im_start|>"),
    "message_end": ("<|message_end|>", "<|im_end|>"),
}
"""What foreign tokenizers call these marks."""

CHAT_TEMPLATE = """\
{{- bos_token }}{% for message in messages %}{{ 'START' + message['role'] + '\\n' + message['content'] + 'END' }}\
{% endfor %}{% if add_generation_prompt %}{{ 'STARTassistant\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    text: str


@dataclass(frozen=True)
class ChatIds:
    """A chat as a model reads it."""

    ids: list[int]
    assistant: list[bool]
    """For each id, whether the assistant wrote it: its text and the mark that ends its message. For loss masks."""


def encode_chat(tokenizer: Tokenizer, messages: Iterable[Message], ask: bool = False) -> ChatIds:
    """The ids of a chat; with `ask`, up to where the assistant is to write."""
    start, end = (mark_id(tokenizer, role) for role in USUAL_NAMES)
    ids = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    assistant = [False] * len(ids)
    for message in messages:
        if message.role not in ROLES:
            raise UsageError(f"A message has the role {message.role!r}; expected one of {', '.join(ROLES)}.")
        head = [start, *tokenizer.encode_text(f"{message.role}\n")]
        body = [*tokenizer.encode_text(message.text), end]
        ids += [*head, *body]
        assistant += [False] * len(head) + [message.role == LEARNED_ROLE] * len(body)
    if ask:
        head = [start, *tokenizer.encode_text(f"{LEARNED_ROLE}\n")]
        ids += head
        assistant += [False] * len(head)
    return ChatIds(ids, assistant)


def chat_template(tokenizer: Tokenizer) -> str | None:
    """The same layout for tools that render text (see `save.compatible_files`); None without the two marks."""
    try:
        start, end = (_mark(tokenizer, role) for role in USUAL_NAMES)
    except UsageError:
        return None
    return CHAT_TEMPLATE.replace("START", start).replace("END", end)


def mark_id(tokenizer: Tokenizer, role: str) -> int:
    """The id of message_start or message_end."""
    return tokenizer.encode_control(_mark(tokenizer, role))


def _mark(tokenizer: Tokenizer, role: str) -> str:
    """The control token with this role."""
    named = tokenizer.control_roles.get(role)
    for name in [named] if named else USUAL_NAMES[role]:
        if name in tokenizer.control:
            return name
    raise UsageError(
        f"This tokenizer has no control token for {role} (looked for {', '.join(USUAL_NAMES[role])}), so it "
        "cannot format a chat. Train a tokenizer that has one with `z2a tokenizer train`."
    )
