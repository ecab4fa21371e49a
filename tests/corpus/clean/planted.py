"""Made-up texts for the tests: good ones in Chinese, English and Python, and garbage of every kind."""

import base64
import random
from collections.abc import Callable

ZH_SUBJECTS = str.split("老师 学生 医生 农民 工人 记者 邻居 姐姐 爷爷 船长 村长 画家 司机 店主 研究人员")
ZH_PLACES = str.split("村口 河边 学校 图书馆 山上 车站 市场 医院 实验室 码头 老城 院子 广场 田野 海岛")
ZH_ACTIONS = str.split(
    "看见了一只受伤的小鸟 说起了去年夏天的大水 把旧书整理好放在窗台上 和朋友们讨论新的计划 "
    "等着从北方来的信 学会了怎样修理水车 发现门前的树已经开花 想起小时候听过的故事 准备给孩子们做晚饭 "
    "在纸上画出桥的样子 听见远处传来的钟声 写下了当天的天气和收成 决定明天一早就出发 问起这条路通向哪里 "
    "为迟到的客人点亮了灯"
)
ZH_LINKS = str.split("后来 因为天气很好 虽然路不好走 到了晚上 第二天 没有人想到 就在这个时候 过了几年 据说 事实上")
EN_SUBJECTS = str.split("teacher sailor doctor farmer reporter neighbour painter driver baker student engineer captain")
EN_PLACES = str.split("village harbour library station market hospital garden workshop island valley museum bridge")
EN_ACTIONS = str.split(
    "found an old map under the floor | talked about the flood of last summer | "
    "put the books back on the window sill | waited for a letter from the north | "
    "learned how to mend the water wheel | noticed that the trees were in bloom | "
    "remembered a story heard long ago | drew the shape of the new bridge on paper | "
    "wrote down the weather and the harvest of the day | asked where the narrow road would lead | "
    "decided to leave before sunrise | lit a lamp for the guests who were late",
    " | ",
)
EN_LINKS = ["Later", "Because the weather was fine", "In the evening", "The next day", "As far as we know", "Once"]
ZH_KEYWORDS = str.split(
    "装修 报价 公司 批发 厂家 直销 手机 价格 优惠 北京 上海 广州 深圳 成都 网站 推广 排名 "
    "培训 学校 招生 贷款 搬家 电话 维修 空调 冰箱 热水器 二手 汽车 租赁 酒店 预订 机票 旅游 "
    "攻略 加盟 代理 品牌 官网 图片 大全"
)
EN_KEYWORDS = str.split(
    "cheap discount buy online best price sale free shipping shoes watches outlet store replica deal coupon code "
    "insurance quote loan credit casino poker bonus hotel flights travel rental cars phones laptop review "
    "download"
)


def zh_prose(rng: random.Random, sentences: int = 40) -> str:
    parts = []
    for at in range(sentences):
        place, subject, action = rng.choice(ZH_PLACES), rng.choice(ZH_SUBJECTS), rng.choice(ZH_ACTIONS)
        year = f"一九{rng.choice('二三四五六七八九')}{rng.choice('一二三四五六七八九')}年"
        parts.append(f"{rng.choice(ZH_LINKS)}，{year}的{place}，{rng.choice(ZH_SUBJECTS)}和{subject}{action}。")
        if at % 6 == 5:
            parts.append("\n")
    return "".join(parts).strip()


def en_prose(rng: random.Random, sentences: int = 30) -> str:
    parts = []
    for at in range(sentences):
        who, other, where = rng.choice(EN_SUBJECTS), rng.choice(EN_SUBJECTS), rng.choice(EN_PLACES)
        parts.append(f"{rng.choice(EN_LINKS)}, near the {where} of {rng.choice(EN_PLACES)}, the {who} and a {other} ")
        parts.append(f"{rng.choice(EN_ACTIONS)}.")
        parts.append("\n" if at % 5 == 4 else " ")
    return "".join(parts).strip()


def python_code(rng: random.Random, functions: int = 12) -> str:
    parts = ["import math", ""]
    for _ in range(functions):
        name, other, value = rng.choice(EN_PLACES), rng.choice(EN_SUBJECTS), rng.randrange(100)
        parts += [
            "",
            f"def {name}_of_{other}_{value}({other}, limit={rng.randrange(1000)}):",
            f'    """Say how far the {other} is from the {name}."""',
            f"    distance = math.hypot({other}.x, {other}.y) * {rng.random():.3f}",
            f"    if distance > limit + {value}:",
            f'        raise ValueError("the {name} is too far for the {other}")',
            f"    return round(distance, {rng.randrange(1, 6)})",
        ]
    return "\n".join(parts) + "\n"


def gbk_mojibake(rng: random.Random) -> str:
    return zh_prose(rng).encode().decode("gbk", errors="replace").replace("\ufffd", "?")


def lossy_latin_mojibake(rng: random.Random) -> str:
    """Every tenth character lost, so that no line can be read again."""
    text = zh_prose(rng).encode().decode("cp1252", errors="replace")
    return "".join("?" if rng.random() < 0.1 else character for character in text).replace("\ufffd", "?")


def lost_characters(rng: random.Random) -> str:
    return "".join("\ufffd" if rng.random() < 0.2 else character for character in en_prose(rng))


def menu(rng: random.Random) -> str:
    return "\n".join(f"{rng.choice(EN_KEYWORDS).title()} {rng.choice(EN_PLACES)}" for _ in range(60))


def zh_menu(rng: random.Random) -> str:
    return "\n".join(rng.choice(ZH_KEYWORDS) + rng.choice(ZH_KEYWORDS) for _ in range(60))


def link_list(rng: random.Random) -> str:
    return "\n".join(
        f"{rng.choice(EN_PLACES)} https://www.{rng.choice(EN_KEYWORDS)}{rng.randrange(100)}.com/{rng.choice(EN_PLACES)}"
        f"/{rng.choice(EN_PLACES)}?id={rng.randrange(10**6)}"
        for _ in range(40)
    )


def block_art(rng: random.Random) -> str:
    return "\n".join("".join(rng.choice("▁▂▃▅▆▇█ ░▒▓") for _ in range(40)) for _ in range(12)) + "\n" + zh_prose(rng, 4)


def number_table(rng: random.Random) -> str:
    return "\n".join(" ".join(f"{rng.random() * 1000:.2f}" for _ in range(8)) for _ in range(50))


def base64_blob(rng: random.Random) -> str:
    encoded = base64.b64encode(rng.randbytes(3000)).decode()
    return "\n".join(encoded[at : at + 76] for at in range(0, len(encoded), 76))


def zh_keywords(rng: random.Random) -> str:
    separator = rng.choice([" ", "、", "，", "|", "_"])
    return separator.join("".join(rng.sample(ZH_KEYWORDS, rng.randrange(2, 4))) for _ in range(120))


def en_keywords(rng: random.Random) -> str:
    separator = rng.choice([" ", ", ", " | ", "; "])
    return separator.join(" ".join(rng.sample(EN_KEYWORDS, rng.randrange(2, 4))) for _ in range(120))


def address_list(rng: random.Random) -> str:
    return "\n".join(f"{rng.choice(EN_SUBJECTS)}{rng.randrange(999)}@{rng.choice(EN_PLACES)}.org" for _ in range(40))


def minified(rng: random.Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return "".join(
        f"function {rng.choice(letters)}{rng.choice(letters)}({rng.choice(letters)}){{var {rng.choice(letters)}="
        f"{rng.choice(letters)}.{rng.choice(EN_PLACES)}({rng.randrange(99)});return {rng.choice(letters)}&&!0}}"
        for _ in range(80)
    )


def generated(rng: random.Random) -> str:
    notices = ["# Generated by the protocol buffer compiler.  DO NOT EDIT!", "# This file was autogenerated."]
    return f"{rng.choice(notices)}\n{python_code(rng)}"


ZH_COMMON = (
    "的一是了不在有人我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经么去"
    "法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点"
    "正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教"
)
"""Frequent characters, for text that is nothing but characters."""
MENU_ENTRIES = """
    首页 新闻 体育 财经 科技 汽车 房产 教育 健康 旅游 论坛 博客 视频 下载 登录 注册 帮助中心 关于我们 联系我们
    网站地图 版权声明 友情链接 会员中心 我的订单 在线客服 意见反馈 产品中心 解决方案 公司简介 上一页 下一页 返回顶部
""".split()  # noqa: SIM905
GAMBLING_PLACES = ["澳门", "葡京", "皇冠", "永利", "新濠", "太阳城"]
GAMBLING_GAMES = ["百家乐", "老虎机", "轮盘", "时时彩", "六合彩", "体育投注", "德州扑克", "捕鱼", "龙虎斗"]
GAMBLING_OFFERS = ["注册就送彩金", "首存双倍", "提款秒到账", "每天返水", "高赔率", "客服全天在线", "新会员有礼金"]


def han_salad(rng: random.Random) -> str:
    letters = ZH_COMMON[: rng.choice([80, 150, 300])]
    phrases = ("".join(rng.choices(letters, k=rng.randrange(4, 14))) + rng.choice("，，。") for _ in range(30))
    return "".join(phrases)


def shuffled_prose(rng: random.Random) -> str:
    """Good text with its characters in any order, the punctuation where it was."""
    text = zh_prose(rng, 12)
    letters = [character for character in text if character.isalpha()]
    rng.shuffle(letters)
    return "".join(letters.pop() if character.isalpha() else character for character in text)


def badly_scanned(rng: random.Random) -> str:
    noise = "~^*#|=+<>§°•■□◆lIOort"
    out = []
    for character in zh_prose(rng, 12):
        if character.isalpha() and rng.random() < 0.2:
            others = (rng.choice(noise), character + rng.choice(noise), chr(rng.randrange(0x4E00, 0x9F00)))
            character = rng.choice(others)
        out.append(character)
    return "".join(out)


def en_badly_scanned(rng: random.Random) -> str:
    wrong = {"o": "0", "l": "1", "i": "!", "e": "c", "s": "5", "a": "@", "t": "+", "m": "rn"}
    return "".join(wrong.get(c, c) if rng.random() < 0.25 else c for c in en_prose(rng, 12))


def bar_menu(rng: random.Random) -> str:
    bar = rng.choice(["|", " | ", "｜", " · "])
    return "\n".join(bar.join(rng.choices(MENU_ENTRIES, k=rng.randrange(5, 20))) for _ in range(rng.randrange(2, 12)))


def gambling(rng: random.Random) -> str:
    def some(words: list[str]) -> str:
        return rng.choice(words)

    return "".join(
        rng.choice(
            [
                f"{some(GAMBLING_PLACES)}娱乐城为您提供{some(GAMBLING_GAMES)}和{some(GAMBLING_GAMES)}，{some(GAMBLING_OFFERS)}。",
                f"想在{some(GAMBLING_GAMES)}里赢钱，先要学会看牌路，再到{some(GAMBLING_PLACES)}平台下注，{some(GAMBLING_OFFERS)}。",
                f"很多玩家都说{some(GAMBLING_PLACES)}官网的{some(GAMBLING_GAMES)}最公平，{some(GAMBLING_OFFERS)}，大家可以放心投注！",
            ]
        )
        for _ in range(rng.randrange(6, 14))
    )


def en_gambling(rng: random.Random) -> str:
    offers = [
        "Join our online casino and claim a welcome bonus on your first deposit",
        "Play roulette and blackjack with live dealers, and bet from your phone",
        "The jackpot has never been higher, so spin the reels and take the payout",
        "Our sportsbook has the best odds for football betting in the country",
        "Poker players get cashback, free spins and other bonuses every week",
        "Withdraw your winnings in minutes from the safest gambling site there is",
    ]
    return ". ".join(rng.sample(offers, 5)) + "."


GOOD: dict[str, Callable[[random.Random], str]] = {"zh": zh_prose, "en": en_prose, "code": python_code}

GARBAGE: dict[str, tuple[Callable[[random.Random], str], ...]] = {
    "zh": (
        gbk_mojibake, lossy_latin_mojibake, zh_menu, link_list, block_art, number_table,
        base64_blob, zh_keywords, address_list, en_prose, han_salad, shuffled_prose, badly_scanned, bar_menu, gambling,
    ),
    "en": (
        lost_characters, lossy_latin_mojibake, menu, link_list, block_art, number_table,
        base64_blob, en_keywords, address_list, zh_prose, en_badly_scanned, en_gambling,
    ),
    "code": (minified, generated, base64_blob, number_table, block_art, zh_prose),
}  # fmt: skip
"""Channel -> makers of texts that should be dropped there."""
