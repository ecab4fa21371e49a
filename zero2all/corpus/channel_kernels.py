"""The compiled loops of `channels.py`."""

from __future__ import annotations

import numpy as np
from numba import njit, types

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_SIGNATURE = types.void(_BYTES, types.int64[::1], types.uint8[::1], types.int64, types.int64, types.uint8[::1])


@njit(_SIGNATURE, cache=True, nogil=True)
def find_scripts(data, offsets, classes, sampled, scripts, out):  # type: ignore[no-untyped-def]
    """For each text, the script that most letters in its middle belong to."""
    counts = np.zeros(scripts, np.int64)
    for text in range(out.size):
        start, end = offsets[text], offsets[text + 1]
        if end - start > sampled:
            start += (end - start - sampled) // 2
            end = start + sampled
        counts[:] = 0
        for at in range(start, end):
            byte = data[at]
            script = classes[byte]
            if byte == 0xE3:  # kana, Han and punctuation share this first byte; the second tells them apart
                second = data[at + 1] if at + 1 < end else np.uint8(0)
                script = np.uint8(3) if 0x81 <= second <= 0x83 else np.uint8(1) if second >= 0x90 else np.uint8(0)
            elif byte == 0xE0:
                second = data[at + 1] if at + 1 < end else np.uint8(0)
                script = np.uint8(7) if 0xA4 <= second <= 0xA5 else np.uint8(9)
            counts[script] += 1
        best, most = 0, 0
        for script in range(1, scripts):
            # A character of these says about as much as four letters.
            weight = counts[script] * (4 if script in (1, 3, 4) else 1)
            if weight > most:
                best, most = script, weight
        if best in (1, 3) and counts[3] * 10 > counts[1] + counts[3]:
            best = 3  # Japanese, though most of its letters may be Han
        out[text] = best


_WORDS = types.Array(types.uint64, 1, "C", readonly=True)


@njit(types.void(_BYTES, types.int64[::1], _WORDS, _WORDS, types.int64[:, ::1]), cache=True, nogil=True)
def count_words(data, offsets, english, other, out):  # type: ignore[no-untyped-def]
    """For each text: its words in Latin letters, those among `english`, and those among `other`.

    Words are packed into 8 bytes, big-endian, A-Z in lower case; longer ones are in neither list.
    """
    for text in range(out.shape[0]):
        words = in_english = in_other = 0
        word = np.uint64(0)
        length = 0
        end = offsets[text + 1]
        for at in range(offsets[text], end + 1):
            byte = data[at] if at < end else np.uint8(0)
            if 0x41 <= byte <= 0x5A:
                byte += np.uint8(0x20)
            if 0x61 <= byte <= 0x7A or byte >= 0x80:
                word = (word << np.uint64(8)) | np.uint64(byte)
                length += 1
                continue
            if length:
                words += 1
                if length <= 8:
                    place = np.searchsorted(english, word)
                    if place < english.size and english[place] == word:
                        in_english += 1
                    else:
                        place = np.searchsorted(other, word)
                        in_other += place < other.size and other[place] == word
                word = np.uint64(0)
                length = 0
        out[text, 0] = words
        out[text, 1] = in_english
        out[text, 2] = in_other
