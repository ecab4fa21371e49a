"""From counts to measures, and from measures to the reason of a drop; all texts of a batch at once.

A measure is a number per text that a threshold is compared with. `JUDGES` has one entry per dropping rule that
needs nothing but measures: it says which texts the rule drops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from zero2all.corpus.clean import kernels as k
from zero2all.corpus.clean import tables as t
from zero2all.corpus.clean.config import CleanConfig

Array = np.ndarray[Any, np.dtype[Any]]
Measures = dict[str, Array]

SCRIPTS: Final = {"han": "han_share", "latin": "latin_share", "ascii": "ascii_share"}


def measures_of(counts: Array, config: CleanConfig) -> Measures:
    """What the rules look at, from the counts of `kernels.scan` (a row per text)."""
    column = counts.T.astype(np.float64)
    chars = column[t.HAN : t.JOINER + 1].sum(axis=0)
    letters = column[t.HAN : t.LETTER + 1].sum(axis=0)
    latin = column[t.LATIN_LOWER] + column[t.LATIN_UPPER]
    symbols = column[t.SENTENCE_END : t.ART + 1].sum(axis=0)
    lines = column[k.LINES]
    return {
        "chars": chars,
        "replacement_share": _share(column[t.REPLACEMENT], chars),
        "mojibake_latin_share": _share(column[k.MOJIBAKE_PAIRS], chars),
        "mojibake_han_share": _share(column[k.GBK_SUSPECTS], column[t.HAN]),
        "art_share": _share(column[t.ART], chars),
        "han_share": _share(column[t.HAN], letters),
        "latin_share": _share(latin, letters),
        "ascii_share": _share(column[k.ASCII], chars),
        "blob_share": _share(column[k.BLOB_CHARS], chars),
        "digit_share": _share(column[t.DIGIT], chars),
        "symbol_share": _share(symbols, chars),
        "url_share": _share(column[k.URL_CHARS], chars),
        "emails": column[k.EMAILS],
        "emails_per_1000_chars": 1000 * _share(column[k.EMAILS], chars),
        "distinct_share": np.minimum(1, _share(column[k.DISTINCT], np.minimum(chars, config.few_distinct.of_chars))),
        "duplicate_line_share": _share(column[k.DUPLICATE_LINE_CHARS], column[k.LINE_CHARS]),
        "top_ngram_share": _share(column[k.TOP_NGRAM_CHARS], column[k.UNIT_CHARS]),
        "duplicate_ngram_share": _share(column[k.DUPLICATE_NGRAM_CHARS], column[k.UNIT_CHARS]),
        "loose_line_share": _share(column[k.LOOSE_CHARS], column[k.LINE_CHARS]),
        "lines": lines,
        "unended_line_share": _share(lines - column[k.ENDED_LINES], lines),
        "ellipsis_line_share": _share(column[k.ELLIPSIS_LINES], lines),
        "sentences_per_1000_chars": 1000 * _share(column[k.SENTENCES], chars),
        "function_share": _share(column[k.FUNCTION_WORDS] + column[k.FUNCTION_HANS], column[k.WORDS] + column[t.HAN]),
        "words": column[k.WORDS],
        "function_word_share": _share(column[k.FUNCTION_WORDS], column[k.WORDS]),
        "han": column[t.HAN],
        "function_han_share": _share(column[k.FUNCTION_HANS], column[t.HAN]),
        "longest_line_chars": column[k.LINE_CHARS_MAX],
        "mean_line_chars": _share(column[k.LINE_CHARS], lines),
    }


def _share(part: Array, whole: Array) -> Array:
    return part / np.maximum(whole, 1)


def _over(rule: str, measure: str) -> Callable[[Measures, CleanConfig], Array]:
    """Drops above `max_share`, from `from_chars` on."""

    def judge(measures: Measures, config: CleanConfig) -> Array:
        settings = getattr(config, rule)
        return (measures[measure] > settings.max_share) & (measures["chars"] >= settings.from_chars)

    return judge


def _list_like(rule: str, measure: str) -> Callable[[Measures, CleanConfig], Array]:
    """Drops above `max_share`, from `from_lines` on, what has not the function words of running text."""

    def judge(measures: Measures, config: CleanConfig) -> Array:
        settings = getattr(config, rule)
        enough = measures["lines"] >= settings.from_lines
        spared = measures["function_share"] >= settings.spare_function_share
        return (measures[measure] > settings.max_share) & enough & ~spared

    return judge


def _wrong_script(m: Measures, c: CleanConfig) -> Array:
    rule = c.wrong_script
    return (m[SCRIPTS[rule.script]] < rule.min_share) & (m["chars"] >= rule.from_chars)


def _few_distinct(m: Measures, c: CleanConfig) -> Array:
    return (m["distinct_share"] < c.few_distinct.min_share) & (m["chars"] >= c.few_distinct.from_chars)


def _few_sentences(m: Measures, c: CleanConfig) -> Array:
    rule = c.few_sentences
    few = m["sentences_per_1000_chars"] < rule.min_per_1000_chars
    return few & (m["chars"] >= rule.from_chars) & (m["function_share"] < rule.spare_function_share)


def _ellipsis_lines(m: Measures, c: CleanConfig) -> Array:
    rule = c.ellipsis_lines
    return (m["ellipsis_line_share"] > rule.max_share) & (m["lines"] >= rule.from_lines)


def _few_function_words(m: Measures, c: CleanConfig) -> Array:
    rule = c.few_function_words
    if rule.of == "han":
        return (m["function_han_share"] < rule.min_share) & (m["han"] >= rule.from_units)
    return (m["function_word_share"] < rule.min_share) & (m["words"] >= rule.from_units)


def _mojibake(m: Measures, c: CleanConfig) -> Array:
    rule = c.mojibake
    return (m["mojibake_latin_share"] > rule.max_latin_share) | (m["mojibake_han_share"] > rule.max_han_share)


def _long_lines(m: Measures, c: CleanConfig) -> Array:
    rule = c.long_lines
    return (m["longest_line_chars"] > rule.max_line_chars) | (m["mean_line_chars"] > rule.max_mean_line_chars)


def _emails(m: Measures, c: CleanConfig) -> Array:
    return (m["emails"] >= 3) & (m["emails_per_1000_chars"] > c.emails.max_per_1000_chars)


JUDGES: dict[str, Callable[[Measures, CleanConfig], Array]] = {
    "empty": lambda m, c: m["chars"] == 0,  # noqa: ARG005
    "too_short": lambda m, c: m["chars"] < c.too_short.min_chars,
    "too_long": lambda m, c: m["chars"] > c.too_long.max_chars,
    "replacement_characters": _over("replacement_characters", "replacement_share"),
    "mojibake": _mojibake,
    "block_art": lambda m, c: m["art_share"] > c.block_art.max_share,
    "wrong_script": _wrong_script,
    "blobs": lambda m, c: m["blob_share"] > c.blobs.max_share,
    "digits": _over("digits", "digit_share"),
    "symbols": _over("symbols", "symbol_share"),
    "urls": _over("urls", "url_share"),
    "emails": _emails,
    "few_distinct": _few_distinct,
    "duplicate_lines": lambda m, c: m["duplicate_line_share"] > c.duplicate_lines.max_share,
    "top_ngram": _over("top_ngram", "top_ngram_share"),
    "duplicate_ngrams": _over("duplicate_ngrams", "duplicate_ngram_share"),
    "loose_lines": _list_like("loose_lines", "loose_line_share"),
    "unended_lines": _list_like("unended_lines", "unended_line_share"),
    "ellipsis_lines": _ellipsis_lines,
    "few_sentences": _few_sentences,
    "few_function_words": _few_function_words,
    "long_lines": _long_lines,
}
"""Rule -> which texts it drops, in the order in which they are judged."""
