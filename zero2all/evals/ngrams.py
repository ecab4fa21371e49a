"""n-grams of texts as 64-bit hashes, by numpy alone: what `contamination.py` compares.

A text becomes units, and every run of n units a hash:

    words        letters and digits, in lower case; a run begins where a word does          60 (English and the rest)
    characters   letters and digits, each by itself; punctuation and white space left out   24 (Chinese)
    tokens       names and numbers, and every other sign by itself; case kept               50 (code)

60 letters are about 13 words; what stands between them (don't, dont; well-known, well known) makes no difference.
Width (Ａ and A) and simplified or traditional Han make none either, except in code. The hash of a run is a polynomial
over its units modulo 2^64: with prefix sums, all runs of one length take two subtractions and a multiplication.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from zero2all.common.files import package_text

Kind = Literal["words", "characters", "tokens"]
RUN_LENGTHS: dict[Kind, int] = {"words": 60, "characters": 24, "tokens": 50}
STRETCH_CHARACTERS = 1 << 17
"""Texts are taken in groups, and longer ones in stretches, of about this many characters: the arrays stay in the
processor's cache, and memory is bounded."""
OVERLAP_CHARACTERS = 1 << 12
"""How much of a stretch the next one repeats, so that no run of usual words is cut."""
APART, LETTER, SIGN = range(3)
"""Classes of characters: not part of a unit, part of a run of letters, a unit of its own. The two lowest bits of a
character's hash say which it is."""
CLASS_BITS = 3
POINTS = 0x110000
EMOJI = slice(0x1F000, 0x1FB00)
BASE = 0x9E3779B97F4A7C15
"""Odd, so that it has an inverse modulo 2^64."""


def kind_for(text: str, language: str) -> Kind:
    """The units that a text of some language is compared by. One in ASCII alone has words, whatever its language."""
    if language == "code":
        return "tokens"
    return "characters" if language == "zh" and not text.isascii() else "words"


class Units(NamedTuple):
    """The units of some texts, one after the other."""

    hashes: np.ndarray
    """(units,) uint64."""
    bounds: np.ndarray
    """(texts + 1,) int64: the first unit of each text, and the end."""
    sums: np.ndarray
    """(units + 1,) uint64: prefix sums of the polynomial over all units."""
    starts: np.ndarray | None = None
    """The units that a run may begin with; None: all of them."""


def units_of(texts: Sequence[str], kind: Kind) -> Units:
    """The units of texts, none of them longer than STRETCH_CHARACTERS (see `stretches`) where there are many."""
    joined = "\n".join(texts)
    points = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    values = _character_hashes(kind == "tokens").take(points.astype(np.intp), mode="clip")
    if kind == "tokens":
        hashes, places = _runs_of_letters(values)
    else:
        places = np.flatnonzero(values)
        hashes = values[places]
    of_words = np.flatnonzero(np.diff(places, prepend=-2) > 1) if kind == "words" else None
    return Units(hashes, np.searchsorted(places, starts), _prefix_sums(hashes), of_words)


def _runs_of_letters(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hash of every word or sign, and where it begins."""
    of_point = np.zeros(len(values) + 2, np.uint8)
    np.bitwise_and(values, np.uint64(CLASS_BITS), out=of_point[1:-1], casting="unsafe")
    is_letter, is_sign = of_point == LETTER, of_point[1:-1] == SIGN
    begins = np.flatnonzero((is_letter[1:-1] & ~is_letter[:-2]) | is_sign)
    ends = np.flatnonzero((is_letter[1:-1] & ~is_letter[2:]) | is_sign) + 1
    sums = _prefix_sums(values)
    return _mixed((sums[ends] - sums[begins]) * _powers(len(sums))[1][begins]), begins


def run_hashes(units: Units, length: int) -> np.ndarray:
    """The hash of the run of `length` units from each start on, also of runs that go on into the next text."""
    count = max(0, len(units.hashes) - length + 1)
    if units.starts is not None:
        return run_hashes_at(units, units.starts[: np.searchsorted(units.starts, count)], length)
    return (units.sums[length:] - units.sums[:count]) * _powers(count)[1][:count]


def run_hashes_at(units: Units, places: np.ndarray, length: int) -> np.ndarray:
    """The same, of the runs that begin at some units."""
    return (units.sums[places + length] - units.sums[places]) * _powers(len(units.sums))[1][places]


def runs_within(units: Units, places: np.ndarray, length: int) -> np.ndarray:
    """Units from which a run of `length` stays within its text."""
    ends = units.bounds[np.searchsorted(units.bounds, places, side="right")]
    return places[places + length <= ends]


def stretches(text: str) -> list[str]:
    """A text in overlapping stretches of bounded length; most texts are one."""
    if len(text) <= STRETCH_CHARACTERS:
        return [text]
    step = STRETCH_CHARACTERS - OVERLAP_CHARACTERS
    return [text[start : start + STRETCH_CHARACTERS] for start in range(0, len(text) - OVERLAP_CHARACTERS, step)]


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _powers(len(values))[0][: len(values)], out=sums[1:])
    return sums


_kept_powers: list[tuple[np.ndarray, np.ndarray]] = []


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """At least `count` powers of BASE and of its inverse, kept between calls."""
    if not _kept_powers or len(_kept_powers[0][0]) < count:
        made = []
        for base in (BASE, pow(BASE, -1, 1 << 64)):
            factors = np.full(max(count, 1 << 16), base, np.uint64)
            factors[0] = 1
            made.append(np.cumprod(factors, dtype=np.uint64))
        _kept_powers[:] = [(made[0], made[1])]
    return _kept_powers[0]


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(32))


@cache
def _character_hashes(is_code: bool) -> np.ndarray:
    """Of every code point: the hash of what it is folded to, with its class; 0 where it is not part of a unit."""
    classes = np.full(POINTS, LETTER, np.uint64)
    folded = np.arange(POINTS, dtype=np.uint64)
    other = SIGN if is_code else APART
    classes[EMOJI] = other
    simplified = {} if is_code else simplified_of()
    for point in range(1 << 16):
        character = chr(point)
        if not is_code:
            plain = unicodedata.normalize("NFKC", character).lower()
            character = plain if len(plain) == 1 else character
            folded[point] = ord(simplified.get(character, character))
        if character.isspace() or not (character.isprintable() or character.isalnum()):
            classes[point] = APART
        elif not (character.isalnum() or (is_code and character == "_") or unicodedata.category(character)[0] == "M"):
            classes[point] = other
    hashes = _mixed(folded + np.uint64(BASE)) & ~np.uint64(CLASS_BITS) | classes
    return np.where(classes == APART, np.uint64(0), hashes)


@cache
def simplified_of() -> dict[str, str]:
    """Traditional Han character -> its simplified form."""
    words = package_text("zero2all.corpus", "han_forms.txt").split()
    return {form: word[0] for word in words for form in word[1:]}
