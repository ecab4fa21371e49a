"""A small workspace and a small config to train with."""

import gc
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import WarmProcess
from tests.train.ranks import RankStarter
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import RunConfig, config_from_values, config_yaml
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.packed.writer import pack_corpus
from zero2all.parallel.world import World
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus
from zero2all.train import trainer
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.context import RunContext
from zero2all.train.run import train
from zero2all.train.setup import prepare
from zero2all.train.state import TrainState

SMALL: dict[str, Any] = {
    "model": {
        **{"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1, "max_seq_len": 32},
        **{"residual_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1},
    },
    "data": {"seq_len": 32, "mixture": {"en": 3, "zh": 1}},
    "train": {"name": "run", "steps": 8, "tokens_per_step": 128, "micro_batch_samples": 2},
    "optim": {"lr_max": 0.01},
    "schedule": {"warmup_steps": 3},
    "checkpoint": {"every_steps": 3},
    "validation": {"every_steps": 4, "tokens_per_source": 256},
    "parallel": {"device": "cpu", "cpu_threads": 1},
    # tests/resilience has the supervisor, whose processes import torch anew; test_train_memory.py has the others
    "resilience": {"supervise": False, "memory_every_steps": 0},
}
NO_DROPOUT = {"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}

EARLY_ROLLBACK = {
    **{"spike_window_steps": 8, "spike_min_steps": 8, "spike_sigmas": 2.0, "spike_mads": 3.0},
    **{"rollback_after_spikes": 1, "rollback_margin_steps": 2, "skip_steps_after": 1},
}
"""Guards that go back at the first spike of a run of a few steps."""


def small_config(stages: list[dict[str, Any]] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """SMALL with some fields of some sections changed."""
    values = {name: {**SMALL.get(name, {}), **fields} for name, fields in {**SMALL, **sections}.items()}
    return config_from_values({**values, "stages": stages or []}, "of a test")


@pytest.fixture(scope="session")
def config() -> Callable[..., RunConfig]:
    return small_config


def quiet(_text: str) -> None:
    """For `say`, where a test does not read what a run says."""


def said_by_run(settings: RunConfig, work: Workspace, **options: Any) -> list[str]:
    """What a run says from its start to its end."""
    said: list[str] = []
    train(settings, work, say=said.append, **options)
    return said


def prepared_run(settings: RunConfig, work: Workspace, fresh: bool = False) -> tuple[RunContext, TrainState]:
    """What a run of one process has before its first step."""
    return prepare(settings, work, World(), CheckpointStore(work.run(settings.train.name)), fresh=fresh)


KEEP_ALL = DedupConfig(near="off")
"""So that what these tests train on does not depend on how near copies and the split are found."""


def build_small_corpus(work: Workspace, seed: int = 0) -> None:
    rng = random.Random(seed)
    parts = {"en": ["ka", "lo ", "mi", "ter ", "vun, ", "es. "], "zh": [chr(0x4E00 + n) for n in range(40)]}
    work.raw.mkdir(exist_ok=True)
    sources = []
    for name in ("en", "zh"):
        texts = ["".join(rng.choices(parts[name], k=rng.randint(30, 90))) for _ in range(150)]
        path = work.raw / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append(Source(name, path, name))
    build_corpus(work.corpus, sources, BuildOptions(valid_share=0.15, rules="none", dedup=KEEP_ALL))


@pytest.fixture(scope="session")
def shared_work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Packed data of two channels. Read only: see `work`."""
    work = open_workspace(tmp_path_factory.mktemp("train") / "work", create=True)
    build_small_corpus(work)
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=400))
    pack_corpus(work.corpus, work.tokenizer, work.packed)
    return work


@pytest.fixture
def work(shared_work: Workspace, tmp_path: Path) -> Workspace:
    """A copy of the shared workspace, without runs."""
    shutil.copytree(shared_work.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


@pytest.fixture(scope="module")
def lab(shared_work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace that all tests of a file share; each has runs of its own name."""
    root = tmp_path_factory.mktemp("lab") / "work"
    shutil.copytree(shared_work.root, root)
    return Workspace(root)


@pytest.fixture(scope="module")
def ranks(warm: WarmProcess, lab: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankStarter]:
    """Starts runs of real processes in the lab."""
    starter = RankStarter(warm, lab.root, tmp_path_factory.mktemp("ranks"))
    yield starter
    starter.stop()


@pytest.fixture
def repack() -> Callable[[Workspace, int], None]:
    """Give a workspace other text, packed with the same tokenizer."""

    def change(work: Workspace, seed: int) -> None:
        build_small_corpus(work, seed)
        pack_corpus(work.corpus, work.tokenizer, work.packed)

    return change


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Call something after a step of the runs that follow; a second call replaces the first."""
    train_step = trainer.train_step

    def arrange(step: int, action: Callable[[], object]) -> None:
        def watched(*arguments: Any) -> Any:
            pending = train_step(*arguments)
            if pending.step == step:
                action()
            return pending

        monkeypatch.setattr(trainer, "train_step", watched)

    return arrange


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A training run sets the threads of its process, and collects garbage; here both are pytest's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # or each run looks at every object of pytest, and takes twice as long
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def warmed(warm: WarmProcess) -> None:
    """Started at once, so that it imports while other tests run."""


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:

    def write(**sections: dict[str, Any]) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(config_yaml(small_config(**sections)))
        return path

    return write
