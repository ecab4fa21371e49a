"""A small workspace that was made by typing every verb of the journey."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero2all.cli import main
from zero2all.cli.parser import Parser

TINY = [
    *("--train.name", "tiny", "--train.steps", "4", "--train.tokens_per_step", "128"),
    *("--resilience.supervise", "false"),
    *("--train.micro_batch_samples", "2", "--data.seq_len", "32", "--data.mixture", "{en: 1, zh: 1}"),
    *("--model.hidden_size", "32", "--model.intermediate_size", "64", "--model.heads", "4"),
    *("--model.max_seq_len", "64", "--schedule.warmup_steps", "1", "--validation.tokens_per_source", "256"),
    *("--parallel.device", "cpu", "--checkpoint.every_steps", "2"),
]


def parsers(parser: Parser) -> Iterator[Parser]:
    """A parser and all below it."""
    yield parser
    for verb in parser.verbs.values():
        yield from parsers(verb)


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Overrides that make the quickstart preset a run of a second, named `tiny`."""
    return TINY


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files in two formats: 150 English-like documents as JSON lines, 100 Chinese ones as one JSON array."""
    folder = tmp_path_factory.mktemp("raw")
    rng = random.Random(0)
    syllables = ["ka", "lo", "mi", "ter", "vun", "es", "or", "pi", "shan", "dre"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(200)]
    # Cleaning drops Chinese without 的, 是 or 在 and characters that never stand together, so these are real words.
    pairs = re.findall("..", "我们他们自己什么没有知道时候可以这个因为所以现在问题工作学生老师朋友先生")
    characters = [*pairs, *"的是在了" * 3]
    english = [json.dumps({"text": " ".join(rng.choices(words, k=40))}) for _ in range(150)]
    chinese = [{"content": "".join(rng.choices(characters, k=36))} for _ in range(100)]
    (folder / "en.jsonl").write_text("\n".join(english), encoding="utf-8")
    (folder / "zh.json").write_text(json.dumps(chinese, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def journey(raw: Path, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with corpus, tokenizer, packed data and the run `tiny`. Only read it; `copy` is yours to change."""
    work = tmp_path_factory.mktemp("journey") / "work"
    commands = [
        ["corpus", "build", f"en={raw / 'en.jsonl'}:en", f"zh={raw / 'zh.json'}", "--valid-share", "0.1"],
        ["tokenizer", "train", "--vocab-size", "400"],
        ["pack"],
        ["train", "quickstart", *tiny],
    ]
    for command in commands:
        assert main([*command, "--work", str(work)]) == 0
    return work


@pytest.fixture
def copy(journey: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(journey, tmp_path / "copy"))
