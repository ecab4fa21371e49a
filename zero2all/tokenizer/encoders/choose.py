"""Chooses which encoder encodes, says why, and checks what it returns.

`auto` ranks the encoders by the speed expected on text like the sample and takes the first that runs here and agrees
with the reference. A named one that cannot run, or that differs, is replaced by `auto` and the reason is given, or,
under `strict`, is an error. The ranking uses fixed speeds, not a clock, so that the same text gives the same choice.

The comparison of an encoder with the reference, on real text and on strings made to be difficult.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero2all.common.errors import UsageError, UserError
from zero2all.tokenizer.encoders.kinds import (
    ENCODER_NAMES,
    KINDS,
    REFERENCE,
    EncodedBatch,
    EncoderConfig,
    EncoderKind,
    EncoderName,
    RawEncoder,
    joined,
)
from zero2all.tokenizer.encoders.tables import NotSupported
from zero2all.tokenizer.load import Tokenizer
from zero2all.tokenizer.text import well_formed

LONG_TEXT_CHARACTERS = 1 << 17
"""Longer texts go to an encoder whose time and memory are proportional to the length: for a line of 100 MB without a
space, ours needs 0.3 GB beside the text, `tokenizers` 270 bytes a token."""
SMALL_TEXT_BYTES = 4_000_000
"""`auto` stays with the reference for less text than this: loading and checking another encoder would take longer."""


@dataclass(frozen=True)
class EncoderChoice:
    """What was asked, what was taken, why, and what it was compared with the reference on. Goes into the manifest."""

    asked: EncoderName
    got: EncoderName
    reason: str
    parity: Parity | None
    """None where the reference itself encodes."""


class Encoder:
    """An encoder that was chosen. Texts may be anything that Python calls a string."""

    def __init__(self, tokenizer: Tokenizer, raw: RawEncoder, choice: EncoderChoice, threads: int | None) -> None:
        self.choice = choice
        self._tokenizer, self._raw, self._threads = tokenizer, raw, threads
        self._raw_for_long: RawEncoder | None = raw if KINDS[choice.got].long_texts else None
        self._is_control = control_mask(tokenizer)

    @property
    def name(self) -> EncoderName:
        """Which one it is."""
        return self.choice.got

    @property
    def reason(self) -> str:
        """Why it was chosen."""
        return self.choice.reason

    def encode_batch(self, texts: Sequence[str]) -> EncodedBatch:
        """The ids of every text, none of them a control id. Lone surrogates count as U+FFFD."""
        whole = [well_formed(text) for text in texts]
        if max(map(len, whole), default=0) <= LONG_TEXT_CHARACTERS:
            batch = self._raw.encode(whole)
        else:
            batch = joined([self._raw_for(part).encode(part) for part in _runs_by_length(whole)])
        if forbidden_id(batch, self._is_control) is not None:
            raise ParityError(
                f"The encoder {self.name} gave a control id for a text. Nothing was written. Use another one "
                f"(--encoder {REFERENCE}) and report this bug: text must never produce a control token."
            )
        return batch

    def _raw_for(self, texts: Sequence[str]) -> RawEncoder:
        if len(texts[0]) <= LONG_TEXT_CHARACTERS:
            return self._raw
        if self._raw_for_long is None:
            try:
                self._raw_for_long = KINDS["numba"].open(self._tokenizer, self._threads)
                check_parity(self._raw_for_long, self._tokenizer, [])
            except (NotSupported, ParityError):  # then the reference takes them, at whatever cost
                self._raw_for_long = KINDS[REFERENCE].open(self._tokenizer, self._threads)
        return self._raw_for_long


def open_encoder(
    tokenizer: Tokenizer, config: EncoderConfig | None = None, sample: Sequence[str] = (), text_bytes: int | None = None
) -> Encoder:
    """The encoder for this tokenizer, checked against the reference on `sample` and on hard strings.

    `text_bytes` is how much there will be to encode, where that is known.
    """
    config = config or EncoderConfig()
    passed_over: list[str] = []
    for kind, why in _candidates(config, sample, text_bytes):
        try:
            raw = kind.open(tokenizer, config.threads)
            parity = None if kind.name == REFERENCE else check_parity(raw, tokenizer, sample)
        except (NotSupported, ParityError) as problem:
            if config.strict and kind.name == config.name:
                raise UsageError(
                    f"The encoder {kind.name} cannot be used: {problem}. Choose another one "
                    f"({', '.join(ENCODER_NAMES)}), or leave --strict-encoder out to fall back."
                ) from problem
            passed_over.append(f"{kind.name}: {problem}")
            continue
        reason = "; ".join([why, *(f"skipped {problem}" for problem in passed_over)])
        return Encoder(tokenizer, raw, EncoderChoice(config.name, kind.name, reason, parity), config.threads)
    raise AssertionError("unreachable: the reference always runs")


def _candidates(config: EncoderConfig, sample: Sequence[str], text_bytes: int | None) -> list[tuple[EncoderKind, str]]:
    """Encoders in the order in which to try them, each with the reason if it is the one."""
    named = [] if config.name == "auto" else [(KINDS[config.name], "as asked")]
    if config.name == REFERENCE:
        return named
    if not named and text_bytes is not None and text_bytes < SMALL_TEXT_BYTES:
        return [(KINDS[REFERENCE], "there is too little text for a faster encoder to pay off")]
    ascii_share = _ascii_share(sample)
    ranked = sorted(
        (kind for kind in KINDS.values() if kind.name != config.name),
        key=lambda kind: ascii_share / kind.ascii_speed + (1 - ascii_share) / kind.other_speed,
    )
    why = f"expected to be the fastest on text that is {ascii_share:.0%} ASCII"
    return [*named, *((kind, "the reference" if kind.name == REFERENCE else why) for kind in ranked)]


def _ascii_share(sample: Sequence[str]) -> float:
    """Share of the bytes that are ASCII; a half where there is no sample."""
    total = plain = 0
    for text in sample:
        data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        total += len(data)
        plain += int(np.count_nonzero(data < 128))
    return plain / total if total else 0.5


def _runs_by_length(texts: Sequence[str]) -> list[list[str]]:
    """The texts in order, in lists that are either all short or one long text."""
    runs: list[list[str]] = []
    for text in texts:
        is_long = len(text) > LONG_TEXT_CHARACTERS
        if runs and not is_long and len(runs[-1][0]) <= LONG_TEXT_CHARACTERS:
            runs[-1].append(text)
        else:
            runs.append([text])
    return runs


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
