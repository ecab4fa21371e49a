"""Request bodies -> what is asked of the engine.

OpenAI's fields and defaults. Others beside them: top_k, min_p and repetition_penalty; in chats also `frame`, how the
messages become a prompt (infer/chat.py), `continue_final_message`: the last message is the beginning of the answer,
`truncation`: `auto` leaves out the oldest turns where the model has no room for them, as `z2a chat` does, and
`chat_template_kwargs`: whether the model thinks.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero2all.common import jsonio
from zero2all.common.schema import MISSING, Problem, nearest_hint
from zero2all.infer.chat import FRAMES, ChatPrompt, chat_prompt
from zero2all.infer.conversation import Conversation
from zero2all.infer.load import LoadedModel
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import TextRequest
from zero2all.infer.tools import THINK, THINK_END, call_of
from zero2all.tokenizer.chat import LEARNED_ROLE, ROLES, Message

# The fields of a request body: their types and bounds. All problems of a body are reported together.

Reader = Callable[[Any], Any]
"""The value as the server uses it. A ValueError says what was expected instead."""

LARGEST_INT = (1 << 63) - 1
MAX_STOPS = 8  # a chat adds its own, and the engine takes 16
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 300


def text(value: Any) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise ValueError("text")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def whole(minimum: int, maximum: int = LARGEST_INT) -> Reader:
    """A whole number within bounds."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            is_open = maximum == LARGEST_INT and not (type(value) is int and value > maximum)
            bounds = f"at least {minimum}" if is_open else f"from {minimum} to {maximum}"
            raise ValueError(f"a whole number {bounds}")
        return value

    return read


def number(minimum: float, maximum: float, above: bool = False) -> Reader:
    """A number from `minimum` (or `above` it) to `maximum`."""

    def read(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= maximum or (above and value == minimum):
            bounds = f"above {minimum:g} and at most {maximum:g}" if above else f"from {minimum:g} to {maximum:g}"
            raise ValueError(f"a number {bounds}")
        return float(value)

    return read


def stops(value: Any) -> tuple[str, ...]:
    """One stop string or several."""
    found = [value] if isinstance(value, str) else value
    is_list = isinstance(found, list) and len(found) <= MAX_STOPS
    if not is_list or not all(isinstance(each, str) and each for each in found):
        raise ValueError(f"text, or a list of at most {MAX_STOPS} texts, none of them empty")
    return tuple(found)


def one_of(*words: str) -> Reader:
    """One of these words."""

    def read(value: Any) -> str:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return str(value)

    return read


def stream_options(value: Any) -> tuple[bool, bool]:
    """Whether the stream ends with the usage, and whether every chunk says what was used so far (as vLLM has it)."""
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if not isinstance(value, dict) or set(value) - known:
        raise ValueError('an object such as {"include_usage": true}')
    return flag(value.get("include_usage", False)), flag(value.get("continuous_usage_stats", False))


def template_options(value: Any) -> bool | None:
    """Whether the model thinks; None: as its template has it."""
    if not isinstance(value, dict) or set(value) - {"enable_thinking"}:
        raise ValueError('an object such as {"enable_thinking": false}')
    return flag(value["enable_thinking"]) if value else None


def functions(value: Any) -> list[dict[str, Any]]:
    """Functions that the model may call."""
    for index, each in enumerate(value if isinstance(value, list) else [None]):
        match each:
            case {"type": "function", "function": {"name": str(name), **more}} if re.fullmatch(r"[\w-]{1,64}", name):
                if isinstance(more.get("parameters", {}), dict):
                    continue
        usual = '{"type": "function", "function": {"name": "add", "parameters": {}}}'
        raise ValueError(f"functions such as {usual}; tools[{index}] is none")
    return list(value)


def prompts(value: Any, most: int = MAX_CHOICES) -> list[str | list[int]]:
    """The prompts: one text or one list of ids, or a list of either."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    expected = "text, a list of token ids, or a list of either; ids are whole numbers, and no list is empty"
    if len(several) > most:
        raise ValueError(f"at most {most:,} in one request")
    for each in several:
        is_ids = isinstance(each, list) and each and all(type(token) is int and token >= 0 for token in each)
        if not (is_ids or isinstance(each, str)):
            raise ValueError(expected)
    return several


def biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Token ids, which are names in JSON, and what is added to their logits."""
    read = number(-100, 100)
    if (
        not isinstance(value, dict)
        or len(value) > MAX_BIASES
        or not all(re.fullmatch(r"[0-9]{1,9}", each) for each in value)
    ):
        raise ValueError(f'an object with at most {MAX_BIASES} token ids, such as {{"50": -100}}')
    return tuple((int(name), read(each)) for name, each in value.items())


def response_format(value: Any) -> tuple[str, str] | None:
    """The grammar of JSON that an answer has to be."""
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"} if isinstance(schema := value.get("schema", {"type": "object"}), dict):
            return "json", jsonio.dumps_line(schema).decode()
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return "json", jsonio.dumps_line(schema).decode()
    raise ValueError('{"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}')


SHARED: dict[str, Reader] = {
    "model": text,
    "max_tokens": whole(1),
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": whole(-1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0, 10, above=True),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "logit_bias": biases,
    "response_format": response_format,
    "grammar": lambda value: ("gbnf", text(value)),
    "seed": whole(-LARGEST_INT),
    "stop": stops,
    "n": whole(1, MAX_CHOICES),
    "stream": flag,
    "stream_options": stream_options,
}
"""top_k -1 is what other servers call 0: all tokens."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
"""Fields of OpenAI's that do nothing here: accepted where they ask for nothing."""

IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields about the caller, which change no answer."""


def read_fields(body: Any, readers: Mapping[str, Reader], required: str) -> dict[str, Any]:
    """The fields that were given, each read; null counts as left out."""
    if not isinstance(body, dict):
        raise RefusedError(400, f"The body has to be a JSON object with the fields of the request, `{required}` first.")
    problems: list[Problem] = []
    found: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in readers:
            try:
                found[name] = readers[name](value)
            except ValueError as error:
                problems.append(Problem(name, value, str(error)))
        elif name in NEUTRAL:
            if not _is_neutral(value, NEUTRAL[name]):
                problems.append(Problem(name, value, "nothing: this server cannot do that", "Leave the field out."))
        else:
            problems.append(Problem(name, value, "a field of this route", nearest_hint(name, readers)))
    if required not in found and not any(problem.field == required for problem in problems):
        problems.append(Problem(required, MISSING, "what the model is to answer"))
    if problems:
        raise RefusedError(400, " ".join(map(str, problems)), problems[0].field)
    return found


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """`False == 0` in Python, so a flag is compared with flags only."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


# Refusals: an HTTP status and OpenAI's error body, with a message that says what to do.


TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_SECONDS = {429: 1, 503: 2}


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def headers(self) -> dict[str, str]:
        """When to try again, where that helps; after a body that did not come, the connection is of no use."""
        if self.status == 408:
            return {"Connection": "close"}
        return {"Retry-After": str(RETRY_SECONDS[self.status])} if self.status in RETRY_SECONDS else {}

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


TOKENIZE_FIELDS = {"model": text, "prompt": text, "add_special_tokens": flag}
DETOKENIZE_FIELDS = {"model": text, "tokens": lambda value: prompts(value, 1)}
COMPLETION_FIELDS = {
    **SHARED,
    "max_tokens": whole(0),
    "prompt": prompts,
    "logprobs": whole(0, MAX_TOP_LOGPROBS),
    "echo": flag,
    "best_of": whole(1, MAX_CHOICES),
}
MAX_INPUTS = 2048  # OpenAI's
MAX_EMBEDDED = 1 << 20
"""Characters, or ids, of the texts of one request for embeddings."""
MAX_EMBEDDING_VALUES = 1 << 21
"""Numbers in one answer: some 45 MB as text."""
EMBEDDING_FIELDS = {
    "model": text,
    "input": lambda value: prompts(value, MAX_INPUTS),
    "encoding_format": one_of("float", "base64"),
    "dimensions": whole(1),
}
MAX_SCORED = 1 << 19
"""Log probabilities of prompts in one answer, alternatives counted: some 50 MB."""
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
SEEDS = 1 << 63


@dataclass(frozen=True)
class Call:
    """One HTTP request: its choices, prompt by prompt, and how they are to be answered."""

    model: str | None
    requests: list[TextRequest]
    n: int
    """Texts that are written for each prompt."""
    kept: int = MAX_CHOICES
    """Of these, the likeliest, which alone are answered (`best_of`)."""
    shows_logprobs: bool = True
    stream: bool = False
    include_usage: bool = False
    running_usage: bool = False
    """With the usage at the end: what was used so far, in every chunk."""
    echoes: tuple[str, ...] = ()
    """For each choice, what stands before what was written."""
    dropped_messages: int = 0
    """The oldest messages, which the model had no room for."""
    prompt: ChatPrompt | None = None
    """Of a chat: it knows how answers are read."""
    at_once: int | None = None
    """How many are handed in at a time, so that the requests of others come in between; None: all."""
    as_base64: bool = False
    """Embeddings as the bytes of little-endian float32."""


def embedding_call(body: Any, width: int) -> Call:
    """What a body of /v1/embeddings asks for, of a model with hidden states of this width."""
    fields = read_fields(body, EMBEDDING_FIELDS, "input")
    texts = fields["input"]
    if fields.get("dimensions", width) != width:
        words = f"dimensions: the embeddings of this model have {width:,}. Leave the field out."
        raise RefusedError(400, words, "dimensions")
    if (count := sum(map(len, texts))) > MAX_EMBEDDED or len(texts) * width > MAX_EMBEDDING_VALUES:
        words = f"input: {len(texts):,} texts with {count:,} characters (or ids) give {len(texts) * width:,} numbers"
        most = f"{MAX_EMBEDDED:,} characters and {MAX_EMBEDDING_VALUES:,} numbers are the most"
        raise RefusedError(400, f"{words}; {most}. Send fewer texts at a time.", "input")
    requests = [TextRequest(each, 0, heal=False, pools=True) for each in texts]
    return Call(fields.get("model"), requests, 1, as_base64=fields.get("encoding_format") == "base64")


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
    "tools": functions,
    "tool_choice": one_of("auto", "none"),
    "chat_template_kwargs": template_options,
}


def completion_call(body: Any, loaded: LoadedModel, _max_len: int) -> Call:
    """What a body of /v1/completions asks for."""
    fields = read_fields(body, COMPLETION_FIELDS, "prompt")
    texts: list[str | list[int]] = fields["prompt"]
    limit, logprobs = fields.get("max_tokens", DEFAULT_COMPLETION_TOKENS), fields.get("logprobs")
    n, drawn = fields.get("n", 1), fields.get("best_of", fields.get("n", 1))
    if drawn < n or (drawn > n and fields.get("stream")):
        why = "cannot be streamed: the best is known at the end" if drawn >= n else f"must be at least n, which is {n}"
        raise RefusedError(400, f"best_of: {drawn} {why}.", "best_of")
    scores, entries = bool(fields.get("echo")) and logprobs is not None, 1 + (logprobs or 0)
    if not limit and not scores:
        raise RefusedError(400, "max_tokens is 0: that needs echo: true and logprobs beside it.", "max_tokens")
    if scores and (count := sum(map(len, texts)) * drawn * entries) > MAX_SCORED:
        words = f"echo with logprobs: up to {count:,} log probabilities of prompts; {MAX_SCORED:,} are the most."
        raise RefusedError(400, f"{words} Send fewer prompts at a time.", "echo")
    computed = 0 if logprobs is None and drawn > n else logprobs
    usual = TextRequest("", limit, stop=fields.get("stop", ()), logprobs=computed, score_prompt=scores)
    base = [dataclasses.replace(usual, prompt=each) for each in texts]
    echoes = [spelled(each, loaded) for each in texts] if fields.get("echo") else []
    call = _call({**fields, "n": drawn}, base, echoes)
    return dataclasses.replace(call, kept=n, shows_logprobs=logprobs is not None)


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
    frame, dropped, thinking = fields.get("frame", "auto"), 0, fields.get("chat_template_kwargs")
    tools = fields.get("tools", []) if fields.get("tool_choice") != "none" else []
    if fields.get("truncation") == "auto":
        told = "\n".join(each.text for each in messages if each.role == "system")
        said = [each for each in messages if each.role != "system"]
        conversation = Conversation(loaded, max_len - len(begun_ids), frame, told, said, tools, thinking)
        fitted = conversation.fitted(limit or max_len)
        prompt, dropped = fitted.prompt, fitted.dropped
    else:
        prompt = chat_prompt(loaded, messages, frame, tools, thinking)
    if prompt.begun is not None:
        prompt = dataclasses.replace(prompt, begun=prompt.begun + begun)
    given = prompt.prompt
    given = given + begun if isinstance(given, str) else [*given, *begun_ids]
    stop = tuple(dict.fromkeys((*fields.get("stop", ()), *prompt.stop)))
    logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    request = TextRequest(given, limit, stop=stop, heal=prompt.heal, logprobs=logprobs, end_ids=prompt.end_ids)
    return dataclasses.replace(_call(fields, [request], []), dropped_messages=dropped, prompt=prompt)


def _taken_beginning(messages: list[Message]) -> str:
    """Takes the last message away: the assistant has begun with it, and goes on."""
    if messages[-1].role != LEARNED_ROLE:
        raise RefusedError(
            400,
            f"continue_final_message goes on with a last message of the role {LEARNED_ROLE}; the last is of another.",
            "continue_final_message",
        )
    last = messages.pop()
    if last.calls:
        raise RefusedError(400, "An answer that calls functions is complete: nothing continues it.", "messages")
    thought = f"{THINK}\n{last.thought}" + f"\n{THINK_END}\n\n" * bool(last.text) if last.thought else ""
    return thought + last.text


def _call(fields: dict[str, Any], base: Sequence[TextRequest], echoes: Sequence[str]) -> Call:
    n, is_stream = fields.get("n", 1), fields.get("stream", False)
    if len(base) * n > MAX_CHOICES:
        raise RefusedError(
            400, f"n: {len(base)} prompts, {n} texts for each: more than {MAX_CHOICES}. Ask for fewer.", "n"
        )
    if "stream_options" in fields and not is_stream:
        raise RefusedError(400, "stream_options needs stream: true beside it.", "stream_options")
    grammars = [fields[name] for name in ("response_format", "grammar") if fields.get(name)]
    if len(grammars) > 1:
        raise RefusedError(400, "response_format and grammar: give one of them.", "grammar")
    base = [dataclasses.replace(each, grammar=grammars[0]) for each in base] if grammars else base
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
        frequency_penalty=fields.get("frequency_penalty", 0.0),
        presence_penalty=fields.get("presence_penalty", 0.0),
        logit_bias=fields.get("logit_bias", ()),
    )


def spelled(prompt: str | list[int], loaded: LoadedModel, field: str = "prompt", skip_control: bool = True) -> str:
    """The text of ids."""
    try:
        return prompt if isinstance(prompt, str) else loaded.tokenizer.decode(prompt, skip_control)
    except ValueError as error:
        raise RefusedError(400, f"{field}: {error}.", field) from None


BESIDE = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}
"""What messages of a role may have beside role and content."""


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f'messages such as {{"role": "user", "content": "Hello"}}; {place} is none')
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ROLES:
        raise ValueError(f"roles among {', '.join(ROLES)}; {place} has another")
    known = ("role", "content", *BESIDE.get(role, ()))
    beyond = [name for name, given in value.items() if name not in known and given not in (None, [], "")]
    if beyond:
        raise ValueError(f"messages of role and content; {place} has `{beyond[0][:40]}`, which cannot be shown to it")
    calls = value.get("tool_calls") or []
    calls = tuple(_function_call(each, place) for each in (calls if isinstance(calls, list) else [calls]))
    content = "" if value.get("content") is None and calls else _content(value.get("content"), place)
    return Message(role, content, _content(value.get("reasoning_content") or "", place), calls)


def _function_call(value: Any, place: str) -> Mapping[str, Any]:
    """A call that the assistant made."""
    try:
        call = call_of(value["function"]["name"], jsonio.loads_strict(value["function"]["arguments"].encode()))
    except (TypeError, KeyError, ValueError, AttributeError):
        call = None
    if call is None:
        raise ValueError(f"calls with a name and with arguments as the text of a JSON object; {place} has another")
    return call


def _content(value: Any, place: str) -> str:
    """The text of a message, which may come in parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        return "".join(part["text"] for part in parts)
    raise ValueError(f"text as content, or a list of text parts (no pictures, no sound); {place} has something else")
