"""The coloured segmentation: the same text, cut by each tokenizer, token by token.

A token that ends inside a character shows its bytes instead. Pointing at a token (or touching it) shows its id and its
bytes; that is done by style alone, so the page has no script. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

TINTS = 5
VISIBLE = {"\n": "⏎\n", "\t": "⇥", "\r": "␍", "\x00": "␀"}


def segmentation(tokens: Sequence[Sequence[Any]]) -> str:
    """One excerpt as spans, colours in turn."""
    spans = []
    for place, (number, digits) in enumerate(tokens):
        data = bytes.fromhex(digits)
        shown, is_text = _shown(data)
        tip = f"{number} · {' '.join(f'{byte:02X}' for byte in data[:12])}{' …' if len(data) > 12 else ''}"
        kind = f"t{place % TINTS}" if is_text else "part"
        spans.append(f'<i class="{kind}" tabindex="0" data-tip="{escape(tip)}">{shown}</i>')
    return "".join(spans)


def _shown(data: bytes) -> tuple[str, bool]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return escape(data.decode("utf-8", "backslashreplace").replace("\\x", "")), False
    return "".join(VISIBLE.get(character, escape(character)) for character in text), True
