import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planted import cut_documents, measure, plant, stdlib_sources
from benchmarks.shingles import jaccard, shingle_set, units_of
from tests.corpus.dedup.dedup_helpers import changed, en_text, zh_text
from zero2all.corpus.dedup.config import ANCHORS, DedupConfig, jaccard_estimate
from zero2all.corpus.dedup.signatures import describe

CHANNELS = ("zh", "en", "code")
TRICKY = "aZ09_ \t\n\x1c\x1f\x85\xa0éß—“”’。，　ＡＢ！①漢字かなカナ한글🙂𠀀\u2028\u1680\u205f\u202f(){}='\"\\#"


def signatures(texts: list[str], channel: str, config: DedupConfig | None = None) -> np.ndarray:
    rows = describe(texts, channel, config or DedupConfig()).signatures
    assert rows is not None
    return rows


def estimate(first: str, second: str, channel: str) -> float:
    rows = signatures([first, second], channel)
    return jaccard_estimate(int(np.count_nonzero(rows[0] == rows[1])))


def test_signature_of_a_text_does_not_depend_on_its_batch() -> None:
    rng = random.Random(2)
    texts = [zh_text(rng, rng.randint(0, 300)) for _ in range(40)]
    assert (signatures(texts, "zh") == np.concatenate([signatures([text], "zh") for text in texts])).all()
    described = describe(["天地", ""], "zh", DedupConfig(near="off"))
    assert described.signatures is None
    assert described.text_bytes.tolist() == [6, 0]
    assert describe([], "zh", DedupConfig()).digests.shape == (0, 16)
    same, spaced, other = describe(["a  b\n c", " a b c\t", "ab c"], "en", DedupConfig(near="off")).digests.tolist()
    assert same == spaced != other, "a digest ignores white space only"


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=TRICKY, max_size=60), st.text(alphabet=TRICKY, max_size=60), st.sampled_from(CHANNELS))
def test_signatures_are_equal_exactly_when_shingle_sets_are(first: str, second: str, channel: str) -> None:
    rows = signatures([first, second], channel)
    one, two = shingle_set(first, channel), shingle_set(second, channel)
    assert (rows[0].any(), rows[1].any()) == (bool(one), bool(two))
    if one == two:
        assert (rows[0] == rows[1]).all()
    elif one and two:
        assert abs(estimate(first, second, channel) - jaccard(one, two)) < 0.2


@pytest.mark.parametrize("channel", ["en", "code"])
def test_every_character_has_the_class_of_the_definition(channel: str) -> None:
    codes = [*range(0x3400), *range(0x3400, 0x110000, 97)]
    texts = [f"ab{char}cd{char}" for char in map(chr, codes) if not 0xD800 <= ord(char) < 0xE000]
    spelt = [" ".join(units_of(text, DedupConfig().shingle(channel))) for text in texts]
    assert (signatures(texts, channel) == signatures(spelt, channel)).all()


@pytest.mark.parametrize("channel", CHANNELS)
def test_estimate_is_unbiased_for_long_and_short_texts(channel: str) -> None:
    rng = random.Random(5)
    errors = []
    for length in [12, 20, 30, 50, 80, 150, 300, 600, 1200] * 20:
        text = zh_text(rng, length) if channel == "zh" else en_text(rng, length)
        other = changed(text, rng.uniform(0.02, 0.4), rng)
        exact = jaccard(shingle_set(text, channel), shingle_set(other, channel))
        errors.append(estimate(text, other, channel) - exact)
    assert abs(np.mean(errors)) < 0.006
    assert np.std(errors) < 0.035


def test_case_white_space_and_signs_do_not_matter_for_words() -> None:
    assert estimate("Hello, wide  world!\nHow are you?", "hello wide world how are you", "en") == 1
    assert estimate("x = Foo(1)", "x=Foo( 1 )", "code") == 1
    assert estimate("x = Foo(1) + y", "x = foo(1) + y", "code") < 0.7
    assert estimate("天地 玄黄\n宇宙洪荒", "天地玄黄宇宙洪荒", "zh") == 1


def test_texts_shorter_than_a_shingle_have_one_shingle_and_empty_ones_none() -> None:
    config = DedupConfig(character_ngram=5)
    rows = signatures(["", " \n", "天地", "天 地", "天地玄", "地天"], "zh", config)
    assert not rows[0].any()
    assert not rows[1].any()
    assert (rows[2] == rows[3]).all()
    assert np.count_nonzero(rows[2] == rows[4]) < 20
    assert np.count_nonzero(rows[2] == rows[5]) < 20
    assert not signatures(["-----", "。。"], "en").any()


def test_texts_of_one_shingle_are_told_apart() -> None:
    rng = random.Random(3)
    texts = sorted({zh_text(rng, 4).replace("。", "") for _ in range(300)})
    rows = signatures(texts, "zh", DedupConfig(character_ngram=5))
    assert max(np.count_nonzero(rows[at] == row) for at in range(len(rows)) for row in rows[:at]) < 40


WIDE = str.maketrans(",.!?:;()", "，。！？：；（）")
TRADITIONAL = str.maketrans("这个们来时为会说学国对过还没经进么样问题发", "這個們來時為會說學國對過還沒經進麼樣問題發")


def test_width_of_punctuation_and_traditional_characters_do_not_matter() -> None:
    text = "我们来这个国家学习时, 没有经过什么问题; 他说: 还会发现这样的! (对吗?) 进来."
    signs, traditional = text.translate(WIDE), text.translate(TRADITIONAL)
    assert signs != text != traditional
    described = describe([text, signs, traditional, "“引文”……", '"引文"..'], "zh", DedupConfig())
    rows = described.signatures
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])
    assert np.array_equal(rows[3], rows[4])
    assert len(set(described.keys[:3].tolist())) == 1, "held out together"
    assert len({row.tobytes() for row in described.digests}) == 5, "but no exact duplicates"
    wide, plain = (describe([text], "en", DedupConfig()).keys for text in ("Ｈｅｌｌｏ，　１２３", "hello 123"))
    assert np.array_equal(wide, plain)
    code = describe(["x = '這'", "x = '这'"], "code", DedupConfig()).signatures
    assert not np.array_equal(code[0], code[1]), "code is not folded"


def test_keys_are_the_same_with_and_without_signatures_and_never_the_same_for_all_signs() -> None:
    texts = ["hello there", "你好，世界", "----", "....", ""]
    near, plain = describe(texts, "zh", DedupConfig()), describe(texts, "zh", DedupConfig(near="off"))
    assert near.keys.tolist() == plain.keys.tolist()
    assert len(set(near.keys.tolist())) == 5


@pytest.mark.parametrize("channel", ["zh", "code"])
def test_planted_copies_are_found_and_nothing_else(channel: str, tmp_path: Path) -> None:
    rng = random.Random(11)
    made = [zh_text(rng, 700) for _ in range(40)]
    bases = cut_documents(stdlib_sources()[:200], channel, 40) if channel == "code" else made
    quality = measure(plant(bases, channel, copies=3), channel, tmp_path)
    assert quality.similar_copies >= 25
    assert quality.recall >= 0.95, quality
    assert quality.false_positive_share <= 0.005, quality


@pytest.mark.parametrize("channel", CHANNELS)
def test_texts_with_a_common_run_have_a_common_anchor_and_others_have_none(channel: str) -> None:
    rng = random.Random(8)
    gram, window = ANCHORS[DedupConfig().shingle(channel).unit]
    for _ in range(200):
        run, *others = (text_of(channel, rng, gram + window - 1) for _ in range(5))
        texts = [" ".join((one, run, two)) for one, two in (others[:2], others[2:])]
        one, two, three = (set(anchors_of(text, channel)) for text in (*texts, " ".join(others[2:])))
        assert one & two
        assert not one & three


def text_of(channel: str, rng: random.Random, units: int) -> str:
    text = zh_text(rng, units).replace("。", "天") if channel == "zh" else en_text(rng, units)
    return text[:units] if channel == "zh" else text


def anchors_of(text: str, channel: str) -> list[int]:
    return describe([text], channel, DedupConfig()).anchors.tolist()
