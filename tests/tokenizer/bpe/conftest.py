from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.bpe.bpe_texts import TextList
from zero2all.tokenizer.bpe.learn import BpeResources, BpeRules, LearnedBpe, learn_bpe


@pytest.fixture
def learn(tmp_path: Path):
    calls = 0

    def run(texts: list[str] | list[TextList], wanted: int, **options: Any) -> LearnedBpe:
        nonlocal calls
        calls += 1
        parts = [TextList(texts)] if not texts or isinstance(texts[0], str) else texts
        options = {"threads": 1, "scratch": tmp_path / f"scratch-{calls}", **options}
        given = ({each.name for each in fields(one)} & set(options) for one in (BpeResources, BpeRules))
        resources, rules = ({name: options.pop(name) for name in names} for names in given)
        return learn_bpe(parts, wanted, BpeResources(**resources), BpeRules(**rules), **options)

    return run
