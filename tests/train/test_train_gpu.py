"""A step on a GPU: the host never waits in it, a refused one leaves no trace, float8 and offloaded copies follow."""

import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.train.conftest import NO_DROPOUT, quiet
from tests.train.states import assert_same_bits, copies
from zero2all.model.z2all import Z2all
from zero2all.ops.linear import fp8_linear
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch, LoaderOptions, batches_on, read_batch
from zero2all.parallel.device import pick_device
from zero2all.parallel.parameter_table import draw, init_weights
from zero2all.parallel.world import World
from zero2all.track.reader import read_run
from zero2all.train import offload, trainer
from zero2all.train.build import empty_state, op_context
from zero2all.train.guards.detector import StepLimits
from zero2all.train.hooks.reports import UpdateRatios
from zero2all.train.micro_batch import choose_micro_batch
from zero2all.train.run import train
from zero2all.train.run_data import open_run_data
from zero2all.train.state import DTYPES, TrainState, new_state
from zero2all.train.step_timer import PARTS
from zero2all.train.train_step import StepPlan, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "layers": 2, "heads": 4, "kv_heads": 2}
SHAPE |= {**NO_DROPOUT, "max_seq_len": 64}
CHANNELS, ROWS, SEQ_LEN = 2, 8, 64
OPTIMIZERS = ("adamw", "muon", "adamw_8bit", "adamw_bf16")
# Offload: copies that are slow on their streams change nothing, because everything that needs them waits.
OFFLOADED, STEPS = {"offload": "optimizer"}, 8
CYCLES = 20_000_000  # about 10 ms


def gpu_config(config, precision="bfloat16", kind="adamw", ops=None, parallel=None, **train):
    train = {"tokens_per_step": ROWS * SEQ_LEN, "micro_batch_samples": 4, "precision": precision, **train}
    sections = {"data": {"seq_len": SEQ_LEN}, "optim": {"kind": kind}, "ops": ops or {}}
    return config(model=SHAPE, train=train, parallel={"device": "cuda", **(parallel or {})}, **sections)


def gpu_state(settings) -> TrainState:
    dtype = DTYPES[settings.train.precision]
    model = Z2all(settings.model, resolve(settings.ops, op_context(settings, "cuda", dtype)))
    init_weights(model, 1)
    state = new_state(model.to(pick_device("cuda")).train(), settings.optim, dtype)
    state.micro_batch_samples = 4
    return state


def gpu_batch(seed=0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, SHAPE["vocab_size"], (ROWS, SEQ_LEN + 1))).cuda()
    channels = torch.from_numpy(np.arange(ROWS) % 2).cuda()
    return Batch(tokens, channels, channels, 0)


@contextmanager
def any_wait_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step(state, settings, plan=None, batch=None):
    world = World(device=pick_device("cuda"))
    return train_step(state, batch or gpu_batch(), CHANNELS, settings, world, plan or StepPlan(lr=0.01))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_the_host_never_waits_in_a_step(config, kind, precision):
    if kind == "adamw_bf16" and precision != "bfloat16":
        pytest.skip("it is for bfloat16")
    settings = gpu_config(config, precision, kind)
    state, batch = gpu_state(settings), gpu_batch()
    step(state, settings, batch=batch).result()  # kernels are built
    with any_wait_is_an_error():
        ratios = UpdateRatios(state, World(device=pick_device("cuda")), log=None)
        ratios.before_step(batch, StepPlan(0.01))
        pending = step(state, settings, StepPlan(0.01, StepLimits(loss=100.0, grad_norm=1e9)), batch)
        assert ratios.ratios()
    result = pending.result()
    assert np.isfinite(result.loss)
    assert sum(result.seconds.values()) > 0


def test_a_step_of_the_gpu_is_that_of_the_cpu(config):
    settings = gpu_config(config, "float32", ops={"attention": "math"})
    on_gpu = gpu_state(settings)
    model = Z2all(settings.model, resolve(type(settings.ops)(), "cpu"))
    init_weights(model, 1)
    on_cpu = new_state(model.train(), settings.optim, torch.float32)
    on_cpu.micro_batch_samples = 4
    for seed in range(3):
        batch = gpu_batch(seed)
        host = Batch(batch.tokens.cpu().numpy(), batch.channels.cpu().numpy(), batch.channels.cpu().numpy(), 0)
        ours = step(on_gpu, settings, batch=batch).result()
        theirs = train_step(on_cpu, host, CHANNELS, settings, World(), StepPlan(lr=0.01)).result()
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-2)
        assert ours.channel_losses == pytest.approx(theirs.channel_losses, rel=1e-3)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_refused_step_leaves_every_bit_as_it_was(config, kind):
    settings = gpu_config(config, kind=kind)
    state = gpu_state(settings)
    step(state, settings).result()
    before = copies(state)
    forward = {name: value.detach().clone() for name, value in state.model.named_parameters()}
    assert not step(state, settings, StepPlan(0.01, StepLimits(loss=0.0))).result().updated
    assert_same_bits(copies(state), before)
    assert_same_bits(dict(state.model.named_parameters()), forward)


def test_float8_copies_follow_the_weights(config):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8 tensor cores")
    settings = gpu_config(config, ops={"linear": "fp8"})
    state = gpu_state(settings)
    weight = state.model.blocks[0].attention.qkv.weight
    step(state, settings).result()
    step(state, settings).result()  # its forward pass made the copies that lie there now
    stale = fp8_linear.copies[weight].straight.clone()
    with torch.no_grad():
        state.model(gpu_batch().tokens[:, :-1])
    assert not torch.equal(fp8_linear.copies[weight].straight.view(torch.uint8), stale.view(torch.uint8))


def test_a_micro_batch_is_found_on_the_device_and_remembered(config, tmp_path):
    settings = gpu_config(config, micro_batch_samples="auto")
    state, world = gpu_state(settings), World(device=pick_device("cuda"))
    found, _ = choose_micro_batch(settings, state.model, world, tmp_path, state.weights.zero_gradients)
    assert found == ROWS  # all of them fit
    assert not state.weights.gradients.any()  # the search left nothing behind
    again, notes = choose_micro_batch(settings, state.model, world, tmp_path, state.weights.zero_gradients)
    assert again == found
    assert "found in an earlier attempt" in notes[0]


def test_batches_reach_the_device_whole_while_it_is_busy(config, work):
    settings = config()
    data, _ = open_run_data(settings, work, resumed=False)
    tokens_per_step = settings.train.tokens_per_step
    busy = torch.randn(4096, 4096, device="cuda")
    loader = batches_on(pick_device("cuda"), data, tokens_per_step, 0, 6, LoaderOptions(prefetch_steps=3))
    try:
        for number, batch in enumerate(loader):
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
            samples = tokens_per_step // data.segment_at(number * tokens_per_step).seq_len
            wanted = read_batch(data, number * tokens_per_step, samples)
            doubled = batch.tokens * 2  # queued behind the matmuls
            del batch
            assert np.array_equal(doubled.cpu().numpy(), wanted.tokens * 2)
    finally:
        loader.close()


def test_the_parts_of_a_step_add_up_to_its_time_where_it_was_validated_and_saved_too(config, work):
    settings = {"parallel": {"device": "cuda"}, "validation": {"every_steps": 4}, "checkpoint": {"every_steps": 6}}
    train(config(train={"steps": 12, "micro_batch_samples": "auto"}, **settings), work, say=quiet)
    whole = train(config(train={"steps": 16}, **settings), work, accept_changes=True, say=quiet)
    assert all(np.isfinite(loss) for loss in (whole.loss, *whole.held_out.values()))
    series = read_run(work.run("run")).series
    parts = sum(series[f"time/{part}"].value for part in ("data_wait", *PARTS, "other"))
    # By the host's clock they did not.
    np.testing.assert_allclose(parts, series["time/step"].value, rtol=1e-3, atol=1e-4)


def test_rows_are_stamped_with_the_end_of_their_steps_also_where_the_host_reads_them_late(config, work, monkeypatch):
    """The host is held up after it has queued a step, as with a full queue, and reads the one before late."""
    queue_step = trainer.train_step

    def held_up(*arguments):
        pending = queue_step(*arguments)
        time.sleep(0.15)
        return pending

    monkeypatch.setattr(trainer, "train_step", held_up)
    settings = {"parallel": {"device": "cuda"}, "validation": {"every_steps": 6}, "checkpoint": {"every_steps": 0}}
    train(config(train={"steps": 12}, **settings), work, say=quiet)
    row_times = read_run(work.run("run")).series["time/step"]
    between = np.diff(row_times.time)
    after_pause = row_times.step[1:] == 7  # its time does not hold the pause
    np.testing.assert_allclose(between[~after_pause], row_times.value[1:][~after_pause], atol=0.02)


def small_bucket_state(config, precision, **parallel):
    settings = gpu_config(config, precision, parallel={"bucket_mb": 0.5, **parallel})
    world = World(device=pick_device("cuda"))
    state = empty_state(settings, world, resolve(settings.ops, op_context(settings, "cuda", DTYPES[precision])))
    state.micro_batch_samples = 4
    with state.weights.masters_between_steps() as masters:
        draw(masters, state.model.config, 1)
    state.weights.publish_masters()
    return state, settings


def losses_of(state, settings):
    """Nothing is read before the last step is queued, so that the host runs ahead of the device."""
    batches = [gpu_batch(seed) for seed in range(STEPS)]
    pending = [step(state, settings, StepPlan(1e-3), batch) for batch in batches]
    return torch.tensor([each.result().loss for each in pending])


@pytest.fixture
def slow_copies(monkeypatch):
    """Each copy of the pipeline begins with a pause on its stream; pieces are small, so that there are many."""
    monkeypatch.setattr(offload, "PIECE_VALUES", 1 << 15)

    def slow(copy, stream):
        def copied(self, *arguments, **options):
            if getattr(self, stream) is not None:
                with torch.cuda.stream(getattr(self, stream)):
                    torch.cuda._sleep(CYCLES // 20)
            copy(self, *arguments, **options)

        return copied

    for name, stream in (("_fetch", "_coming"), ("_send", "_going")):
        monkeypatch.setattr(offload.HostPipeline, name, slow(getattr(offload.HostPipeline, name), stream))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_offload_gives_the_losses_of_the_device(config, slow_copies, precision):
    expected = losses_of(*small_bucket_state(config, precision))
    found = losses_of(*small_bucket_state(config, precision, **OFFLOADED))
    torch.testing.assert_close(found, expected, rtol=1e-5 if precision == "float32" else 2e-3, atol=0)


def test_a_refused_offloaded_step_leaves_no_trace_and_its_gradients_are_gone(config, slow_copies):
    state, settings = small_bucket_state(config, "bfloat16", **OFFLOADED)
    losses_of(state, settings)
    before = copies(state)
    state.weights.gradients.fill_(torch.nan)
    state.optimizer.step(torch.tensor(torch.nan, device="cuda"), torch.tensor(True, device="cuda"))
    assert_same_bits(copies(state), before)
    assert not state.weights.gradients.any()


def test_the_host_does_not_wait_for_the_device_to_start_an_update(config):
    state, _ = small_bucket_state(config, "bfloat16", **OFFLOADED)
    scale, refused = torch.tensor(1.0, device="cuda"), torch.tensor(False, device="cuda")  # these copies wait
    ended = torch.cuda.Event()
    torch.cuda._sleep(100 * CYCLES)
    ended.record()
    state.optimizer.step(scale, refused)
    assert not ended.query()
    state.weights.wait()
