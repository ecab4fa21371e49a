"""What the native scan counts in a text, by column, and what it is told. Importing this does not import numba.

numba's cache knows when `kernels.py` changes, not when this file does: touch that one too.
"""

(
    ASCII, FUNCTION_HANS, GBK_SUSPECTS, DISTINCT, UNITS, UNIT_CHARS, WORDS, FUNCTION_WORDS,
    LINES, LINE_CHARS, LINE_CHARS_MAX, ENDED_LINES, ELLIPSIS_LINES, LOOSE_CHARS, DUPLICATE_LINE_CHARS,
    TOP_NGRAM_CHARS, DUPLICATE_NGRAM_CHARS, SENTENCES, URL_CHARS, EMAILS, BLOB_CHARS, MOJIBAKE_PAIRS,
    SPLIT_PAIRS, LONGEST_NUMBER, LONG_TOKENS, BYTES_IN, BYTES_OUT, CHANGED, KEEP_FROM, KEEP_TO,
    CLASSICAL_HANS, MODERN_HANS, SPAM_HANS, SPAM_WORDS, RARE_HANS, PAIRS, PAIR_HITS, FAR_PAIRS, FAR_HITS,
    PHRASES, ENDED_PHRASES, LINE_PHRASES, LONE_HANS, BARE_CHARS, VERSE_CHARS, EVEN_CHARS, LONGEST_PHRASE,
    NOISE_SIGNS, NOISE_LETTERS, PARTED, BROKEN_WORDS, MENU_CHARS, TABLE_CHARS, TABLE_RULES, PROSE_CHARS, STOPPED_LINES,
    ASIDE_CHARS, ASIDE_LATIN, ASIDE_LETTERS, ASIDE_DIGITS, ASIDE_SYMBOLS,
) = range(16, 77)  # fmt: skip
"""Columns of the counts, one row per text; the first sixteen are the character classes of `tables`. `CHANGED` is 0
for a text that stays as it was, 1 when only its ends are cut off, 2 when it needs `compact`."""
COLUMNS = ASIDE_SYMBOLS + 1

PAIR_HANS = 2048
"""Pairs are looked up among the first Han characters of a text, at most this many."""

LOOSE_LINE, BLOB_RUN, DUPLICATE_LINE, TOP_NGRAM, DUPLICATE_NGRAM, KEEP_INDENT = range(6)
"""The settings of the scan."""
