"""The cleaner as a whole: batches, order, accounting, edits."""

import dataclasses
import random

import pytest

from tests.corpus.clean import planted
from zero2all.corpus.clean.cleaner import Cleaner
from zero2all.corpus.clean.config import Mask, build_config, default_config


def mixed_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    makers = [*planted.GOOD.values(), *(maker for makers in planted.GARBAGE.values() for maker in makers)]
    extras = [
        "",
        "\ufeff\r\n",
        "a\r\nb",
        "it\u200bâ€™s",
        "😀" * 3,
        "▅▅▅ 横线\n" + planted.zh_prose(rng),
        "a@b.cn 13800138000",
    ]
    return [rng.choice(extras) if rng.random() < 0.2 else rng.choice(makers)(rng) for _ in range(count)]


@pytest.mark.parametrize("channel", ["zh", "en", "code", "other"])
def test_a_batch_gives_what_its_texts_give_alone(channel: str) -> None:
    texts = mixed_texts(1, 60)
    config = dataclasses.replace(default_config(channel), mask=Mask(True, True, True, True))
    together = Cleaner(config, channel, measure_kept=True).clean(texts)
    alone = Cleaner(config, channel, measure_kept=True)
    assert together == [alone.clean([text])[0] for text in texts]
    assert together == Cleaner(config, channel, measure_kept=True).clean(texts)
    assert [one.reason for one in together] == [one.reason for one in reversed(alone.clean(texts[::-1]))]


@pytest.mark.parametrize("channel", ["zh", "en", "code"])
def test_bytes_in_are_bytes_of_the_text_and_bytes_removed(channel: str) -> None:
    texts = mixed_texts(2, 80)
    for text, done in zip(texts, Cleaner(channel=channel).clean(texts), strict=True):
        assert done.text_bytes == len(done.text.encode())
        assert done.text_bytes + done.repaired_bytes == len(text.encode("utf-8", "surrogatepass"))
        assert done.repaired_bytes >= 0


def test_many_texts_are_cleaned_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = mixed_texts(3, 50)
    whole = Cleaner(channel="zh").clean(texts)
    monkeypatch.setattr("zero2all.corpus.clean.cleaner.GROUP_CHARS", 1000)
    assert Cleaner(channel="zh").clean(texts) == whole


def test_stamps_run_out_without_harm() -> None:
    texts = mixed_texts(4, 20)
    cleaner = Cleaner(channel="zh", measure_kept=True)
    first = cleaner.clean(texts)
    cleaner._next_stamp = 0xFFFE_FFF0
    assert cleaner.clean(texts) == first
    assert cleaner.clean(texts) == first


def test_boilerplate_lines_go_and_long_lines_stay() -> None:
    prose = planted.zh_prose(random.Random(1))
    notice, kept = "上一篇：某某新闻", "版权所有的说法" + "很长" * 80 + "。"
    (done,) = Cleaner(channel="zh").clean([f"{notice}\n{prose}\n{kept}\n 京ICP备12345号 版权所有 \n"])
    assert done.text == f"{prose}\n{kept}"
    config = build_config("zh", {"boilerplate_lines": {"phrases": ["某某新闻"]}}, "clean", [])
    assert Cleaner(config, "zh").clean([f"{notice}\n{prose}\n版权所有"])[0].text == f"{prose}\n版权所有"
    config = build_config("zh", {"boilerplate_lines": {"on": False}}, "clean", [])
    assert Cleaner(config, "zh").clean([f"{notice}\n{prose}"])[0].text == f"{notice}\n{prose}"


def test_single_drawn_lines_go_and_ornaments_stay() -> None:
    prose = planted.zh_prose(random.Random(1), 60)
    (done,) = Cleaner(channel="zh").clean([f"▅▅▅▅▅▅▅▅\n{prose}\n█ 标题 █"])
    assert (done.text, done.reason) == (f"{prose}\n█ 标题 █", None)


def test_first_failing_rule_in_the_documented_order_is_the_reason() -> None:
    text = "\ufffd" * 50 + "1234567890" * 50
    assert Cleaner(channel="en").clean([text])[0].reason == "replacement_characters"
    config = build_config("en", {"replacement_characters": {"on": False}, "wrong_script": {"on": False}}, "clean", [])
    assert Cleaner(config, "en").clean([text])[0].reason in ("blobs", "digits")
