"""Offload on a GPU: copies that are slow on their streams change nothing, because everything that needs them waits."""

import pytest
import torch

from tests.train.states import copies
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch
from zero2all.parallel.device import pick_device
from zero2all.parallel.parameter_table import draw
from zero2all.parallel.world import World
from zero2all.train import offload
from zero2all.train.build import empty_state, op_context
from zero2all.train.state import DTYPES
from zero2all.train.train_step import StepPlan, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPE = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "layers": 4, "heads": 4, "kv_heads": 2},
    **{"max_seq_len": 64, "residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0},
}
ROWS, SEQ_LEN, STEPS = 8, 64, 8
CYCLES = 20_000_000  # about 10 ms


def state_of(config, precision, **parallel):
    settings = config(
        model=SHAPE,
        data={"seq_len": SEQ_LEN},
        train={
            **{"tokens_per_step": ROWS * SEQ_LEN, "micro_batch_samples": 4},
            "precision": precision,
        },
        parallel={"device": "cuda", "bucket_mb": 0.5, **parallel},
    )
    world = World(device=pick_device("cuda"))
    ops = resolve(settings.ops, op_context(settings, "cuda", DTYPES[precision]))
    state = empty_state(settings, world, ops)
    state.micro_batch_samples = 4
    with state.weights.masters_between_steps() as masters:
        draw(masters, state.model.config, 1)
    state.weights.publish_masters()
    return state, settings, world


def losses_of(state, settings, world):
    """Nothing is read before the last step is queued, so that the host runs ahead of the device."""
    generator, pending = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        tokens = torch.randint(0, 512, (ROWS, SEQ_LEN + 1), generator=generator).numpy()
        channels = tokens[:, 0] * 0
        pending.append(train_step(state, Batch(tokens, channels, channels, 0), 1, settings, world, StepPlan(1e-3)))
    return torch.tensor([step.result().loss for step in pending])


@pytest.fixture
def slow_copies(monkeypatch):
    """Each copy of the pipeline begins with a pause on its stream; pieces are small, so that there are many."""
    monkeypatch.setattr(offload, "PIECE_VALUES", 1 << 15)
    fetch, send = offload.HostPipeline._fetch, offload.HostPipeline._send

    def pause(stream):
        if stream is not None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES // 20)

    def slow_fetch(self, *arguments):
        pause(self._coming)
        fetch(self, *arguments)

    def slow_send(self, *arguments, **options):
        pause(self._going)
        send(self, *arguments, **options)

    monkeypatch.setattr(offload.HostPipeline, "_fetch", slow_fetch)
    monkeypatch.setattr(offload.HostPipeline, "_send", slow_send)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_offload_gives_the_losses_of_the_device(config, slow_copies, precision):
    expected = losses_of(*state_of(config, precision))
    found = losses_of(*state_of(config, precision, offload="optimizer"))
    torch.testing.assert_close(found, expected, rtol=1e-5 if precision == "float32" else 2e-3, atol=0)


def test_a_refused_step_leaves_no_trace_and_its_gradients_are_gone(config, slow_copies):
    state, *rest = state_of(config, "bfloat16", offload="optimizer")
    losses_of(state, *rest)
    before = copies(state)
    state.weights.gradients.fill_(torch.nan)
    state.optimizer.step(torch.tensor(torch.nan, device="cuda"), torch.tensor(True, device="cuda"))
    for name, values in copies(state).items():
        assert torch.equal(values, before[name]), name
    assert not state.weights.gradients.any()


def test_the_host_does_not_wait_for_the_device_to_start_an_update(config):
    state, *_ = state_of(config, "bfloat16", offload="optimizer")
    scale, refused = torch.tensor(1.0, device="cuda"), torch.tensor(False, device="cuda")  # these copies wait
    ended = torch.cuda.Event()
    torch.cuda._sleep(100 * CYCLES)
    ended.record()
    state.optimizer.step(scale, refused)
    assert not ended.query()
    state.weights.wait()
