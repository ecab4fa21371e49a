"""Repair of single characters, before a text is judged.

- Line ends (CR LF, CR, VT, FF, NEL, U+2028, U+2029) become line feeds.
- Unicode categories Cc, Cf, Cs, Co and Cn are removed, but for newline and tab. ZWJ and ZWNJ stay directly behind an
  emoji or a letter of a joining script (Arabic, Indic, Burmese, Khmer, Mongolian). Nothing is normalised (no NFKC).
- Private-use characters of GB18030 that have a standard code point by now get it, beside Han characters.
- A line of UTF-8 that was read as Windows-1252 is read again, where that is certain (see `mend_mojibake`).
- White space at both ends is removed; code keeps the indentation of its first line.

Repairing twice is the same as once. No repair makes a text longer in UTF-8, but for six of those standard characters,
by a byte each.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from zero2all.corpus.clean.tables import (
    CLASS_MASK,
    CONTINUATION_CHARACTERS,
    PRIVATE_USE,
    REMOVE,
    SYMBOL,
    WINDOWS_1252,
    character_table,
    standard_characters,
)

Table = np.ndarray[Any, np.dtype[np.uint8]]

_CANDIDATE = re.compile(f"[\xc2-\xf4][{re.escape(CONTINUATION_CHARACTERS)}]")
_CONTINUATION = f"[{re.escape(CONTINUATION_CHARACTERS)}]"
_CERTAIN_ALONE = re.compile(
    f"(?<![\xc2-\xf4{re.escape(CONTINUATION_CHARACTERS)}])(?:(?:â€|ã€|ï¼|ï½){_CONTINUATION})+(?!{_CONTINUATION})"
)
"""General punctuation (â€™), CJK punctuation (ã€‚) and full-width forms (ï¼Œ): no language writes these in a row.
Not beside other such characters, which would be a piece of something that is broken twice."""
_PRIVATE_USE = re.compile("[" + "".join(f"{chr(start)}-{chr(end - 1)}" for start, end in PRIVATE_USE) + "]+")
_BYTES_BY_POINT = {ord(character): byte for character, byte in WINDOWS_1252.items()}
_CERTAIN_SEQUENCES = 3
"""From this many mended characters on, and not one left over, a line cannot have been meant as it was."""


def repair(text: str, *, mojibake: bool = True, private_use: bool = True, keep_indent: bool = False) -> str:
    """`text` with the repairs above."""
    if text.isascii() and text.isprintable():
        return text.rstrip() if keep_indent else text.strip()
    table = table_for(private_use)
    text = with_standard_characters(text if private_use else without_unwanted(text, table))
    while True:
        mended = strip_blank(without_unwanted(mend_mojibake(text) if mojibake else text, table), keep_indent)
        # Without a zero-width space, or an ideographic one at an end, a line may be mojibake for certain. Every round
        # shortens the text, so this ends.
        if mended == text or not mojibake or not _CANDIDATE.search(mended):
            return mended
        text = mended


def with_standard_characters(text: str) -> str:
    """`text` with standard characters for the private-use ones of GB18030 that stand beside Han characters.

    Elsewhere they are more likely the icons of some font.
    """
    pattern, standard = _gb18030()
    return pattern.sub(lambda match: match[0].translate(standard), text)


def private_use_count(text: str) -> int:
    """How many private-use characters a text has."""
    return sum(map(len, _PRIVATE_USE.findall(text)))


@cache
def _gb18030() -> tuple[re.Pattern[str], dict[int, int]]:
    standard = standard_characters()
    run = f"[{''.join(map(chr, standard))}]+"
    beside = "[\u3001-\u3011\u3400-\u9fff\U00020000-\U0003ffff\uff01-\uff1f]"
    return re.compile(f"(?<={beside}){run}|{run}(?={beside})"), standard


@cache
def table_for(private_use: bool) -> Table:
    """The character table; with private-use characters as symbols when they are not to be removed."""
    if private_use:
        return character_table()
    table = character_table().copy()
    for start, end in PRIVATE_USE:
        table[start:end] = SYMBOL
    table.flags.writeable = False
    return table


def without_unwanted(text: str, table: Table) -> str:
    """`text` with one kind of line end and without the characters that `table` says to remove."""
    from zero2all.corpus.clean.kernels import compact

    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    kept = np.empty(len(points), np.uint32)
    count = compact(points, 0, len(points), table, kept)
    return kept[:count].tobytes().decode("utf-32-le")


def strip_blank(text: str, keep_indent: bool) -> str:
    """`text` without white space at its ends, or without blank lines before and white space after it."""
    if not keep_indent:
        return text.strip()
    text = text.rstrip()
    return text[text.rfind("\n", 0, len(text) - len(text.lstrip())) + 1 :]


def mend_mojibake(text: str) -> str:
    """Lines of UTF-8 that were read as Windows-1252, read again; double encodings too.

    Certain are (1) lines in which every character outside ASCII belongs to a valid sequence, when there are at least
    three sequences, or all of them are lower-case accented letters and Latin-1 signs (Ã© Ã¼ Â°); (2) anywhere, the
    sequences of general punctuation, CJK punctuation and full-width forms. `café…”` is a valid sequence by accident
    (it would become 酔) and is left alone.
    """
    if not _CANDIDATE.search(text):
        return text
    return "\n".join(_mend_line(line) if _CANDIDATE.search(line) else line for line in text.split("\n"))


def _mend_line(line: str) -> str:
    while True:
        mended = _reread(line)
        if mended is None:
            mended = _CERTAIN_ALONE.sub(lambda match: _reread_run(match[0]), line)
        if mended == line:
            return line
        line = mended


def _reread(line: str) -> str | None:
    """The whole line read again, or None when that is not certain."""
    if line.isascii():
        return None
    try:
        mended = bytes(point if (point := ord(c)) < 0x80 else _BYTES_BY_POINT[point] for c in line).decode()
    except (KeyError, UnicodeDecodeError):
        return None
    sequences = [character for character in mended if character >= "\x80"]
    if not all(map(_is_wanted, sequences)):
        return _reread(mended)  # encoded more than once: what is between may look like controls
    sure = all("\xa0" <= character <= "\xbf" or "\xe0" <= character <= "\xff" for character in sequences)
    return mended if sure or len(sequences) >= _CERTAIN_SEQUENCES else None


def _reread_run(sequence: str) -> str:
    try:
        mended = bytes(_BYTES_BY_POINT[ord(character)] for character in sequence).decode()
    except UnicodeDecodeError:
        return sequence
    return mended if all(map(_is_wanted, mended)) else sequence


def _is_wanted(character: str) -> bool:
    return bool(character_table()[ord(character)] & CLASS_MASK != REMOVE)


# What is particular to source code: licence headers, generated files.


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
