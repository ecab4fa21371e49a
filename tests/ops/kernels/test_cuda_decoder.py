"""Decoding with our kernels gives what the passes in plain torch give. On a GPU the passes are CUDA graphs."""

import dataclasses

import pytest
import torch

from tests.ops.agreement import assert_close
from zero2all.infer import cuda
from zero2all.infer import weights as infer_weights
from zero2all.infer.cache import BLOCK, KeyValueBlocks
from zero2all.infer.cuda import CudaDecoder, bucket_of, obstacle, unsupported
from zero2all.infer.forward import Forward, Span
from zero2all.infer.weights import Weights, quantise, weights_of
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.kernels import decode_linear
from zero2all.ops.registry import resolve

SMALL = ModelConfig(vocab_size=70, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, max_seq_len=48)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def new_weights(device: str, dtype: torch.dtype, config: ModelConfig = SMALL) -> Weights:
    torch.manual_seed(0)
    model = Z2all(config, resolve(OpsConfig(), device))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    return weights_of(model.to(device, dtype).eval())


class Pair:
    """The same sequences, decoded by both, each with its own cache of random earlier keys and values."""

    def __init__(self, device: str, weights: Weights, positions: list[int]) -> None:
        config, dtype = weights.config, weights.embedding.dtype
        blocks = [KeyValueBlocks(config, 1 + 3 * len(positions), dtype, torch.device(device)) for _ in range(2)]
        for ours, theirs in ((blocks[0].keys, blocks[1].keys), (blocks[0].values, blocks[1].values)):
            theirs.copy_(ours.normal_())
        self.plain, self.caches = Forward(weights, blocks[0]), blocks
        self.fast = CudaDecoder(weights, blocks[1], config.max_seq_len, records=device == "cuda")
        self.positions = torch.tensor(positions, device=device)
        self.tables = 1 + torch.arange(3 * len(positions), dtype=torch.int32, device=device).view(-1, 3).flip(1)
        self.tokens = torch.arange(3, 3 + len(positions), device=device) % config.vocab_ids

    def assert_same_cache(self, tolerance: float) -> None:
        for name in ("keys", "values"):
            found, wanted = (getattr(cache, name)[:, 1:] for cache in reversed(self.caches))
            assert_close(found, wanted, tolerance, name)


@pytest.fixture(autouse=True)
def few_programs(device, monkeypatch):
    """A program takes the interpreter as long as a large tile does."""
    if device == "cpu":
        monkeypatch.setattr(decode_linear, "tiles_for", lambda *_: decode_linear.Tiles(512, 64, 1))


@pytest.fixture(params=[0, 16], ids=["cuBLAS", "our own"])
def products(request, monkeypatch):
    """Which matmuls the passes take."""
    monkeypatch.setattr(cuda, "FEW_ROWS", request.param)


WIDE = dataclasses.replace(SMALL, fp32_residual=True, tied_embeddings=True, head_dim=16, heads=2, kv_heads=1)
NORMED = dataclasses.replace(SMALL, qk_norm=True)
CASES = {
    "first": (SMALL, torch.float32, "plain", [0]),
    "three": (SMALL, torch.float32, "plain", [5, 16, 47]),
    "bfloat16": (SMALL, torch.bfloat16, "plain", [5, 16, 47]),
    "8 bits": (SMALL, torch.bfloat16, "int8", [5, 20]),
    "float32 residual and tied": (WIDE, torch.bfloat16, "plain", [5, 20]),
    "4 bits and float32 residual": (WIDE, torch.bfloat16, "int4", [5]),
    "qk_norm": (NORMED, torch.float32, "plain", [5, 16]),
    "qk_norm in 8 bits": (NORMED, torch.float32, "int8", [5]),
}


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("config", "dtype", "kind", "positions"), CASES.values(), ids=CASES)
def test_logits_and_cache_are_those_of_the_plain_pass(device, config, dtype, kind, positions, monkeypatch):
    monkeypatch.setattr(infer_weights, "_has_int4_cpu_kernel", lambda: False)
    weights = new_weights(device, dtype, config)
    pair = Pair(device, weights if kind == "plain" else quantise(weights, kind), positions)
    given, tolerance = (pair.tokens, pair.positions, pair.tables), max(TOLERANCE[dtype], 1e-5 * (kind != "plain"))
    assert_close(pair.fast.decode(*given), pair.plain.decode(*given), tolerance, "logits")
    pair.assert_same_cache(tolerance)


def test_padding_rows_write_only_to_block_0(device):
    pair = Pair(device, new_weights(device, torch.float32), [14, 3, 30])
    before = pair.caches[1].keys.clone()
    pair.fast.decode(pair.tokens, pair.positions, pair.tables)
    changed = (pair.caches[1].keys != before).flatten(2).any(dim=2).any(dim=0)
    written = pair.tables.gather(1, (pair.positions // BLOCK).unsqueeze(1)).flatten().tolist()
    assert changed.nonzero().flatten().tolist() == sorted([0, *written])


def test_tokens_of_prompts_are_rows_of_a_pass(device):
    pair = Pair(device, new_weights(device, torch.float32), [0, 0])
    # Of one sequence the positions 3 to 7, of another the first two: earlier ones are in the cache.
    spans = [Span(0, 5, 8, pair.tables[0].tolist()), Span(5, 2, 2, pair.tables[1].tolist())]
    tokens, positions = torch.arange(9, 16, device=device), torch.tensor([*range(3, 8), 0, 1], device=device)
    tables = pair.tables.repeat_interleave(torch.tensor([5, 2], device=device), dim=0)
    wanted = pair.plain.prefill(tokens, positions, tables[:, 0] * BLOCK + positions, spans)
    assert_close(pair.fast.read(tokens, positions, tables), wanted, TOLERANCE[torch.float32], "hidden states")
    pair.assert_same_cache(TOLERANCE[torch.float32])


def test_greedy_tokens_stay_on_the_device_and_feed_passes_that_may_become_smaller(device):
    pair = Pair(device, new_weights(device, torch.float32), [14, 3])
    never = torch.tensor([0, 5])
    pair.fast = CudaDecoder(pair.fast.weights, pair.caches[1], 40, never, records=device == "cuda")
    tokens = wanted = pair.tokens
    for count in (2, 2, 1):
        positions, tables = pair.positions[:count], pair.tables[:count]
        logits = pair.plain.decode(wanted[:count], positions, tables)
        wanted = logits.index_fill(1, never.to(device), -torch.inf).argmax(dim=-1)
        # Positions and tables as the host has them, the tokens as they are on the device.
        tokens = pair.fast.greedy(tokens[:count], positions.cpu(), tables.cpu())
        assert tokens.device.type == device
        assert tokens.tolist() == wanted.tolist()
        pair.positions = pair.positions + 1


def test_sizes_of_a_pass_and_what_cannot_be_decoded_this_way():
    assert [bucket_of(rows) for rows in (1, 3, 17, 64, 65, 256, 257, 600)] == [1, 4, 24, 64, 96, 256, 512, 768]
    weights = new_weights("cpu", torch.float32)
    assert obstacle(weights) == "the decoding kernels need a CUDA device"
    assert unsupported(weights) == ""

    changes = {"experts": {"moe": MoeConfig(experts=4)}, "biases": {"attention_bias": "qkv"}}
    for words, change in {**changes, "columns": {"intermediate_size": 1 << 16}}.items():
        assert words in unsupported(dataclasses.replace(weights, config=dataclasses.replace(SMALL, **change)))
    assert "float64" in unsupported(new_weights("cpu", torch.float64))
