"""From counts to measures, and from measures to the rule that drops a text; all texts of a batch at once.

A measure is a number per text that a threshold is compared with. `JUDGES` says which texts a rule drops, for every rule
that needs nothing but measures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zero2all.corpus.clean import counts as k
from zero2all.corpus.clean import tables as t
from zero2all.corpus.clean.config import CleanConfig

Array = np.ndarray[Any, np.dtype[Any]]
Measures = dict[str, Array]
Judge = Callable[[Measures, CleanConfig], Array]


class CleaningRule(NamedTuple):
    """A rule that drops texts."""

    judge: Judge
    """Which texts it drops."""
    compared: str = ""
    """The measures that it compares with its thresholds."""


_BROKEN = re.compile(r"[a-z][0135-9!$%*+;@^|~][a-z]")
"""Not 2 and 4, which stand for to and for in names, and not two digits, as in i18n."""
SEARCHED_CHARS = 20_000
"""Longer texts are searched for different words up to here."""


def measures_of(counts: Array, config: CleanConfig) -> Measures:
    """What the rules look at, from the counts of `kernels.scan` (a row per text)."""
    column = counts.T.astype(np.float64)
    chars = column[t.HAN : t.JOINER + 1].sum(axis=0)
    letters = column[t.HAN : t.LETTER + 1].sum(axis=0)
    latin = column[t.LATIN_LOWER] + column[t.LATIN_UPPER]
    symbols = column[t.SENTENCE_END : t.ART + 1].sum(axis=0)
    beside = chars - column[k.ASIDE_CHARS]  # formulas and tags
    lines = column[k.LINES]
    return {
        "chars": chars,
        "letters": letters,
        "letters_beside": letters - column[k.ASIDE_LETTERS],
        "replacement_share": _share(column[t.REPLACEMENT], chars),
        "mojibake_latin_share": _share(column[k.MOJIBAKE_PAIRS], chars),
        "mojibake_han_share": _share(column[k.GBK_SUSPECTS], column[t.HAN]),
        "art_share": _share(column[t.ART], chars),
        "han_share": _share(column[t.HAN], letters - column[k.ASIDE_LATIN]),
        "latin_share": _share(latin - column[k.ASIDE_LATIN], letters - column[k.ASIDE_LETTERS]),
        "ascii_share": _share(column[k.ASCII], chars),
        "blob_share": _share(column[k.BLOB_CHARS], chars),
        "digit_share": _share(column[t.DIGIT] - column[k.ASIDE_DIGITS], beside),
        "symbol_share": _share(symbols - column[k.ASIDE_SYMBOLS], beside),
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
        "sentences_per_1000_chars": 1000 * _share(column[k.SENTENCES], beside),
        "function_share": _share(column[k.FUNCTION_WORDS] + column[k.FUNCTION_HANS], column[k.WORDS] + column[t.HAN]),
        "words": column[k.WORDS],
        "function_word_share": _share(column[k.FUNCTION_WORDS], column[k.WORDS]),
        "han": column[t.HAN],
        "function_han_share": _share(column[k.FUNCTION_HANS], column[t.HAN]),
        "longest_line_chars": column[k.LINE_CHARS_MAX],
        "mean_line_chars": _share(column[k.LINE_CHARS], lines),
        "spam_share": np.zeros(len(chars)),  # these two are worked out by `spam`, for the few texts that need it
        "spam_terms": np.zeros(len(chars)),
        "footer_share": np.zeros(len(chars)),  # set by the cleaner, for the few texts that have such phrases
        "spam_han_share": _share(column[k.SPAM_HANS], column[t.HAN]),
        "spam_word_share": _share(column[k.SPAM_WORDS], column[k.WORDS]),
        "bare_share": _share(column[k.BARE_CHARS], column[t.HAN]),
        "noise_share": _noise(column),
        "aside_share": _share(column[k.ASIDE_CHARS], chars),
        "rare_share": _share(column[k.RARE_HANS], np.minimum(column[t.HAN], k.PAIR_HANS)),
        "broken_word_share": _share(column[k.BROKEN_WORDS], column[k.WORDS]),  # lowered by `lower_broken_share`
        "menu_share": _share(
            column[k.MENU_CHARS] + np.where(column[k.TABLE_RULES] > 0, 0, column[k.TABLE_CHARS]), column[k.LINE_CHARS]
        ),
        "prose_share": _share(column[k.PROSE_CHARS], column[k.LINE_CHARS] - column[k.URL_CHARS]),
        **_pairs(column),
        **_kinds(column, chars, latin, config),
    }


def _noise(column: Array) -> Array:
    """Han characters that stand alone, behind a single sign, or one character apart from the one they go with.

    A single letter between Han is the name of a place, a point or a person; noise only as often as there are signs.
    """
    signs = column[k.NOISE_SIGNS]
    single = column[k.LONE_HANS] + signs + np.minimum(signs, column[k.NOISE_LETTERS])
    return _share(single, column[t.HAN]) + _share(column[k.PARTED], np.minimum(column[t.HAN], k.PAIR_HANS))


def lower_broken_share(texts: list[str], measures: Measures, config: CleanConfig) -> None:
    """Set `broken_word_share` to the share among different words where it is smaller: a name repeated is no damage."""
    shares = measures["broken_word_share"]
    over = (shares > config.garbled.max_word_share) & (measures["words"] >= config.garbled.from_units)
    for at in np.flatnonzero(over).tolist():
        words = set(texts[at][:SEARCHED_CHARS].lower().split())
        shares[at] = min(shares[at], sum(map(bool, map(_BROKEN.search, words))) / max(1, len(words)))


def _pairs(column: Array) -> Measures:
    """How many neighbours are frequent pairs, beyond what the same characters in any order would have.

    A standard error is added, so that a short text is judged more leniently than a long one.
    """
    pairs = column[k.PAIRS]
    share = _share(column[k.PAIR_HITS], pairs)
    # Of one share; the spread of the difference is larger by half.
    error = np.sqrt(np.maximum(share, 0.02) * (1 - share) / np.maximum(pairs, 1))
    excess = share - _share(column[k.FAR_HITS], column[k.FAR_PAIRS]) + error
    return {"pairs": pairs, "pair_share": share, "pair_excess": excess}


def _kinds(column: Array, chars: Array, latin: Array, config: CleanConfig) -> Measures:
    """Whether a text is verse, or in classical Chinese; and what that was seen by."""
    rule = config.kinds
    han = column[t.HAN]
    lines = column[k.LINES]
    modern = _share(column[k.MODERN_HANS], han)
    classical = _share(column[k.CLASSICAL_HANS], han)
    ended = column[k.ENDED_PHRASES] >= 0.15 * column[k.PHRASES]
    strange = _share(column[k.PAIR_HITS], column[k.PAIRS]) < rule.max_bare_pair_share
    # A list of words has phrases of one length too.
    even = np.where(ended | (strange & (column[k.EVEN_CHARS] >= 0.9 * han)), column[k.EVEN_CHARS], 0)
    rhythm = _share(np.maximum(column[k.VERSE_CHARS], even), han)
    phrase_chars = _share(han, column[k.PHRASES])
    old = (modern <= rule.max_modern_share) & (han >= latin)
    on_lines = _share(column[k.LINE_PHRASES], column[k.PHRASES])
    paused = ended | (on_lines >= 0.15) | strange
    song = (  # ci and qu: phrases of any length, none long, several to a sentence or a line
        (phrase_chars >= 3)
        & (column[k.LONGEST_PHRASE] <= rule.max_phrase_chars)
        & ((on_lines <= 0.8) | strange)
        & (column[k.DISTINCT] >= 0.4 * np.minimum(chars, 400))  # advertisements repeat their words
    )
    words = column[k.WORDS]
    spoken = (column[k.FUNCTION_WORDS] >= 0.15 * words) | (column[k.STOPPED_LINES] >= 0.3 * lines)
    short = (column[k.LINE_CHARS_MAX] <= rule.max_line_chars) & (column[k.LINE_CHARS] >= 8 * lines) & (lines >= 4)
    plain = (latin >= 0.7 * chars) & (column[t.DIGIT] + column[t.SYMBOL] <= 0.02 * chars)
    verse = (old & paused & ((rhythm >= rule.min_rhythm_share) | song)) | (plain & short & spoken)
    # Old books are printed without punctuation, and list offices and measures. Lists of modern words have neither
    # classical characters nor long phrases, and more frequent pairs.
    flowing = (phrase_chars >= 10) & (_share(column[k.PAIR_HITS], column[k.PAIRS]) < rule.max_pair_share)
    spoken_old = (classical >= rule.min_classical_share / 2) | flowing
    return {
        "modern_share": modern,
        "classical_share": classical,
        "rhythm_share": rhythm,
        "old": old,
        "phrase_chars": phrase_chars,
        "ended_phrase_share": _share(column[k.ENDED_PHRASES], column[k.PHRASES]),
        "verse": verse,
        "classical": old & (classical >= rule.min_classical_share),
        "unstopped": verse | (old & spoken_old & (column[k.BARE_CHARS] < 0.5 * han)),
    }


def _share(part: Array, whole: Array) -> Array:
    return part / np.maximum(whole, 1)


def _over(rule: str, measure: str, unit: str = "chars") -> Judge:
    """Drops above `max_share`, from `from_chars` (or lines) on; what has enough sentences beside it is spared."""

    def judge(measures: Measures, config: CleanConfig) -> Array:
        settings = getattr(config, rule)
        over = (measures[measure] > settings.max_share) & (measures[unit] >= getattr(settings, f"from_{unit}"))
        spare = getattr(settings, "spare_prose_share", None)
        if spare is None:
            return over
        prose = measures["prose_share"] >= spare
        return over & ~(prose | (measures["aside_share"] >= 0.4)) | over & (measures[measure] > 0.8)

    return judge


def _list_like(rule: str, measure: str) -> Judge:
    """As `_over`, counting lines; documents with the function words of running text are spared."""
    over = _over(rule, measure, "lines")

    def judge(measures: Measures, config: CleanConfig) -> Array:
        spare = getattr(config, rule).spare_function_share
        return over(measures, config) & ~(
            (measures["function_share"] >= spare) | measures["unstopped"] | _spoken(measures)
        )

    return judge


def _spoken(m: Measures) -> Array:
    """Pages that are mostly code or mark-up, and Chinese without marks that is no list: enough function characters, and
    few phrases without any."""
    chinese = (m["han"] >= 20) & (m["function_han_share"] >= 0.1) & (m["modern_share"] >= 0.02)
    return (m["aside_share"] >= 0.3) | (chinese & (m["bare_share"] < 0.35))


def _wrong_script(m: Measures, c: CleanConfig) -> Array:
    rule = c.wrong_script
    return (m[f"{rule.script}_share"] < rule.min_share) & (m["chars"] >= rule.from_chars) & (m["letters_beside"] > 20)


def _digits(m: Measures, c: CleanConfig) -> Array:
    alone = (m["letters"] == 0) & (m["chars"] >= c.wrong_script.from_chars)  # in no script, so it is not a wrong one
    return _over("digits", "digit_share")(m, c) | (alone & (m["digit_share"] > c.digits.max_share))


def _blobs(m: Measures, c: CleanConfig) -> Array:
    share = m["blob_share"]
    prose = m["prose_share"] / np.maximum(1 - share, 0.1)
    return (share > c.blobs.max_share) & ((prose < c.blobs.spare_prose_share) | (share > 0.3))


def _few_sentences(m: Measures, c: CleanConfig) -> Array:
    rule = c.few_sentences
    few = (m["sentences_per_1000_chars"] < rule.min_per_1000_chars) & (m["chars"] >= rule.from_chars)
    return few & (m["function_share"] < rule.spare_function_share) & ~m["unstopped"] & ~_spoken(m)


def _few_function_words(m: Measures, c: CleanConfig) -> Array:
    rule = c.few_function_words
    if rule.of == "han":
        error = np.sqrt(m["function_han_share"] / np.maximum(m["han"], 1))
        few = (m["function_han_share"] + error < rule.min_share) & (m["han"] >= rule.from_units)
        # News full of figures has few of them, but sentences.
        return few & ~m["verse"] & ~m["classical"] & (m["prose_share"] < rule.spare_prose_share)
    least = np.where(m["aside_share"] >= 0.3, rule.min_share / 2, rule.min_share)
    return (m["function_word_share"] < least) & (m["words"] >= rule.from_units)


def _mojibake(m: Measures, c: CleanConfig) -> Array:
    rule = c.mojibake
    han = (m["mojibake_han_share"] > rule.max_han_share) & (m["rare_share"] >= rule.min_rare_share)
    han |= (
        (m["rare_share"] > rule.max_rare_share)
        & (m["pair_share"] < 0.1)
        & (m["pairs"] >= 20)
        & (m["function_han_share"] < 0.07)
    )
    return (m["mojibake_latin_share"] > rule.max_latin_share) | han


def _long_lines(m: Measures, c: CleanConfig) -> Array:
    rule = c.long_lines
    return (m["longest_line_chars"] > rule.max_line_chars) | (m["mean_line_chars"] > rule.max_mean_line_chars)


def _duplicate_lines(m: Measures, c: CleanConfig) -> Array:
    rule = c.duplicate_lines
    return m["duplicate_line_share"] > np.where(m["verse"], rule.max_verse_share, rule.max_share)


def _duplicate_ngrams(m: Measures, c: CleanConfig) -> Array:
    rule = c.duplicate_ngrams
    limit = np.where(m["verse"], c.duplicate_lines.max_verse_share, rule.max_share)
    return (m["duplicate_ngram_share"] > limit) & (m["chars"] >= rule.from_chars)


def _scrambled(m: Measures, c: CleanConfig) -> Array:
    rule = c.scrambled
    limit = np.where(m["old"], rule.min_old_excess, rule.min_excess)
    enough = m["pairs"] >= np.where(m["verse"], rule.from_verse_pairs, rule.from_pairs)
    repeats = m["old"] & (m["top_ngram_share"] >= rule.spare_repeated_share)
    return (m["pair_excess"] < limit) & enough & ~repeats


def _garbled(m: Measures, c: CleanConfig) -> Array:
    rule = c.garbled
    rare = m["rare_share"] - np.where(m["old"], rule.max_old_rare_share, rule.max_rare_share)
    in_lines = (m["mean_line_chars"] < 16) & (m["lines"] >= 6)  # modern verse
    noise = m["noise_share"] + np.where(m["verse"] | in_lines, 0, np.maximum(0, rare))
    noise = noise - 1.5 * np.sqrt(noise / np.maximum(m["han"], 1))  # standard errors
    han = (noise > np.where(m["old"], rule.max_old_share, rule.max_share)) & (m["han"] >= rule.from_units)
    return han | ((m["broken_word_share"] > rule.max_word_share) & (m["words"] >= rule.from_units))


def _keyword_lists(m: Measures, c: CleanConfig) -> Array:
    rule = c.keyword_lists
    old = m["verse"] | m["classical"]
    unended = (m["ended_phrase_share"] < 0.03) & (m["han"] >= 2 * rule.from_chars)
    limit = np.where(unended, rule.max_unended_bare_share, rule.max_bare_share)
    bare = (m["bare_share"] > np.where(old, rule.max_bare_share, limit)) & (m["han"] >= rule.from_chars)
    listed = (m["function_han_share"] < rule.max_function_share) & ~old
    many = rule.min_old_pair_share - np.where(m["phrase_chars"] < 4, 0.08, 0)  # short phrases are words alone
    words = (m["function_han_share"] < rule.max_old_function_share) & (m["pair_share"] > many)
    repeated = (m["bare_share"] > rule.max_unended_bare_share) & (m["distinct_share"] < rule.min_distinct_share) & ~old
    advertised = (
        repeated & (m["modern_share"] < 0.02) & (m["function_han_share"] < 0.13) & (m["han"] >= rule.from_chars)
    )
    return advertised | bare & (listed | (words & (m["classical_share"] < 0.005)))


JUDGES: dict[str, CleaningRule] = {
    "empty": CleaningRule(lambda m, c: m["chars"] == 0),  # noqa: ARG005
    "too_short": CleaningRule(lambda m, c: m["chars"] < c.too_short.min_chars, "chars"),
    "too_long": CleaningRule(lambda m, c: m["chars"] > c.too_long.max_chars, "chars"),
    "replacement_characters": CleaningRule(_over("replacement_characters", "replacement_share"), "replacement_share"),
    "mojibake": CleaningRule(_mojibake, "mojibake_latin_share mojibake_han_share rare_share"),
    "block_art": CleaningRule(lambda m, c: m["art_share"] > c.block_art.max_share, "art_share"),
    "wrong_script": CleaningRule(_wrong_script, "han_share latin_share ascii_share"),
    "blobs": CleaningRule(_blobs, "blob_share"),
    "digits": CleaningRule(_digits, "digit_share prose_share"),
    "symbols": CleaningRule(_over("symbols", "symbol_share"), "symbol_share prose_share"),
    "urls": CleaningRule(_over("urls", "url_share"), "url_share prose_share"),
    "emails": CleaningRule(
        lambda m, c: (m["emails"] >= 3) & (m["emails_per_1000_chars"] > c.emails.max_per_1000_chars),
        "emails_per_1000_chars",
    ),
    "few_distinct": CleaningRule(
        lambda m, c: (m["distinct_share"] < c.few_distinct.min_share) & (m["chars"] >= c.few_distinct.from_chars),
        "distinct_share",
    ),
    "duplicate_lines": CleaningRule(_duplicate_lines, "duplicate_line_share"),
    "top_ngram": CleaningRule(_over("top_ngram", "top_ngram_share"), "top_ngram_share"),
    "duplicate_ngrams": CleaningRule(_duplicate_ngrams, "duplicate_ngram_share"),
    "menu_lines": CleaningRule(_over("menu_lines", "menu_share"), "menu_share"),
    "footers": CleaningRule(_over("footers", "footer_share"), "footer_share"),
    "loose_lines": CleaningRule(_list_like("loose_lines", "loose_line_share"), "loose_line_share function_share"),
    "unended_lines": CleaningRule(
        _list_like("unended_lines", "unended_line_share"), "unended_line_share function_share"
    ),
    "ellipsis_lines": CleaningRule(_over("ellipsis_lines", "ellipsis_line_share", "lines"), "ellipsis_line_share"),
    "few_sentences": CleaningRule(_few_sentences, "sentences_per_1000_chars function_share"),
    "few_function_words": CleaningRule(_few_function_words, "function_word_share function_han_share"),
    "keyword_lists": CleaningRule(
        _keyword_lists, "bare_share ended_phrase_share function_han_share pair_share verse classical"
    ),
    "scrambled": CleaningRule(_scrambled, "pair_excess pair_share modern_share"),
    "garbled": CleaningRule(_garbled, "noise_share rare_share broken_word_share modern_share"),
    "spam": CleaningRule(
        lambda m, c: (m["spam_share"] > c.spam.max_share) & (m["spam_terms"] >= c.spam.min_terms),
        "spam_share spam_terms",
    ),
    "long_lines": CleaningRule(_long_lines, "longest_line_chars mean_line_chars"),
}
"""Every dropping rule that needs nothing but measures, in the order in which they are judged."""
