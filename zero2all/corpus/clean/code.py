"""What is particular to source code: licence headers, generated files, Python that does not parse."""

from __future__ import annotations

import ast
import re
import warnings

HEAD_CHARS = 4_000
HEAD_LINES = 20

_LICENCE = re.compile(
    r"copyright|spdx-|licen[sc]ed (?:under|to)|all rights reserved|\(c\) (?:19|20)\d\d|版权|许可证"
    r"|\b(?:gnu|gpl|mit|bsd|apache|mozilla|isc)\b.{0,40}licen[sc]e",
    re.IGNORECASE,
)
_LICENCE_HINTS = ("copyright", "licen", "spdx-", "(c)", "rights", "版权", "许可证")
_BLANK_LINES = re.compile(r"(?:[ \t]*\n)*")
_KEPT_FIRST_LINES = re.compile(r"(?:#!.*\n|#.*coding[:=].*\n|<\?xml.*\n|\s*\n)*")
_OPENING_COMMENT = re.compile(
    r"(?:[ \t]*(?:#(?!include|define|if|pragma|import|!\[)|//|--|;+|%+)[^\n]*(?:\n|\Z))+"  # lines of comment
    r"|[ \t]*/\*(?:(?!\*/).)*\*/[ \t]*\n?"
    r"|[ \t]*<!--(?:(?!-->).)*-->[ \t]*\n?",
    re.DOTALL,
)
_GENERATED_HINTS = ("generated", "not edit", "not modify", "自动生成")
_COMMENT_LINE = re.compile(r"\s*(?:#|//|/\*|\*|<!--|--|;|%)")
_GENERATED = re.compile(
    r"@generated\b|\b(?:auto(?:matically)?|machine)[- ]?generated\b|\bgenerated (?:automatically|by)\b"
    r"|\bdo not (?:edit|modify)\b|自动生成",
    re.IGNORECASE,
)


def without_licence(text: str) -> str:
    """`text` without the comment it opens with, if that speaks of licence or copyright; shebang and coding stay."""
    while True:
        head = text[:HEAD_CHARS].lower()
        if not any(hint in head for hint in _LICENCE_HINTS):
            return text
        kept = _end_of(_KEPT_FIRST_LINES, text, 0)
        comment = _OPENING_COMMENT.match(text, kept)
        if comment is None or not _LICENCE.search(comment[0]):
            return text
        text = (text[:kept] + text[_end_of(_BLANK_LINES, text, comment.end()) :]).rstrip()


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start


def is_generated(text: str) -> bool:
    """Whether a comment in the first lines says that a program wrote the file."""
    head = text[:HEAD_CHARS].lower()
    if not any(hint in head for hint in _GENERATED_HINTS):
        return False
    lines = text[:HEAD_CHARS].split("\n")[:HEAD_LINES]
    return any(_COMMENT_LINE.match(line) and _GENERATED.search(line) for line in lines)


def is_broken_python(text: str) -> bool:
    """Whether this interpreter cannot parse the text as Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return False
