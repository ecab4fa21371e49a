"""Which encoding a text has, found from a sample, and how to bring it to UTF-8.

UTF-8 is the rule. A byte order mark decides; without one, zero bytes in most lines point to UTF-16 or to no text at
all, and bytes that are not UTF-8 to GB18030 (the superset of GBK and GB2312) if the characters they give are mostly
common Chinese ones. A file in which some lines are garbage stays what the others are, and each broken record goes to
quarantine; so does text in any other encoding.
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
COMMON_SHARE = 0.5
"""At least this share of GB18030 text beyond ASCII is in the first level of GB 2312 or punctuation: 0.95 in modern
prose, under 0.4 when Big5 or UTF-8 is read as GB18030."""
PLAIN_SHARE = 0.97
"""At least this share of UTF-16 text is in the blocks of living scripts."""
BAD_SHARE = 0.01
"""At most this share of the characters of a GB18030 sample may be undecodable, or two."""

_MULTIBYTE = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_HIGH_RUN = re.compile(rb"[\x80-\xff]+")
_ZEROS = re.compile(rb"\0+")
_CONTROL = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")
_PLAIN = re.compile(
    "[\t\n\r -~\u00a0-\u024f\u0370-\u052f\u2000-\u206f\u3000-\u30ff\u4e00-\u9fff\uac00-\ud7af\uff00-\uffef]"
)


def find_encoding(sample: bytes, whole: bool) -> tuple[str, int]:
    """The encoding of a text that starts with `sample`, and the length of its byte order mark.

    `whole`: the sample is all there is, so that nothing can have been cut at its end. `BINARY`: no text.
    """
    for bom, encoding in BOMS:
        if sample.startswith(bom):
            return encoding, len(bom)
    if b"\0" in sample:
        clean = _clean_lines(sample)
        if not clean:
            return _find_utf16(sample), 0
        sample, whole = clean, False
    if _is_utf8(sample, whole):
        return "utf-8", 0
    good = len(_MULTIBYTE.findall(sample))
    bad = sum(map(len, _HIGH_RUN.findall(_MULTIBYTE.sub(b" ", sample))))
    if good < MANY * bad and _looks_like_gb18030(sample):
        return "gb18030", 0
    return "utf-8", 0


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


def _looks_like_gb18030(sample: bytes) -> bool:
    text = codecs.getincrementaldecoder("gb18030")("replace").decode(sample)
    beyond = [character for character in text if character > "\x7f"]
    if len(beyond) < 2 or beyond.count("\ufffd") > 2 + BAD_SHARE * len(beyond):
        return False
    common = 0
    for character in beyond:
        pair = character.encode("gb18030")
        if len(pair) == 2 and pair[1] >= 0xA1:
            common += 0xB0 <= pair[0] <= 0xD7 or 0xA1 <= pair[0] <= 0xA3
    return common >= COMMON_SHARE * len(beyond)


def newline_of(encoding: str) -> bytes:
    """A line end as the encoding writes it."""
    return "\n".encode(encoding)


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
