"""A small model with random weights over a real tokenizer, and the slow way to use it, with which the engine agrees."""

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from zero2all.infer.boundary import Vocabulary
from zero2all.infer.load import LoadedModel
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights
from zero2all.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

MAX_LEN = 160
TEXTS = ["hello world, 中国的首都是北京。", "def f(x):\n    return x + 1\n", "a b c 是北京 首都 hello hello"]


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    folder = Path(tempfile.mkdtemp(prefix="z2a-tiny-")) / "tokenizer"
    train_tokenizer(TEXTS * 100, 305, folder, "tiny", kind="hf-bbpe")
    return load_tokenizer(folder)


def random_model(config: ModelConfig) -> Z2all:
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    init_weights(model, 0)
    return model.eval()


@functools.cache
def tiny_model(moe: bool = False, tied: bool = False) -> LoadedModel:
    """Weights four times larger than usual: with the usual ones every token would be as likely as the next."""
    tokenizer = tiny_tokenizer()
    experts = MoeConfig(experts=4, experts_per_token=2, expert_size=24, dense_layers=1) if moe else MoeConfig()
    shape = {"hidden_size": 64, "intermediate_size": 96, "layers": 3, "heads": 4, "kv_heads": 2}
    config = ModelConfig(tokenizer.vocab_size, **shape, max_seq_len=MAX_LEN, tied_embeddings=tied, moe=experts)
    model = random_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return LoadedModel("tiny", 0, model, tokenizer)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Ids of several lengths; the last ones begin like others."""
    draw = random.Random(seed)
    rows = [[draw.randrange(250) for _ in range(draw.randrange(1, 70))] for _ in range(count - 2)]
    longest = max(rows, key=len)
    return [*rows, [*longest, 5, 6], [*longest, 7]]


@torch.no_grad()
def greedy(loaded: LoadedModel, ids: Sequence[int], count: int) -> list[int]:
    """The likeliest continuation, with the whole text computed anew for every token."""
    never = Vocabulary(loaded.tokenizer, loaded.model.config.vocab_ids).never
    found = list(ids)
    while len(found) < min(len(ids) + count, MAX_LEN):
        logits = loaded.model.logits(loaded.model(torch.tensor([found])))[0, -1]
        logits[never] = -torch.inf
        if int(logits.argmax()) in loaded.tokenizer.end_ids:
            break
        found.append(int(logits.argmax()))
    return found[len(ids) :]


@torch.no_grad()
def log_probabilities(loaded: LoadedModel, ids: Sequence[int]) -> list[float]:
    """Of each token but the first."""
    table = loaded.model.logits(loaded.model(torch.tensor([ids])))[0].double().log_softmax(dim=-1)
    return [float(table[place, token]) for place, token in enumerate(ids[1:])]
