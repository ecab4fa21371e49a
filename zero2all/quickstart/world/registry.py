"""The languages the small world is written in. Their words are data: `en.json` and `zh.json` beside this file."""

from __future__ import annotations

import json
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.files import package_text
from zero2all.quickstart.world.arithmetic import ArithmeticWords
from zero2all.quickstart.world.facts import Pin, Relation
from zero2all.quickstart.world.language import Language
from zero2all.quickstart.world.stories import Arc, StoryBook


def language_named(name: str) -> Language:
    """The language with this short name, `en` or `zh`."""
    if name not in LANGUAGES:
        raise UsageError(f"The small world has no language {name!r}. Choose one of: {', '.join(sorted(LANGUAGES))}.")
    return LANGUAGES[name]


def _load(name: str) -> Language:
    words = _tuples(json.loads(package_text(__package__, f"{name}.json")))
    stories = words["stories"]
    return Language(
        **words
        | {
            "relations": tuple(Relation(**relation) for relation in words["relations"]),
            "pins": tuple(Pin(**pin) for pin in words["pins"]),
            "arithmetic": ArithmeticWords(**words["arithmetic"]),
            "stories": StoryBook(**stories | {"arcs": tuple(Arc(**arc) for arc in stories["arcs"])}),
        }
    )


def _tuples(value: Any) -> Any:
    """The same value with a tuple in place of every list."""
    if isinstance(value, dict):
        return {name: _tuples(member) for name, member in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


LANGUAGES = {name: _load(name) for name in ("en", "zh")}
