"""The name of a tokenizer: two tokenizers with the same fingerprint give the same ids for every text.

Packed shards and checkpoints record it, so that tokens of one vocabulary are never read with another.
"""

from __future__ import annotations

from typing import Any

from zero2all.common.manifest import fingerprint

_IRRELEVANT = ("version", "truncation", "padding")
"""Parts of tokenizer.json that our loader overrides and that therefore cannot change an id."""


def tokenizer_fingerprint(tokenizer_json: dict[str, Any], special_map: dict[str, object]) -> str:
    """Sha256 (first 16 hex digits) over the canonical tokenizer.json and the special-token map.

    Canonical: keys sorted and whitespace gone, so that reformatting the file changes nothing.
    """
    relevant = {key: value for key, value in tokenizer_json.items() if key not in _IRRELEVANT}
    return fingerprint({"tokenizer": relevant, "special": special_map})
