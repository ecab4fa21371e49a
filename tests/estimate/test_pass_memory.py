"""The memory of a step by arithmetic, against every tensor that is alive while the trainer's own step runs."""

import dataclasses
import itertools

import pytest

from tests.simulated_rank import simulate_ranks
from zero2all.config import load_config
from zero2all.estimate.memory import MemorySettings, estimate_memory
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.ops.registry import footprints

SMALL = """
    --model.vocab_size 512 --model.hidden_size 128 --model.intermediate_size 352 --model.layers 3 --model.heads 4
    --model.kv_heads 2 --model.max_seq_len 128 --data.seq_len 128 --data.document_mask false
    --train.tokens_per_step 512 --train.micro_batch_samples 4 --model.qk_norm false --model.tied_embeddings true
    --train.precision bfloat16
"""


@pytest.mark.parametrize(
    ("words", "within"),
    [
        ("--model.tied_embeddings false --train.micro_batch_samples 2 --model.embedding_norm true", 2e-3),  # two passes
        ("--model.intermediate_size 1408", 2e-3),  # the peak is in the last block
        ("--train.recompute selective", 2e-3),
        ("--train.precision float32 --model.qk_norm true", 2e-3),
        # The peak is where query and key are turned back, which takes one after the other and is counted as one.
        ("--model.qk_norm true --model.head_dim 256 --model.intermediate_size 64", 3e-2),
        # The first block gets no branch: one of the inputs that are counted for a block does not exist.
        ("--train.precision float32 --train.recompute every_n --train.recompute_every 3", 3e-2),
        ("--train.recompute groups --model.layers 5", 2e-3),  # the last group has one block
        ("--ops.linear_cross_entropy off --ops.cross_entropy eager --ops.swiglu eager", 2e-3),
        ("--optim.kind adamw --finetune.lora.rank 8", 0.25),  # never less: gradients of frozen matrices are counted
    ],
)
def test_peak_is_that_of_all_tensors_alive_in_a_step(words, within):
    step = simulate_ranks(load_config("quickstart", [*SMALL.split(), *words.split()]), 1)
    assert step.expected_state_bytes == pytest.approx(step.state_bytes, rel=5e-2)  # figures, tables, counters
    beside_states = step.expected_peak_bytes - step.expected_state_bytes
    assert beside_states == pytest.approx(step.peak_bytes - step.expected_state_bytes, rel=within)


MODELS = (
    ModelConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, layers=6, heads=16, kv_heads=4),
    ModelConfig(vocab_size=32000, hidden_size=1024, layers=6, heads=16, kv_heads=4, moe=MoeConfig(16, 2, 512, 1, 1)),
)
OPERATORS = {"attention": "sdpa_cudnn", "rope": "triton", "rms_norm": "triton", "swiglu": "triton"}
OPERATORS |= {"linear": "fp32_wgrad", "embedding": "triton", "linear_cross_entropy": "triton"}
OPERATORS |= {"cross_entropy": "triton", "optimizer": "triton"}
FOOTPRINTS = {
    name: footprints(OPERATORS | changes)
    for name, changes in {
        "own": {},
        "fp8": {"linear": "fp8"},
        "plain": {"linear": "plain", "swiglu": "torch", "rms_norm": "eager", "rope": "eager", "attention": "sdpa"},
        "logits": {"linear_cross_entropy": "off", "cross_entropy": "torch"},
        "quack": {"swiglu": "quack", "linear_cross_entropy": "quack", "attention": "fa4"},
    }.items()
}
RECOMPUTE = ("none", "selective", "every_n", "full", "groups")


def peaks(model: ModelConfig, runs: list[MemorySettings]) -> list[float]:
    return [estimate_memory(model, settings).total for settings in runs]


@pytest.mark.parametrize("operators", FOOTPRINTS)
@pytest.mark.parametrize("model", MODELS, ids=["dense", "experts"])
def test_more_tokens_and_more_blocks_never_need_less(model, operators):
    for recompute in RECOMPUTE:
        given = MemorySettings(1024, 1, FOOTPRINTS[operators], recompute=recompute, recompute_every=2)
        by_samples = [dataclasses.replace(given, micro_batch_samples=samples) for samples in (1, 7, 8, 9, 33)]
        by_length = [dataclasses.replace(given, seq_len=length) for length in (128, 1024, 10000)]
        for runs in (by_samples, by_length):
            assert peaks(model, runs) == sorted(peaks(model, runs))
        by_layers = [estimate_memory(dataclasses.replace(model, layers=layers), given).total for layers in range(2, 12)]
        assert by_layers == sorted(by_layers)


@pytest.mark.parametrize("operators", FOOTPRINTS)
@pytest.mark.parametrize("model", MODELS, ids=["dense", "experts"])
def test_parts_sum_to_the_total_and_the_total_is_what_is_always_there_and_the_worst_phase(model, operators):
    for recompute, zero, precision in itertools.product(RECOMPUTE, range(4), ("bfloat16", "float32")):
        changes = {"recompute": recompute, "zero": zero, "precision": precision}
        given = MemorySettings(512, 4, FOOTPRINTS[operators], shard=4, workspace_bytes=64.0 * 2**20, **changes)
        estimate = estimate_memory(model, given)
        on_device = [part.bytes for part in estimate.parts if part.place == "device"]
        assert sum(on_device) == pytest.approx(estimate.total)
        assert min(on_device) >= 0
        assert estimate.persistent + max(phase.bytes for phase in estimate.phases) == pytest.approx(estimate.total)
        assert estimate.state <= estimate.persistent <= estimate.step_peak <= estimate.total <= estimate.reserved
