"""Good text lost and junk kept: genres of real text by folder, generated school and law text, planted junk.

    python -m benchmarks.corpus_genres verse=FOLDER:zh law=FILE.jsonl:zh docs=FOLDER:auto … --prose FILE_ZH FILE_EN

Every genre (NAME=PATH:CHANNEL) should be good text of one kind that the rules were not written with: a folder of texts,
or JSON lines with `text`. It is cleaned with the default rules of its channel, or with `auto` each document with those
of its own. Junk is planted: `DOCUMENTS` of each kind, generated from word lists in this file or made of the good prose
of --prose (JSON lines); each document is cleaned as a document of `auto`, and as zh and en (the channel of its kind).
Goals: at most 0.5 % of the documents and 1 % of the bytes of a genre lost, at least 90 % of each kind of junk dropped.
"""

# ruff: noqa: E501 - templates of Chinese text and of LaTeX
from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result
from zero2all.corpus.channels import channels_of
from zero2all.corpus.clean.cleaner import Cleaner

DOCUMENTS = 60
MOST_DOCUMENTS_LOST, MOST_BYTES_LOST, LEAST_DROPPED = 0.005, 0.01, 0.9
LEAST_CHARS = 30
"""Shorter texts are no documents of a genre."""


def main() -> None:
    """Clean, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("genres", nargs="*", metavar="NAME=PATH:CHANNEL")
    parser.add_argument("--prose", nargs=2, type=Path, required=True, metavar="FILE")
    parser.add_argument("--samples", type=Path, help="write what was lost of good text, and kept of junk, here")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/corpus_genres.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"genres": {}, "junk": {}}
    given = {name: read_genre(rest) for name, _, rest in (word.partition("=") for word in arguments.genres)}
    rng = random.Random(11)
    given |= {name: ([make(rng) for _ in range(400)], "zh") for name, make in GENERATED.items()}
    for name, (texts, channel) in given.items():
        results["genres"][name] = _measured(name, texts, channel, arguments.samples, is_junk=False)
    zh, en = (read_genre(f"{file}:auto")[0] for file in arguments.prose)
    for name, (make, channel) in junk_makers(zh, en).items():
        rng = random.Random(name)
        texts = [make(rng) for _ in range(DOCUMENTS)]
        results["junk"][name] = _measured(name, texts, channel, arguments.samples, is_junk=True)
    if arguments.save:
        save_result("corpus_genres", results)


def read_genre(place: str) -> tuple[list[str], str]:
    """The texts at PATH:CHANNEL."""
    path_name, _, channel = place.rpartition(":")
    path = Path(path_name)
    if path.is_file():
        texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n") if line]
    else:
        files = (file for file in sorted(path.rglob("*")) if file.is_file())
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [text for text in texts if len("".join(text.split())) >= LEAST_CHARS], channel


def clean_all(texts: list[str], channel: str) -> list[tuple[str, str | None]]:
    """The channel of each text and the rule that drops it."""
    titles = [""] * len(texts)
    channels = [found or "en" for found in channels_of(titles, texts)] if channel == "auto" else [channel] * len(texts)
    cleaners = {each: Cleaner(channel=each) for each in set(channels)}
    return [(each, cleaners[each].clean([text])[0].reason) for each, text in zip(channels, texts, strict=True)]


def _measured(name: str, texts: list[str], channel: str, samples: Path | None, is_junk: bool) -> dict[str, Any]:
    found = clean_all(texts, channel)
    rules = Counter(reason for _, reason in found if reason is not None)
    sizes = [len(text.encode()) for text in texts]
    lost = sum(size for size, (_, reason) in zip(sizes, found, strict=True) if reason is not None)
    documents, share = len(texts), rules.total() / max(1, len(texts))
    result = {"documents": documents, "dropped_share": share, "dropped_bytes_share": lost / max(1, sum(sizes))}
    missed = share < LEAST_DROPPED if is_junk else share > MOST_DOCUMENTS_LOST or lost / sum(sizes) > MOST_BYTES_LOST
    by_rule = ", ".join(f"{rule} {count}" for rule, count in rules.most_common(6))
    print(
        f"{'junk' if is_junk else 'good'} {name:22} {channel:5} {documents:6,} documents, dropped {share:7.2%}, bytes "
        f"{result['dropped_bytes_share']:7.2%} {'MISSED' if missed else '':6} {by_rule}",
        flush=True,
    )
    if samples is not None:
        wrong = [(text, each) for text, each in zip(texts, found, strict=True) if (each[1] is None) == is_junk]
        samples.mkdir(parents=True, exist_ok=True)
        lines = [f"── {each[0]} {each[1]}\n{text[:600]}\n" for text, each in wrong[:60]]
        (samples / f"{name.replace('/', 'slash')}.txt").write_text("\n".join(lines), encoding="utf-8")
    return {**result, "rules": dict(rules), "missed": missed}


# ---- good text by templates: what school books and law are like, with letters between Han ------------------------

LETTERS = "ABCDMNPQ"


def word_problem(rng: random.Random) -> str:
    """A problem of school mathematics with letters for places, persons and points."""
    a, b, c, d = rng.sample(LETTERS, 4)
    n = [rng.randrange(2, 95) for _ in range(6)]
    one = [
        f"甲、乙两车同时从{a}地开往{b}地，甲车每小时行{n[0]}千米，乙车每小时行{n[1]}千米，经过{n[2]}小时两车相距多少千米？"
        f"如果甲车到达{b}地后立即返回，又过了几小时与乙车相遇？",
        f"一项工程，{a}队单独做{n[0]}天完成，{b}队单独做{n[1]}天完成。现在由{a}队先做{n[3] % 7 + 1}天，余下的由{b}队做，还要多少天？",
        f"在三角形{a}{b}{c}中，{d}是{b}{c}边上的一点，{a}{d}平分角{b}{a}{c}，已知{a}{b}的长为{n[0]}厘米，求点{d}到{a}{b}的距离。",
        f"商店运来{a}种水果{n[0]}箱，{b}种水果的箱数是{a}种的{n[2] % 5 + 2}倍，{c}种水果比{b}种少{n[1] % 20}箱，三种水果一共多少箱？",
        f"小明从{a}点出发，沿圆形跑道按顺时针方向跑，小红从{b}点出发按逆时针方向跑，{n[3]}秒后两人在{c}点第一次相遇。",
        f"设x为整数，y是x的{n[2] % 6 + 2}倍，且x与y的和是{n[0] + n[1]}，求x和y各是多少。",
        "若集合M与N的交集为空集，且a属于M，b属于N，那么a和b的关系是什么？请说明理由。",
        f"已知函数f(x)=x²+{n[0] % 9}x－{n[1] % 9}，当x取何值时函数有最小值？并求|x－{n[2] % 5}|≤{n[3] % 6}时函数的值域。",
    ]
    return "\n".join(f"{at}．{text}" for at, text in enumerate(rng.sample(one, rng.randrange(2, 6)), 1))


def biology(rng: random.Random) -> str:
    """Questions of biology, chemistry and physics: names of bases, elements, factors and quantities are letters."""
    one = [
        "红眼对白眼为显性，由X染色体上的一对等位基因R和r控制。雌果蝇R个体与雄果蝇r个体杂交，子一代全部为红眼。",
        "DNA分子中A与T配对、G与C配对，若A占全部碱基的百分之二十，则C占多少？RNA中与A配对的是U而不是T。",
        "植物细胞在甲、乙两种溶液中的变化如图所示，a点时细胞液的浓度大于b点，c点以后植物细胞开始质壁分离复原。",
        "把A和B两种物质放入密闭容器，加热后生成C和D。反应前A的质量是B的两倍，反应后D的质量等于C，求四种物质的质量比。",
        "电阻R与灯泡L串联，开关S闭合后，电流表的示数为I，电压表V测的是灯泡L两端的电压U。滑片P向右移动时，I变小而U变大。",
        "人体缺少维生素A会患夜盲症，缺少维生素C会患坏血病，缺少维生素D会患佝偻病。长期缺碘则会引起甲状腺肿大。",
        "图中E表示能量，m表示质量，c表示光速；物体的动能与速度v的平方成正比，重力势能与高度h成正比。",
        "在甲图的细胞有丝分裂中，B时期的染色体数目是A时期的两倍，而C时期又恢复到A时期的数目，D时期DNA开始复制。",
    ]
    return "\n".join(rng.sample(one, rng.randrange(2, 7)))


def law(rng: random.Random) -> str:
    """Cases and articles of law in which the parties are letters."""
    a, b, c = rng.sample("ABCDEFGXYZ", 3)
    one = [
        f"被告{a}与原告{b}于二〇一九年签订买卖合同，约定{a}向{b}交付设备两台，{b}在收到设备后三十日内付款。",
        f"{b}收货后发现其中一台不能使用，遂要求{a}更换，{a}以质量检验期已过为由拒绝，{b}因此诉至人民法院。",
        f"第三人{c}主张该设备系其所有，{a}无权处分。经审理查明，{c}将设备出租给{a}，租期尚未届满。",
        f"本院认为，{a}和{b}之间的买卖合同依法成立并生效，{a}未按约定履行义务的，应当承担违约责任。",
        f"依照《中华人民共和国民法典》第五百七十七条之规定，判决{a}于本判决生效之日起十日内退还{b}货款。",
        f"公司的股东{a}、{b}、{c}分别持有百分之四十、百分之三十五和百分之二十五的股权，{c}对外转让股权时{a}和{b}有优先购买权。",
        f"当事人{a}死亡的，由其继承人{b}承受诉讼；{b}为无民事行为能力人的，由其监护人{c}代为诉讼。",
    ]
    return "\n".join(rng.sample(one, rng.randrange(3, 7)))


def exam_in_latex(rng: random.Random) -> str:
    """Choices and solutions with formulas between dollar signs."""
    n = [rng.randrange(2, 30) for _ in range(6)]
    one = [
        f"设集合 $A=\\{{x \\mid |x-{n[0]}|<{n[1]}\\}}$，$B=\\{{x \\mid x^{{2}}-{n[2]}x>0\\}}$，则 $A \\cap B=$（ ）\n"
        f"A. $(0,{n[0]})$ B. $({n[1]},{n[2]})$ C. $[{n[0]},+\\infty)$ D. $\\varnothing$",
        f"解：由 $|x-{n[0]}|<{n[1]}$ 得 ${n[0] - n[1]}<x<{n[0] + n[1]}$，\n所以 $\\left|\\frac{{x}}{{{n[3]}}}\\right|<\\frac{{{n[4]}}}{{{n[5]}}}$，故选 A",
        f"已知向量 $\\overrightarrow{{AB}}=({n[0]},{n[1]})$，$\\overrightarrow{{AC}}=({n[2]},{n[3]})$，则 $|\\overrightarrow{{BC}}|=$",
        f"求 $\\lim_{{x \\to 0}} \\frac{{\\sin {n[0]}x}}{{\\tan {n[1]}x}}$ 的值，并证明数列 $\\left\\{{a_{{n}}\\right\\}}$ 收敛。",
        f"$$\n\\begin{{aligned}}\nS_{{n}} &= \\sum_{{k=1}}^{{n}} \\frac{{1}}{{k(k+{n[2]})}} \\\\\n&< \\frac{{{n[3]}}}{{{n[4]}}}\n\\end{{aligned}}\n$$",
    ]
    return "\n".join(rng.sample(one, rng.randrange(2, 6)))


GENERATED: dict[str, Callable[[random.Random], str]] = {
    "word problems": word_problem, "science questions": biology, "law with letters": law, "exam in LaTeX": exam_in_latex,
}  # fmt: skip

# ---- junk ---------------------------------------------------------------------------------------------------------

PLACES = "金沙 银河 新濠天地 威尼斯人 太阳城 凯旋门 大富豪 万豪".split()  # noqa: SIM905
GAMES = "百家乐 老虎机 轮盘 六合彩 时时彩 体育投注 德州扑克 捕鱼 骰宝 电子游艺 真人视讯 棋牌 北京赛车".split()  # noqa: SIM905
OFFERS = [
    "注册就送体验金", "首存送彩金", "提款三分钟到账", "天天返水", "全网最高赔率", "客服二十四小时在线", "代理佣金日结",
    "下载手机客户端", "充值有优惠", "信誉有保证", "新会员领红包", "资金安全有保障",
]  # fmt: skip
SHOPS = "装修公司 搬家公司 开锁公司 保洁公司 管道疏通 二手回收 空调维修 热水器维修 律师事务所 代理记账 整形医院 驾校".split()  # noqa: SIM905
CITIES = "北京 上海 广州 深圳 杭州 成都 武汉 南京 西安 重庆 苏州 郑州 长沙 青岛 沈阳 合肥".split()  # noqa: SIM905
PITCHES = """
    哪家好 多少钱 价格表 排名 电话 官网 地址 推荐 报价 一览 口碑 靠谱吗 十大品牌 收费标准 免费咨询 上门服务
""".split()  # noqa: SIM905
ENTRIES = """
    首页 资讯 国际 社会 军事 娱乐 财经 股票 基金 汽车 房产 家居 教育 留学 健康 旅游 美食 时尚 母婴 彩票 游戏 动漫 视频
    图片 论坛 博客 微博 邮箱 登录 注册 会员中心 购物车 我的订单 帮助 客服中心 网站地图 关于我们 联系我们 友情链接 招聘
    广告服务 版权声明 隐私政策 意见反馈 手机版 电脑版 收藏本站 返回顶部 上一页 下一页 更多
""".split()  # noqa: SIM905
ENGLISH_ENTRIES = """
    Home|News|Sports|Business|Technology|Travel|Weather|Shop|My Account|Sign In|Register|Cart|Wishlist|Help|Contact Us|
    About Us|Careers|Press|Privacy Policy|Terms of Use|Site Map|Store Locator|Gift Cards|Returns|Shipping|FAQ|Blog|Forum
""".replace("\n", "").replace("    ", "").split("|")  # fmt: skip
ENGLISH_KEYS = """
    cheap hotel flights car rental best price online discount coupon buy shoes nike adidas replica watches rolex viagra
    cialis loan payday credit score insurance quotes lawyer attorney dentist plumber near me free download crack keygen
    torrent movie streaming hd full episode casino bonus weight loss pills seo backlinks web design hosting domain
""".split()  # noqa: SIM905
FOOTERS = [
    "版权所有 © {y} {c}信息技术有限公司 保留一切权利", "京ICP备{n}号-1 京公网安备{n}{n}号", "增值电信业务经营许可证：京B2-{n}",
    "违法和不良信息举报电话：010-{n}", "关于我们 联系我们 广告合作 网站地图 隐私政策", "地址：{c}市朝阳区{n}号 邮编：{n}",
    "Copyright © {y} {c} Inc. All Rights Reserved.", "未经书面授权，不得转载、摘编本站内容", "客服热线：400-{n}（工作日9:00-18:00）",
    "建议使用1024×768分辨率浏览本站", "技术支持：{c}网络科技有限公司", "网络视听许可证{n}号 新闻信息服务许可证{n}",
]  # fmt: skip


def junk_makers(zh: list[str], en: list[str]) -> dict[str, tuple[Callable[[random.Random], str], str]]:
    """Kind -> how a document of it is made and the channel it is cleaned as; `zh` and `en` are good prose."""
    frequent = Counter(character for text in zh[:300] for character in text if "\u4e00" <= character <= "\u9fff")
    common, weights = zip(*frequent.most_common(3000), strict=True)

    def piece(rng: random.Random, texts: list[str], size: int) -> str:
        text = rng.choice([each for each in rng.sample(texts, 40) if len(each) > size] or texts)
        at = rng.randrange(max(1, len(text) - size))
        return text[at : at + size].strip()

    def gambling(rng: random.Random, sentences: int = 0) -> str:
        def some(words: list[str]) -> str:
            return rng.choice(words)

        return "".join(
            rng.choice([
                f"{some(PLACES)}娱乐城官网提供{some(GAMES)}、{some(GAMES)}等多种玩法，{some(OFFERS)}，{some(OFFERS)}。",
                f"玩{some(GAMES)}想要稳赢，就来{some(PLACES)}平台投注，{some(OFFERS)}！",
                f"小王上周在{some(PLACES)}玩{some(GAMES)}赢了三万，他说{some(OFFERS)}，而且{some(OFFERS)}。",
                f"很多人问{some(GAMES)}有什么技巧，其实看懂走势图再下注，胜率会高很多，{some(OFFERS)}。",
            ])
            for _ in range(sentences or rng.randrange(5, 15))
        )  # fmt: skip

    def diluted(rng: random.Random) -> str:
        parts = []
        for _ in range(rng.randrange(3, 7)):
            parts += [piece(rng, zh, rng.randrange(60, 140)), gambling(rng, rng.randrange(1, 3))]
        return "\n".join(parts)

    def ad(rng: random.Random) -> str:
        lines = []
        for _ in range(rng.randrange(6, 16)):
            city, shop = rng.choice(CITIES), rng.choice(SHOPS)
            lines.append(
                rng.choice([
                    f"{city}{shop}{rng.choice(PITCHES)}，{city}{shop}{rng.choice(PITCHES)}，{city}{rng.choice(SHOPS)}{rng.choice(PITCHES)}",
                    f"{city}专业{shop}，服务热线：{rng.randrange(13000000000, 18999999999)}，{rng.choice(PITCHES)}，欢迎来电咨询！",
                    f"【{city}{shop}】{rng.choice(PITCHES)}_{city}{shop}{rng.choice(PITCHES)}_{rng.choice(CITIES)}{shop}",
                ])
            )  # fmt: skip
        return "\n".join(lines)

    def english_ad(rng: random.Random) -> str:
        def some(count: int) -> str:
            return " ".join(rng.sample(ENGLISH_KEYS, count))

        return "\n".join(
            rng.choice([f"Buy {some(3)} online! {some(4)} | {some(3)} - {some(2)}", f"{some(5).title()} - {some(4)}", f"{some(8)}, {some(6)}"])
            for _ in range(rng.randrange(8, 20))
        )  # fmt: skip

    def menu(joined: str, words: list[str]) -> Callable[[random.Random], str]:
        def make(rng: random.Random) -> str:
            lines = rng.randrange(3, 14)
            return "\n".join(joined.join(rng.choices(words, k=rng.randrange(4, 18))) for _ in range(lines))

        return make

    def salad(rng: random.Random, by_frequency: bool) -> str:
        def some(size: int) -> str:
            if by_frequency:
                return "".join(rng.choices(common, weights, k=size))
            return "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(size))

        return "".join(some(rng.randrange(4, 16)) + rng.choice("，，。、！") for _ in range(rng.randrange(15, 50)))

    def keywords(rng: random.Random) -> str:
        joined = rng.choice([" ", "，", "、", "|", "\n", "_", ","])
        one = (rng.choice(CITIES) * rng.randrange(2) + rng.choice(SHOPS) + rng.choice(PITCHES) for _ in range(90))
        return joined.join(one)

    def english_keywords(rng: random.Random) -> str:
        joined = rng.choice([", ", " ", "; ", " | ", "\n"])
        return joined.join(" ".join(rng.sample(ENGLISH_KEYS, rng.randrange(1, 4))) for _ in range(100))

    def scanned(rng: random.Random) -> str:
        """A fifth to a tenth of the characters spoilt: swapped, with signs or letters between, broken apart."""
        share, out = rng.uniform(0.1, 0.2), []
        for character in piece(rng, zh, 500):
            if "\u4e00" <= character <= "\u9fff" and rng.random() < share:
                sign = rng.choice("~^*#|=+<>§°•■□◆『丿乂ｌIlOo0iJtT.,;'")
                character = rng.choice([sign, character + sign, f" {character} ", chr(rng.randrange(0x4E00, 0x9FA5))])
            out.append(character)
        return "".join(out)

    def english_scanned(rng: random.Random) -> str:
        wrong = {"o": "0", "l": "1", "i": "!", "e": "c", "s": "5", "a": "@", "t": "+", "m": "rn", "h": "li", "u": "ii"}
        return "".join(wrong.get(c, c) if rng.random() < 0.25 else c for c in piece(rng, en, 900))

    def footers(rng: random.Random) -> str:
        lines = []
        for _ in range(rng.randrange(5, 12)):
            line = rng.choice(FOOTERS).replace("{y}", str(rng.randrange(2003, 2025))).replace("{c}", rng.choice(CITIES))
            while "{n}" in line:
                line = line.replace("{n}", str(rng.randrange(10**5, 10**8)), 1)
            lines.append(line)
        return "\n".join(lines)

    def misread(written: str, read: str) -> Callable[[random.Random], str]:
        def make(rng: random.Random) -> str:
            text = piece(rng, zh, 400)
            if written == "big5":
                from zero2all.corpus.dedup.fold import simplified_of

                forms = {chr(b): chr(a) for a, b in simplified_of().items()}
                text = "".join(forms.get(c, c) for c in text)
            return text.encode(written, "ignore").decode(read, "replace").replace("\ufffd", rng.choice("?\ufffd"))

        return make

    return {
        "gambling": (gambling, "zh"),
        "gambling, diluted": (diluted, "zh"),
        "SEO ads zh": (ad, "zh"),
        "SEO ads en": (english_ad, "en"),
        "menu by |": (menu(" | ", ENTRIES), "zh"),
        "menu by >": (menu(" > ", ENTRIES), "zh"),
        "menu by /": (menu(" / ", ENTRIES), "zh"),
        "menu by spaces": (menu("  ", ENTRIES), "zh"),
        "menu en by |": (menu(" | ", ENGLISH_ENTRIES), "en"),
        "menu en by >": (menu(" > ", ENGLISH_ENTRIES), "en"),
        "menu en by /": (menu(" / ", ENGLISH_ENTRIES), "en"),
        "menu en by spaces": (menu("  ", ENGLISH_ENTRIES), "en"),
        "Han, uniform": (lambda rng: salad(rng, by_frequency=False), "zh"),
        "Han, by frequency": (lambda rng: salad(rng, by_frequency=True), "zh"),
        "keywords zh": (keywords, "zh"),
        "keywords en": (english_keywords, "en"),
        "scanned zh": (scanned, "zh"),
        "scanned en": (english_scanned, "en"),
        "GBK as Latin-1": (misread("gbk", "latin-1"), "auto"),
        "UTF-8 as GBK": (misread("utf-8", "gbk"), "auto"),
        "UTF-8 as cp1252": (misread("utf-8", "cp1252"), "auto"),
        "Big5 as GBK": (misread("big5", "gbk"), "auto"),
        "footers": (footers, "auto"),
    }


if __name__ == "__main__":
    main()
