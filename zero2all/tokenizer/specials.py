"""The control tokens: marks that only the program may set, never the text.

They take the first ids of every vocabulary that we train, in this order, so that an id means the same thing in all
of them. The reserved ones let a later stage (tools, images) have marks without moving any id.
"""

from __future__ import annotations

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
END_OF_PROMPT = "<|end_of_prompt|>"
MESSAGE_START = "<|message_start|>"
MESSAGE_END = "<|message_end|>"
PAD = "<|pad|>"
RESERVED_COUNT = 8

CONTROL_TOKENS: tuple[str, ...] = (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    END_OF_PROMPT,
    MESSAGE_START,
    MESSAGE_END,
    PAD,
    *(f"<|reserved_{number}|>" for number in range(RESERVED_COUNT)),
)
"""All control tokens; the place in this tuple is the id."""

BYTE_COUNT = 256
SMALLEST_VOCAB_SIZE = len(CONTROL_TOKENS) + BYTE_COUNT + 1
"""Control tokens, all bytes and one learned piece: below that there is nothing to train."""


def special_map(control: dict[str, int], begin: str | None, end: str, pad: str | None) -> dict[str, object]:
    """The special-token map that goes into the fingerprint: every control token's id, and who plays which part."""
    return {"control": control, "begin": begin, "end": end, "pad": pad}


def our_special_map() -> dict[str, object]:
    """The special-token map of every vocabulary that we train."""
    ids = {name: number for number, name in enumerate(CONTROL_TOKENS)}
    return special_map(ids, BEGIN_OF_TEXT, END_OF_TEXT, PAD)
