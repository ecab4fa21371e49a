"""One small tokenizer, trained once on made-up Chinese, English and code, and the text it was trained on."""

import random
from pathlib import Path

import pytest

from zero2all.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

VOCAB_SIZE = 700


def make_texts(documents: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ter", "vun", "es", "or", "pi", "shan", "dre"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(300)]
    characters = [chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(150)]
    kinds = [
        lambda: " ".join(rng.choices(words, k=30)).capitalize() + ". It's 3.14!\n",
        lambda: "".join(rng.choices(characters, k=20)) + ",“" + "".join(rng.choices(characters, k=9)) + "”。\n",
        lambda: f"def {rng.choice(words)}(x):\n    return x + {rng.randint(0, 999)}\n\n",
    ]
    return ["".join(rng.choice(kinds)() for _ in range(5)) for _ in range(documents)]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(documents=200, seed=0)


@pytest.fixture(scope="session")
def folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "tokenizer"
    train_tokenizer(texts, VOCAB_SIZE, folder, "made in conftest")
    return folder


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)
