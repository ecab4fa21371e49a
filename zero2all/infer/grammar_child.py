"""The process in which llguidance works, for `grammar`. A program of its own: it imports nothing of ours. Requests are
JSON; an answer is `+` and bits, or `-` and words."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

MEMORY_BYTES, MOST_SECONDS = 2 << 30, 10
LIMITS: Any = {
    "max_items_in_row": 10_000, "initial_lexer_fuel": 500_000, "step_lexer_fuel": 100_000, "step_max_items": 50_000,
    "max_lexer_states": 10_000, "max_grammar_size": 100_000, "verbose_errors": False,
}  # fmt: skip
COMPACT: Any = {"item_separator": ",", "key_separator": ":", "whitespace_pattern": r"[\x20\x0A]?"}
"""At most one space or line end at a place: a small model would write them without end."""


def _serve(connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    known, ends = json.loads(connection.recv_bytes())
    pieces = [bytes.fromhex(piece) for piece in known]
    greedy = LLTokenizer(TokenizerWrapper(_Words(pieces, ends)), eos_token=ends, slices=[])
    words = _Words(pieces, ends, greedy.greedy_tokenize)  # text that a grammar forces is looked up so
    tokenizer = LLTokenizer(TokenizerWrapper(words), eos_token=ends, slices=[])
    matchers: dict[int, LLMatcher] = {}
    connection.send_bytes(b"+")
    while True:
        signal.alarm(0)
        number, grammar, ids = json.loads(connection.recv_bytes())
        signal.alarm(MOST_SECONDS)  # also where the one who asked is gone
        if ids is None:
            matchers.pop(number, None)
            connection.send_bytes(b"+")
            continue
        try:
            if grammar is not None:
                is_json = grammar[0] == "json"
                made = LLMatcher.grammar_from_json_schema(grammar[1], None, COMPACT) if is_json else None
                made = made or grammar_from(*grammar)
                matchers[number] = LLMatcher(tokenizer, made, log_level=0, limits=LLParserLimits(**LIMITS))
            matcher = matchers[number]
            matcher.consume_tokens(ids)
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            connection.send_bytes(b"+" + mask)
        except (ValueError, RecursionError, MemoryError) as error:
            matchers.pop(number, None)
            connection.send_bytes(b"-" + (str(error) or type(error).__name__).encode()[:1000])


class _Words:
    """A vocabulary as llguidance reads it."""

    bos_token_id = None

    def __init__(self, pieces: list[bytes], ends: list[int], encode: Callable[[str], list[int]] | None = None) -> None:
        self.tokens, self.eos_token_id, self._encode = pieces, ends[0], encode
        self.special_token_ids = [number for number, piece in enumerate(pieces) if not piece]

    def __call__(self, text: str) -> list[int]:
        return self._encode(text) if self._encode else []


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
