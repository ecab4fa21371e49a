"""The comparison of an encoder with the reference, on real text and on strings made to be difficult."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero2all.common.errors import UserError
from zero2all.tokenizer.encoders.kinds import EncodedBatch, RawEncoder
from zero2all.tokenizer.load import Tokenizer
from zero2all.tokenizer.text import well_formed

SHOWN_CHARACTERS = 60
RUN = 3000
"""Length of the runs of one character: longer than any encoder's buffers for a word."""
RANDOM_STRINGS = 200
AT_A_TIME = 64


class ParityError(UserError):
    """An encoder and the reference do not agree, or an encoder gave a control id."""

    exit_code = 3


@dataclass(frozen=True)
class Parity:
    """What an encoder was compared on and found equal."""

    documents: int
    hard_strings: int
    tokens: int


def check_parity(encoder: RawEncoder, tokenizer: Tokenizer, texts: Sequence[str]) -> Parity:
    """Compare with the reference on `texts` and on the hard strings; raises ParityError at the first difference."""
    hard = hard_strings(list(tokenizer.control))
    is_control = control_mask(tokenizer)
    tokens = 0
    every = [*hard, *texts]
    for start in range(0, len(every), AT_A_TIME):
        part = [well_formed(text) for text in every[start : start + AT_A_TIME]]
        found = encoder.encode(part)
        bad = forbidden_id(found, is_control)
        if bad is not None:
            raise ParityError(f"it gave the id {bad} for a text, which is a control id or not in this vocabulary")
        for place, (text, ids, expected) in enumerate(zip(part, found, tokenizer.encode_batch(part), strict=True)):
            if len(ids) != len(expected) or not np.array_equal(ids, expected):
                raise ParityError(_difference(text, ids, expected, tokenizer, start + place < len(hard)))
            tokens += len(expected)
    return Parity(len(texts), len(hard), tokens)


def control_mask(tokenizer: Tokenizer) -> np.ndarray:
    """By id: whether it is a control id."""
    mask = np.zeros(tokenizer.vocab_size, bool)
    mask[list(tokenizer.control_ids)] = True
    return mask


def forbidden_id(batch: EncodedBatch, is_control: np.ndarray) -> int | None:
    """An id that no text may give, a control id or one outside the vocabulary; None when all are allowed."""
    ids = batch.ids
    if not len(ids):
        return None
    if int(ids.max()) >= len(is_control):
        return int(ids.max())
    found = is_control[ids]
    return int(ids[found.argmax()]) if found.any() else None


def hard_strings(control: Sequence[str]) -> list[str]:
    """Texts on which encoders go wrong: spelled control tokens, odd Unicode, white space, long runs, random strings."""
    chance = random.Random(2026)
    spelled = [part for name in control for part in (name, f"a{name}b", f" {name}\n", name[:-1], f"{name}{name}")]
    odd = [
        "",
        "\x00",
        "a\x00b\x00\x00",
        "\ufeffBOM",
        "e\u0301 n\u0303 ﬁ Å Å ①②③ Ⅷ ½ ٣٤ १२ 〇",
        "👩‍👩‍👧‍👦🏳️‍🌈🇨🇳 👍🏽",
        "שלום مرحبا สวัสดี नमस्ते 안녕 한 ｶﾅ かな",
        "\u200b\u200d\u2060\u00ad\u202e\ufffd\U0010ffff\U000e0001",
        "𠀀𠀁𪜀𱍐𲎰㐀﨎",
        "it's IT'S 'twas we'Ll they'Re I'Ve 'ſ '’s ''s 's's",
        "  two  spaces   \t\ttabs \u00a0nbsp\u3000ideographic \u2003em\u2028line\u2029para\x85nel\x0b\x0c",
        "line\nline\r\nline\r\r\n\n\n   \n\t\n  end  ",
        "    def f(x):\n        return x ** 2  # 注释\n\n\n",
        "1234567890 3.14159 1,000,000 ２０２６年１１月 -1e-9",
        "。，、！？；：“”‘’（）《》【】…—·～｡､",
        "中文English混排123test测试",
        'http://example.com/a?b=c&d=%E4%BD%A0#x <div class="a">&nbsp;</div>',
    ]
    alphabets = ("aA'sS \n", "的一是不了，。 ", "ab12 \t\r\n'.,!中", " \n\r\t\u3000x")
    mixed = ["".join(chance.choices(alphabet, k=chance.randint(1, 60))) for alphabet in alphabets for _ in range(20)]
    runs = [unit * RUN for unit in ("a", "A", "中", "。", " ", "\n", "\r\n", "\t ", "1", "!", "👍", "ab", "天地玄黄")]
    runs += [f"x{unit * RUN}y" for unit in (" ", "中", "=", "\u0301")]
    wild = [
        "".join(well_formed(chr(chance.choice(_PLANES)(chance))) for _ in range(chance.randint(1, 24)))
        for _ in range(RANDOM_STRINGS)
    ]
    return [*spelled, *odd, *mixed, *runs, *wild]


_PLANES = (
    lambda chance: chance.randrange(0x80),
    lambda chance: chance.randrange(0x3000),
    lambda chance: chance.randrange(0x4E00, 0xA000),
    lambda chance: chance.randrange(0x110000),
)


def _difference(text: str, ids: np.ndarray, expected: Sequence[int], tokenizer: Tokenizer, is_hard: bool) -> str:
    same = 0
    while same < min(len(ids), len(expected)) and int(ids[same]) == expected[same]:
        same += 1
    around = b"".join(map(tokenizer.token_bytes, expected[max(0, same - 3) : same + 6])).decode("utf-8", "replace")
    what = "a hard string" if is_hard else "a document of the sample"
    return (
        f"it differs from the reference on {what} of {len(text):,} characters ({text[:SHOWN_CHARACTERS]!r}…), first at "
        f"token {same:,} near {around!r}: {[int(number) for number in ids[same : same + 4]]} instead of "
        f"{list(expected[same : same + 4])}"
    )
