"""A whole small workspace, from raw text to a trained run, made once for all tests that only read it. Properties
(hypothesis) are tried on the same examples in every run; `HYPOTHESIS_PROFILE=random` looks for new ones."""

import gc
import itertools
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.bigram import bigram, border_tokenizer, logits, speller  # noqa: F401  (fixtures)
from tests.browser import launched
from tests.command_line import z2a, z2a_without_rights  # noqa: F401  (fixtures)
from tests.processes import Z2A, Program, Start, WarmProcess
from zero2all.common.engine import EngineConfig
from zero2all.common.progress import show_log
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config import RunConfig, config_from_values
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.infer.load import LoadedModel, load_run
from zero2all.packed.writer import pack_corpus
from zero2all.tokenizer.stage import train_on_corpus
from zero2all.train.run import train

# How long an example takes says something about the machine only.
SLOW_IS_FINE = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", derandomize=True, **SLOW_IS_FINE)
hypothesis.settings.register_profile("random", **SLOW_IS_FINE)
os.environ["Z2A_LANG"] = "en"  # tests read English, whatever the locale of the machine
show_log()  # as z2a does
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

LONG_FILES = (
    *("track/board/test_page.py", "ops/kernels/test_softmax_epilogue.py", "train/test_train_guards.py"),
    *("quickstart/test_pipeline.py", "train/test_train_exact.py", "corpus/test_corpus_engine.py"),
    *("cli/test_cli_train.py", "cli/test_cli_journey.py", "track/test_mirror.py", "test_doors.py"),
    *("train/test_train_resume.py", "track/board/test_accessibility.py", "train/test_trainer.py"),
    *("corpus/test_corpus_build.py", "train/test_train_data.py", "train/test_train_chaos.py", "test_exchange.py"),
    *("serve/test_page.py", "parallel/test_parallel_like_one.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, or the last of them runs while the other workers have nothing to do."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Modules and collected tests stay: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


CAPITALS = {
    "zh": {"中国": "北京", "法国": "巴黎", "日本": "东京", "英国": "伦敦", "德国": "柏林"},
    "en": {"China": "Beijing", "France": "Paris", "Japan": "Tokyo", "Britain": "London", "Germany": "Berlin"},
}
SENTENCES = {
    "zh": ("{0}的首都是{1}。", "我知道{0}的首都是{1}。", "{1}在{0}。", "答案是{1}。"),
    "en": ("The capital of {0} is {1}. ", "I know that {1} is in {0}. ", "The answer is {1}. "),
}


@pytest.fixture(scope="session")
def tiny_config() -> RunConfig:
    """Two layers, 64 wide, 30 steps: seconds on one core."""
    shape = {"hidden_size": 64, "intermediate_size": 160, "layers": 2, "heads": 4, "kv_heads": 2}
    return config_from_values(
        {
            "tokenizer": {"vocab_size": 420, "max_piece_bytes": 12},
            "data": {"seq_len": 64},
            "model": {"max_seq_len": 128, **shape},
            "parallel": {"device": "cpu", "cpu_threads": 1},
            "optim": {"lr_max": 5e-3},
            "schedule": {"warmup_steps": 5},
            "train": {"name": "tiny", "steps": 30, "tokens_per_step": 1024, "micro_batch_samples": 16},
            "checkpoint": {"every_steps": 15},
            "resilience": {"supervise": False},
            "validation": {"every_steps": 0, "tokens_per_source": 256},
        },
        "of the tests",
    )


@pytest.fixture(scope="session")
def trained_workspace(tmp_path_factory: pytest.TempPathFactory, tiny_config: RunConfig) -> Workspace:
    """Corpus, tokenizer, packed data and the run `tiny` with checkpoints at steps 15 and 30. Copy it to change it."""
    root = tmp_path_factory.mktemp("trained")
    workspace = open_workspace(root / "work", create=True)
    sources = [Source(channel, _write_raw(root / f"{channel}.jsonl", channel), channel) for channel in CAPITALS]
    here = EngineConfig(workers=1)  # worker processes would take longer to start than this text to read
    build_corpus(workspace.corpus, sources, BuildOptions(valid_share=0.1), here)
    train_on_corpus(workspace.corpus, workspace.tokenizer, tiny_config.tokenizer)
    pack_corpus(workspace.corpus, workspace.tokenizer, workspace.packed, engine=here)
    train(tiny_config, workspace, say=lambda _: None)
    return workspace


@pytest.fixture(scope="session")
def trained(trained_workspace: Workspace) -> LoadedModel:
    """The model of that run after its last step."""
    return load_run(trained_workspace, "tiny")


def _write_raw(path: Path, channel: str) -> Path:
    """150 documents of true sentences in random order."""
    rng = random.Random(channel)
    pairs = itertools.product(SENTENCES[channel], CAPITALS[channel].items())
    sentences = [sentence.format(*names) for sentence, names in pairs]
    texts = ["".join(rng.choices(sentences, k=rng.randint(4, 12))) for _ in range(150)]
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests of pages."""
    with launched() as chromium:
        yield chromium


@pytest.fixture(params=["en-US", "zh-CN"])
def locale(request: pytest.FixtureRequest) -> str:
    """The languages that pages have."""
    return str(request.param)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmProcess]:
    process = WarmProcess()
    yield process
    process.process.communicate()


@pytest.fixture
def start(warm: WarmProcess, tmp_path: Path) -> Iterator[Start]:
    """Start `z2a` with these words, or other code; what is still running at the end of the test is killed."""
    started: list[Program] = []

    def run(*words: object, code: str = Z2A) -> Program:
        program = Program(warm, code, [str(word) for word in words], tmp_path / f"output-{len(started)}.txt")
        started.append(program)
        return program

    yield run
    for program in started:
        program.signal(signal.SIGKILL)
        program.wait()
