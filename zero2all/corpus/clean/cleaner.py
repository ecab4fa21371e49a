"""Cleaning a batch of texts.

scan    one native pass over all texts (kernels.py) -> counts
edit    texts in which the scan found something: repair, drawn lines, boilerplate lines, licence headers; scanned again
judge   counts -> measures -> the first rule that drops the text (rules.py), for all texts at once
mask    secrets and personal data, also in dropped texts, since samples of them are shown
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from zero2all.common.errors import UsageError
from zero2all.corpus.clean import counts as k
from zero2all.corpus.clean import rules
from zero2all.corpus.clean.config import CleanConfig, config_problems, default_config
from zero2all.corpus.clean.han import pair_tables
from zero2all.corpus.clean.mask import Hints, mask_text
from zero2all.corpus.clean.repair import (
    is_generated,
    private_use_count,
    repair,
    strip_blank,
    table_for,
    with_standard_characters,
    without_licence,
    without_unwanted,
)
from zero2all.corpus.clean.tables import ART, CODE_POINTS, FUNCTION_WORDS, JOINER, SPACE, SPAM_WORDS

# Terms of gambling and its advertising, and how much of a text is made of them.
#
# The native scan counts the characters and words of such terms; only texts with many of them are searched here. A
# report on gambling, a novel or a page on probability has a few of the terms; an advertisement has one in every
# sentence, and next to it what it offers: registration, credit, bonus, payout.

Array = np.ndarray[Any, np.dtype[Any]]

LEAST_HAN_SHARE = 0.025
"""Texts with a smaller share of the characters of spam are not searched."""
LEAST_WORD_SHARE = 0.02
LEAST_OFFERS = 2
"""A report or a novel names games and casinos; an advertisement has offers, too."""
LEAST_ENGLISH_OFFERS = 3
SEARCHED_CHARS = 20_000
"""Longer texts are searched up to here."""

GAMBLING = """
博彩 赌博 赌场 赌网 赌城 赌客 赌桌 赌球 投注 下注 押注 注码 加注 彩金 彩票 彩民 特码 六合彩 时时彩 双色球 一肖 平特
百家乐 老虎机 角子机 轮盘 骰宝 龙虎斗 牛牛 炸金花 扎金花 斗地主 德州扑克 麻将 捕鱼 棋牌 荷官 发牌 娱乐城 娱乐场
娱乐平台 赌钱 真人视讯 真人娱乐 真钱 现金网 葡京 威尼斯人 太阳城 皇冠 永利 赔率 盘口 让球 竞猜 庄家 闲家 庄闲 牌路
北京赛车 赛车pk pk10 飞艇 快三 大小单双 定位胆 组选 倍投 开奖 走势图 中奖 大奖 头奖 返水 洗码 打码 流水 稳赢 稳赚
包赢 必中 赢钱 回血 上岸 电子游艺 体育投注 买球 外围 菠菜 胜率 赢家 足彩 滚球 21点
""".split()  # noqa: SIM905
OFFERS = """
注册 开户 会员 充值 首充 首存 存款 提款 提现 取款 到账 秒到 优惠 红包 礼金 礼包 体验金 救援金 返利 返佣 代理 客服
官网 官方 平台 信誉 公信力 牌照 下载 玩家 玩法 技巧 计划 推荐 免费 在线 网上 线上 点击 链接 微信 支付宝 领取 彩头
资金 安全 手机 app
""".split()  # noqa: SIM905
ENGLISH_OFFERS = """
join register signup deposit deposits withdraw withdrawal withdrawals claim welcome promo promotion promotions bonus
bonuses spins cashback vip exclusive sportsbook dealers trusted safest your our
""".split()  # noqa: SIM905
_TRADITIONAL = str.maketrans(
    "赌场网钱乐龙斗马将鱼发娱台视讯现赔盘让竞闲庄车赛飞奖势图赢稳赚码游艺体买围开户会员优红礼验录线点击链领计划荐费载誉宝头资单双组选轮战",
    "賭場網錢樂龍鬥馬將魚發娛臺視訊現賠盤讓競閒莊車賽飛獎勢圖贏穩賺碼遊藝體買圍開戶會員優紅禮驗錄線點擊鏈領計劃薦費載譽寶頭資單雙組選輪戰",
)


def _pattern(terms: list[str]) -> re.Pattern[str]:
    """Any of the terms, in both scripts, the longest first."""
    forms = {*terms, *(term.translate(_TRADITIONAL) for term in terms)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))), re.IGNORECASE)


_GAMBLING = _pattern(GAMBLING)
_OFFERS = _pattern(OFFERS)
_ENGLISH_OFFERS = re.compile(rf"\b(?:{'|'.join(ENGLISH_OFFERS)})\b", re.IGNORECASE)
_WORDS = re.compile(rf"\b(?:{'|'.join(SPAM_WORDS)})\b", re.IGNORECASE)


def set_spam_measures(texts: list[str], measures: dict[str, Array]) -> None:
    """Set `spam_share`, the share of Han characters or of words in such terms, and `spam_terms`, how many differ.

    Only texts with offers are advertisements. Chinese offers count only up to the weight of the gambling terms beside
    them: every shop has them.
    """
    share, terms = measures["spam_share"], measures["spam_terms"]
    for at in np.flatnonzero(measures["spam_han_share"] >= LEAST_HAN_SHARE).tolist():
        found = _GAMBLING.findall(texts[at], 0, SEARCHED_CHARS)
        if not found:
            continue
        offers = _OFFERS.findall(texts[at], 0, SEARCHED_CHARS)
        if len(set(offers)) < LEAST_OFFERS:
            continue
        offered = min(sum(map(len, offers)), sum(map(len, found)))
        share[at] = (sum(map(len, found)) + offered) / max(1.0, min(measures["han"][at], SEARCHED_CHARS))
        terms[at] = len(set(found))
    for at in np.flatnonzero(measures["spam_word_share"] >= LEAST_WORD_SHARE).tolist():
        offers = _ENGLISH_OFFERS.findall(texts[at], 0, SEARCHED_CHARS)
        if len(set(map(str.lower, offers))) < LEAST_ENGLISH_OFFERS:
            continue
        share[at] = max(share[at], measures["spam_word_share"][at])
        terms[at] = max(terms[at], len(set(map(str.lower, _WORDS.findall(texts[at])))))


FOOTER_CHARS, FOOTERS_CHARS = 120, 4_000
"""A longer line is prose that mentions the phrase; a longer text is more than footers."""
GROUP_CHARS = 1 << 19
"""Texts are put together up to this many characters (4 bytes each) before they are scanned."""
LAST_STAMP = 0xFFFF_0000

_ART = re.compile("[\u2580-\u259f\u2800-\u28ff]")
_MENDABLE = re.compile("[\u00c2-\u00f4]")
"""Every text in a wrong encoding that repair can mend has one of these."""
_SECRET_NUMBERS = 10**9
"""A whole number from here on has the ten digits of a phone number."""
_MIN_ART_CHARS = 3
"""Fewer on a line are an ornament, not a drawing."""


@dataclass(slots=True)
class Cleaned:
    """What became of one text. `text_bytes + repaired_bytes` are the UTF-8 bytes that came in."""

    text: str
    """The text after repair, edits and masks; also of a text that is dropped."""
    reason: str | None
    """The rule that drops the text; None when it is kept."""
    text_bytes: int
    """UTF-8 bytes of `text`."""
    repaired_bytes: int
    """UTF-8 bytes that repair, edits and masks took away; less than none where mapped characters are longer."""
    masked: dict[str, int] = field(default_factory=dict)
    """How many secrets of each kind were masked; kinds without any are left out."""
    measures: dict[str, float] | None = None
    """What the rules looked at: for dropped texts, and for all if the cleaner was asked to."""
    private_use: dict[str, int] = field(default_factory=dict)
    """How many private-use characters were `mapped` to standard ones and `removed`; empty where there were none."""


class _Joined(NamedTuple):
    """Texts put end to end."""

    points: Array
    """Their code points."""
    starts: Array
    """Where each begins, and the end."""


class Cleaner:
    """Cleans texts of one channel. Texts do not influence each other; one thread at a time."""

    def __init__(self, config: CleanConfig | None = None, channel: str = "en", measure_kept: bool = False) -> None:
        self.config = config or default_config(channel)
        self.channel = channel
        self.measure_kept = measure_kept
        problems = config_problems(self.config)
        if problems:
            raise UsageError("The cleaning rules cannot be used: " + " ".join(map(str, problems)))
        self._keep_indent = channel == "code"
        self.masks = any(dataclasses.astuple(self.config.mask))
        """Whether anything is to be masked."""
        self._table = table_for(self.config.repair.private_use)
        self._stamps = np.zeros(CODE_POINTS, np.uint32)
        self._next_stamp = 1

    def clean(self, texts: Sequence[str]) -> list[Cleaned]:
        """Each text repaired, edited, judged and masked; in the order given."""
        done: list[Cleaned] = []
        for group in _groups(texts):
            done.extend(self._clean_group(group))
        return done

    def tidy(self, text: str, masked: Counter[str] | None = None) -> str:
        """A short text beside the documents, such as a title: repaired and masked, not judged."""
        if text.isprintable() and not _MENDABLE.search(text):  # most of them
            text = text.strip()
        else:
            options = self.config.repair
            text = repair(text, mojibake=options.mojibake, private_use=options.private_use)
        return self.mask(text, masked)

    def mask(self, value: Any, masked: Counter[str] | None = None) -> Any:
        """A text, or anything JSON can hold with texts in it, with the marks; `masked` counts them."""
        if not self.masks:
            return value
        if isinstance(value, str):
            value, counts = mask_text(value, self.config.mask)
            if masked is not None:
                masked.update(counts)
            return value
        if isinstance(value, dict):
            return {self.mask(key, masked): self.mask(item, masked) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mask(item, masked) for item in value]
        if type(value) is int and abs(value) >= _SECRET_NUMBERS:
            text = str(value)
            marked = self.mask(text, masked)
            return value if marked == text else marked
        return value

    def _clean_group(self, originals: list[str]) -> list[Cleaned]:
        joined = _join(originals)
        counts, texts = self._scan(originals, joined)
        bytes_in = counts[:, k.BYTES_IN].copy()
        private_use = self._private_use(originals, counts)
        holding = self._holding_phrases(originals, joined)
        edited = self._edited(originals, holding, texts, counts, private_use)
        if edited:
            places = list(edited)
            counts[places], again = self._scan(list(edited.values()), _join(list(edited.values())))
            for place, text in zip(places, again, strict=True):
                texts[place] = text
        measures = rules.measures_of(counts, self.config)
        if self.config.garbled.on:
            rules.lower_broken_share(texts, measures, self.config)
        if self.config.footers.on:
            for at in holding:
                if len(originals[at]) <= FOOTERS_CHARS:
                    measures["footer_share"][at] = self._footer_share(originals[at])
        if self.config.spam.on:
            set_spam_measures(texts, measures)
        reasons = self._reasons(texts, measures)
        hints = counts[:, [k.EMAILS, k.LONGEST_NUMBER, k.LONG_TOKENS]].tolist()
        text_bytes = counts[:, k.BYTES_OUT].tolist()
        done = []
        for at, (text, reason, size) in enumerate(zip(texts, reasons, text_bytes, strict=True)):
            masked: dict[str, int] = {}
            if self.masks:
                text, masked = mask_text(text, self.config.mask, Hints(*hints[at]))
                size = _utf8_bytes(text) if masked else size
            done.append(
                Cleaned(text, reason, size, int(bytes_in[at]) - size, masked, private_use=private_use.get(at, {}))
            )
            if reason is not None or self.measure_kept:
                done[-1].measures = {name: float(values[at]) for name, values in measures.items()}
        return done

    def _scan(self, texts: list[str], joined: _Joined) -> tuple[Array, list[str]]:
        """Counts of the texts, and the texts with unwanted characters and white space at the ends removed."""
        from zero2all.corpus.clean import kernels

        config = self.config
        points, starts = joined
        counts = np.empty((len(texts), k.COLUMNS), np.int64)
        settings = np.array(
            [
                config.loose_lines.max_line_chars,
                config.blobs.min_run_chars,
                config.duplicate_lines.min_line_chars,
                config.top_ngram.ngram_units if config.top_ngram.on else 0,
                config.duplicate_ngrams.ngram_units if config.duplicate_ngrams.on else 0,
                self._keep_indent,
            ],
            np.int64,
        )
        first_stamp = self._stamp(len(texts))
        pairs = pair_tables()
        words = kernels.word_table(FUNCTION_WORDS, SPAM_WORDS)
        kernels.scan(points, starts, self._table, *pairs, *words, settings, self._stamps, first_stamp, counts)
        cleaned = list(texts)
        for at in np.flatnonzero(counts[:, k.CHANGED]).tolist():
            first, end = int(counts[at, k.KEEP_FROM]), int(counts[at, k.KEEP_TO])
            if counts[at, k.CHANGED] == 1:
                cleaned[at] = texts[at][first:end]
                continue
            kept = np.empty(end - first, np.uint32)
            count = kernels.compact(points, starts[at] + first, starts[at] + end, self._table, kept)
            cleaned[at] = kept[:count].tobytes().decode("utf-32-le")
            counts[at, k.BYTES_OUT] = _utf8_bytes(cleaned[at])
        return counts, cleaned

    def _stamp(self, texts: int) -> np.uint32:
        if self._next_stamp + texts > LAST_STAMP:
            self._stamps[:] = 0
            self._next_stamp = 1
        first = self._next_stamp
        self._next_stamp += texts
        return np.uint32(first)

    def _private_use(self, originals: list[str], counts: Array) -> dict[int, dict[str, int]]:
        """Place -> what became of its private-use characters, for the texts that have any."""
        removes = self.config.repair.private_use
        places = np.flatnonzero(counts[:, k.CHANGED] > 1).tolist() if removes else range(len(originals))
        found: dict[int, dict[str, int]] = {}
        for at in places:
            if before := private_use_count(originals[at]):
                left = private_use_count(with_standard_characters(originals[at]))
                found[at] = {"mapped": before - left, "removed": left if removes else 0}
        return found

    def _edited(
        self,
        originals: list[str],
        holding: list[int],
        texts: list[str],
        counts: Array,
        private_use: dict[int, dict[str, int]],
    ) -> dict[int, str]:
        """Place -> text, for the texts that an edit changes."""
        config = self.config
        edited: dict[int, str] = {}
        for at, found in private_use.items():
            if found["mapped"]:
                text = without_unwanted(with_standard_characters(originals[at]), self._table)
                edited[at] = strip_blank(text, self._keep_indent)
        if config.repair.mojibake:
            for at in np.flatnonzero(counts[:, k.MOJIBAKE_PAIRS] + counts[:, k.SPLIT_PAIRS]).tolist():
                edited[at] = repair(originals[at], private_use=config.repair.private_use, keep_indent=self._keep_indent)
        if config.boilerplate_lines.on:
            for at in holding:
                edited[at] = self._without_boilerplate(edited.get(at, texts[at]))
        if config.block_art.on:
            art = counts[:, ART]
            drawn = (art >= _MIN_ART_CHARS) & (
                art <= config.block_art.max_share * counts[:, SPACE + 1 : JOINER + 1].sum(axis=1)
            )
            for at in np.flatnonzero(drawn).tolist():
                edited[at] = self._without_drawn_lines(edited.get(at, texts[at]))
        if config.licence_headers.on:
            for at, text in enumerate(texts):
                edited[at] = without_licence(edited.get(at, text))
        return {at: text for at, text in sorted(edited.items()) if text != texts[at]}

    def _holding_phrases(self, texts: list[str], joined: _Joined) -> list[int]:
        """Places of the texts that may have phrases of boilerplate or footers."""
        rules = (self.config.boilerplate_lines, self.config.footers)
        return _holding(texts, joined, list(dict.fromkeys(p for rule in rules if rule.on for p in rule.phrases)))

    def _footer_share(self, text: str) -> float:
        found = total = 0
        phrases = self.config.footers.phrases
        for line in text.split("\n"):
            size = len(line)
            total += size
            if size <= FOOTER_CHARS and not line.endswith(("。", ". ")) and any(phrase in line for phrase in phrases):
                found += size
        return found / max(1, total)

    def _without_boilerplate(self, text: str) -> str:
        rule = self.config.boilerplate_lines
        for phrase in rule.phrases:
            found = text.find(phrase)
            while found >= 0:
                start = text.rfind("\n", 0, found) + 1
                end = text.find("\n", found)
                end = len(text) if end < 0 else end
                if end - start <= rule.max_line_chars:
                    text = text[:start] + text[end + 1 :]
                    end = start
                found = text.find(phrase, end)
        return strip_blank(text, self._keep_indent)

    def _without_drawn_lines(self, text: str) -> str:
        kept = []
        for line in text.split("\n"):
            drawn = len(_ART.findall(line))
            share = self.config.block_art.max_line_share
            if drawn < _MIN_ART_CHARS or drawn <= share * len("".join(line.split())):
                kept.append(line)
        return strip_blank("\n".join(kept), self._keep_indent)

    def _reasons(self, texts: list[str], measures: dict[str, Array]) -> list[str | None]:
        reasons: list[str | None] = [None] * len(texts)
        open_places = np.ones(len(texts), bool)
        for name, rule in rules.JUDGES.items():
            if not getattr(self.config, name).on:
                continue
            dropped = rule.judge(measures, self.config) & open_places
            for at in np.flatnonzero(dropped).tolist():
                reasons[at] = name
            open_places &= ~dropped
        if self.config.generated.on:
            for at, text in enumerate(texts):
                if reasons[at] is None and is_generated(text):
                    reasons[at] = "generated"
        return reasons


def _join(texts: list[str]) -> _Joined:
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    starts = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=starts[1:])
    return _Joined(points, starts)


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    chars = 0
    for text in texts:
        if group and chars + len(text) > GROUP_CHARS:
            yield group
            group, chars = [], 0
        group.append(text)
        chars += len(text)
    if group:
        yield group


def _holding(texts: list[str], joined: _Joined, phrases: list[str]) -> list[int]:
    """Places of the texts that may hold a phrase: the first characters of one are there."""
    from zero2all.corpus.clean import kernels

    if not phrases:
        return []
    may_hold = np.empty(len(texts), np.bool_)
    kernels.find_beginnings(*joined, *kernels.beginnings_of(tuple(phrases)), may_hold)
    found: list[int] = np.flatnonzero(may_hold).tolist()
    return found


def _utf8_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
