"""Prompts from a file: JSON lines with settings of their own, or one prompt a line."""

from __future__ import annotations

import codecs
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.progress import counted, say, terminal_safe
from zero2all.common.schema import nearest_hint
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import TextRequest

SHOWN_PROBLEMS = 20
MOST_SAMPLES = 10_000
"""Texts for one prompt: each is a request of its own, known from the start."""
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Prompt:
    """One prompt, and how it is to be continued."""

    request: TextRequest
    n: int = 1
    """Texts to write for it; each has a seed of its own."""
    place: str = ""
    """Where it stands, for a person: `prompts.jsonl line 3`."""
    id: str | int | None = None
    """A name that the result repeats."""

    def samples(self) -> list[TextRequest]:
        """The request for each of the n texts."""
        sampling = self.request.sampling
        seeds = [dataclasses.replace(sampling, seed=sampling.seed + number) for number in range(self.n)]
        return [dataclasses.replace(self.request, sampling=each) for each in seeds]


def read_prompts(data: bytes, name: str, usual: Prompt) -> list[Prompt]:
    """The prompts in a file with these bytes; what a line does not say is as in `usual`.

    They are JSON where the first line is an object with `prompt`, or the name says so; else each line is a text. Every
    line that cannot be used is named in the error. Empty lines are passed over.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    lines = [(number, line.strip(b"\r")) for number, line in enumerate(data.split(b"\n"), start=1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    as_json = name.endswith(JSON_SUFFIXES) or (bool(lines) and _has_prompt(lines[0][1]))
    read = _from_json if as_json else _from_text
    if not as_json and (number := next((number for number, line in lines if _has_prompt(line)), None)) is not None:
        say(
            f"z2a: {name} line {number} is a JSON object with `prompt`, but the first line is not, so every line is "
            f"read as text. To read every line as JSON, name the file .jsonl."
        )
    prompts, problems = [], []
    for number, line in lines:
        try:
            prompts.append(dataclasses.replace(read(line, usual), place=f"{name} line {number}"))
        except (ValueError, UsageError) as error:
            problems.append(f"line {number}: {terminal_safe(str(error))}")
    if problems:
        shown = problems[:SHOWN_PROBLEMS]
        more = [f"and {counted(len(problems) - len(shown), 'more line')}"] if len(problems) > len(shown) else []
        raise BadInputError(
            f"{counted(len(problems), 'line')} of {name} cannot be used. Nothing was generated. Correct the file:\n  "
            + "\n  ".join([*shown, *more])
        )
    if not prompts:
        raise BadInputError(f"{name} has no prompts. Give one a line, as text or as a JSON object with `prompt`.")
    return prompts


def _has_prompt(line: bytes) -> bool:
    """Whether a line is a JSON object with `prompt`."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        value = jsonio.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and "prompt" in value


def _from_text(line: bytes, usual: Prompt) -> Prompt:
    return dataclasses.replace(usual, request=dataclasses.replace(usual.request, prompt=line.decode("utf-8")))


def _from_json(line: bytes, usual: Prompt) -> Prompt:
    value = jsonio.loads(line.decode("utf-8"))
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise ValueError('expected an object with `prompt`, a text: {"prompt": "Once upon a time"}')
    for key, given in value.items():
        if key not in FIELDS:
            raise ValueError(f"`{key}` is not a setting. {nearest_hint(key, FIELDS)}")
        is_good, expected = FIELDS[key]
        if not is_good(given):
            raise ValueError(f"`{key}` is {str(given)[:40]!r}, expected {expected}")
    if isinstance(value.get("stop"), str):
        value["stop"] = [value["stop"]]
    if "stop" in value:
        value["stop"] = tuple(value["stop"])
    sampling = dataclasses.replace(usual.request.sampling, **_taken(value, SAMPLING_FIELDS))
    request = dataclasses.replace(usual.request, sampling=sampling, **_taken(value, REQUEST_FIELDS))
    return dataclasses.replace(usual, request=request, **_taken(value, ("n", "id")))


def _taken(value: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value}


def _whole(least: int, most: int = (1 << 62) - 1) -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)


SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))
REQUEST_FIELDS = ("prompt", "max_new_tokens", "stop")
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (lambda value: isinstance(value, str), "a text"),
    "id": (lambda value: type(value) in (int, str), "a text or a whole number"),
    "n": _whole(1, MOST_SAMPLES),
    "max_new_tokens": _whole(1),
    "stop": (_is_stop, "a text or a list of texts, none of them empty"),
    "temperature": (_is_number, "a number"),
    "top_k": _whole(0),
    "top_p": (_is_number, "a number"),
    "min_p": (_is_number, "a number"),
    "repetition_penalty": (_is_number, "a number"),
    "seed": _whole(0),
}
"""What a line may say: whether a value is one, and what is expected."""


def prompts_file(path: Path) -> bytes:
    """The bytes of a file with prompts."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(f"The prompts in {path} cannot be read: {error.strerror}. Check the path.") from error
