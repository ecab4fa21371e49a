"""Repair of characters: what goes, what stays, what is read again; licences, generated and broken code."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.corpus.clean import planted
from zero2all.corpus.clean import repair as repairing
from zero2all.corpus.clean.cleaner import Cleaner
from zero2all.corpus.clean.config import RULES, build_config, default_config
from zero2all.corpus.clean.repair import is_generated, mend_mojibake, repair, without_licence
from zero2all.corpus.clean.tables import standard_characters

PIECES = [*"aé…”â€™Ã©\x81\u200b\u200d\u200c\r\n \t\ufeff\ue000\ue82a\ud800中，😀❤\ufe0fن\u2028\x0c\u3000\U000f0000▅"]
MESSY = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
ANY_TEXT = st.one_of(MESSY, st.text(st.characters(exclude_categories=[]), max_size=60))
EVERY_RULE_OFF = {name: {"on": False} for name in RULES if name not in ("empty", "repair", "mask", "kinds")}


def bytes_of(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# Joiners stay where they join, and new emoji and rare Han characters stay.
STAY = ["a\tb", "ｆｕｌｌ ﬁ ① ㎏", "👩\u200d💻 ok", "❤\ufe0f\u200d🔥", "می\u200cخواهم", "क्\u200dष"]
STAY += ["\U0001faef \U0001fad2 \U00020000 \U00031350"]
GO = {"a\r\nb\rc\n": "a\nb\nc", "\ufeffa\u200bb\u00adc\u202ed": "abcd", "a\x00b\x07c\x1bd": "abcd"}
GO |= {"a\u2028b\u2029c\x0cd\x85e": "a\nb\nc\nd\ne", "a\ud800b\udfffc": "abc", "a\ue000b\U000f0000c\U0010fffdd": "abcd"}
GO |= {"a\ufffeb\u0378c": "abc", "　中文 \u00a0": "中文", "中\u200d文": "中文", "wo\u200crd \u200dx": "word x"}
GO |= {"👩\u200d\u200d💻": "👩\u200d💻", "中文 itâ€™s “fine” ï¼Œ ok": "中文 it’s “fine” ， ok"}
# Private-use characters of GB 18030 become standard ones beside Han; elsewhere they are icons, or unknown.
GO |= {"分明\ue82a\ue82a羽林槍": "分明㧐㧐羽林槍", "氏\ue817。\ue864，": "氏𠂉。龻，", "menu \ue82a home": "menu  home"}
GO |= {"王\ue406夹": "王夹"}


@pytest.mark.parametrize(("before", "after"), [*GO.items(), *zip(STAY, STAY, strict=True)])
def test_unwanted_characters_go_and_those_that_mean_something_stay(before: str, after: str) -> None:
    assert repair(before) == after


GOOD = ["It’s a “quote” – really…", "naïve café über señor ©", "你好，世界。这是一个测试。", "Привет, мир"]


@pytest.mark.parametrize("good", [*GOOD, "25 °C, ½, 3 × 4"])
def test_utf8_read_as_windows_1252_is_read_again(good: str) -> None:
    broken = "".join(bytes((byte,)).decode("cp1252", errors="ignore") or chr(byte) for byte in good.encode())
    assert broken != good
    assert repair(broken) == good
    twice = "".join(bytes((byte,)).decode("cp1252", errors="ignore") or chr(byte) for byte in broken.encode())
    assert repair(twice) == good


LOOKS_LIKE_MOJIBAKE = "Un café…” dit-il | « déjà » | “IRMÔ | AMANHÅ | São Paulo, Âme, Ängström | Öl für 3 € | "
LOOKS_LIKE_MOJIBAKE += "Ça va ? À bientôt ! | 中文里的 é 和 … | Ã | â€"


@pytest.mark.parametrize("text", LOOKS_LIKE_MOJIBAKE.split(" | "))
def test_text_that_only_looks_like_mojibake_is_left_alone(text: str) -> None:
    assert mend_mojibake(text) == text


def test_private_use_and_mojibake_stay_when_told() -> None:
    assert repair("a\ue000b", private_use=False) == "a\ue000b"
    assert repair("itâ€™s", mojibake=False) == "itâ€™s"


def test_code_keeps_the_indentation_of_its_first_line() -> None:
    assert repair("\r\n\r\n    a = 1\r\n    b = 2\r\n\r\n", keep_indent=True) == "    a = 1\n    b = 2"
    assert repairing.strip_blank("  \n\n\tx\n ", keep_indent=True) == "\tx"


@settings(max_examples=300, deadline=None)
@given(ANY_TEXT, st.booleans())
@example("â\u200b€™", False)
@example("ä\u00ad\u0085", False)
@example("\u3000Ã©", False)
@example("\u3000\nÃ©\u3000", True)
def test_repairing_twice_is_repairing_once_and_never_lengthens(text: str, keep_indent: bool) -> None:
    once = repair(text, keep_indent=keep_indent)
    assert repair(once, keep_indent=keep_indent) == once
    assert bytes_of(once) <= bytes_of(text)
    once.encode()


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY_TEXT, max_size=5), st.sampled_from(["zh", "code"]))
def test_cleaner_repairs_as_repair_does(texts: list[str], channel: str) -> None:
    config = build_config(channel, EVERY_RULE_OFF, "clean", [])
    for text, done in zip(texts, Cleaner(config, channel).clean(texts), strict=True):
        assert done.text == repair(text, mojibake=channel == "zh", keep_indent=channel == "code")
        assert done.text_bytes == bytes_of(done.text)
        assert done.text_bytes + done.repaired_bytes == bytes_of(text)
        assert done.repaired_bytes >= 0


def test_the_table_of_gb18030_is_that_of_python_where_python_knows_the_character():
    assert len(standard_characters()) == 105
    trails = [trail for trail in range(0x50, 0xA1) if trail != 0x7F]
    for point, trail in zip(range(0xE815, 0xE865), trails, strict=True):
        known = bytes((0xFE, trail)).decode("gb18030")  # an older edition: some of them are still where they were
        assert known in (chr(standard_characters()[point]), chr(point))


def test_private_use_characters_are_counted():
    texts = ["分明\ue82a羽林\ue406槍", "plain", "菜单\uf101\uf102"]
    found = Cleaner(default_config("zh"), "zh").clean(texts)
    assert [each.private_use for each in found] == [{"mapped": 1, "removed": 1}, {}, {"mapped": 0, "removed": 2}]
    assert [each.text for each in found] == ["分明㧐羽林槍", "plain", "菜单"]
    for text, each in zip(texts, found, strict=True):
        assert each.text_bytes + each.repaired_bytes == len(text.encode())
    longer = Cleaner(default_config("zh"), "zh").clean(["氏\ue817氏"])[0]
    assert (longer.text, longer.repaired_bytes) == ("氏𠂉氏", -1)


CODE = planted.python_code(random.Random(1)).strip()
SHEBANG = "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n\n"


LICENCES = ["# Copyright 2020 Some One\n# Licensed under the Apache License, Version 2.0\n\n"]
LICENCES += ["/*\n * Copyright (c) 2019\n */\n", "// SPDX-License-Identifier: MIT\n", "<!-- Copyright me -->\n"]
LICENCES += ["# Copyright me\n\n\n/* MIT License */\n"]
OTHERS = ["# What this is about.\n", '"""Copyright of the text is checked here."""\n', "#include <license.h>\n"]
HEADERS = {
    **dict.fromkeys(LICENCES, ""),
    f"{SHEBANG}# Copyright me\n": SHEBANG,
    **dict(zip(OTHERS, OTHERS, strict=True)),
}


@pytest.mark.parametrize(("header", "kept"), HEADERS.items())
def test_licence_header_is_removed_and_nothing_else(header: str, kept: str) -> None:
    assert without_licence(header + CODE) == kept + CODE
    (done,) = Cleaner(channel="code").clean([header + CODE + "\n"])
    if kept in ("", SHEBANG):
        assert (done.text, done.reason) == (kept + CODE, None)
    assert done.text_bytes + done.repaired_bytes == len((header + CODE).encode()) + 1
    assert Cleaner(channel="code").clean(["# Copyright me\n# All rights reserved\n"])[0].reason == "empty"


def test_generated_files() -> None:
    notices = [
        "# Generated by Django 3.2 on 2021-01-01\n",
        "/* AUTOMATICALLY GENERATED FILE - DO NOT EDIT */\nint x;\n",
    ]
    others = ["\n" * 30 + "# Generated by hand\n", "text = 'generated by a program'\n", ""]
    for notice in (*notices, "<!-- 本文件自动生成 -->\n", *others):
        assert (notice, is_generated(notice + CODE)) == (notice, notice not in others)
