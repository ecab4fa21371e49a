"""Request bodies -> what is asked of the engine.

OpenAI's fields and defaults. Others beside them: top_k, min_p and repetition_penalty; in chats also `frame`, how the
messages become a prompt (infer/chat.py), `continue_final_message`: the last message is the beginning of the answer, and
`truncation`: `auto` leaves out the oldest turns where the model has no room for them, as `z2a chat` does.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero2all.infer.chat import FRAMES, chat_prompt
from zero2all.infer.conversation import Conversation
from zero2all.infer.load import LoadedModel
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import TextRequest
from zero2all.serve.errors import RefusedError
from zero2all.serve.fields import MAX_CHOICES, MAX_TOP_LOGPROBS, SHARED, flag, one_of, prompts, read_fields, whole
from zero2all.tokenizer.chat import LEARNED_ROLE, ROLES, Message

COMPLETION_FIELDS = {**SHARED, "prompt": prompts, "logprobs": whole(0, MAX_TOP_LOGPROBS), "echo": flag}
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
SEEDS = 1 << 63


@dataclass(frozen=True)
class Call:
    """One HTTP request: its choices, prompt by prompt, and how they are to be answered."""

    model: str | None
    requests: list[TextRequest]
    n: int
    """Choices of each prompt."""
    stream: bool = False
    include_usage: bool = False
    running_usage: bool = False
    """With the usage at the end: what was used so far, in every chunk."""
    echoes: tuple[str, ...] = ()
    """For each choice, what stands before what was written."""
    dropped_messages: int = 0
    """The oldest messages, which the model had no room for."""


def read_messages(value: Any) -> list[Message]:
    """The turns of a chat."""
    if not isinstance(value, list) or not value:
        raise ValueError('a list of messages such as {"role": "user", "content": "Hello"}')
    return [_message(each, f"messages[{index}]") for index, each in enumerate(value)]


CHAT_FIELDS = {
    **SHARED,
    "messages": read_messages,
    "max_completion_tokens": whole(1),
    "logprobs": flag,
    "top_logprobs": whole(0, MAX_TOP_LOGPROBS),
    "frame": one_of(*FRAMES),
    "continue_final_message": flag,
    "truncation": one_of("auto", "disabled"),
}


def completion_call(body: Any, loaded: LoadedModel, _max_len: int) -> Call:
    """What a body of /v1/completions asks for."""
    fields = read_fields(body, COMPLETION_FIELDS, "prompt")
    if fields.get("echo") and "logprobs" in fields:
        raise RefusedError(
            400,
            "echo with logprobs would need those of the prompt, which are not kept. Ask for one of the two.",
            "echo",
        )
    texts: list[str | list[int]] = fields["prompt"]
    limit = fields.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    base = [TextRequest(each, limit, stop=fields.get("stop", ()), logprobs=fields.get("logprobs")) for each in texts]
    echoes = [_spelled(each, loaded) for each in texts] if fields.get("echo") else []
    return _call(fields, base, echoes)


def chat_call(body: Any, loaded: LoadedModel, max_len: int) -> Call:
    """What a body of /v1/chat/completions asks for; prompt and answer have room for `max_len` tokens."""
    fields = read_fields(body, CHAT_FIELDS, "messages")
    limits = {name: fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields}
    if len(limits) == 2:
        raise RefusedError(400, "max_tokens and max_completion_tokens mean the same; give one of them.", "max_tokens")
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise RefusedError(400, "top_logprobs needs logprobs: true beside it.", "top_logprobs")
    messages: list[Message] = fields["messages"]
    begun = _taken_beginning(messages) if fields.get("continue_final_message") else ""
    begun_ids, limit = loaded.tokenizer.encode_text(begun), next(iter(limits.values()), None)
    frame, dropped = fields.get("frame", "auto"), 0
    if fields.get("truncation") == "auto":
        told = "\n".join(each.text for each in messages if each.role == "system")
        said = [each for each in messages if each.role != "system"]
        fitted = Conversation(loaded, max_len - len(begun_ids), frame, told, said).fitted(limit or max_len)
        prompt, dropped = fitted.prompt, fitted.dropped
    else:
        prompt = chat_prompt(loaded, messages, frame)
    given = prompt.prompt
    given = given + begun if isinstance(given, str) else [*given, *begun_ids]
    stop = tuple(dict.fromkeys((*fields.get("stop", ()), *prompt.stop)))
    logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    request = TextRequest(
        given,
        limit,
        stop=stop,
        heal=prompt.heal,
        logprobs=logprobs,
        end_ids=prompt.end_ids,
    )
    return dataclasses.replace(_call(fields, [request], []), dropped_messages=dropped)


def _taken_beginning(messages: list[Message]) -> str:
    """Takes the last message away: the assistant has begun with it, and goes on."""
    if messages[-1].role != LEARNED_ROLE:
        raise RefusedError(
            400,
            f"continue_final_message goes on with a last message of the role {LEARNED_ROLE}; the last is of another.",
            "continue_final_message",
        )
    return messages.pop().text


def _call(fields: dict[str, Any], base: Sequence[TextRequest], echoes: Sequence[str]) -> Call:
    n, is_stream = fields.get("n", 1), fields.get("stream", False)
    if len(base) * n > MAX_CHOICES:
        raise RefusedError(
            400, f"n: {len(base)} prompts with {n} choices each are more than {MAX_CHOICES}. Ask for fewer.", "n"
        )
    if "stream_options" in fields and not is_stream:
        raise RefusedError(400, "stream_options needs stream: true beside it.", "stream_options")
    include_usage, running_usage = fields.get("stream_options", (False, False))
    seed = fields.get("seed", secrets.randbelow(SEEDS))  # who names none wants another answer each time
    samplings = [_sampling(fields, (seed + place) % SEEDS) for place in range(n)]
    requests = [dataclasses.replace(each, sampling=sampling) for each in base for sampling in samplings]
    return Call(
        model=fields.get("model"),
        requests=requests,
        n=n,
        stream=is_stream,
        include_usage=include_usage,
        running_usage=running_usage,
        echoes=tuple(each for each in echoes for _ in range(n)),
    )


def _sampling(fields: dict[str, Any], seed: int) -> Sampling:
    return Sampling(
        temperature=fields.get("temperature", 1.0),
        top_k=max(0, fields.get("top_k", 0)),
        top_p=fields.get("top_p", 1.0),
        min_p=fields.get("min_p", 0.0),
        repetition_penalty=fields.get("repetition_penalty", 1.0),
        seed=seed,
    )


def _spelled(prompt: str | list[int], loaded: LoadedModel) -> str:
    try:
        return prompt if isinstance(prompt, str) else loaded.tokenizer.decode(prompt)
    except ValueError as error:
        raise RefusedError(400, f"prompt: {error}.", "prompt") from None


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f'messages such as {{"role": "user", "content": "Hello"}}; {place} is none')
    beyond = [name for name, given in value.items() if name not in ("role", "content") and given not in (None, [], "")]
    if beyond:
        raise ValueError(f"messages of role and content; {place} has `{beyond[0][:40]}`, which cannot be shown to it")
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ROLES:
        raise ValueError(f"roles among {', '.join(ROLES)}; {place} has another")
    return Message(role, _content(value.get("content"), place))


def _content(value: Any, place: str) -> str:
    """The text of a message, which may come in parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        return "".join(part["text"] for part in parts)
    raise ValueError(f"text as content, or a list of text parts (no pictures, no sound); {place} has something else")
