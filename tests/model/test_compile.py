"""A model says the same compiled or not."""

import functools

import pytest
import torch

from tests.ops.agreement import assert_close
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all, compile_model
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights

SIZES = {"hidden_size": 16, "intermediate_size": 24, "layers": 4, "heads": 2, "kv_heads": 1, "max_seq_len": 16}
TINY = ModelConfig(61, **SIZES, init_std=0.2)


def loss_and_gradients(mode: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = Z2all(TINY, resolve(OpsConfig(compile=mode), OpContext("cpu", compiled=mode != "none")))
    init_weights(model, 0)
    compile_model(model)
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    total, _ = model.loss(ids[:, :-1], ids[:, 1:])
    total.backward()
    return total.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "graphs"), [("block", 2), ("trunk", 1)])
def test_tracing_changes_nothing_and_finds_whole_graphs(mode, graphs, fresh_compiler, monkeypatch):
    # Without a code generator, which takes half a minute. Of four blocks the first differs: it has nothing to add yet.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    loss, gradients = loss_and_gradients("none")
    found, compiled = loss_and_gradients(mode)
    assert_close(found, loss, 1e-6)
    for name, gradient in gradients.items():
        assert_close(compiled[name], gradient, 1e-5, name)
    assert fresh_compiler["stats"]["unique_graphs"] == graphs
    assert not fresh_compiler["graph_break"]
