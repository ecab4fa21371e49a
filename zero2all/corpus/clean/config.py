"""What cleaning does, rule by rule: a switch and thresholds for each, with defaults for zh, en and code.

The field name of a rule in `CleanConfig` is its name everywhere: in configs and overrides (`clean.zh.digits.on=false`),
as the reason of a dropped document, in the report and in `z2a corpus show --dropped digits`.

The defaults were fitted on good text of many kinds: Chinese and English prose and verse of several centuries, technical
documentation in eight languages. docs/corpus.md says what they drop of each, `benchmarks/corpus_rules.py` measures it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from zero2all.common.schema import NaturalInt, PositiveInt, Problem, Range, Share, build, field_docs

NgramUnits = Annotated[int, Range(minimum=1, maximum=64)]

ENGLISH_BOILERPLATE = (
    "All rights reserved",
    "Accept all cookies",
    "Share this:",
    "Sign up for our newsletter",
    "enable JavaScript to",
)
CHINESE_BOILERPLATE = (
    "版权所有",
    "责任编辑：",
    "点击查看更多",
    "扫描二维码",
    "关注公众号",
    "上一篇：",
    "下一篇：",
    "ICP备",
    "All rights reserved",
)
ENGLISH_FOOTERS = (
    *("All rights reserved", "All Rights Reserved", "Copyright ©", "Privacy Policy", "Terms of Use"),
    *("Terms of Service", "Cookie Policy", "Contact Us", "About Us", "Site Map", "Sitemap", "Powered by"),
)  # fmt: skip
CHINESE_FOOTERS = (
    *("版权所有", "版权声明", "ICP备", "公网安备", "经营许可证", "服务许可证", "视听许可证", "举报电话", "举报邮箱"),
    *("友情链接", "网站地图", "联系我们", "关于我们", "隐私政策", "免责声明", "广告合作", "商务合作", "客服热线"),
    *("服务热线", "技术支持：", "浏览本站", "不得转载", "禁止转载", "保留一切权利", "备案号：", "Copyright ©"),
)  # fmt: skip


@dataclass(frozen=True)
class Repair:
    """Repairs of single characters, made before anything is judged."""

    mojibake: bool = True
    """Read a line again as UTF-8 that had been taken for Windows-1252 (â€™ becomes ’), where that is certain."""
    private_use: bool = True
    """Remove private-use characters, which mean nothing without the font they were made for."""


@dataclass(frozen=True)
class Mask:
    """Secrets and personal data, replaced by a short mark and counted. A mark is never longer than what it hides."""

    emails: bool = False
    """E-mail addresses become <mail>."""
    phones: bool = False
    """Chinese mobile and landline numbers, and numbers in international or North American notation, become <tel>."""
    id_numbers: bool = False
    """Chinese resident identity numbers whose date and check digit are right become <id>."""
    ip_addresses: bool = False
    """Public IPv4 and IPv6 addresses become <ip>; not versions such as 1.2.3.4, private ranges, examples (RFC 5737)."""
    bank_cards: bool = False
    """Numbers of payment cards with a known beginning and a right check digit become <card>."""
    addresses: bool = False
    """Chinese street addresses with a house number, and a place or a flat, become <addr>."""
    keys: bool = False
    """Private keys in PEM form, and keys of known services, tokens and passwords in assignments, become <key>."""


@dataclass(frozen=True)
class Switch:
    """A rule without thresholds."""

    on: bool = True
    """Whether the rule is applied."""


@dataclass(frozen=True)
class BoilerplateLines(Switch):
    """Removes lines of navigation and legal notices."""

    max_line_chars: PositiveInt = 120
    """Longer lines are kept: they may be prose that mentions the phrase."""
    phrases: list[str] = field(default_factory=lambda: list(ENGLISH_BOILERPLATE))
    """A line that has one of these in it, in this spelling, is removed."""


@dataclass(frozen=True)
class Footers(Switch):
    """What stands below every page of a site, and nothing else."""

    max_share: Share = 0.5
    """Largest share of the text in lines with one of the phrases, that are not longer than 120 characters and no
    sentences."""
    from_chars: NaturalInt = 0
    """Documents with fewer characters, white space not counted, are not judged by this rule."""
    phrases: list[str] = field(default_factory=lambda: list(ENGLISH_FOOTERS))
    """Copyright, licences, contact, in this spelling."""


@dataclass(frozen=True)
class BlockArt(Switch):
    """Drops documents full of ▅ █ ▂ ⣿, and takes single drawn lines out of the others."""

    max_share: Share = 0.02
    """Largest share of block elements and Braille patterns among the characters other than white space."""
    max_line_share: Share = 0.3
    """In a document that is kept, lines with a larger share of them are removed."""


@dataclass(frozen=True)
class MinChars(Switch):
    """A lower limit of length."""

    min_chars: PositiveInt = 1
    """Fewest characters, white space not counted."""


@dataclass(frozen=True)
class MaxChars(Switch):
    """An upper limit of length."""

    on: bool = False
    max_chars: PositiveInt = 10_000_000
    """Most characters, white space not counted."""


@dataclass(frozen=True)
class MaxShare(Switch):
    """An upper limit of a share."""

    max_share: Share = 1.0
    """Documents with a larger share are dropped."""
    from_chars: NaturalInt = 0
    """Documents with fewer characters, white space not counted, are not judged by this rule."""


@dataclass(frozen=True)
class MaxShareBesideProse(Switch):
    """An upper limit of a share, for documents that are hardly anything else."""

    max_share: Share = 1.0
    """Documents with a larger share are dropped."""
    spare_prose_share: Share = 0.3
    """Documents with at least this share of their characters, addresses not counted, in lines of 20 and more
    characters that end as sentences do are spared, up to a share of 0.8."""
    from_chars: NaturalInt = 0
    """Documents with fewer characters, white space not counted, are not judged by this rule."""


@dataclass(frozen=True)
class Mojibake(Switch):
    """Text read in a wrong encoding that could not be repaired."""

    max_latin_share: Share = 0.02
    """Largest share of pairs such as Ã© or â€ (UTF-8 read as Windows-1252) among the characters."""
    max_han_share: Share = 0.15
    """Largest share of Han characters that are typical of UTF-8 read as GBK (鐨 銆 锛), and of 锟 (锟斤拷)."""
    min_rare_share: Share = 0.12
    """They must be such that at least this share of the Han characters is rare (in none of the frequent pairs, see
    scrambled): short poems have some of them too."""
    max_rare_share: Share = 0.28
    """Largest share of rare Han characters where less than a tenth of the neighbours are frequent pairs (Big5 read as
    GBK has 0.35, old books 0.15)."""


@dataclass(frozen=True)
class WrongScript(Switch):
    """Too little of the script that the channel is in."""

    script: Literal["han", "latin", "ascii"] = "latin"
    """`han`: Han characters among letters; `latin`: Latin among letters; `ascii`: printable ASCII among all
    characters other than white space."""
    min_share: Share = 0.5
    """Documents with a smaller share are dropped."""
    from_chars: NaturalInt = 0
    """Documents with fewer characters, white space not counted, are not judged by this rule."""


@dataclass(frozen=True)
class Emails(Switch):
    """Address lists."""

    max_per_1000_chars: Annotated[float, Range(minimum=0)] = 5.0
    """Most e-mail addresses per 1,000 characters, white space not counted, in documents with at least 3 of them."""


@dataclass(frozen=True)
class Blobs(Switch):
    """Encoded data: base64, hashes, hexadecimal dumps without spaces."""

    max_share: Share = 0.2
    """Largest share of characters in such runs."""
    min_run_chars: PositiveInt = 60
    """A run of letters, digits and + - / = _ is data from this length on, if at least nine tenths are letters and
    digits and one in thirty is a digit, as in base64 and unlike in paths."""
    spare_prose_share: Share = 0.1
    """Documents with at least this share of their other characters in lines of 20 and more characters that end as
    sentences do are spared, up to a share of 0.3."""


@dataclass(frozen=True)
class LooseLines(Switch):
    """Menus, link lists, lists of names: short lines that are not sentences."""

    max_share: Share = 0.9
    """Largest share of characters in loose lines."""
    max_line_chars: PositiveInt = 30
    """A line is loose when it has fewer characters than this and does not end in a sentence end (. ! ? 。 ！ ？ …)."""
    spare_function_share: Share = 0.25
    """Documents with at least this share of function words (see few_function_words) are spared: verse, speech."""
    from_lines: PositiveInt = 12
    """Documents with fewer lines are not judged by this rule."""


@dataclass(frozen=True)
class EllipsisLines(Switch):
    """Lists of teasers, each cut off."""

    max_share: Share = 0.3
    """Largest share of lines that end in an ellipsis."""
    from_lines: PositiveInt = 8
    """Documents with fewer lines are not judged by this rule."""


@dataclass(frozen=True)
class UnendedLines(Switch):
    """Lists and tables have lines, but no sentences."""

    max_share: Share = 0.995
    """Largest share of lines that do not end in a sentence end (. ! ? 。 ！ ？ …), closing quotes aside."""
    spare_function_share: Share = 0.25
    """Documents with at least this share of function words (see few_function_words) are spared: verse, speech."""
    from_lines: PositiveInt = 10
    """Documents with fewer lines are not judged by this rule."""


@dataclass(frozen=True)
class FewSentences(Switch):
    """Running text has sentence ends; lists of search terms do not."""

    min_per_1000_chars: Annotated[float, Range(minimum=0)] = 1.0
    """Fewest sentence ends per 1,000 characters, white space not counted."""
    spare_function_share: Share = 0.25
    """Documents with at least this share of function words (see few_function_words) are spared: verse, speech."""
    from_chars: NaturalInt = 300
    """Documents with fewer characters, white space not counted, are not judged by this rule."""


@dataclass(frozen=True)
class FewFunctionWords(Switch):
    """Language cannot do without function words; lists of search terms can."""

    of: Literal["words", "han"] = "words"
    """`words`: English function words among words; `han`: function characters (的 是 不) among Han characters."""
    min_share: Share = 0.05
    """Documents with a smaller share are dropped."""
    from_units: NaturalInt = 50
    """Documents with fewer words, or fewer Han characters, are not judged by this rule."""
    spare_prose_share: Share = 0.9
    """Chinese of which so much stands in lines of 20 characters and more that end as sentences do is kept."""


@dataclass(frozen=True)
class FewDistinct(Switch):
    """Running text uses many different characters."""

    min_share: Share = 0.045
    """Fewest different characters, as a share of the characters or of `of_chars`, whichever is less."""
    of_chars: PositiveInt = 400
    """From this length on the number of different characters is compared with a constant, since it hardly grows."""
    from_chars: NaturalInt = 60
    """Documents with fewer characters, white space not counted, are not judged by this rule."""


@dataclass(frozen=True)
class DuplicateLines(Switch):
    """Lines that repeat an earlier line, within windows of 8,192 lines."""

    max_share: Share = 0.3
    """Largest share of characters in lines that repeat an earlier one (white space ignored)."""
    max_verse_share: Share = 0.6
    """The same for verse, which has refrains; also for duplicate_ngrams."""
    min_line_chars: PositiveInt = 4
    """Shorter lines, such as closing brackets, are not compared."""


@dataclass(frozen=True)
class Kinds:
    """How verse and classical Chinese are recognised; several rules have other limits for them."""

    max_modern_share: Share = 0.04
    """Chinese is verse or classical only up to this share of function characters of modern Chinese (的 了 是 们 这)
    among its Han characters."""
    min_classical_share: Share = 0.03
    """It is classical from this share of classical function characters (之 其 而 以 于 者 也 曰) on."""
    min_rhythm_share: Share = 0.6
    """It is verse when this share of its Han characters is in phrases of 5 or 7, or of the length of the phrase
    before. A phrase is what stands between two separators."""
    max_phrase_chars: Annotated[int, Range(minimum=1, maximum=14)] = 12
    """It is also verse (ci, qu) when no phrase is longer, they have 3 characters or more on average, and a fifth of
    them ends a sentence."""
    max_pair_share: Share = 0.42
    """It is an old text without punctuation when half of `min_classical_share` is reached, or when its phrases have 10
    characters or more and at most this share of its neighbours are frequent pairs (see scrambled)."""
    max_bare_pair_share: Share = 0.36
    """It is also verse without any punctuation, of phrases as short or as even as those, when a smaller share of its
    neighbours are frequent pairs than in lists of modern words."""
    max_line_chars: PositiveInt = 90
    """Text in Latin letters is verse when it has 4 lines or more, 8 characters a line on average, none longer than
    this, hardly a digit or symbol, and 15 % function words or 30 % lines that end in punctuation."""


@dataclass(frozen=True)
class Scrambled(Switch):
    """Characters drawn at random: neighbours go together no more often than characters far apart."""

    min_excess: Share = 0.1
    """Least excess of frequent pairs: their share among neighbouring Han characters, less that among characters six
    places apart, plus one standard error."""
    min_old_excess: Share = 0.05
    """The same where modern function characters are few (`kinds.max_modern_share`)."""
    from_pairs: NaturalInt = 40
    """Documents with fewer neighbouring Han characters are not judged by this rule."""
    from_verse_pairs: NaturalInt = 60
    """The same for verse: short poems have few frequent pairs."""
    spare_repeated_share: Share = 0.02
    """Documents with few modern function characters are spared when one n-gram (see top_ngram) makes up this share:
    songs repeat themselves, random characters do not."""


@dataclass(frozen=True)
class Garbled(Switch):
    """Text as a bad scanner reads it: letters and symbols between Han, lone characters, digits in words."""

    max_share: Share = 0.05
    """Largest share, less 1.5 standard errors, of Han characters that stand alone between spaces, behind a single sign
    (or letter, as often as there are signs) between Han, apart from one they form a frequent pair with, or are rare."""
    max_old_share: Share = 0.07
    """The same where modern function characters are few (`kinds.max_modern_share`)."""
    max_rare_share: Share = 0.015
    """Only the share of rare characters (in none of the frequent pairs, see scrambled) above this one is counted."""
    max_old_rare_share: Share = 0.1
    """The same where modern function characters are few; in verse, none are counted."""
    max_word_share: Share = 0.06
    """Largest share of words with a digit or a sign such as ! ~ ^ | between two lower-case letters; also among the
    different words, since a name such as z2a may be frequent."""
    from_units: NaturalInt = 60
    """Documents with fewer Han characters, or fewer words, are not judged by them."""


@dataclass(frozen=True)
class KeywordLists(Switch):
    """Search terms in a row: short phrases without any function character."""

    max_bare_share: Share = 0.6
    """Largest share of Han characters in phrases of at most 8 without a function character."""
    max_unended_bare_share: Share = 0.3
    """The same where less than 3 % of the phrases end a sentence; not for verse and classical text."""
    min_distinct_share: Share = 0.4
    """The same limit holds for advertisements: few different characters (see few_distinct), and hardly a function
    character of modern Chinese."""
    max_function_share: Share = 0.2
    """Documents with a larger share of function characters are spared."""
    max_old_function_share: Share = 0.12
    """The same for verse and classical text."""
    min_old_pair_share: Share = 0.45
    """Verse and classical text are spared up to this share of frequent pairs (see scrambled), less 0.08 for phrases
    of less than 4 characters on average: lists of modern words have more than verse has."""
    from_chars: NaturalInt = 80
    """Documents with fewer Han characters are not judged by this rule."""


@dataclass(frozen=True)
class Spam(Switch):
    """Advertisements for gambling."""

    max_share: Share = 0.06
    """Largest share of characters, or of words, in terms of gambling and its advertising."""
    min_terms: NaturalInt = 4
    """Documents with fewer different terms of gambling are kept."""


@dataclass(frozen=True)
class Ngrams(Switch):
    """Repetition within windows of 32,768 units. A unit is a word, or a character of a script without spaces."""

    max_share: Share = 0.2
    """Largest share of the characters of all units."""
    ngram_units: NgramUnits = 4
    """Length of the n-grams in units: characters in Chinese, words in English."""
    from_chars: NaturalInt = 0
    """Documents with fewer characters, white space not counted, are not judged by this rule."""


@dataclass(frozen=True)
class LongLines(Switch):
    """Minified code, data on one line."""

    on: bool = False
    max_line_chars: PositiveInt = 2_000
    """Longest line allowed, white space counted."""
    max_mean_line_chars: PositiveInt = 100
    """Largest mean number of characters per line, white space and empty lines not counted."""


@dataclass(frozen=True)
class CleanConfig:
    """Cleaning for one channel. Rules are judged in this order; the first that fails is the reason of the drop."""

    repair: Repair = Repair()
    """Edits: removes control, format and unassigned characters and outer white space, unifies line ends."""
    mask: Mask = Mask()
    """Which secrets and personal data are replaced."""
    kinds: Kinds = Kinds()
    """How verse and classical text are recognised. Drops nothing."""
    licence_headers: Switch = Switch(on=False)
    """Edits: removes an opening comment of a source file that is about licence or copyright."""
    boilerplate_lines: BoilerplateLines = field(default_factory=BoilerplateLines)
    """Edits: removes short lines with phrases of navigation menus and legal notices."""

    empty: Switch = Switch()
    """Nothing is left after repairs. This rule cannot be switched off."""
    too_short: MinChars = MinChars()
    """Fewer characters than the minimum."""
    too_long: MaxChars = MaxChars()
    """More characters than the maximum."""
    replacement_characters: MaxShare = MaxShare(max_share=0.002)
    """Too large a share of U+FFFD, the mark of lost characters."""
    mojibake: Mojibake = Mojibake()
    """Read in a wrong encoding, which could not be repaired."""
    block_art: BlockArt = BlockArt()
    """Drawn with block elements or Braille patterns. Single drawn lines are removed from other documents."""
    wrong_script: WrongScript = WrongScript()
    """Too small a share of the channel's script."""
    blobs: Blobs = Blobs()
    """Base64 and other encoded data."""
    digits: MaxShareBesideProse = MaxShareBesideProse(max_share=0.25)
    """Too large a share of digits: tables of numbers."""
    symbols: MaxShareBesideProse = MaxShareBesideProse(max_share=0.4)
    """Too large a share of punctuation and symbols."""
    urls: MaxShareBesideProse = MaxShareBesideProse(max_share=0.3)
    """Too large a share of web addresses."""
    emails: Emails = Emails()
    """Too many e-mail addresses."""
    few_distinct: FewDistinct = FewDistinct()
    """Too few different characters for the length."""
    duplicate_lines: DuplicateLines = DuplicateLines()
    """Too much text in repeated lines."""
    top_ngram: Ngrams = Ngrams(max_share=0.15, ngram_units=3)
    """One repeated n-gram makes up too much of the text."""
    duplicate_ngrams: Ngrams = Ngrams(max_share=0.4, ngram_units=8)
    """Too much text in n-grams that occurred before."""
    menu_lines: MaxShare = MaxShare(max_share=0.5, from_chars=20)
    """Menus: lines of short entries joined by three or more of | · » • > /, no sentence. Markdown tables are kept."""
    footers: Footers = field(default_factory=Footers)
    """Footers of pages: copyright, licences and contact make up most of the text."""
    loose_lines: LooseLines = LooseLines()
    """Menus and lists: nearly all text is in short lines that are not sentences."""
    unended_lines: UnendedLines = UnendedLines()
    """Too few lines end in a sentence end."""
    ellipsis_lines: EllipsisLines = EllipsisLines()
    """Too many lines end in an ellipsis: lists of teasers."""
    few_sentences: FewSentences = FewSentences()
    """Too few sentence ends for the length."""
    few_function_words: FewFunctionWords = FewFunctionWords()
    """Too few function words (the, of, and; in Chinese, characters such as 的 是 不): keyword lists, not language."""
    keyword_lists: KeywordLists = KeywordLists()
    """Chinese search terms in a row."""
    scrambled: Scrambled = Scrambled()
    """Han characters in random order."""
    garbled: Garbled = Garbled()
    """Text with many recognition errors (OCR)."""
    spam: Spam = Spam()
    """Advertisements for gambling."""
    long_lines: LongLines = LongLines()
    """Minified code or data: a line too long, or lines too long on average."""
    generated: Switch = Switch(on=False)
    """A comment in the first 20 lines says that a program generated the file."""


EDITS = ("repair", "mask", "kinds", "licence_headers", "boilerplate_lines")
"""Fields of CleanConfig that change documents and never drop one."""


RULES: dict[str, str] = field_docs(CleanConfig)
"""Every rule by its name, with what it is about, in the order in which they are judged."""


def default_config(channel: str) -> CleanConfig:
    """The defaults of a channel; channels other than zh, en and code get rules that hold for any script."""
    return DEFAULTS.get(channel, DEFAULTS["other"])


def build_config(
    channel: str, values: Mapping[str, Any] | None, place: str, problems: list[Problem]
) -> CleanConfig | None:
    """The defaults of `channel` with `values` (nested mappings, as YAML gives them) on top; appends to `problems`.

    The result is only of use when no problem was added.
    """
    if values is not None and not isinstance(values, Mapping):
        problems.append(Problem(place, values, "a mapping of rule names to settings"))
        return None
    before = len(problems)
    all_values = merged(dataclasses.asdict(default_config(channel)), values or {})
    config: CleanConfig | None = build(CleanConfig, all_values, place, problems)
    if config is not None and len(problems) == before:
        problems.extend(config_problems(config, place))
    return config


def config_problems(config: CleanConfig, place: str = "clean") -> list[Problem]:
    """What is wrong with a config beyond the range of single values."""
    found = []
    if not config.empty.on:
        found.append(Problem(f"{place}.empty.on", False, "true", "An empty document cannot be kept."))
    if config.too_short.on and config.too_long.on and config.too_long.max_chars < config.too_short.min_chars:
        found.append(Problem(f"{place}.too_long.max_chars", config.too_long.max_chars, "at least too_short.min_chars"))
    found.extend(
        Problem(f"{place}.{rule}.phrases[{at}]", phrase, "at least 2 characters on one line")
        for rule in ("boilerplate_lines", "footers")
        for at, phrase in enumerate(getattr(config, rule).phrases)
        if len(phrase.strip()) < 2 or "\n" in phrase or "\r" in phrase
    )
    return found


def merged(below: Any, above: Any) -> Any:
    """Nested mappings, the second on top of the first."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **{name: merged(below.get(name), value) for name, value in above.items()}}
    return above


def _defaults(off: tuple[str, ...] = (), base: CleanConfig | None = None, **settings: dict[str, Any]) -> CleanConfig:
    """The rules of `base` with some switched off and some settings changed."""
    base = base or CleanConfig()
    values = merged({name: {"on": False} for name in off}, settings)
    return dataclasses.replace(
        base, **{name: dataclasses.replace(getattr(base, name), **changed) for name, changed in values.items()}
    )


_PROSE_RULES = ("unended_lines", "few_sentences", "few_function_words", "keyword_lists", "scrambled", "garbled")
"""Rules that hold only for prose of languages they know."""

_EN = _defaults(
    too_short={"min_chars": 20},
    wrong_script={"min_share": 0.8, "from_chars": 50},
    blobs={"max_share": 0.12},
    digits={"max_share": 0.2, "from_chars": 200},
    symbols={"max_share": 0.4, "from_chars": 100},
    urls={"max_share": 0.35},
    duplicate_lines={"max_share": 0.35},
    top_ngram={"max_share": 0.3, "from_chars": 300},
    duplicate_ngrams={"max_share": 0.45},
    loose_lines={"max_share": 0.75, "max_line_chars": 40},
    few_sentences={"min_per_1000_chars": 0.8},
)

DEFAULTS: dict[str, CleanConfig] = {
    "zh": _defaults(
        boilerplate_lines={"phrases": list(CHINESE_BOILERPLATE)},
        footers={"phrases": list(CHINESE_FOOTERS)},
        too_short={"min_chars": 10},
        wrong_script={"script": "han", "min_share": 0.015, "from_chars": 50},
        blobs={"max_share": 0.15},
        digits={"max_share": 0.2, "from_chars": 200},
        symbols={"max_share": 0.48, "from_chars": 100},
        urls={"max_share": 0.4},
        few_distinct={"min_share": 0.1},
        duplicate_lines={"max_share": 0.4},
        top_ngram={"max_share": 0.3, "ngram_units": 4, "from_chars": 300},
        duplicate_ngrams={"max_share": 0.45, "ngram_units": 10, "from_chars": 200},
        loose_lines={"max_share": 0.7, "spare_function_share": 0.2},
        unended_lines={"spare_function_share": 0.2},
        few_sentences={"spare_function_share": 0.2},
        few_function_words={"of": "han", "min_share": 0.09, "from_units": 80},
        garbled={"max_word_share": 0.15},
    ),
    "en": _EN,
    "code": _defaults(
        ("boilerplate_lines", "footers", "loose_lines", "ellipsis_lines", "spam", *_PROSE_RULES),
        repair={"mojibake": False},  # tests and tables of encodings have it on purpose
        licence_headers={"on": True},
        too_short={"min_chars": 10},
        wrong_script={"script": "ascii", "from_chars": 50},
        digits={"max_share": 0.3, "from_chars": 200},
        symbols={"max_share": 0.5},
        urls={"max_share": 0.4},
        duplicate_lines={"max_share": 0.55},
        top_ngram={"on": False, "max_share": 0.4},
        duplicate_ngrams={"on": False, "max_share": 0.65},
        menu_lines={"on": False, "from_chars": 0},
        long_lines={"on": True},
        generated={"on": True},
    ),
    "other": _defaults(
        _PROSE_RULES,
        _EN,
        wrong_script={"on": False, "min_share": 0.5, "from_chars": 0},
        loose_lines={"max_share": 0.9},
        few_sentences={"min_per_1000_chars": 1.0},
    ),
}
