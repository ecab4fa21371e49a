"""One byte per Unicode code point: the class in the low four bits, flags in the high four.

The meaning of a flag depends on the class. The table has 0x110000 bytes and is made from `unicodedata` on first use
(0.1 s). Planes 2 and 3 and the emoji blocks count as assigned wherever Unicode has not ruled otherwise, so that a new
emoji or Han character is not removed because Python is older than it.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

import numpy as np

CODE_POINTS = 0x110000

REMOVE = 0
"""Controls, format characters, surrogates, private use, unassigned: taken out by repair."""
NEWLINE = 1
"""Line feed, and what becomes one: CR, VT, FF, NEL, line and paragraph separators (Zl, Zp)."""
SPACE = 2
HAN = 3
SINGLE = 4
"""Letters of other scripts written without spaces (kana, bopomofo, Thai, Lao, Tibetan, Burmese, Khmer)."""
LATIN_LOWER = 5
LATIN_UPPER = 6
LETTER = 7
MARK = 8
DIGIT = 9
SENTENCE_END = 10
PUNCTUATION = 11
"""Other punctuation, and numbers that are not decimal digits."""
SYMBOL = 12
ART = 13
"""Block elements (▅ █ ▂) and Braille patterns, which text uses to draw."""
REPLACEMENT = 14
JOINER = 15
"""ZWJ and ZWNJ: kept after a character that can join (emoji, Arabic, Indic), removed elsewhere."""

CLASS_MASK = 15
FUNCTION_HAN = 16
"""On Han: one of the commonest function characters, which running text cannot do without."""
GBK_SUSPECT = 32
"""On Han: what the lead bytes of Chinese UTF-8 become when read as GBK, and 锟 of 锟斤拷."""
MODERN_HAN = 64
"""On function characters: of modern Chinese (的 了 们 这), hardly ever in classical prose and verse."""
CLASSICAL_HAN = 128
"""On function characters: of classical Chinese (之 其 矣 曰), rare in modern prose."""
COUNTING_HAN = 128
"""On other Han: numerals, units of time and the signs of the calendar. Annals and registers are full of them."""
SPAM_HAN = 64
"""On other Han: a character of the words of gambling and sales; a text with many is searched for such words."""
CONTINUATION = 16
"""On anything but Han: what a UTF-8 continuation byte becomes when read as Windows-1252."""
SIGN = 32
"""On anything but Han: a sign that stands between the entries of a menu (| · » •) or in a badly read word (! ~ ^)."""
CAN_JOIN = 64
"""A joiner may follow."""
CLOSER = 128
"""Closing quotes, brackets and Markdown emphasis, which may stand behind the end of a sentence."""

FUNCTION_CHARACTERS = (
    "的一是了不在有我他她它这为之来以个中上们到说时要就出会可也你对能而那得于着下自过后里其者所与则及或并把被让从但因如此等"
    "都还没又只很么什吗呢吧啊将已向由使用果去看好最多两些何无乃曰若故皆亦"
    "這為來個們說時會對過後裡與則並從還沒麼嗎將無於矣焉哉兮乎夫盖蓋岂豈耶尔爾未莫非欲犹猶遂既且即吾汝"
)
MODERN_CHARACTERS = "的了是们們这這那个個么麼什吗嗎呢吧啊她它很还還没沒把被让"
CLASSICAL_CHARACTERS = "之其而以於于者也乃曰矣焉哉兮乎夫盖蓋岂豈耶尔爾吾汝若皆亦则則故遂既莫犹猶何"
FUNCTION_WORDS = tuple(
    """
    the of and to a in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were all her she there would their we him been has when who will no more if out so what up its about
    than into them can only other some could these may then do any my our me i also did must where your should
    because each just those how too very here both between being
    """.split()  # noqa: SIM905
)

COUNTING_CHARACTERS = (
    "二三四五六七八九十百千万萬亿億年月日春夏秋冬朔闰閏甲乙丙丁戊己庚辛壬癸子丑寅卯辰巳午未申酉戌亥两兩斤钱錢分寸尺卷"
)
SPAM_CHARACTERS = "博彩赌賭庄莊赔賠娱娛乐樂棋牌押盘盤奖獎赢贏竞競猜荷虎轮輪肖佣钱錢玩票投"
SPAM_WORDS = tuple(
    """
    casino casinos jackpot jackpots betting bet bets gambling gamble poker blackjack roulette baccarat sportsbook
    bookmaker bookmakers wager wagers wagering bonus bonuses spins payout payouts odds winnings cashback
    """.split()  # noqa: SIM905
)

BARS = "|·»›•│｜丨"
_ODD_IN_WORDS = "!$%*+;@^|~"
_SENTENCE_ENDS = "．.!?。！？…⋯｡‥‼⁇⁈⁉؟।"
_CLOSERS = ")]}）】」』”’\"'》〉>*_`］｝〕〗＂＇›»"
_LINE_BREAKS = "\n\r\x0b\x0c\x85\u2028\u2029"
_VISIBLE_FORMATS = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2"
_LATIN = ((0x41, 0x2B0), (0x1E00, 0x1F00), (0x2C60, 0x2C80), (0xA720, 0xA800), (0xAB30, 0xAB70), (0xFF21, 0xFF5B))
_HAN = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x3FFFE), (0x3005, 0x3008))
_SINGLE = ((0x0E00, 0x10A0), (0x1780, 0x1800), (0x3040, 0x3130), (0x31A0, 0x31C0), (0x31F0, 0x3200), (0xFF66, 0xFFA0))
_ART = ((0x2580, 0x25A0), (0x2800, 0x2900))
_EMOJI = (0x1F300, 0x1FB00)
_JOINING = (
    (0x0600, 0x0E00),
    (0x0F00, 0x10A0),
    (0x1780, 0x18B0),
    (0x1F000, 0x1FB00),
    (0x2190, 0x21B0),
    (0x2600, 0x27C0),
)
PRIVATE_USE = ((0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
"""Characters whose meaning only a font knows; the last two code points of both planes are no characters."""
_LISTED_END = 0x20000
"""Below this every code point is asked about; above, whole planes are Han, private use or unassigned."""
_KINDS = {"Zs": SPACE, "Nd": DIGIT, "Nl": PUNCTUATION, "No": PUNCTUATION}
_KINDS_BY_LETTER = {"L": LETTER, "M": MARK, "P": PUNCTUATION, "S": SYMBOL}


@cache
def character_table() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Class and flags of every code point; read-only, made once per process."""
    table = np.zeros(CODE_POINTS, np.uint8)
    categories = [unicodedata.category(chr(point)) for point in range(_LISTED_END)]
    table[:_LISTED_END] = [_KINDS.get(name) or _KINDS_BY_LETTER.get(name[0], REMOVE) for name in categories]
    lower = np.array([name != "Lu" and name != "Lt" for name in categories])
    for start, end in _LATIN:
        piece = table[start:end]
        piece[piece == LETTER] = np.where(lower[start:end][piece == LETTER], LATIN_LOWER, LATIN_UPPER)
    for start, end in _HAN:
        piece = table[start:end]
        piece[(piece == LETTER) | (piece == PUNCTUATION) | (start >= _LISTED_END)] = HAN
    for start, end in _SINGLE:
        piece = table[start:end]
        piece[(piece == LETTER) | (piece == MARK)] = SINGLE
    emoji = table[_EMOJI[0] : _EMOJI[1]]
    emoji[emoji == REMOVE] = SYMBOL
    table[0xE0100:0xE01F0] = MARK  # variation selectors, which choose among shapes of a Han character
    for start, end in _ART:
        table[start:end] = ART
    table[_points(_VISIBLE_FORMATS)] = SYMBOL
    table[_points(_SENTENCE_ENDS)] = SENTENCE_END
    table[_points(_LINE_BREAKS)] = NEWLINE
    table[ord("\t")] = SPACE
    table[0xFFFD] = REPLACEMENT
    table[_points("\u200c\u200d")] = JOINER
    _add_flags(table)
    table.flags.writeable = False
    return table


def standard_characters() -> dict[int, int]:
    """Private-use code point -> standard one, for what GB18030 and GBK put there before Unicode had it.

    The editions of 2005 and 2022 moved these: vertical punctuation, two letters of pinyin, the signs that describe a
    Han character, and parts and characters of Han. Six of them lie in plane 2 and take four bytes of UTF-8, not three.
    """
    runs = {
        0xE78D: "\ufe10\ufe12\ufe11\ufe13\ufe14\ufe15\ufe16\ufe17\ufe18\ufe19",
        0xE7C7: "ḿǹ",
        0xE7E7: "\u303e\u2ff0\u2ff1\u2ff2\u2ff3\u2ff4\u2ff5\u2ff6\u2ff7\u2ff8\u2ff9\u2ffa\u2ffb",
        0xE815: "⺁𠂇𠂉𠃌⺄㑳㑇⺈⺋龴㖞㘚㘎⺌⺗㥮㤘龵㧏㧟㩳㧐龶龷㭎㱮㳠⺧𡗗龸⺪䁖䅟⺮䌷⺳⺶⺷𢦏䎱"
        "䎬⺻䏝䓖䙡䙌龹䜣䜩䝼䞍⻊䥇䥺䥽䦂䦃䦅䦆䦟䦛䦷䦶龺𤇾䲣䲟䲠䲡䱷䲢䴓䴔䴕䴖䴗䴘䴙䶮龻",
    }
    return {first + at: ord(character) for first, run in runs.items() for at, character in enumerate(run)}


def _add_flags(table: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    table[ord("丨")] = PUNCTUATION  # a stroke of Han that is written for |
    table[_points(FUNCTION_CHARACTERS)] |= FUNCTION_HAN
    table[sorted(set(_points(MODERN_CHARACTERS)) & set(_points(FUNCTION_CHARACTERS)))] |= MODERN_HAN
    table[_points(CLASSICAL_CHARACTERS)] |= CLASSICAL_HAN
    table[sorted(set(_points(COUNTING_CHARACTERS)) - set(_points(FUNCTION_CHARACTERS)))] |= COUNTING_HAN
    table[sorted(set(_points(SPAM_CHARACTERS)) - set(_points(FUNCTION_CHARACTERS)))] |= SPAM_HAN
    pairs = (bytes((lead, trail)) for lead in range(0xE3, 0xEA) for trail in range(0x80, 0xC0))
    suspects = set(map(ord, "".join(pair.decode("gbk", errors="ignore") for pair in pairs)))
    table[sorted(suspects - {ord(character) for character in FUNCTION_CHARACTERS} | {ord("锟")})] |= GBK_SUSPECT
    table[_points(CONTINUATION_CHARACTERS)] |= CONTINUATION
    table[_points(_CLOSERS)] |= CLOSER
    table[_points(BARS + _ODD_IN_WORDS)] |= SIGN
    for start, end in _JOINING:
        piece = table[start:end]
        piece[piece >= SINGLE] |= CAN_JOIN
    table[[0xFE0E, 0xFE0F, 0x20E3]] |= CAN_JOIN


def _points(characters: str) -> list[int]:
    return [ord(character) for character in characters]


WINDOWS_1252 = {bytes((byte,)).decode("cp1252", errors="ignore") or chr(byte): byte for byte in range(0x80, 0x100)}
"""Character -> byte; the five bytes that Windows-1252 leaves undefined stand for themselves, as browsers read them."""
CONTINUATION_CHARACTERS = "".join(character for character, byte in WINDOWS_1252.items() if byte < 0xC0)
