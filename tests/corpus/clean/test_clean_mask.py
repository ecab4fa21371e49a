"""Masks: what is found, what is not, and that nothing leaks."""

import dataclasses
import random

import pytest

from tests.corpus.clean import planted
from zero2all.corpus.clean import Cleaner, default_config
from zero2all.corpus.clean.config import Mask
from zero2all.corpus.clean.mask import MARKS, is_id_number, mask_text

ALL = Mask(emails=True, phones=True, id_numbers=True, keys=True)
# Made up for this test: random letters and digits in the shapes of the services' keys.
SECRETS = {
    "emails": ["zhang.san+news@mail.example.com.cn", "a@b.co", "X_Y%1@sub-domain.example.org"],
    "phones": [
        "13800138000", "138-0013-8000", "138 0013 8000", "+86 13800138000", "010-62345678", "(0755) 26345678",
        "+44 20 7946 0958", "(415) 555-0132", "415-555-0132", "400-812-3456",
    ],
    "id_numbers": ["11010519491231002X", "440524188001010014"],
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
    "第 10086 号，编号 20240101-0001，价格 1,234,567.89 元",
]


@pytest.mark.parametrize(
    ("kind", "secret"), [(kind, secret) for kind, secrets in SECRETS.items() for secret in secrets]
)
def test_secret_is_masked_wherever_it_stands(kind: str, secret: str) -> None:
    for before, after in (
        ("", ""),
        ("联系：", "。谢谢"),
        ("call (", ") now"),
        ("x " * 500, "\n" + "y " * 500),
        ('"', '"'),
    ):
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


def test_assigned_secrets_keep_their_name() -> None:
    text = 'api_key = "a1b2c3d4e5f6g7h8i9j0"\nPASSWORD: hunter2hunter2hunter2\ntoken=Zm9vYmFyMTIzNDU2Nzg5MA=='
    masked, counts = mask_text(text, ALL)
    assert masked == 'api_key = "<key>"\nPASSWORD: <key>\ntoken=<key>'
    assert counts == {"keys": 3}


def test_private_key_that_is_cut_off_is_masked_to_its_end() -> None:
    text = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nBKcwggSjAgEAAoIBAQC7\nThen prose goes on."
    assert mask_text(text, ALL) == ("<key>\nThen prose goes on.", {"keys": 1})


def test_check_digit_of_id_numbers() -> None:
    assert is_id_number("11010519491231002X")
    assert is_id_number("11010519491231002x")
    assert not is_id_number("110105194912310021")


@pytest.mark.parametrize("channel", ["zh", "en", "code"])
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
    config = dataclasses.replace(default_config("en"), mask=ALL)
    assert Cleaner(config, "en").tidy("\ufeff Ask a@b.org\r\n") == "Ask <mail>"
    assert Cleaner(channel="en").tidy(" Ask\u200b a@b.org") == "Ask a@b.org"
