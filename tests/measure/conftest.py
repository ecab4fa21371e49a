"""A config so small that a row is its imports."""

from pathlib import Path

import pytest

from zero2all.config import RunConfig, load_config

TINY = """
model: {vocab_size: 200, hidden_size: 32, intermediate_size: 64, layers: 1, heads: 4, kv_heads: 2, max_seq_len: 64}
data: {seq_len: 32}
train: {tokens_per_step: 128, micro_batch_samples: 2}
parallel: {device: cpu, cpu_threads: 1}
"""


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> RunConfig:
    return load_config(tiny_path)
