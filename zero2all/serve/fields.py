"""The fields of a request body: their types and bounds. All problems of a body are reported together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero2all.common.schema import MISSING, Problem, nearest_hint
from zero2all.serve.errors import RefusedError

Reader = Callable[[Any], Any]
"""The value as the server uses it. A ValueError says what was expected instead."""

LARGEST_INT = (1 << 63) - 1
MAX_STOPS = 8  # a chat adds its own, and the engine takes 16
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


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


def prompts(value: Any) -> list[str | list[int]]:
    """The prompts: one text or one list of ids, or a list of either."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    expected = "text, a list of token ids, or a list of either; ids are whole numbers, and no list is empty"
    if len(several) > MAX_CHOICES:
        raise ValueError(f"at most {MAX_CHOICES} prompts in one request")
    for each in several:
        if isinstance(each, list) and not (each and all(type(token) is int and token >= 0 for token in each)):
            raise ValueError(expected)
        if not isinstance(each, list | str):
            raise ValueError(expected)
    return several


SHARED: dict[str, Reader] = {
    "model": text,
    "max_tokens": whole(1),
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": whole(-1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0, 10, above=True),
    "seed": whole(-LARGEST_INT),
    "stop": stops,
    "n": whole(1, MAX_CHOICES),
    "stream": flag,
    "stream_options": stream_options,
}
"""top_k -1 is what other servers call 0: all tokens."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
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
