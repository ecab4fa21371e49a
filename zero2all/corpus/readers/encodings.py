"""Which encoding a text has, found from a sample, and how to bring it to UTF-8.

UTF-8 is the rule. A byte order mark decides; without one, zero bytes in most lines point to UTF-16 or to no text at
all. Bytes that are not UTF-8 are decoded as each of `LEGACY`, and what comes out is judged as language: neighbouring
Han characters that go together (`clean.han`), kana, frequent Hangul, frequent pairs of Cyrillic letters, accented
letters of one language inside words. Text read in a wrong encoding has none of that. Where no encoding gives language,
or two do, the file stays UTF-8 by name: its records go to quarantine, and `--encoding` can name what it is. A file in
which some lines are garbage stays what the others are, and each broken record goes to quarantine.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

UTF8_BOM = b"\xef\xbb\xbf"
BOMS = (
    (UTF8_BOM, "utf-8"),
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
BINARY = ""
"""In place of an encoding: this is no text."""
CLEAN_SHARE = 0.5
"""A file with zero bytes in it is text when at least this share of its lines, and of its bytes (a run of zeros as one),
has no control characters. Of random bytes, 4 % of the lines have none."""
BINARY_STARTS = (
    *(b"%PDF-", b"SQLite format 3\0", b"\x7fELF", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"\xd0\xcf\x11\xe0", b"MZ"),
    *(b"\xca\xfe\xba\xbe", b"RIFF", b"OggS", b"ID3", b"\x93NUMPY", b"wOFF", b"wOF2", b"\0\x01\0\0", b"OTTO"),
)
"""Well-known files that hold much text but are none."""

MANY = 4
"""A file is UTF-8 with damage when it has this many good sequences for each bad byte."""
LEGACY = {
    "gb18030": "han",
    "big5hkscs": "han",
    "cp932": "japanese",
    "euc_jp": "japanese",
    "cp949": "korean",
    "cp1251": "cyrillic",
    "koi8_r": "cyrillic",
    "cp1252": "latin",
    "cp1250": "eastern latin",
    "iso8859_2": "eastern latin",
    "cp1254": "eastern latin",
}
"""Encodings without a mark, and what text in them is written in; each includes its smaller forms (GBK, Latin-1 …)."""
JUDGED_BYTES = 1 << 12
"""So much of the lines that are not ASCII is judged."""
LEAST_LIKELY = 0.25
"""Least mean evidence of a character beyond ASCII; see benchmarks/corpus_encodings.py."""
LEAST_ALONE = 0.15
"""The same where no other reading has any evidence."""
LEAST_AHEAD = 0.15
"""The best reading must be this much ahead of the next one that gives another text."""
PLAIN_SHARE = 0.97
"""At least this share of UTF-16 text is in the blocks of living scripts."""
BAD_SHARE = 0.01
"""At most this share of the characters beyond ASCII may be undecodable, or two."""

_MULTIBYTE = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_HIGH_RUN = re.compile(rb"[\x80-\xff]+")
_ZEROS = re.compile(rb"\0+")
_CONTROL = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")
_PLAIN = re.compile(
    "[\t\n\r -~\u00a0-\u024f\u0370-\u052f\u2000-\u206f\u3000-\u30ff\u4e00-\u9fff\uac00-\ud7af\uff00-\uffef]"
)


def find_encoding(sample: bytes, whole: bool, named: str | None = None) -> tuple[str, int]:
    """The encoding of a text that starts with `sample`, and the length of its byte order mark.

    `whole`: the sample is all there is, so that nothing can have been cut at its end. `named`: what it is when it is
    neither marked nor UTF-8. `BINARY`: no text.
    """
    for bom, encoding in BOMS:
        if sample.startswith(bom):
            return encoding, len(bom)
    if b"\0" in sample:
        clean = _clean_lines(sample)
        if not clean:
            return named if named and is_wide(named) else _find_utf16(sample), 0
        sample, whole = clean, False
    if _is_utf8(sample, whole):
        return named if named and sample.isascii() else "utf-8", 0
    if named:
        return named, 0
    good = len(_MULTIBYTE.findall(sample))
    bad = sum(map(len, _HIGH_RUN.findall(_MULTIBYTE.sub(b" ", sample))))
    return _find_legacy(sample) if good < MANY * bad else "utf-8", 0


def _clean_lines(sample: bytes) -> bytes:
    """The lines without control characters, where they are most of the sample; else nothing."""
    if sample.startswith(BINARY_STARTS):
        return b""
    lines = [line for line in _ZEROS.sub(b"\0", sample).split(b"\n") if line.strip()]
    clean = [line for line in lines if not _CONTROL.search(line)]
    enough = len(clean) >= max(2, CLEAN_SHARE * len(lines))
    return b"\n".join(clean) if enough and sum(map(len, clean)) >= CLEAN_SHARE * sum(map(len, lines)) else b""


def _is_utf8(sample: bytes, whole: bool) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample, final=whole)
    except UnicodeDecodeError:
        return False
    return True


def _find_utf16(sample: bytes) -> str:
    shares = {}
    for encoding in ("utf-16-le", "utf-16-be"):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(sample[: len(sample) // 2 * 2])
        except UnicodeDecodeError:
            continue
        shares[encoding] = len(_PLAIN.findall(text)) / max(len(text), 1)
    best = max(shares, key=lambda encoding: shares[encoding], default=BINARY)
    return best if shares.get(best, 0.0) >= PLAIN_SHARE else BINARY


def _find_legacy(sample: bytes) -> str:
    """The one of `LEGACY` in which the sample is language, else UTF-8."""
    lines = b"\n".join(line for line in sample.split(b"\n") if not line.isascii())[:JUDGED_BYTES]
    readings: dict[str, tuple[float, str]] = {}
    for encoding, kind in LEGACY.items():
        text = codecs.getincrementaldecoder(encoding)("replace").decode(lines)
        found = likelihood(text, kind)
        if found > readings.get(text, (-9.0, ""))[0]:
            readings[text] = (found, encoding)
    (best, encoding), *others = sorted(readings.values(), reverse=True)
    ahead = best - max((other for other, _ in others), default=-1.0)
    is_sure = best >= LEAST_LIKELY and ahead >= LEAST_AHEAD
    return encoding if is_sure or (best >= LEAST_ALONE and ahead > 1) else "utf-8"


_SIGNS = frozenset("　、。，．・：；？！「」『』（）【】《》〈〉“”‘’—…～％＋－＝／·–«»§°€£©®™\xa0")
_HANGUL = frozenset(
    "다이니는하에을를의로지가수서기사용은있한합스습자성정요트리해시인고드할어으제소우입일라문나도보그여대과면값적위되만반아들함모것전상세터환체열된예와"
    "속부경저오생작구게음않호같타브메동명개포크러때변배프더됩식능미유표데내설단래공객코장록간주디비원방조선레형분거버화치없출각페결현본른파또든키추실두"
    "중연행마웹법목바신확운며필처재발특진안당언번션접텐력복참될테및계항업청관매역알링새통색점최했었겠습까네죠군무말차산년월"
)
_CYRILLIC = frozenset(
    """
    ст ен то ра ни по ет ме на но пр ов ер ол ко ва та те ан от ро ть об ре ль ат ри ле од ли ка им ем не во мо
    ны тр ос ис ор де ие ит ля нт ти да со ес ак ом го ия же вы за ел ед ог че ве до ой сп ся ав ци нн сл ин ло
    он тс тв ок аз ае ек ож зо пе ам эт ал ки ач ас ру ьз из бр ые бо ил ди оз бы оп дл ла ми ад иц ый ий ую ше
    ещ ще хо ух жи чт ну
    """.split()  # noqa: SIM905
)
"""Pairs of letters that are frequent in Russian."""
_SHORT_CYRILLIC = frozenset(
    "и в на не по из с к о у а но за от до со во бы же ни ли да мы он то их его я і з й та".split()  # noqa: SIM905
)
_CYRILLIC_WORD = re.compile("[\u0400-\u04ff]+")
_NOT_RUSSIAN = frozenset("ЂЃЉЊЌЋЏђѓљњќћџѕЅјЈ")
_LATIN = ("àâæçéèêëîïôœùûü", "äöüßéà", "áéíñóúü", "áâãàçéêíóôõúü", "àèéìíòóùúî", "ëïéöèóáü", "åäöæøéü")
_EASTERN_LATIN = ("ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áéíóöőúüű", "áäčďéíĺľňóôŕšťúýž", "ăâîşţ", "çğıiöşüâî", "čćđšž")
"""The accented letters of a language each: of Western Europe, of Eastern Europe and Turkey."""
_OUTSIDE_WORDS = frozenset("‘’“”–—…«»·§°€£©®™\xa0¿¡•†×№")


def likelihood(text: str, kind: str) -> float:
    """How much like language the characters beyond ASCII are: their mean evidence, about -2 to 1.

    One more character without evidence is counted, so that two or three of them must be very sure.
    """
    beyond = [at for at, character in enumerate(text) if character > "\x7f"]
    evidence = _EVIDENCE.get(kind, _east_asian)(text, beyond, kind)
    if evidence < 1:
        return -1.0
    return (evidence - 3 * max(0, text.count("\ufffd") - 2)) / (len(beyond) + 1)


def _east_asian(text: str, beyond: list[int], kind: str) -> float:
    from zero2all.corpus.clean.han import pair_evidence

    of_han = pair_evidence(text)
    total = 0.0
    for at in beyond:
        character = text[at]
        if "\u4e00" <= character <= "\u9fff":
            found = of_han[at] * (0.5 if kind == "korean" else 1)
        elif character in _SIGNS or "\uff10" <= character <= "\uff5a":
            found = 0.4
        elif "\u3041" <= character <= "\u30fc":
            found = 1 if kind == "japanese" else 0.4
        elif "\uac00" <= character <= "\ud7a3":
            found = 1.2 if character in _HANGUL else -0.3
        else:
            found = -1
        around = text[at - 1 : at + 2 : 2]
        total += found - (len(around) == 2 and around.isascii() and around.isalpha() and around.islower())
    return total


def _cyrillic(text: str, beyond: list[int], kind: str) -> float:  # noqa: ARG001
    total = sum(0.3 if text[at] in _OUTSIDE_WORDS else -1.0 for at in beyond if not "\u0400" <= text[at] <= "\u04ff")
    for match in _CYRILLIC_WORD.finditer(text):
        word = match[0]
        beside = text[match.start() - 1 : match.start()] + text[match.end() : match.end() + 1]
        lowered = word.lower()
        if any(character.isalpha() for character in beside):
            total -= len(word)
        elif not _NOT_RUSSIAN.isdisjoint(word):
            total -= 6
        elif len(word) < 3:
            total += 0.5 if lowered in _SHORT_CYRILLIC else -0.5
        else:
            hits = sum(lowered[at : at + 2] in _CYRILLIC for at in range(len(word) - 1))
            total += (1.6 * hits - 0.4 * len(word)) * (word[1:].islower() or word.isupper())
    return total


def _latin(text: str, beyond: list[int], kind: str) -> float:
    total = 0.0
    letters = []
    for at in beyond:
        character = text[at]
        before, after = text[max(0, at - 2) : at], text[at + 1 : at + 3]
        inside = before[-1:].isalpha() and after[:1].isalpha()
        if character in "¿¡":
            total += 0.6 if after.isalpha() and not before[-1:].isalnum() else -1
        elif character in _OUTSIDE_WORDS:
            total += -4 if inside and character not in "’·\xa0" else 0.6
        elif character.isalpha() and character not in "ªº":
            letters.append(character.lower())
            pair_before = before[:1] if before[-1:] > "\x7f" else ""
            beside = any(each.isascii() and each.isalpha() for each in before[-1:] + after[:1] + pair_before)
            alone = character in "éàóèôÉÀ" and not (before + after).strip().isalpha()
            inner = character.isupper() and before[-1:].islower()
            total += -2 if inner else 1 if beside else 0.5 if alone else -1.5
        else:
            total += -4 if inside else 0.3
    languages = _LATIN if kind == "latin" else _EASTERN_LATIN
    strange = len(letters) - max(sum(letter in language for letter in letters) for language in languages)
    total -= 8 * max(0.0, strange - 0.02 * len(letters) - (len(letters) > 20))
    return total if kind == "latin" else total - 0.2 * len(beyond)


_EVIDENCE = {"cyrillic": _cyrillic, "latin": _latin, "eastern latin": _latin}


def encoding_problem(name: str) -> str | None:
    """Why text cannot be read in an encoding of this name; None when it can."""
    try:
        return (
            None if "\n{".encode(name) in (b"\n{", *("\n{".encode(wide) for _, wide in BOMS)) else "it has no line ends"
        )
    except LookupError:
        return "Python knows no text encoding of this name"


def is_wide(encoding: str) -> bool:
    """Whether a line end has more than one byte (UTF-16, UTF-32)."""
    return "\n".encode(encoding) != b"\n"


def _mark_bad_bytes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error("z2a-mark", _mark_bad_bytes)


class Transcoded:
    """Bytes of another encoding, read as UTF-8.

    What cannot be decoded becomes the byte 0xff, which UTF-8 never has: the record it stands in fails as a record, and
    the rest is not touched.
    """

    def __init__(self, read: Callable[[int], bytes], encoding: str) -> None:
        self._read = read
        self._decoder = codecs.getincrementaldecoder(encoding)("z2a-mark")
        self._rest = b""
        self._at_end = False

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end."""
        while not self._rest and not self._at_end:
            data = self._read(size)
            self._at_end = not data
            text = self._decoder.decode(data, final=self._at_end)
            self._rest = text.encode("utf-8", errors="surrogateescape")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data
