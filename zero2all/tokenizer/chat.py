"""Messages, and our own chat template (`chat_template.jinja`), which every vocabulary that we train brings along.

    <|begin_of_text|> <|message_start|> user \\n …text… <|message_end|> <|message_start|> assistant \\n …

The marks are control ids. `template.py` lays conversations out with it, or with the template of an imported folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zero2all.common.errors import UsageError
from zero2all.tokenizer.save import template_text

if TYPE_CHECKING:
    from zero2all.tokenizer.load import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
LEARNED_ROLE = "assistant"
USUAL_NAMES = {
    "message_start": ("<|message_start|>", "<|im_start|>"),
    "message_end": ("<|message_end|>", "<|im_end|>"),
}
"""What foreign tokenizers call these marks."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    text: str
    thought: str = ""
    """What the assistant thinks before it answers."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Functions that the assistant calls, as OpenAI's API writes them."""

    def values(self) -> dict[str, Any]:
        """As templates know it."""
        values: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.thought:
            values["reasoning_content"] = self.thought
        if self.calls:
            values["tool_calls"] = list(self.calls)
        return values


@dataclass(frozen=True)
class Dialogue:
    """The messages of a conversation, and what else a template is given."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the assistant may call."""
    thinking: bool | None = None
    """Whether it is to think before it answers; None leaves that to the template."""


def own_template(tokenizer: Tokenizer) -> str | None:
    """Our template with the marks of this tokenizer; None where it has none."""
    try:
        marks = [_mark(tokenizer, role) for role in USUAL_NAMES]
    except UsageError:
        return None
    return template_text(*marks)


def require_marks(tokenizer: Tokenizer) -> None:
    """UsageError where a tokenizer has no marks for messages."""
    for role in USUAL_NAMES:
        _mark(tokenizer, role)


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
