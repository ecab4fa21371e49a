"""A conversation as it grows: what was said, and what of it fits into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero2all.infer.chat import ChatPrompt, chat_prompt
from zero2all.infer.engine import PromptTooLongError
from zero2all.infer.load import LoadedModel
from zero2all.tokenizer.chat import Message

ROOM_SHARE = 4
"""At least one part in this many of the model's length is kept free for the answer."""


@dataclass(frozen=True)
class Fitted:
    """The prompt of a conversation that may have lost its oldest messages."""

    prompt: ChatPrompt
    tokens: int
    dropped: int
    """Messages that had no room."""


@dataclass
class Conversation:
    """The messages between a person and a model."""

    loaded: LoadedModel
    max_len: int
    """Tokens of prompt and answer together."""
    frame: str = "auto"
    system: str = ""
    messages: list[Message] = field(default_factory=list)
    """Of the person and the model in turn; the system's message is kept apart."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the model may call."""
    thinking: bool | None = None
    """Whether it is to think before it answers; None leaves that to the template."""

    def undo(self) -> str | None:
        """Take back the last message of the person and what came after it; None where there is none."""
        places = [number for number, message in enumerate(self.messages) if message.role == "user"]
        if not places:
            return None
        taken = self.messages[places[-1]].text
        del self.messages[places[-1] :]
        return taken

    def take_back_answer(self) -> bool:
        """Forget the last answer, with its calls, so that another can be asked for; False where there is nothing to
        answer."""
        while self.messages and self.messages[-1].role != "user":
            self.messages.pop()
        return bool(self.messages)

    def fitted(self, max_new_tokens: int) -> Fitted:
        """The prompt for the next answer, without the oldest turns where the model has no room for them."""
        fitted = self.newest(max_new_tokens)
        if fitted.tokens >= self.max_len:
            raise PromptTooLongError(
                f"The message and the system message have {fitted.tokens:,} tokens. The context has room for "
                f"{self.max_len:,}, including the answer. Shorten the message."
            )
        return fitted

    def newest(self, max_new_tokens: int) -> Fitted:
        """The newest turns that leave room for an answer; the last turn also where it leaves none."""
        most = self.max_len - min(max_new_tokens, self.max_len // ROOM_SHARE)
        turns = [number for number, message in enumerate(self.messages) if number and message.role == "user"]
        starts = [0, *turns]
        # Twice as many turns each time, then bisection: what is encoded depends on the model's length, not on how
        # long the conversation has become.
        fits, too_many, step = len(starts) - 1, -1, 1
        fitted = self._from(starts[fits])
        while fits - too_many > 1:
            first = max(fits - step, 0) if too_many < 0 else (fits + too_many) // 2
            longer = self._from(starts[first])
            if longer.tokens <= most:
                fits, fitted, step = first, longer, step * 2
            else:
                too_many = first
        return fitted

    def _from(self, first: int) -> Fitted:
        """The prompt without the messages before `first`."""
        head = [Message("system", self.system)] if self.system else []
        prompt = chat_prompt(self.loaded, [*head, *self.messages[first:]], self.frame, self.tools, self.thinking)
        return Fitted(prompt, self._count(prompt), first)

    def _count(self, prompt: ChatPrompt) -> int:
        if isinstance(prompt.prompt, list):
            return len(prompt.prompt)
        return len(self.loaded.tokenizer.encode_text(prompt.prompt)) + 1  # the id that opens a document
