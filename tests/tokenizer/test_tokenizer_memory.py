"""The refusal of kind hf-bbpe when its memory may not suffice."""

import pytest

from zero2all.common.errors import BadInputError
from zero2all.tokenizer import TokenizerConfig, train_tokenizer
from zero2all.tokenizer.parts import parts_from_texts
from zero2all.tokenizer.train import BASE_BYTES, BYTES_PER_DISTINCT_BYTE, check_memory


def test_what_may_not_fit_is_refused_with_advice(tmp_path):
    parts = parts_from_texts(["x" * 1_000_000], tmp_path)
    needed = BASE_BYTES + 1_000_000 * BYTES_PER_DISTINCT_BYTE
    check_memory(parts, TokenizerConfig(kind="hf-bbpe", max_memory=str(needed)))
    small = TokenizerConfig(kind="hf-bbpe", max_memory=str(needed - 1))
    with pytest.raises(BadInputError, match=r"up to 315.0 MB .* --max-memory allows .*--kind bpe.*--take 99/100"):
        check_memory(parts, small)


def test_refusal_comes_before_training_and_leaves_nothing(tmp_path):
    with pytest.raises(BadInputError, match="may need up to"):
        train_tokenizer(["text"], 1000, tmp_path / "t", "inputs", kind="hf-bbpe", max_memory="100MB")
    assert list(tmp_path.iterdir()) == []
