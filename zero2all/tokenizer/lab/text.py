"""The text that tokenizers are judged on: documents of the corpus by channel, and fixed texts for the hard cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero2all.common.errors import BadInputError
from zero2all.common.records import corpus_sources, iter_records, text_template, training_text
from zero2all.tokenizer.text import well_formed

EXCERPT_CHARACTERS = 280
EXCERPTS_PER_CHANNEL = 2

NUMBERS = (
    "7 42 365 1024 2026 10086 65536 299792458 3.14159265 0.001 1,234,567.89 -40 100% 6.02e23 1/3 "
    "2026-11-15 08:30:00 192.168.0.1 +86-10-12345678 v2.13.0 ２０２６年 第十二章 一百二十三"
)
CODE = '''class Counter:
    """Count things by name."""

    def __init__(self, start: int = 0) -> None:
        self.counts: dict[str, int] = {}
        self.start = start

    def add(self, name: str, amount: int = 1) -> int:
        if name not in self.counts:
            self.counts[name] = self.start
        for _ in range(amount):
            self.counts[name] += 1
        return self.counts[name]


async function load(url) {
  const reply = await fetch(url, { headers: { "Accept": "application/json" } });
  if (!reply.ok) {
    throw new Error(`HTTP ${reply.status}`);
  }
  return (await reply.json()).items.map((item) => item.id);
}
'''
INDENTATION = "".join(f"{' ' * width}x\n" for width in range(0, 33, 2)) + "".join(
    f"{chr(9) * n}x\n" for n in range(1, 7)
)
MIXED = "用Python写一个GPT-4级别的LLM，需要多少GPU？About 1,024块H100，约$30,000,000。👩‍🔬 naïve café — “引号”……"

FIXED_TEXTS = {"numbers": NUMBERS, "code": CODE, "indentation": INDENTATION, "mixed": MIXED}
"""Made for the purpose: held-out text may have no code and few numbers."""


@dataclass(frozen=True)
class EvalText:
    """Documents by channel, well-formed."""

    split: str
    channels: dict[str, list[str]]

    @property
    def documents(self) -> list[str]:
        """All documents."""
        return [text for texts in self.channels.values() for text in texts]

    def excerpts(self) -> Iterator[tuple[str, str]]:
        """Title and beginning of some documents of each channel, then the fixed texts: what the page shows cut up."""
        for channel, texts in self.channels.items():
            step = max(1, len(texts) // EXCERPTS_PER_CHANNEL)
            for number, text in enumerate(texts[::step][:EXCERPTS_PER_CHANNEL], 1):
                yield f"{channel}, document {1 + (number - 1) * step}", _beginning(text)
        for name, text in FIXED_TEXTS.items():
            yield name, _beginning(text)


def held_out_text(corpus: Path, split: str, limit_bytes: int) -> EvalText:
    """The first documents of every source's split, in equal shares of bytes; what short ones leave is not given on."""
    sources = corpus_sources(corpus)
    channels: dict[str, list[str]] = {}
    for name, manifest in sources.items():
        left = limit_bytes // len(sources)
        for record in iter_records(corpus, name, split):
            text = well_formed(training_text(record, text_template(manifest)))
            left -= len(text.encode())
            if left < 0 and channels.get(manifest["channel"]):
                break
            channels.setdefault(manifest["channel"], []).append(text)
    if not channels:
        raise BadInputError(
            f"The {split} split of the corpus in {corpus} has no documents. Build the corpus with a larger "
            "--valid-share, or measure on training text with --split train."
        )
    return EvalText(split, channels)


def _beginning(text: str) -> str:
    if len(text) <= EXCERPT_CHARACTERS:
        return text
    cut = text[:EXCERPT_CHARACTERS]
    return cut[: cut.rfind("\n")] if cut.rfind("\n") > EXCERPT_CHARACTERS // 2 else cut
