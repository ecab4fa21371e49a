"""The cleaner as a whole: batches, order, accounting, edits; its masks, which leak nothing; its config."""

import dataclasses
import pickle
import random

import numpy as np
import pytest

from tests.corpus.clean import planted
from zero2all.common.schema import Problem, build, field_docs
from zero2all.corpus.clean.cleaner import Cleaner
from zero2all.corpus.clean.config import EDITS, RULES, CleanConfig, Mask, build_config, default_config
from zero2all.corpus.clean.mask import MARKS, mask_text
from zero2all.corpus.clean.rules import JUDGES, measures_of


def mixed_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    makers = [*planted.GOOD.values(), *(maker for makers in planted.GARBAGE.values() for maker in makers)]
    extras = ["", "\ufeff\r\n", "a\r\nb", "it\u200bâ€™s", "😀" * 3, "a@b.cn 13800138000"]
    extras.append("▅▅▅ 横线\n" + planted.zh_prose(rng))
    return [rng.choice(extras) if rng.random() < 0.2 else rng.choice(makers)(rng) for _ in range(count)]


@pytest.mark.parametrize("channel", ["zh", "en", "code", "other"])
def test_a_batch_gives_what_its_texts_give_alone_and_in_groups(channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = mixed_texts(1, 60)
    config = dataclasses.replace(default_config(channel), mask=ALL)
    together = Cleaner(config, channel, measure_kept=True).clean(texts)
    alone = Cleaner(config, channel, measure_kept=True)
    assert together == [alone.clean([text])[0] for text in texts]
    assert [one.reason for one in together] == [one.reason for one in reversed(alone.clean(texts[::-1]))]
    monkeypatch.setattr("zero2all.corpus.clean.cleaner.GROUP_CHARS", 1000)
    assert together == Cleaner(config, channel, measure_kept=True).clean(texts)


@pytest.mark.parametrize("channel", ["zh", "en", "code"])
def test_bytes_in_are_bytes_of_the_text_and_bytes_removed(channel: str) -> None:
    texts = mixed_texts(2, 80)
    for text, done in zip(texts, Cleaner(channel=channel).clean(texts), strict=True):
        assert done.text_bytes == len(done.text.encode())
        assert done.text_bytes + done.repaired_bytes == len(text.encode("utf-8", "surrogatepass"))
        assert done.repaired_bytes >= 0


def test_stamps_run_out_without_harm() -> None:
    texts = mixed_texts(4, 20)
    cleaner = Cleaner(channel="zh", measure_kept=True)
    first = cleaner.clean(texts)
    cleaner._next_stamp = 0xFFFE_FFF0
    assert [cleaner.clean(texts), cleaner.clean(texts)] == [first, first]


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


ALL = Mask(**{field.name: True for field in dataclasses.fields(Mask)})
# Made up for this test: random letters and digits in the shapes of the services' keys.
SECRETS = {
    "emails": ["zhang.san+news@mail.example.com.cn", "a@b.co", "X_Y%1@sub-domain.example.org"],
    "phones": [
        "13800138000", "138-0013-8000", "138 0013 8000", "+86 13800138000", "010-62345678", "(0755) 26345678",
        "+44 20 7946 0958", "(415) 555-0132", "415-555-0132", "400-812-3456",
    ],
    "bank_cards": ["4111 1111 1111 1111", "6222 0212 3456 7890 128", "378282246310005", "5555-5555-5555-4444"],
    "ip_addresses": ["93.184.216.34", "113.96.232.215", "2400:da00::6666", "2606:4700:10:0:0:0:6816:1a2b"],
    "addresses": ["浙江省杭州市西湖区文三路478号3幢2单元501室", "朝阳区建国路89号", "学院路37号6号楼302室"],
    "id_numbers": ["11010519491231002X", "11010519491231002x", "440524188001010014"],
    "keys": [
        "AKIA" + "Q3EXAMPLE7ABCDEF", "ASIA" + "QXEXAMPLEYABCDEF", "LTAI" + "AbCdEfGhIjKlMnOpQrSt",
        "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8", "sk-" + "abc123DEF456ghi789JKL012mno",
        "AIza" + "Sy0a1b2c3d4e5f6g7h8i9j0k1l2m3n4o5p6", "xoxb-" + "123456789012-abcdefABCDEF",
        "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789", "LTAI" + "5tAbCdEfGh1234567890",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7x1\nq2w3e4r5t6y7u8i9o0\n-----END RSA PRIVATE KEY-----",
    ],
}  # fmt: skip
INNOCENT = [
    "version 1.2.3.4, 2024-01-02 10:20:30, 1638123456789, 0x1234567890abcdef",
    "pip install package@1.2.3 and @decorator and user@host",
    "110105194912310021 is not a valid number, nor is 123456789012345678",
    "https://example.com/a/very-long-path-with-1-digit/and_more_words_here",
    "test_utf8_encoding_of_long_names_1 = password_from_environment_variable_2",
    "3.14159265358979323846, 0.13800138000, sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "A PEM file opens with -----BEGIN RSA PRIVATE KEY----- and then there are lines of base64.",
    "v93.184.216.34, Version: 45.67.89.10, 2.31.1.4, 192.168.100.200, 127.0.0.1, 999.1.1.1, std::vector<int>::size",
    "4111 1111 1111 1112, 1234567812345670, 订单 4000123412341235",
    "第3号文件，2号线，沿着这条路走一号门，今天是5号，十号楼",
    "第 10086 号，编号 20240101-0001，价格 1,234,567.89 元",
]


@pytest.mark.parametrize(("kind", "secret"), [(kind, each) for kind, secrets in SECRETS.items() for each in secrets])
def test_secret_is_masked_wherever_it_stands(kind: str, secret: str) -> None:
    for before, after in (("", ""), ("联系：", "。谢谢"), ("call (", ") now"), ("x " * 500, "\ny "), ('"', '"')):
        text, counts = mask_text(before + secret + after, ALL)
        assert text == before + MARKS[kind] + after
        assert counts == {kind: 1}
        assert len(MARKS[kind]) <= len(secret)
        assert mask_text(text, ALL) == (text, {})


@pytest.mark.parametrize("kind", SECRETS)
def test_only_the_chosen_kinds_are_masked(kind: str) -> None:
    text = "\n".join(secret for secrets in SECRETS.values() for secret in secrets)
    masked, counts = mask_text(text, Mask(**{kind: True}))
    assert counts == {kind: len(SECRETS[kind])}
    for other, secrets in SECRETS.items():
        for secret in secrets:
            assert (secret in masked) == (other != kind)


@pytest.mark.parametrize("text", INNOCENT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask_text(text, ALL) == (text, {})


def test_assigned_secrets_keep_their_name_and_a_private_key_that_is_cut_off_is_masked_to_its_end() -> None:
    text = 'api_key = "a1b2c3d4e5f6g7h8i9j0"\nPASSWORD: hunter2hunter2hunter2\ntoken=Zm9vYmFyMTIzNDU2Nzg5MA=='
    assert mask_text(text, ALL) == ('api_key = "<key>"\nPASSWORD: <key>\ntoken=<key>', {"keys": 3})
    text = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nBKcwggSjAgEAAoIBAQC7\nThen prose goes on."
    assert mask_text(text, ALL) == ("<key>\nThen prose goes on.", {"keys": 1})


@pytest.mark.parametrize("channel", ["zh", "code"])
def test_cleaner_masks_kept_and_dropped_texts_and_counts(channel: str) -> None:
    rng = random.Random(4)
    config = dataclasses.replace(default_config(channel), mask=ALL)
    good = planted.GOOD[channel](rng)
    garbage = planted.GARBAGE[channel][0](rng)
    every = [secret for secrets in SECRETS.values() for secret in secrets]
    texts = [f"{text}\n\n{secret}\n" for text in (good, garbage) for secret in every]
    for text, secret, done in zip(texts, every * 2, Cleaner(config, channel).clean(texts), strict=True):
        assert secret not in done.text
        assert sum(done.masked.values()) == 1
        assert done.text_bytes == len(done.text.encode())
        assert done.text_bytes + done.repaired_bytes == len(text.encode())
        assert secret not in repr(done)
    plain = Cleaner(channel=channel).clean(texts)
    assert all(secret in done.text and not done.masked for secret, done in zip(every * 2, plain, strict=True))


def test_titles_are_repaired_and_masked() -> None:
    masking = Cleaner(dataclasses.replace(default_config("en"), mask=ALL), "en")
    assert masking.tidy("\ufeff Ask a@b.org\r\n") == "Ask <mail>"
    assert Cleaner(channel="en").tidy(" Ask\u200b a@b.org") == "Ask a@b.org"


def test_channels_have_their_own_defaults_which_survive_the_way_through_a_mapping() -> None:
    scripts = {channel: default_config(channel).wrong_script.script for channel in ("zh", "en", "code")}
    assert scripts == {"zh": "han", "en": "latin", "code": "ascii"}
    for rule, channels in (("licence_headers", ["code"]), ("long_lines", ["code"]), ("wrong_script", list(scripts))):
        on = [each for each in ("zh", "en", "code", "klingon") if getattr(default_config(each), rule).on]
        assert (rule, on) == (rule, channels)
    for channel in ("zh", "en", "code", "other"):
        problems: list[Problem] = []
        default = default_config(channel)
        assert build_config(channel, None, "clean", problems) == default
        assert build(CleanConfig, dataclasses.asdict(default), "clean", problems) == default
        assert problems == []
        assert pickle.loads(pickle.dumps(default)) == default


def test_values_go_on_top_of_the_defaults_of_the_channel() -> None:
    problems: list[Problem] = []
    config = build_config("zh", {"digits": {"max_share": "0.5"}, "mask": {"phones": True}}, "clean.zh", problems)
    assert problems == []
    assert config is not None
    assert config.digits == dataclasses.replace(default_config("zh").digits, max_share=0.5)
    assert config.mask.phones
    assert config.wrong_script == default_config("zh").wrong_script


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"digit": {"on": False}, "symbols": {"max_share": 2}}, ["clean.digit", "clean.symbols.max_share"]),
        ({"urls": {"max_shar": 1}, "emails": 3}, ["clean.urls.max_shar", "clean.emails"]),
        ({"empty": {"on": False}}, ["clean.empty.on"]),
        ({"too_long": {"on": True, "max_chars": 5}}, ["clean.too_long.max_chars"]),
        ({"boilerplate_lines": {"phrases": ["ok phrase", "x"]}}, ["clean.boilerplate_lines.phrases[1]"]),
        ([], ["clean"]),
    ],
)
def test_every_problem_is_found_at_once(values: object, fields: list[str]) -> None:
    problems: list[Problem] = []
    build_config("zh", values, "clean", problems)  # type: ignore[arg-type]
    assert [problem.field for problem in problems] == fields
    assert "digit" not in values or "Did you mean `digits`?" in str(problems[0])


def test_every_rule_and_setting_is_documented() -> None:
    assert list(RULES) == [field.name for field in dataclasses.fields(CleanConfig)]
    assert all(RULES.values())
    assert set(EDITS) < set(RULES)
    for name in RULES:
        section = type(getattr(default_config("en"), name))
        assert {field.name for field in dataclasses.fields(section)} == set(field_docs(section))


def test_measures_of_a_rule_are_those_that_judge_it() -> None:
    """What `z2a corpus show --dropped` prints beside a sample."""
    known = measures_of(np.zeros((1, 100)), default_config("zh"))
    assert [name for name, rule in JUDGES.items() if not rule.compared] == ["empty"]
    assert {measure for rule in JUDGES.values() for measure in rule.compared.split()} <= set(known)
