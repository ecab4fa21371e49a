"""A file of contrast pairs: one JSON object a line, or YAML (ours: `pairs.yaml`). No torch here.

In YAML a pair is one sentence with `{right|wrong}` where the two differ: 河里有一{条|张}鱼。
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.evals.probe_file import load_yaml, objects_of, read_question_file, refuse, repeated_ids

DIFFERENCE = re.compile(r"\{([^{}|]*)\|([^{}|]*)\}")
KIND_FIELDS = ("kind", "language", "pairs")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A right sentence and a wrong one."""

    id: str
    channel: str
    kind: str
    """Pairs of one kind are reported together."""
    right: str
    wrong: str


def read_pairs(path: Path) -> list[Pair]:
    """Read a file of pairs: YAML by its name, else one JSON object a line; all problems are named at once."""
    data = read_question_file(path, "pairs")
    problems: list[str] = []
    if path.suffix in (".yaml", ".yml"):
        found = [
            pair for number, kind in enumerate(load_yaml(data, path), 1) for pair in _of_kind(kind, number, problems)
        ]
    else:
        found = objects_of(data, Pair, problems)
    problems += [
        f"{pair.id}: right and wrong must be two different texts"
        for pair in found
        if not pair.right or not pair.wrong or pair.right == pair.wrong
    ]
    refuse(path, problems + repeated_ids(found))
    return found


def _of_kind(kind: Any, number: int, problems: list[str]) -> list[Pair]:
    place = f"kind {number}"
    if not isinstance(kind, dict) or set(kind) != set(KIND_FIELDS) or not isinstance(kind["pairs"], list):
        problems.append(f"{place}: expected a mapping of kind, language, and pairs, a list of sentences")
        return []
    place = f"{kind['language']}/{kind['kind']}"
    pairs = []
    for text in kind["pairs"]:
        if not isinstance(text, str) or not DIFFERENCE.search(text):
            problems.append(f"{place}: got {text!r}, expected a sentence with {{right|wrong}} where the two differ")
            continue
        right, wrong = DIFFERENCE.sub(r"\1", text), DIFFERENCE.sub(r"\2", text)
        pairs.append(
            Pair(id=f"{place}/{right}", channel=str(kind["language"]), kind=str(kind["kind"]), right=right, wrong=wrong)
        )
    return pairs
