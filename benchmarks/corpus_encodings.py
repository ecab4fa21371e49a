"""Is the encoding of a text found? Real text, encoded; ours beside charset-normalizer.

    python -m benchmarks.corpus_encodings gb18030=zh.jsonl big5=zh-tw.jsonl cp932=ja.jsonl … [--save]

A file has JSON lines with `text`, and may be named for several encodings. Characters that an encoding lacks are left
out. Of every encoding `DOCUMENTS` documents are taken whole (64 KB at most), as 300 bytes from a random place, and with
lines left out until at most `ASCII_SHARE` of the characters are beyond ASCII. Each has `LEAST_CHARS` characters beyond
ASCII or more. Right: the text comes out as it went in. Silent: another text comes out, and nothing says so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from zero2all.corpus.readers.encodings import find_encoding

DOCUMENTS = 200
HEAD_BYTES = 1 << 16
SHORT_BYTES = 300
ASCII_SHARE = 0.06
LEAST_CHARS = 10


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="ENCODING=FILE")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/corpus_encodings.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for encoding, _, name in (word.partition("=") for word in arguments.texts):
        lines = Path(name).read_text(encoding="utf-8").split("\n")
        texts = [json.loads(line)["text"].encode(encoding, "ignore").decode(encoding) for line in lines if line]
        for form, cut in FORMS.items():
            rng = random.Random(form)
            cuts = (cut(text, encoding, rng) for text in rng.sample(texts, len(texts)) + rng.sample(texts, len(texts)))
            enough = [text for text in cuts if sum(character > "\x7f" for character in text) >= LEAST_CHARS]
            documents = enough[:DOCUMENTS]
            found = {finder: measured(find, documents, encoding, form == "whole") for finder, find in FINDERS.items()}
            key = f"{encoding} {Path(name).stem} {form}"
            results[key] = {"documents": len(documents), **found}
            print(f"{key:40} {len(documents)} documents", "; ".join(f"{k}: {v}" for k, v in found.items()), flush=True)
    if arguments.save:
        save_result("corpus_encodings", results)


def measured(find: Callable[[bytes, bool], str | None], texts: list[str], encoding: str, whole: bool) -> dict[str, Any]:
    """How many of the texts come out right, wrong without a word, or not at all; and the time of each."""
    outcomes: Counter[str] = Counter()
    began = time.process_time()
    for text in texts:
        data = text.encode(encoding)
        found = find(data, whole)
        try:
            outcome = "right" if found and data.decode(found) == text else "silent" if found else "unknown"
        except (UnicodeDecodeError, LookupError):
            outcome = "unknown"
        outcomes[outcome] += 1
    milliseconds = 1000 * (time.process_time() - began) / max(1, len(texts))
    return {**{name: outcomes[name] for name in ("right", "unknown", "silent")}, "ms": round(milliseconds, 2)}


def _whole(text: str, encoding: str, rng: random.Random) -> str:  # noqa: ARG001
    return text.encode(encoding)[:HEAD_BYTES].decode(encoding, "ignore")


def _short(text: str, encoding: str, rng: random.Random) -> str:
    at = rng.randrange(max(1, len(text) - SHORT_BYTES // 2))
    return text[at : at + SHORT_BYTES].encode(encoding)[:SHORT_BYTES].decode(encoding, "ignore")


def _mostly_ascii(text: str, encoding: str, rng: random.Random) -> str:
    """Without random lines beyond ASCII until few of the characters are; nothing when that is impossible."""
    lines = _whole(text, encoding, rng).split("\n")
    beyond = {at: sum(character > "\x7f" for character in line) for at, line in enumerate(lines) if not line.isascii()}
    size, number = sum(map(len, lines)), sum(beyond.values())
    for at in rng.sample(sorted(beyond), len(beyond)):
        if number <= ASCII_SHARE * size:
            return "\n".join(lines)
        size, number, lines[at] = size - len(lines[at]), number - beyond[at], ""
    return ""


FORMS = {"whole": _whole, "300 bytes": _short, "much ASCII": _mostly_ascii}


def _ours(data: bytes, whole: bool) -> str | None:
    return find_encoding(data, whole)[0]


def _charset_normalizer(data: bytes, whole: bool) -> str | None:  # noqa: ARG001
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    return best.encoding if best is not None else None


FINDERS = {"ours": _ours, "charset-normalizer": _charset_normalizer}


if __name__ == "__main__":
    main()
