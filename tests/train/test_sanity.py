"""Checks before the first step find what would cost a night, and say nothing where nothing is wrong."""

import dataclasses
import math
import re
import shutil

import numpy as np
import pytest
import torch

from zero2all.common.errors import BadInputError, DiskError
from zero2all.common.files import human_bytes
from zero2all.config import config_from_values
from zero2all.estimate.memory import MemorySettings
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import footprints, resolve
from zero2all.packed.loader import Batch
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.parameter_table import init_weights
from zero2all.train import sanity
from zero2all.train.checkpoints.retention import Retention
from zero2all.train.sanity import FreeMemory, check_disk, check_first_loss, memory_notes, overfit_one_batch, saved_steps

SMALL = ModelConfig(vocab_size=400, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, max_seq_len=32)
LARGE = dataclasses.replace(SMALL, hidden_size=2048, intermediate_size=5632, layers=22, heads=32, vocab_size=64320)
GB = 10**9
OURS = dict.fromkeys(("embedding", "rope", "rms_norm", "swiglu", "linear_cross_entropy"), "triton")
ON_A_GPU = footprints({**OURS, "linear": "fp32_wgrad", "attention": "sdpa_cudnn", "optimizer": "fused"})
ON_A_CPU = resolve(OpsConfig(), "cpu").footprints
GPU_RUN = MemorySettings(2048, 16, ON_A_GPU)


def build(config: ModelConfig) -> Z2all:
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    init_weights(model, 0)
    return model


def make_batch(vocab_size: int = 400, rows: int = 4) -> Batch:
    """Ids as skewed as those of text."""
    frequency = 1.0 / np.arange(1, vocab_size + 1)
    ids = np.random.default_rng(0).choice(vocab_size, (rows, 33), p=frequency / frequency.sum())
    return Batch(ids, np.arange(rows) % 2, np.arange(rows) % 2, 0)


def first_loss(model: Z2all) -> float:
    ids = torch.as_tensor(make_batch(model.config.vocab_ids).tokens)
    with torch.no_grad():
        return float(model.loss(ids[:, :-1], ids[:, 1:])[1].mean())


@pytest.mark.parametrize(
    ("init_std", "tied", "vocab_size"), [(0.02, False, 400), (0.005, True, 400), (0.1, False, 3000), (0.2, True, 3000)]
)
def test_a_new_model_passes_whatever_its_spread(init_std, tied, vocab_size):
    config = dataclasses.replace(SMALL, init_std=init_std, tied_embeddings=tied, vocab_size=vocab_size)
    assert check_first_loss(first_loss(build(config)), config) == []


def test_weights_that_are_larger_than_init_std_says_are_noticed():
    model = build(SMALL)
    with torch.no_grad():
        model.head_weight.mul_(40)
    (warning,) = check_first_loss(first_loss(model), SMALL)
    assert "model.init_std (0.02) is too large" in warning
    assert "ln(400) = 5.99" in warning
    for tied, name in ((False, "init_head_std"), (True, "init_embedding_std")):
        own = dataclasses.replace(SMALL, tied_embeddings=tied, **{name: 0.01})
        assert f"model.{name} (0.01) is too large" in check_first_loss(50.0, own)[0]
    assert "model.init_std is far too large" in check_first_loss(math.nan, SMALL)[0]
    assert "the weights are already trained" in check_first_loss(3.1, SMALL)[0]


def test_preview_shows_text_where_there_is_a_tokenizer_and_ids_where_not():
    batch = Batch(np.array([[72, 105, 10], [72, 111, 33]]), np.array([1, 0]), np.array([0, 0]), 0)
    text = sanity.preview(batch, ["en", "zh"], lambda ids: bytes(ids).decode())
    assert text == [r"data: row 0 (zh) begins: 'Hi\n' …", "data: row 1 (en) begins: 'Ho!' …"]
    assert sanity.preview(batch, ["en", "zh"], None, rows=1) == ["data: row 0 (zh) begins: 72 105 10 …"]


@pytest.mark.parametrize("wrong", [400, -1])
def test_id_out_of_range_in_a_batch_is_named_with_its_place(wrong):
    batch = make_batch()
    sanity.check_batch_ids([batch], 400)
    batch.tokens[2, 5] = wrong
    with pytest.raises(BadInputError, match=rf"token id {wrong} \(row 2, position 5 .* ids 0 to 399"):
        sanity.check_batch_ids([make_batch(), batch], 400)


def test_there_is_room_for_the_checkpoints_of_all_steps_at_which_a_run_saves(tmp_path):
    found = [saved_steps(*given) for given in ((0, 10, 4), (4, 8, 4), (0, 10, 0), (10, 10, 4))]
    assert found == [[4, 8, 10], [8], [10], []]
    run, steps = tmp_path / "runs" / "later", saved_steps(0, 110, 10)
    note = check_disk(run, Retention(2, 0), steps, 1_000_000)
    assert "up to 3 checkpoints of 1.0 MB at once. They need 3.0 MB more" in note
    assert "up to 4 checkpoints" in check_disk(run, Retention(2, 0, keep_best=True), steps, 1_000_000)
    # Two kept and one being written fit into what is free by far; all that are kept for ever do not.
    large = shutil.disk_usage(tmp_path).free // 8
    check_disk(run, Retention(2, 0), steps, large)
    too_many = r"11 checkpoints .*keep_every_steps 10, checkpoint.keep_best false\)"
    with pytest.raises(DiskError, match=too_many) as caught:
        check_disk(run, Retention(2, 10), steps, large)
    assert str(run) in str(caught.value)
    assert not run.exists()


def require_memory(settings, device, device_bytes, host_bytes, local_processes=1, compiled=False):
    sanity.require_memory(LARGE, settings, FreeMemory(device, device_bytes, host_bytes, local_processes), compiled)


def said(settings, *free) -> str:
    """Why a run is refused."""
    with pytest.raises(DiskError) as caught:
        require_memory(settings, *free)
    return str(caught.value)


def test_memory_that_may_not_be_enough_is_a_warning():
    plenty, little = memory_notes(LARGE, GPU_RUN, 140 << 30), memory_notes(LARGE, GPU_RUN, 40 << 30)
    assert plenty[0].endswith("of 140.0 GiB with micro-batches of 16")
    assert little[1 : len(plenty)] == plenty[1:]
    assert little[len(plenty)] == "warning: this may not fit into the memory of the device."
    assert memory_notes(LARGE, GPU_RUN, None)[1:] == plenty[1:]


def test_run_that_cannot_fit_is_refused_with_what_it_needs_and_how_to_need_less():
    settings = MemorySettings(2048, 16, ON_A_CPU)
    require_memory(settings, "cpu", 0, 200 * GB)
    refusal = said(settings, "cpu", 0, 24 * GB)
    assert re.search(r"(?s)about \d+\.\d GiB are needed, 22\.4 GiB are free.*optimizer.*total", refusal)
    assert "train.micro_batch_samples (now 16)" in refusal
    assert re.search(r"4 processes of \d+", said(settings, "cpu", 0, 200 * GB, 4))
    offloaded = dataclasses.replace(settings, micro_batch_samples=1, offload="optimizer")  # to the same memory
    require_memory(offloaded, "cpu", 0, 60 * GB)
    assert "to train this model here" in said(offloaded, "cpu", 0, 24 * GB)


def test_processes_with_a_gpu_each_need_the_machine_only_while_weights_are_drawn():
    require_memory(GPU_RUN, "cuda", 80 * GB, 8 * GB, 8)
    assert "on the GPU" in said(GPU_RUN, "cuda", 40 * GB, 24 * GB)
    assert sanity.drawn_bytes(LARGE) == pytest.approx(0.7 * GB, rel=0.1)
    refusal = said(GPU_RUN, "cuda", 80 * GB, 4 * GB, 8)
    assert re.search(r"to draw the initial weights: about .*\(8 processes of 0\.\d GiB", refusal)
    compiled = dataclasses.replace(GPU_RUN, micro_batch_samples=64)
    assert "on the GPU" in said(compiled, "cuda", 80 * GB, 80 * GB)
    require_memory(compiled, "cuda", 80 * GB, 80 * GB, compiled=True)  # of a compiled model only the state is certain


def test_offload_that_needs_more_host_memory_than_there_is_is_refused_with_a_table_and_what_to_do():
    settings = MemorySettings(2048, 1, ON_A_GPU, offload="optimizer", zero=1, shard=2)
    require_memory(settings, "cuda", 80 * GB, 24 * GB, 2)
    refusal = said(settings, "cuda", 80 * GB, 24 * GB, 4)
    assert "parallel.offload optimizer: about " in refusal
    for words in ("4 processes of", "22.4 GiB are free", "in host memory:", "masters", "parallel.zero 1 or 2"):
        assert words in refusal, words


def advice(device="cuda", samples=64, **changes) -> str:
    return said(MemorySettings(2048, samples, ON_A_GPU, **changes), device, GB, GB).partition("To need less memory")[2]


def test_a_run_that_does_not_fit_is_told_of_what_it_does_not_use_yet():
    assert "set parallel.zero to at most 3 (now 1)" in advice(zero=1, shard=2)
    for unused in ("parallel.zero", "parallel.offload"):
        assert unused not in advice(zero=3, shard=2)
    plain = advice()
    assert "set parallel.offload to optimizer:" in plain
    assert "set train.recompute to full (now none)" in plain
    assert "set train.recompute to full" not in advice(recompute="full")
    assert "set train.recompute to groups (now full)" in advice(recompute="full", recompute_every=2)
    assert "set train.recompute to groups" not in advice(recompute="full", recompute_every=32), "it would need more"
    assert "optim.kind" not in advice(optimizer="adamw_8bit")
    assert "parallel.offload" not in advice(optimizer="muon")


def test_a_run_that_does_not_fit_is_told_nothing_that_would_be_refused_or_do_harm():
    assert "micro_batch_samples" not in advice(samples=1)
    offloaded = advice(samples=1, offload="optimizer", shard=2, zero=1)
    assert "adamw_8bit" not in offloaded
    assert "set parallel.zero to at most 2 (now 1)" in offloaded
    several_passes = advice(samples=4, zero=3, shard=2, passes=4)
    assert "raise train.micro_batch_samples until a step has one pass (now 4)" in several_passes
    assert "lower train.micro_batch_samples" not in several_passes
    assert "processes" not in advice("cpu", offload="optimizer")
    assert "fewer processes (now 2)" in advice("cpu", replicate=2)


def test_notes_say_what_a_process_sends_in_a_step():
    assert sanity.communication_notes(LARGE, GPU_RUN) == []
    first, second = sanity.communication_notes(LARGE, dataclasses.replace(GPU_RUN, replicate=4))
    sent, whole = (human_bytes(each * parameter_counts(LARGE)["total"]) for each in (6, 4))
    assert f"each process sends {sent} per step" in first
    assert " ".join(second.split()) == f"all-reduce gradients {whole} over 4 ranks, {sent} sent"


def updates_of(learning_rate: float):
    model = build(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    ids = torch.as_tensor(make_batch().tokens)

    def update() -> float:
        losses = model.loss(ids[:, :-1], ids[:, 1:])
        (losses[0] / losses[1].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(losses[1].mean())

    return update


def test_loss_of_one_batch_falls_where_the_model_can_learn_and_a_rate_that_teaches_nothing_is_said():
    result = overfit_one_batch(updates_of(3e-3))
    assert len(result.losses) == 31
    assert result.learns
    curve, verdict = result.lines()
    assert curve.startswith(f"dry run: loss by update: 0: {result.losses[0]:.3f}, 1: ")
    assert f"fell from {result.losses[0]:.3f} to {result.losses[-1]:.3f} in 30 updates" in verdict
    result = overfit_one_batch(updates_of(1e-9), updates=5)
    assert not result.learns
    assert "optim.lr_max is too small" in result.lines()[1]


def test_a_loss_that_is_not_finite_ends_it():
    losses = iter([5.0, 4.0, math.inf, 3.0])
    result = overfit_one_batch(lambda: next(losses))
    assert result.losses == [5.0, 4.0, math.inf]
    assert not result.learns


def test_config_of_a_dry_run_is_one_pass_per_update_without_dropout_or_stages():
    values = {"model": {"residual_dropout": 0.1, "max_seq_len": 64}, "data": {"seq_len": 32}}
    values["parallel"] = {"zero": 1, "shard": 2, "replicate": 2}
    values["train"] = {"tokens_per_step": 3200, "micro_batch_samples": "auto", "steps": 5000}
    values["stages"] = [{"name": "long", "from_step": 100, "seq_len": 64}]
    config = config_from_values(values, "of a test")
    dry = sanity.dry_run_config(config, samples=5)
    assert dry.train.micro_batch_samples == 5
    assert dry.train.tokens_per_step == 5 * 32
    assert dry.parallel.sizes(1) == MeshSizes()
    assert (dry.train.steps, dry.schedule.kind, dry.model.residual_dropout, dry.stages) == (31, "constant", 0.0, [])
    assert dry.optim == config.optim
