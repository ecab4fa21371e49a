"""Decoding with our kernels gives what the passes in plain torch give. On a GPU the passes are CUDA graphs."""

import copy
import dataclasses

import pytest
import torch

from tests.infer.tiny import prompts, tiny_model
from tests.ops.agreement import assert_close, dtypes

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.infer import cuda
from zero2all.infer import engine as engine_module
from zero2all.infer.cache import BLOCK, KeyValueBlocks
from zero2all.infer.cuda import CudaDecoder, bucket_of, obstacle, unsupported
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.forward import Forward, Span
from zero2all.infer.job import Request
from zero2all.infer.sampling import Sampling
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

    def assert_agree(self, tolerance: float) -> None:
        """On the next pass, and on what it left in the cache."""
        given = self.tokens, self.positions, self.tables
        assert_close(self.fast.decode(*given), self.plain.decode(*given), tolerance, "logits")
        for name in ("keys", "values"):
            found, wanted = (getattr(cache, name)[:, 1:] for cache in reversed(self.caches))
            assert_close(found, wanted, tolerance, name)


@pytest.fixture(autouse=True)
def few_programs(device, monkeypatch):
    """A program takes the interpreter as long as a large tile does."""
    if device == "cpu":
        monkeypatch.setattr(decode_linear, "tiles_for", lambda *_: decode_linear.Tiles(512, 64, 1))


@pytest.fixture
def no_bucket_is_small(monkeypatch):
    """Passes with cuBLAS's matmuls at every size."""
    monkeypatch.setattr(cuda, "FEW_ROWS", 0)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("positions", [[0], [5, 16, 47]], ids=["first", "three"])
def test_logits_and_cache_are_those_of_the_plain_pass(device, dtype, positions):
    Pair(device, new_weights(device, dtype), positions).assert_agree(TOLERANCE[dtype])


def test_so_are_those_of_a_model_with_qk_norm_also_in_8_bits(device):
    weights = new_weights(device, torch.float32, dataclasses.replace(SMALL, qk_norm=True))
    Pair(device, weights, [5, 16]).assert_agree(TOLERANCE[torch.float32])
    Pair(device, quantise(weights), [5]).assert_agree(1e-5)


@pytest.mark.usefixtures("no_bucket_is_small")
@dtypes(torch.float32, torch.bfloat16)
def test_large_batches_use_matmuls(device, dtype):
    Pair(device, new_weights(device, dtype), [5, 16, 47]).assert_agree(TOLERANCE[dtype])


@pytest.mark.parametrize("few_rows", [0, 16])
@dtypes(torch.float32, torch.bfloat16)
def test_weights_in_8_bits(device, dtype, monkeypatch, few_rows):
    monkeypatch.setattr(cuda, "FEW_ROWS", few_rows)
    Pair(device, quantise(new_weights(device, dtype)), [5, 20]).assert_agree(TOLERANCE[dtype])


@pytest.mark.parametrize("few_rows", [0, 16])
def test_float32_residual_and_tied_embeddings(device, monkeypatch, few_rows):
    monkeypatch.setattr(cuda, "FEW_ROWS", few_rows)
    config = dataclasses.replace(SMALL, fp32_residual=True, tied_embeddings=True, head_dim=16, heads=2, kv_heads=1)
    Pair(device, new_weights(device, torch.bfloat16, config), [5, 20]).assert_agree(TOLERANCE[torch.bfloat16])


def test_passes_of_one_size_follow_each_other(device):
    pair = Pair(device, new_weights(device, torch.float32), [14, 3, 30])
    for _ in range(2):
        pair.assert_agree(TOLERANCE[torch.float32])
        pair.tokens = (pair.tokens * 7 + 1) % SMALL.vocab_ids
        pair.positions = pair.positions + 1
    pair.tokens, pair.positions, pair.tables = pair.tokens[:1], pair.positions[:1], pair.tables[:1]
    pair.assert_agree(TOLERANCE[torch.float32])


def test_padding_rows_write_only_to_block_0(device):
    pair = Pair(device, new_weights(device, torch.float32), [14, 3, 30])
    before = pair.caches[1].keys.clone()
    pair.fast.decode(pair.tokens, pair.positions, pair.tables)
    changed = (pair.caches[1].keys != before).flatten(2).any(dim=2).any(dim=0)
    written = pair.tables.gather(1, (pair.positions // BLOCK).unsqueeze(1)).flatten().tolist()
    assert changed.nonzero().flatten().tolist() == sorted([0, *written])


@dtypes(torch.float32, torch.bfloat16)
def test_tokens_of_prompts_are_rows_of_a_pass(device, dtype):
    pair = Pair(device, new_weights(device, dtype), [0, 0])
    # Of one sequence the positions 3 to 7, of another the first two: earlier ones are in the cache.
    spans = [Span(0, 5, 8, pair.tables[0].tolist()), Span(5, 2, 2, pair.tables[1].tolist())]
    tokens = torch.arange(9, 16, device=device)
    positions = torch.tensor([*range(3, 8), 0, 1], device=device)
    places = [(span.table[0], at) for span in spans for at in range(span.length - span.count, span.length)]
    slots = torch.tensor([block * BLOCK + at for block, at in places], device=device)
    wanted = pair.plain.prefill(tokens, positions, slots, spans)
    tables = pair.tables.repeat_interleave(torch.tensor([5, 2], device=device), dim=0)
    found = pair.fast.read(tokens, positions, tables)
    assert_close(found, wanted, TOLERANCE[dtype], "hidden states")
    for name in ("keys", "values"):
        ours, theirs = (getattr(cache, name)[:, 1:] for cache in reversed(pair.caches))
        assert_close(ours, theirs, TOLERANCE[dtype], name)


def test_greedy_tokens_stay_on_the_device_and_feed_the_next_pass(device):
    pair = Pair(device, new_weights(device, torch.float32), [14, 3, 30])
    never = torch.tensor([0, 5])
    pair.fast = CudaDecoder(pair.fast.weights, pair.caches[1], 40, never, records=device == "cuda")
    tokens = wanted = pair.tokens
    for _ in range(3):
        logits = pair.plain.decode(wanted, pair.positions, pair.tables)
        wanted = logits.index_fill(1, never.to(device), -torch.inf).argmax(dim=-1)
        # Positions and tables as the host has them, the tokens as they are on the device.
        tokens = pair.fast.greedy(tokens, pair.positions.cpu(), pair.tables.cpu())
        assert tokens.device.type == device
        assert tokens.tolist() == wanted.tolist()
        pair.positions = pair.positions + 1


def test_engine_writes_the_same_text_with_it(device, monkeypatch):
    if device == "cpu":  # prompts as rows have a test above; the interpreter takes long for so many
        monkeypatch.setattr(engine_module, "MOST_PROMPT_ROWS", 0)
    loaded = tiny_model()
    loaded = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model).to(device))
    rows = prompts(4)[2:]
    drawn = Request(rows[0], 3, Sampling(temperature=2.0, seed=3))
    written = []
    for is_fast in (False, True):
        engine = Engine(loaded, EngineSettings(max_batch=3))
        if not is_fast:
            engine._fast = None
        elif device == "cpu":
            weights = weights_of(loaded.model)
            engine._fast = CudaDecoder(weights, engine.blocks, engine.max_len, engine.vocabulary.never, records=False)
        likeliest = {job.number: job.new_ids for job in engine.run([Request(row, 3) for row in rows])}
        written.append(likeliest | {job.number: job.new_ids for job in engine.run([drawn])})
    assert written[0] == written[1]
    assert all(len(ids) == 3 for ids in written[0].values())


def test_sizes_of_a_pass():
    assert [bucket_of(rows) for rows in (1, 3, 17, 64, 65, 256, 257, 600)] == [1, 4, 24, 64, 96, 256, 512, 768]


def test_what_cannot_be_decoded_this_way_is_said():
    weights = new_weights("cpu", torch.float32)
    assert obstacle(weights) == "the decoding kernels need a CUDA device"
    assert unsupported(weights) == ""

    def changed(**changes) -> str:
        return unsupported(dataclasses.replace(weights, config=dataclasses.replace(SMALL, **changes)))

    assert "experts" in changed(moe=MoeConfig(experts=4))
    assert "biases" in changed(attention_bias="qkv")
    assert "columns" in changed(intermediate_size=1 << 16)
    assert "float64" in unsupported(new_weights("cpu", torch.float64))
