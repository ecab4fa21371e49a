"""A model learns the same whichever implementations compute it, and says the same compiled or not."""

import functools

import pytest
import torch

from tests.ops.agreement import assert_close
from tests.ops.small_run import EAGER, losses_of_a_run, resolved
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all, compile_model
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so and goes on
@pytest.mark.parametrize(
    ("precision", "largest"), [("float32", 1e-5), pytest.param("bfloat16", 1e-2, marks=pytest.mark.slow)]
)
def test_fifty_steps_with_the_best_and_with_the_reference_operators(precision, largest):
    best = losses_of_a_run(resolved(OpsConfig(), precision), precision, 50)
    reference = losses_of_a_run(resolved(EAGER, precision), precision, 50)
    assert float(reference[-1]) < 0.6 * float(reference[0])
    assert float((best - reference).abs().max()) < largest


TINY = ModelConfig(
    vocab_size=61, hidden_size=16, intermediate_size=24, layers=4, heads=2, kv_heads=1, max_seq_len=16, init_std=0.2
)


def loss_and_gradients(mode: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = Z2all(TINY, resolve(OpsConfig(compile=mode), OpContext("cpu", compiled=mode != "none")))
    init_weights(model, 0)
    compile_model(model)
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    total, _ = model.loss(ids[:, :-1], ids[:, 1:])
    total.backward()
    return total.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_compiled_says_the_same(mode: str) -> None:
    loss, gradients = loss_and_gradients("none")
    found, compiled = loss_and_gradients(mode)
    assert_close(found, loss, 1e-6)
    for name, gradient in gradients.items():
        assert_close(compiled[name], gradient, 1e-5, name)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.slow  # tests/model/test_recompute.py compiles blocks and trunks too
@pytest.mark.parametrize(("mode", "graphs"), [("block", 2), ("trunk", 1)])
def test_tracing_changes_nothing_and_finds_whole_graphs(mode, graphs, fresh_compiler, monkeypatch):
    # Without a code generator, which takes half a minute. Of four blocks the first differs: it has nothing to add yet.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert_compiled_says_the_same(mode)
    assert fresh_compiler["stats"]["unique_graphs"] == graphs
    assert not fresh_compiler["graph_break"]
