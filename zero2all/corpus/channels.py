"""Which script a text is written in, and which channel a document belongs to: zh, en, code or other.

    code    named like a program file
    zh      most of its letters are Han, a Han character counting as four letters (and few of them kana), or they are
            Latin and 3 % of the characters are Han: pages with code in them
    en      Latin letters, unless the function words of another language outnumber the English ones
    other   everything else: other languages in Latin letters, Japanese, Korean, Russian, Arabic, …

Three pieces of a long text stand for the whole; where they are Latin with a few Han characters, all of the text is
looked at. A text without letters has no channel of its own. The channel `auto` splits a source document by document; a
source without a channel gets the one that most of the sampled documents belong to.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np

from zero2all.corpus.clean.tables import FUNCTION_WORDS
from zero2all.corpus.dedup.signatures import Encoded, encode
from zero2all.corpus.listing import CODE_SUFFIXES
from zero2all.corpus.readers.items import suffix_of

SCRIPTS = ("none", "han", "latin", "kana", "hangul", "cyrillic", "arabic", "devanagari", "greek", "other")
"""Names of the numbers `scripts_of_encoded` returns; only the larger scripts have one."""

SAMPLED_BYTES = 1200

NONE, HAN, LATIN, KANA, HANGUL, CYRILLIC, ARABIC, DEVANAGARI, GREEK, OTHER = range(len(SCRIPTS))

CHANNELS = ("zh", "en", "code", "other")
"""What `auto` splits a source into; upper and lower case of these names are the same."""
AUTO = "auto"
NOTHING_SAMPLED = "no document could be sampled"
"""Why the channel of a source is not known."""
PIECE_CHARS = 250
LEAST_HAN = 10
LEAST_HAN_SHARE = 0.03
"""A text in Latin letters with this number and share of letters of another script is in that, beside code or names."""
MOST_KANA_SHARE = 0.2
_NOT_LATIN = re.compile("[\u0370-\u1fff\u3041-\u30ff\u4e00-\u9fff\uac00-\ud7a3]")
_CODE = re.compile(r"```.*?```|<[^<>]*>|\{\{[^{}]*\}\}|\]\([^()\n]*\)", re.DOTALL)
"""Blocks of code, tags, templates and addresses of links, which say nothing of the language of a page. No alternative
reads on over the beginning of another: a page of nothing but `{{` would take minutes."""
_ACCENTED = re.compile("[\u00c0-\u024f]")
OTHER_WORDS = """
der die und das den von zu mit sich des auf für ist im dem nicht ein eine als auch es werden aus hat dass sie nach wird
bei einer um noch wie einem über einen kann diese wir ich aber wenn nur oder vor zur bis mehr durch
le la les et des une du que est dans pour qui par sur pas plus avec ce il sont au cette ont ses aux mais ou nous leur
el los las del por con una para como más pero sus su al lo este fue han esta entre cuando muy sin sobre también
di il che per non sono della del le gli nel alla più anche dei si ha questo con delle
não uma os em um para com ao mais dos das foi ele como pelo seu sua ou são
het een van dat op te zijn voor niet met aan er om ook als bij maar door naar wordt
och att det som på är av för med inte till ett har jag om
og er til ikke af med det for som på en
się nie że jest z do jak po od przez był dla tym
ve bir bu için ile da ne olarak daha gibi çok
je se na že si by ale jako tak
és az hogy nem egy meg van ez csak
și în cu pe care este nu din să
ja on ei että se hän oli mutta
yang dan untuk dengan dari pada ini itu tidak adalah dalam
và của là có không được cho trong với các một
"""
"""The commonest words of other languages in Latin letters, but for those that are English words too."""
LEAST_OTHER_WORDS = 3
LEAST_OTHER_SHARE = 0.03
"""A text is in another language when at least this number and share of its words are among `OTHER_WORDS`, and
more of them than among the English function words. English prose has under 0.01, German, French or Polish 0.2."""


def channel_name(name: str) -> str:
    """A channel as it is written everywhere: the known ones in lower case, others as they were given."""
    lowered = name.lower()
    return lowered if lowered in CHANNELS or lowered == AUTO else name


def channels_of(titles: Sequence[str], contents: Sequence[str]) -> list[str | None]:
    """The channel of each document; None where there are no letters to tell it by."""
    pieces = [sampled_text(content) for content in contents]
    encoded = encode(pieces)
    scripts = scripts_of_encoded(encoded)
    other = _speaks_other_language(encoded.buffer, encoded.offsets)
    # Pages of documentation may be mostly code, whose words are English.
    latin = np.flatnonzero((scripts == LATIN) & ~other).tolist()
    unsure = [at for at in latin if not contents[at].isascii() and len(_ACCENTED.findall(contents[at])) > 2]
    if unsure:
        again = encode([sampled_text(_CODE.sub(" ", contents[at])) for at in unsure])
        other[unsure] = _speaks_other_language(again.buffer, again.offsets)
    found: list[str | None] = []
    of_each = zip(titles, contents, pieces, scripts.tolist(), other.tolist(), strict=True)
    for title, content, piece, script, is_other in of_each:
        if "." in title and suffix_of(title) in CODE_SUFFIXES:
            found.append("code")
        elif script == NONE:
            found.append(None)
        elif script == HAN:
            found.append("zh")
        elif script == LATIN:
            found.append(_channel_beside_code(content, piece) or ("other" if is_other else "en"))
        else:
            found.append("other")
    return found


def _channel_beside_code(content: str, piece: str) -> str | None:
    """zh or other for a text in Latin letters whose pieces, or all of it, have enough letters of another script."""
    if content.isascii():
        return None
    found = _NOT_LATIN.findall(piece)
    if len(found) < max(LEAST_HAN, LEAST_HAN_SHARE * len(piece)):
        found, piece = _NOT_LATIN.findall(content), content
    if len(found) >= LEAST_HAN and len(found) < LEAST_HAN_SHARE * len(piece):
        piece = "".join(_CODE.sub("", content).split())
    is_short = len(found) >= LEAST_HAN // 3 and len(found) > 0.2 * len("".join(_CODE.sub("", content).split()))
    if not is_short and len(found) < max(LEAST_HAN, LEAST_HAN_SHARE * len(piece)):
        return None
    not_han = sum(not "\u4e00" <= character <= "\u9fff" for character in found)
    return "other" if not_han > MOST_KANA_SHARE * len(found) else "zh"


def sampled_text(content: str) -> str:
    """A text short enough to be looked at: of a long one, pieces a sixth, a half and five sixths into it."""
    size = len(content)
    if size <= 3 * PIECE_CHARS:
        return content
    starts = (size * place // 6 - PIECE_CHARS // 2 for place in (1, 3, 5))
    return "\n".join(content[start : start + PIECE_CHARS] for start in starts)


def _speaks_other_language(buffer: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    from zero2all.corpus.channel_kernels import count_words

    counts = np.empty((offsets.size - 1, 3), np.int64)
    count_words(buffer, offsets, *_word_tables(), counts)
    words, english, other = counts.T
    result: np.ndarray = (other >= LEAST_OTHER_WORDS) & (other > english) & (other >= LEAST_OTHER_SHARE * words)
    return result


@cache
def _word_tables() -> tuple[np.ndarray, np.ndarray]:
    """English function words and those of other languages, packed into sorted numbers."""
    english = set(FUNCTION_WORDS)
    other = set(OTHER_WORDS.split()) - english
    return _packed(english), _packed(other)


def _packed(words: set[str]) -> np.ndarray:
    numbers = [int.from_bytes(data, "big") for word in words if len(data := word.encode()) <= 8]
    return np.array(sorted(numbers), np.uint64)


def scripts_of_encoded(encoded: Encoded) -> np.ndarray:
    """(n,) uint8: the number in `SCRIPTS` of the script that most letters in the middle of each text belong to.

    A text with more than a tenth of kana among its Han and kana is Japanese, though most of its letters may be Han.
    """
    from zero2all.corpus.channel_kernels import find_scripts

    out = np.empty(encoded.offsets.size - 1, np.uint8)
    find_scripts(encoded.buffer, encoded.offsets, _classes(), SAMPLED_BYTES, len(SCRIPTS), out)
    return out


@cache
def _classes() -> np.ndarray:
    """For each possible byte, the script of the character it begins; NONE where it begins no letter."""
    table = np.zeros(256, np.uint8)
    ranges = {
        LATIN: [(0x41, 0x5A), (0x61, 0x7A), (0xC3, 0xC9)],
        GREEK: [(0xCE, 0xCF)],
        CYRILLIC: [(0xD0, 0xD3)],
        ARABIC: [(0xD8, 0xDB)],
        OTHER: [(0xD4, 0xD7), (0xDC, 0xDF), (0xE1, 0xE1)],
        HAN: [(0xE4, 0xE9)],
        HANGUL: [(0xEA, 0xED)],
    }
    for script, pairs in ranges.items():
        for first, last in pairs:
            table[first : last + 1] = script
    return table


def guess_channel(titles: Sequence[str], contents: Sequence[str]) -> tuple[str, str]:
    """The channel that most of the sampled documents of a source belong to, and the figures it rests on."""
    found = Counter(channel for channel in channels_of(titles, contents) if channel is not None)
    if not titles:
        return "en", NOTHING_SAMPLED
    if not found:
        return "en", "the sampled documents have no letters"
    total = found.total()
    shares = [f"{count / total:.0%} {name}" for name, count in found.most_common()]
    return found.most_common(1)[0][0], f"sampled documents: {total:,}; {', '.join(shares)}"
