"""Models whose every probability is known: the next token depends on the last one only, by a table that we choose."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zero2all.config import RunConfig
from zero2all.infer.job import Job
from zero2all.infer.load import LoadedModel
from zero2all.infer.service import Service
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights
from zero2all.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

ROWS = 320
BORDER_TEXTS = {"是 北京": 400, "是北京": 300, "首都是北京 首都": 100, "Rome": 200, " Rome Romeland": 100}
"""Text (and how often) from which BPE learns 首都, 是, 北京, and 是北京 as one piece; likewise Rome and ` Rome`."""

Bigram = Callable[[Tensor], LoadedModel]


@pytest.fixture(scope="session")
def border_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """291 ids; `首都是` is 首都|是, `首都是北京` is 首都|是北京."""
    folder = tmp_path_factory.mktemp("border") / "tokenizer"
    train_tokenizer([text for text, count in BORDER_TEXTS.items() for _ in range(count)], 291, folder, "border")
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def bigram(border_tokenizer: Tokenizer) -> Bigram:
    """A real Z2all over border_tokenizer with logits[last token, next token] as given, both of ROWS."""

    def make(logits: Tensor, max_seq_len: int = 64) -> LoadedModel:
        sizes = {"hidden_size": ROWS, "intermediate_size": 2, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 2}
        shape = ModelConfig(ROWS, **sizes, max_seq_len=max_seq_len)
        config = dataclasses.replace(RunConfig(), model=shape)
        model = Z2all(shape, resolve(OpsConfig(), "cpu"))
        init_weights(model, 0)
        with torch.no_grad():
            # The block adds nothing, so the last hidden state is the normalised one-hot vector of the last token.
            model.blocks[0].attention.out.weight.zero_()
            model.blocks[0].feed_forward.down.weight.zero_()
            model.embedding.weight.copy_(torch.eye(ROWS))
            model.head.weight.copy_(logits.T * (1 / ROWS + shape.rms_norm_eps) ** 0.5)
        return LoadedModel("bigram", 0, model.eval(), border_tokenizer, config)

    return make


@pytest.fixture
def logits() -> Tensor:
    """Logits for `bigram` that prefer nothing, to be filled in."""
    return torch.zeros(ROWS, ROWS)


@pytest.fixture(scope="session")
def speller(border_tokenizer: Tokenizer, bigram: Bigram) -> Callable[..., LoadedModel]:
    """A model that writes the given pieces, each in its own tokens, and then ends (or goes on with anything)."""

    def make(*pieces: str, ends: bool = True) -> LoadedModel:
        logits = torch.zeros(ROWS, ROWS)
        ids = [token for piece in pieces for token in border_tokenizer.encode_text(piece)]
        chain = [border_tokenizer.begin_id, *ids, *([border_tokenizer.end_id] if ends else [])]
        for last, following in itertools.pairwise(chain):
            logits[last, following] = 20.0
        return bigram(logits)

    return make


def saying(service: Service, *answers: str) -> None:
    """The next answers of a service are these texts, each with its end, whatever the model prefers."""
    engine, left, scripts = service.engine, iter(answers), {}

    def choose(logits: Tensor, rows: list[Job], ahead: int = 0) -> tuple[Tensor, None]:
        for row in rows:
            if row.number not in scripts:
                ends = row.request.end_ids or engine.tokenizer.end_ids
                scripts[row.number] = [*engine.tokenizer.encode_text(next(left)), min(ends)]
        return torch.tensor([scripts[row.number][len(row.new_ids) + ahead] for row in rows]), None

    engine._choose = choose  # type: ignore[method-assign]
