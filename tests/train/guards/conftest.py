"""Packed data of several shards, and the folder of a run over it that nobody had to train."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.conftest import small_config
from zero2all.common.workspace import Workspace
from zero2all.packed.config import DataConfig
from zero2all.packed.mixture import TrainingData, open_training_data
from zero2all.packed.stages import Stage
from zero2all.packed.writer import PackOptions, pack_corpus
from zero2all.track.writer import MetricsWriter
from zero2all.train.saved_config import save_run_config

SEQ_LEN = 32


@pytest.fixture(scope="session")
def sharded_work(shared_work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The small workspace packed into shards of 1,500 tokens. Read only."""
    work = Workspace(tmp_path_factory.mktemp("sharded") / "work")
    shutil.copytree(shared_work.root, work.root)
    shutil.rmtree(work.packed)
    pack_corpus(work.corpus, work.tokenizer, work.packed, PackOptions(shard_tokens=1500, best_fit=(SEQ_LEN, 16)))
    return work


@pytest.fixture
def sharded(sharded_work: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(sharded_work.root, tmp_path / "sharded")
    return Workspace(tmp_path / "sharded")


@pytest.fixture(scope="session")
def open_data() -> Callable[..., TrainingData]:
    """The data of a workspace with two stages: everything at first, then Chinese only, in shorter samples."""

    def opened(work: Workspace, **fields: object) -> TrainingData:
        stages = [Stage("main", 0, None, SEQ_LEN), Stage("late", 400 * SEQ_LEN, {"zh": 1.0}, 16)]
        return open_training_data(work.packed, DataConfig(seq_len=SEQ_LEN, **fields), stages)

    return opened


@pytest.fixture
def run_folder(sharded: Workspace) -> Path:
    """The run `r` of 12 steps over it, of which 6 were logged; from step 9 on a stage of 16 tokens, Chinese only."""
    late = {"name": "late", "from_step": 8, "mixture": {"zh": 1}, "seq_len": 16}
    config = small_config([late], data={"mixture": None}, train={"name": "r", "steps": 12})
    folder = sharded.run("r")
    folder.mkdir(parents=True)
    save_run_config(config, folder)
    metrics = MetricsWriter(folder)
    for step in range(1, 7):
        metrics.log({"loss": 5.0 - step / 10}, step, step * config.train.tokens_per_step)
    metrics.close()
    return folder
