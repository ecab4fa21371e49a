"""The languages the small world is written in."""

from __future__ import annotations

from zero2all.common.errors import UsageError
from zero2all.quickstart.world.chinese import CHINESE
from zero2all.quickstart.world.english import ENGLISH
from zero2all.quickstart.world.language import Language

LANGUAGES = {language.name: language for language in (ENGLISH, CHINESE)}


def language_named(name: str) -> Language:
    """The language with this short name, `en` or `zh`."""
    if name not in LANGUAGES:
        raise UsageError(f"The small world has no language {name!r}. Choose one of: {', '.join(sorted(LANGUAGES))}.")
    return LANGUAGES[name]
