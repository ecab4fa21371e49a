"""Terms of gambling and its advertising, and how much of a text is made of them.

The native scan counts the characters and words of such terms; only texts with many of them are searched here. A report
on gambling, a novel or a page on probability has a few of the terms; an advertisement has one in every sentence, and
next to it what it offers: registration, credit, bonus, payout.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from zero2all.corpus.clean.tables import SPAM_WORDS

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
