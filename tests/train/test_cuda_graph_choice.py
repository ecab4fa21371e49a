"""Which runs capture their passes as a CUDA graph."""

import dataclasses

import pytest
import torch

from tests.train.states import copies
from tests.train.test_train_step import NO_DROPOUT, assert_same_bits, make_batch, make_state, train_step
from zero2all.common.errors import UsageError
from zero2all.config import RunConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import Choice, Ops, resolve
from zero2all.predict.batch import load_measured_config
from zero2all.train.cuda_graph import check_cuda_graph, choose_cuda_graph, is_worth_it, why_no_cuda_graph

CPU, CUDA, H200 = torch.device("cpu"), torch.device("cuda"), "NVIDIA H200"


def taking(**names: str) -> Ops:
    """The CPU's operators under other names."""
    ops = resolve(OpsConfig(), "cpu")
    choices = tuple(Choice(each.operator, each.asked, names.get(each.operator, each.got), "") for each in ops.choices)
    return dataclasses.replace(ops, choices=choices)


def the_1b(**changes) -> RunConfig:
    config, _ = load_measured_config("z2all-1b", [])
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def test_a_plain_run_on_one_gpu_can_be_captured():
    assert why_no_cuda_graph(the_1b(), CUDA, 1, taking()) is None


@pytest.mark.parametrize(
    ("changes", "processes", "ops", "reason"),
    [
        ({"recompute": "full"}, 1, {}, "train.recompute full"),
        ({"precision": "float16"}, 1, {}, "float16 scales the loss"),
        ({}, 1, {"attention": "flex"}, "flex is compiled"),
    ],
)
def test_what_is_decided_on_the_host_cannot(changes, processes, ops, reason):
    assert reason in str(why_no_cuda_graph(the_1b(**changes), CUDA, processes, taking(**ops)))


def test_neither_can_dropout_documents_or_compiled_blocks():
    config = the_1b()
    dropping = dataclasses.replace(config, model=dataclasses.replace(config.model, residual_dropout=0.1))
    assert "dropout" in str(why_no_cuda_graph(dropping, CUDA, 1, taking()))
    masked = dataclasses.replace(config, data=dataclasses.replace(config.data, document_mask=True))
    assert "document_mask" in str(why_no_cuda_graph(masked, CUDA, 1, taking()))
    compiled = dataclasses.replace(taking(), compile="block")
    assert "ops.compile" in str(why_no_cuda_graph(config, CUDA, 1, compiled))


def test_auto_takes_a_graph_where_the_host_is_the_limit():
    config, ours, fp8 = the_1b(), taking(linear="fp32_wgrad"), taking(linear="fp8")
    assert is_worth_it(config, H200, 2 * 2048, ours)
    assert not is_worth_it(config, H200, 16 * 2048, ours)
    assert is_worth_it(config, H200, 4 * 2048, fp8)
    assert not is_worth_it(config, H200, 4 * 2048, ours)
    assert not is_worth_it(config, "a card nobody knows", 2048, ours)


def small_model() -> Z2all:
    return Z2all(dataclasses.replace(the_1b().model, layers=1, hidden_size=32, heads=2, kv_heads=1), taking())


def test_on_where_it_is_impossible_is_an_error():
    model = small_model()
    with pytest.raises(UsageError, match=r"train.cuda_graph is on, .* it needs a CUDA device. Use auto or off"):
        choose_cuda_graph(the_1b(cuda_graph="on"), model, CPU, 1, 2, 256)
    assert choose_cuda_graph(the_1b(), model, CPU, 1, 2, 256) is None
    assert choose_cuda_graph(the_1b(cuda_graph="off"), model, CPU, 1, 2, 256) is None


def test_it_is_refused_before_any_long_work():
    with pytest.raises(UsageError, match="it needs a CUDA device"):
        check_cuda_graph(the_1b(cuda_graph="on"), CPU, 1, taking())
    check_cuda_graph(the_1b(), CPU, 1, taking())
    check_cuda_graph(the_1b(cuda_graph="on"), CUDA, 1, taking())


def test_of_several_processes_passes_that_send_gradients_cannot():
    config, model = the_1b(cuda_graph="on"), small_model()
    assert why_no_cuda_graph(config, CUDA, 2, taking()) is None
    with pytest.raises(UsageError, match="the only pass of a step sends gradients"):
        choose_cuda_graph(config, model, CUDA, 2, 128, 128)
    zero2 = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, zero=2))
    assert "every pass communicates" in str(why_no_cuda_graph(zero2, CUDA, 2, taking()))


class Passes:
    """In the place of CudaGraphPasses, which needs a GPU: notes the shapes of its passes."""

    problem = ""

    def __init__(self, model):
        self.model, self.rows = model, []

    def __call__(self, ids, shares):
        self.rows.append(len(ids))
        total, losses = self.model.loss(ids[:, :-1], ids[:, 1:], shares)
        total.backward()
        return losses


def test_a_shorter_last_pass_runs_without_the_graph_and_changes_nothing(config):
    settings = config(model=NO_DROPOUT, train={"tokens_per_step": 256, "micro_batch_samples": 3})
    plain, captured = make_state(settings), make_state(settings)
    captured.cuda_graph = Passes(captured.model)
    one, other = (train_step(state, make_batch(), settings) for state in (plain, captured))
    assert captured.cuda_graph.rows == [3, 3]
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert_same_bits(copies(plain), copies(captured))
