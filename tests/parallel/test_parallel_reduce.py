"""Gradients are sent by bucket while the backward pass still computes, in one order, once a step."""

import pytest
import torch

from tests.parallel.layouts import MODEL
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel import reduce
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import init_weights
from zero2all.train.weights import FlatWeights

TWO = Mesh(MeshSizes(replicate=2))  # the first of two replicas; nothing here reaches a second one


class Link:
    """In place of torch's collectives: what was sent, and what had happened by then."""

    def __init__(self, monkeypatch):
        self.events, self.sent = [], []
        monkeypatch.setattr(reduce.dist, "all_reduce", self.all_reduce)

    def all_reduce(self, values, group=None, async_op=False):  # noqa: ARG002
        self.events.append("sent")
        self.sent.append((values, values.clone()))
        return self

    def wait(self):
        self.events.append("waited")


def make(link, overlaps=True, compress="none"):
    model = Z2all(MODEL, resolve(OpsConfig(), "cpu"))
    init_weights(model, 1)
    parallel = ParallelConfig(bucket_mb=0.008, overlap=overlaps, compress=compress)
    weights = FlatWeights(model, torch.float32, mesh=TWO, parallel=parallel)
    model.embedding.weight.register_hook(lambda _gradient: link.events.append("embedding"))  # before it is added
    return model, weights


def run_pass(model, weights, is_last):
    ids = torch.arange(18).view(2, 9) % 60
    weights.begin_pass(is_last)
    model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
    weights.end_pass()


def test_buckets_go_from_the_end_of_the_model_while_the_backward_pass_computes_with_their_final_values(monkeypatch):
    link = Link(monkeypatch)
    model, weights = make(link)
    run_pass(model, weights, is_last=True)
    buckets = [weights.plan.buckets[number] for number in weights.plan.backward_order]
    assert len(buckets) >= 4
    assert (buckets[0].kind, buckets[-1].kind) == ("head", "embedding")
    assert link.events[: link.events.index("embedding")] == ["sent"] * (len(buckets) - 1), "all but the last"
    assert link.events[len(buckets) :] == ["sent"] + ["waited"] * len(buckets)
    assert [values.storage_offset() for values, _ in link.sent] == [bucket.span.start for bucket in buckets]
    for values, as_sent in link.sent:
        assert torch.equal(values, as_sent), "nothing is added after it was sent"


def test_only_the_last_pass_of_a_step_sends_and_it_sends_the_sum_of_all(monkeypatch):
    link = Link(monkeypatch)
    model, weights = make(link)
    run_pass(model, weights, is_last=False)
    assert link.events == ["embedding"]
    first = weights.gradients.clone()
    run_pass(model, weights, is_last=True)
    torch.testing.assert_close(weights.gradients, 2 * first)
    assert len(link.sent) == len(weights.plan.buckets)


def test_without_overlap_everything_is_sent_after_the_backward_pass(monkeypatch):
    link = Link(monkeypatch)
    model, weights = make(link, overlaps=False)
    run_pass(model, weights, is_last=True)
    assert link.events[:2] == ["embedding", "sent"]


def test_a_gradient_that_changes_after_it_was_sent_is_an_error(monkeypatch):
    link = Link(monkeypatch)
    model, weights = make(link)
    weights.begin_pass(True)
    model.head.weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"head\.weight changed after it was sent"):
        model.head.weight.sum().backward()


def test_compressed_gradients_are_sums_of_rounded_values(monkeypatch):
    link = Link(monkeypatch)
    model, weights = make(link, compress="bf16")
    run_pass(model, weights, is_last=True)
    assert {values.dtype for values, _ in link.sent} == {torch.bfloat16}
    exact, plain = make(link)
    run_pass(exact, plain, is_last=True)
    assert torch.equal(weights.gradients, plain.gradients.bfloat16().float())
