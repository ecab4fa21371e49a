"""The facts of a tokenizer for `z2a tokenizer show`, and the coloured view of how a text is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero2all.common.files import MANIFEST_NAME, read_json
from zero2all.tokenizer.config import PATTERNS
from zero2all.tokenizer.load import load_tokenizer, read_tokenizer_files
from zero2all.tokenizer.text import is_utf8
from zero2all.tokenizer.train import CONSEQUENCES

COLOURS = (44, 42, 45, 43, 46, 41)
"""ANSI background colours, one after the other, so that neighbours differ."""


def tokenizer_facts(folder: Path, samples: int = 12) -> dict[str, Any]:
    """Everything about a tokenizer that needs no text, as JSON."""
    tokenizer = load_tokenizer(folder)
    tokenizer_json = read_tokenizer_files(folder).json
    manifest = read_json(folder / MANIFEST_NAME) if (folder / MANIFEST_NAME).is_file() else {}
    pieces = tokenizer.text_pieces
    longest = sorted(pieces, key=lambda number: (-len(pieces[number]), number))[:samples]
    step = max(1, len(pieces) // samples)
    spread = list(pieces)[step // 2 :: step][:samples]
    model = tokenizer_json["model"]
    added = [token["content"] for token in tokenizer_json.get("added_tokens", [])]
    return {
        "folder": str(folder),
        "kind": manifest.get("tokenizer_kind", f"foreign {model.get('type', 'unknown')}"),
        "model": model.get("type"),
        "vocab_size": tokenizer.vocab_size,
        "rows_of_a_model": -(-tokenizer.vocab_size // 64) * 64,
        "pieces": len(pieces),
        "merges": len(model.get("merges", [])),
        "unused_ids": tokenizer.vocab_size - len(pieces) - len(tokenizer.control),
        "fingerprint": tokenizer.fingerprint,
        "normalisation": tokenizer.normalisation,
        "normalisation_means": CONSEQUENCES.get(tokenizer.normalisation, "changed by the folder's own rules"),
        "pattern": _pattern(tokenizer_json),
        "control": tokenizer.control,
        "control_roles": tokenizer.control_roles,
        "begin_id": tokenizer.begin_id,
        "end_ids": list(tokenizer.end_ids),
        "pad_id": tokenizer.pad_id,
        # Those that the plain `tokenizers` library would recognise in text; our loader never does.
        "text_reaches_control": [name for name in added if name in tokenizer.control],
        "whole_characters": sum(map(is_utf8, pieces.values())),
        "sample": {str(number): readable(pieces[number]) for number in spread},
        "longest": {str(number): readable(pieces[number]) for number in longest},
        "made": {name: manifest[name] for name in ("text", "taken", "training", "extension") if name in manifest},
    }


def readable(piece: bytes) -> str:
    """A piece on one line: characters as they are, bytes that form none as \\xe4, a line end as \\n."""
    text = piece.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def coloured(pieces: list[tuple[int, bytes]]) -> str:
    """The text with a background colour for each piece; bytes that form no character alone are shown as \\\\xe4."""
    shown = []
    for place, (_, piece) in enumerate(pieces):
        text = piece.decode("utf-8", "backslashreplace").replace("\n", "⏎\n").replace("\t", "→")
        colour = COLOURS[place % len(COLOURS)]
        lines = [f"\x1b[30;{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n")]
        shown.append("\n".join(lines))
    return "".join(shown)


def _pattern(tokenizer_json: dict[str, Any]) -> str | None:
    """The regular expression that cuts text into pretokens, by its name where it has one."""
    found = tokenizer_json.get("pre_tokenizer") or {}
    for part in (found, *found.get("pretokenizers", [])):
        if part.get("type") == "Split":
            text = next(iter(part["pattern"].values()))
            return next((name for name, known in PATTERNS.items() if known == text), str(text))
    return None
