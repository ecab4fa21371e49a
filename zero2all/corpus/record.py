"""The unified record: what every source becomes, one JSON object a line, and the numbers that name it.

`gid` = source number x 2^40 + ordinal, where the ordinal counts every item of that source, kept or not. So a gid stays
the same when a cleaning option changes, and below 2^53, where JavaScript and float64 are exact. Source numbers come
from the append-only `corpus/sources.json`.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json, write_json

ORDINAL_BITS = 40
SOURCES_LIMIT = 1 << (53 - ORDINAL_BITS)
SOURCES_NAME = "sources.json"
SURROGATES = dict.fromkeys(range(0xD800, 0xE000))


class Document(NamedTuple):
    """A record before it is numbered: raw fields put in their places; empty where the raw data gave none."""

    content: str
    """The text to learn from."""
    title: str = ""
    """Title, question or file path."""
    category: str = ""
    """Topic or class."""
    desc: str = ""
    """Summary or description."""
    others: dict[str, Any] = {}  # noqa: RUF012 - the default of a NamedTuple; never changed in place
    """Every raw field that has no place above, under its raw name."""


def make_gid(source_number: int, ordinal: int) -> int:
    """The global id of item `ordinal` of a source."""
    assert 0 <= source_number < SOURCES_LIMIT, f"source number {source_number} does not fit"
    assert 0 <= ordinal < 1 << ORDINAL_BITS, f"ordinal {ordinal} does not fit in {ORDINAL_BITS} bits"
    return (source_number << ORDINAL_BITS) + ordinal


ENCODING = (
    orjson.OPT_APPEND_NEWLINE
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


def encode_record(data_src: str, category: str, title: str, content: str, desc: str, others: Any) -> bytes:
    """A record as a line of JSON that still lacks its numbers; raises ValueError when `others` is nested too deeply."""
    record = {
        "data_src": data_src,
        "category": category,
        "title": title,
        "content": content,
        "desc": desc,
        "others": others,
    }
    try:
        return orjson.dumps(record, option=ENCODING)
    except TypeError:  # something JSON does not know, or nested deeper than orjson goes
        try:
            record["others"] = plain(others)
            return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        except RecursionError as error:
            raise ValueError("the other fields are nested too deeply") from error


def numbered(line: bytes, source_number: int, ordinal: int) -> bytes:
    """A line of `encode_record` with its numbers in front."""
    return b'{"gid":%d,"id":%d,%b' % ((source_number << ORDINAL_BITS) + ordinal, ordinal, line[1:])


def numbers_bytes(source_number: int, ordinals: np.ndarray) -> np.ndarray:
    """How many bytes `numbered` adds to each line."""
    fixed = len(numbered(b"{", 0, 0)) - len("{00")
    return fixed + _digits(ordinals) + _digits(ordinals + (source_number << ORDINAL_BITS))


def _digits(numbers: np.ndarray) -> np.ndarray:
    """How many decimal digits each number has."""
    powers = 10 ** np.arange(1, 19, dtype=np.int64)
    return np.searchsorted(powers, numbers, side="right") + 1


def source_numbers(corpus_folder: Path, names: list[str]) -> dict[str, int]:
    """The number of every name ever built, old ones as they were; new names get the next ones.

    They are not taken until `keep_source_numbers`, so that a build that stops early uses none.
    """
    path = corpus_folder / SOURCES_NAME
    try:
        numbers: dict[str, int] = read_json(path)
    except FileNotFoundError:
        numbers = {}
    if (
        not isinstance(numbers, dict)
        or not all(isinstance(number, int) and number >= 0 for number in numbers.values())
        or len(set(numbers.values())) < len(numbers)
    ):
        raise BadInputError(
            f"{path} must give every source name a number of its own, and does not. Restore it from a copy, "
            "or delete the whole corpus folder and build again (records get new gids)."
        )
    new = [name for name in names if name not in numbers]
    for name in new:
        numbers[name] = max(numbers.values(), default=-1) + 1
    if numbers and max(numbers.values()) >= SOURCES_LIMIT:
        raise BadInputError(
            f"{path} lists more than {SOURCES_LIMIT} sources, the largest number that gids can hold. Put "
            "several inputs into one folder and give that folder as one source, or start a new workspace."
        )
    return numbers


def keep_source_numbers(corpus_folder: Path, numbers: dict[str, int]) -> None:
    """Write `sources.json`, where it does not say so already."""
    path = corpus_folder / SOURCES_NAME
    if not path.is_file() or read_json(path) != numbers:
        write_json(path, numbers)


def plain(value: Any) -> Any:
    """`value` made of what JSON can hold everywhere: no dates, bytes, decimals, huge integers or lone surrogates."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.translate(SURROGATES)
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, float):
        return value if value - value == 0 else None  # infinities and NaN have no JSON
    if isinstance(value, Decimal):
        return plain(float(value))
    if isinstance(value, dict):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    return plain(str(value))  # datetime, date, timedelta, UUID
