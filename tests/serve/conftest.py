"""A real model with random weights behind a real server on a real port."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import openai
import pytest
import torch

from tests.infer.tiny import random_model
from tests.waiting import wait_until
from zero2all.infer.engine import EngineSettings
from zero2all.infer.load import LoadedModel
from zero2all.model.config import ModelConfig
from zero2all.serve.model import ServedModel
from zero2all.serve.server import ModelServer, ServeOptions
from zero2all.tokenizer import load_tokenizer, train_tokenizer

ROWS = 320
MAX_LEN = 4096
OPTIONS, SETTINGS = ServeOptions(port=0, grace_seconds=0), EngineSettings(max_batch=8)
TEXT = "The capital of France is Paris. 中国的首都是北京。Hello, world! "


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model that never ends a text by itself."""
    folder = tmp_path_factory.mktemp("served") / "tokenizer"
    train_tokenizer([TEXT] * 50, 300, folder, "served")
    tokenizer = load_tokenizer(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16}
    model = random_model(ModelConfig(ROWS, **shape, max_seq_len=MAX_LEN))
    with torch.no_grad():
        model.head.weight.mul_(40)  # likelihoods far apart: greedy text does not hang on the last bit
        model.head.weight[list(tokenizer.end_ids)] = 0
    return LoadedModel("tiny", 7, model, tokenizer, None, "float32", 1000, folder.parent)


class Served:
    """A server in a thread, and how to speak to it."""

    def __init__(self, model: ServedModel, options: ServeOptions, until: str = "ready") -> None:
        self.model, self.server = model, ModelServer(model, options)
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.wait_until(lambda: model.state == until)

    @property
    def port(self) -> int:
        return int(self.server.socket.getsockname()[1])

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0)

    wait_until = staticmethod(wait_until)


@contextlib.contextmanager
def held(served: Served, after: int = 0) -> Iterator[None]:
    """The engine takes so many steps in this block and no more: what runs still runs at its end."""
    engine, goes_on, steps = served.model.service.engine, threading.Event(), itertools.count()
    step = engine.step
    engine.step = lambda: (next(steps) < after or goes_on.wait(120), step())[1]  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]
        goes_on.set()


@contextlib.contextmanager
def serving(loaded: LoadedModel, options=OPTIONS, settings=SETTINGS, max_waiting: int = 256) -> Iterator[Served]:
    served = Served(ServedModel(lambda: loaded, settings, max_waiting=max_waiting), options)
    try:
        yield served
    finally:
        served.server.stop()
        served.thread.join(120)


@pytest.fixture(scope="session")
def served(loaded: LoadedModel) -> Iterator[Served]:
    """One server for all tests that leave it as it was."""
    with serving(loaded) as served:
        yield served


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client
