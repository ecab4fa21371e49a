"""The head and the loss with the softmax in the epilogues of QuACK's matmuls.

Where there is no GPU, or no QuACK, formulas that answer as its functions do stand in for them: what is ours around
them is then tested all the same.
"""

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import assert_agrees, assert_close, random, random_ids, values_and_gradients

pytest.importorskip("triton", reason="the kernels around it are written in Triton, which is not installed")

from zero2all.ops import linear_cross_entropy, trial
from zero2all.ops.gradient_sink import GradientSink
from zero2all.ops.linear_cross_entropy import quack_linear_cross_entropy, triton_linear_cross_entropy

LOW, Z = torch.bfloat16, 1e-2
OURS = "zero2all.ops.kernels.softmax_epilogue"


class Epilogue:
    """A matmul D (+)= A B^T, and what `fn` makes of its result."""

    def __init__(self, fn):
        self.fn = fn

    def gemm(self, a, b, d, *, epi_args, transform_a=None, add_to_output=False, **tiles):
        del transform_a, tiles
        found = self.fn(a.double() @ b.double().t(), **{name: value[0, :, None] for name, value in epi_args.items()})
        d.copy_(found["D"] + d if add_to_output else found["D"])


class ScaledExponentials:
    """Exponentials by tiles, each by a power of two of its own, and what is needed to put them together."""

    def gemm(self, a, b, d, *, epi_args, **tiles):
        assert b.shape[0] > 0
        assert epi_args["target"].data_ptr() % 32 == 0, "QuACK refuses it"
        width = epi_args["max_log2"]
        assert width == tiles["tile_N"]
        assert b.shape[0] % width == 0
        logits = (a.double() @ b.double().t()).unflatten(1, (-1, width))
        k = (logits.amax(dim=-1) * math.log2(math.e)).round()
        e = torch.exp2(logits * math.log2(math.e) - k.unsqueeze(-1))
        d.copy_(e.flatten(1))
        epi_args["sum_exp"].copy_(e.sum(dim=-1))
        epi_args["max_log2_out"].copy_(k)
        target, out = epi_args["target"], epi_args["target_logit"]
        out.fill_(math.nan)  # rows whose target lies elsewhere are not written
        here = (target >= 0) & (target < b.shape[0])
        out[here] = logits.flatten(1)[here].gather(1, target[here].unsqueeze(1)).squeeze(1).float()


def operand(transform, matrix: Tensor, values: dict[str, Tensor], tile_m: int, tile_k: int) -> Tensor:
    """The matrix as the tensor cores get it."""
    assert matrix.shape[0] % tile_m == 0
    u = values["u"]
    assert u.is_contiguous()
    by_columns = transform.kind == "colvec_ktile"
    wide = u.t().repeat_interleave(tile_k, dim=1) if by_columns else u.repeat_interleave(64, dim=0)
    assert wide.shape == matrix.shape
    return transform.fn(matrix.double(), wide.double())


class Transform:
    def __init__(self, fn, kind):
        self.fn, self.kind = fn, kind


@pytest.fixture(autouse=True)
def quack(device, monkeypatch):
    """QuACK, or the formulas above in its place."""
    if device != "cpu":
        pytest.importorskip("quack", reason="quack-kernels is not installed")
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("the epilogues need a GPU of the Hopper generation")
        return
    modules = {
        "quack": {},
        "quack.epilogue": {},
        "quack.epilogue.frontend": {"gemm_epilogue": lambda **_: Epilogue},
        "quack.epilogue.ops": {"ColVecLoad": str},
        "quack.epilogue.library": {"identity_epi": Epilogue(lambda acc: {"D": acc})},
        "quack.epilogue.scaled_exp": {"scaled_exp_target_epi": ScaledExponentials()},
        "quack.operand_transform": {
            "a_transform": lambda args, **_: lambda fn: Transform(fn, args["u"]),
        },
        "quack.operand_transform.host": {"transform_a_operand": operand},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    monkeypatch.setitem(sys.modules, OURS, importlib.import_module(OURS))


def head_and_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float):
    logits = hidden @ head[:vocab_size].t()
    logsum = logits.logsumexp(dim=-1)
    counted = targets >= 0
    losses = torch.where(counted, logsum - logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    penalties = torch.where(counted, z * logsum.square(), 0.0)
    return ((losses + penalties) * weights).sum(), losses.detach()


@contextmanager
def watched_gradients() -> Iterator[list[str]]:
    """Notes every buffer that is made for gradients."""
    made, empty = [], linear_cross_entropy.LossResults.empty

    def watched(given, needed, head_rows=None):
        made.extend(["gradient"] * needed)
        return empty(given, needed, head_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_cross_entropy.LossResults, "empty", staticmethod(watched))
        yield made


def targets_for(vocab_size: int, rows: int) -> Tensor:
    targets = random_ids(vocab_size, rows)
    targets[:4] = torch.tensor([0, vocab_size - 1, -1, -100])
    return targets


def given(rows: int, columns: int, spread: float = 1.0) -> list[Tensor]:
    return [random(rows, 64) / 8 * spread, random(columns, 64, seed=1)]


@pytest.mark.parametrize(
    ("vocab_size", "columns", "z"),
    [
        (192, 192, 0.0),
        (448, 448, Z),
        (574, 576, Z),
        (150, 192, Z),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((384, 384, 0.0), (500, 512, 0.0), (577, 640, Z))),
    ],
    ids=["one tile", "some behind", "padding in a tile", "no tile", "whole tiles", "padding behind", "one id behind"],
)
def test_loss_and_gradients_are_those_of_the_formula(device, vocab_size, columns, z):
    others = (targets_for(vocab_size, 128), random(128, seed=3).abs().float(), vocab_size, z)
    assert_agrees(quack_linear_cross_entropy, head_and_loss, given(128, columns), LOW, *others, device=device)


@pytest.mark.parametrize(
    "rows", [pytest.param(300, marks=pytest.mark.slow), 20], ids=["two chunks and rows behind", "less than a tile"]
)
def test_chunks_and_rows_that_fill_no_tile(device, rows, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "EPILOGUE_CHUNK_ROWS", 128)
    others = (targets_for(448, rows), random(rows, seed=3).abs().float(), 448, Z)
    assert_agrees(quack_linear_cross_entropy, head_and_loss, given(rows, 448), LOW, *others, device=device)


def test_padding_takes_no_part_and_receives_exactly_nothing(device):
    hidden, head = given(128, 448)
    head[400:] = 1000.0
    others = (targets_for(400, 128), random(128, seed=3).abs().float(), 400, Z)
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in others]
    (total, _), gradients = values_and_gradients(
        quack_linear_cross_entropy, [value.to(device, LOW) for value in (hidden, head)], *moved
    )
    assert not gradients[1][400:].any()
    expected, _ = head_and_loss(hidden, head, *others)
    assert_close(total, expected, 1e-2)


def test_logits_far_apart_lose_nothing(device):
    # The targets' tiles lie up to 60 nats below the largest logit.
    others = (targets_for(576, 128), random(128, seed=3).abs().float(), 576, 0.0)
    assert_agrees(quack_linear_cross_entropy, head_and_loss, given(128, 576, spread=16.0), LOW, *others, device=device)


def test_gradient_of_the_head_is_added_to_the_sink_over_micro_batches(device):
    hidden, head = (value.to(device, LOW) for value in given(128, 384))
    others = (targets_for(384, 128).to(device), random(128, seed=3).abs().float().to(device), 384, 0.0)
    plain = head.double().requires_grad_()
    head_and_loss(hidden.double(), plain, *others)[0].backward()
    head.requires_grad_()
    head.gradient_sink = GradientSink(torch.zeros(head.shape, device=device))
    for factor in (1.0, 0.3):
        (quack_linear_cross_entropy(hidden, head, *others)[0] * factor).backward()
    assert head.grad is None
    assert_close(head.gradient_sink.buffer, 1.3 * plain.grad, 6e-3)


def test_targets_may_begin_anywhere(device):
    # So do the ids behind the first one, where a batch is one row.
    ids = random_ids(384, 129).to(device).unsqueeze(0)
    others = (ids[:, 1:], torch.ones(1, 128, device=device), 384, 0.0)
    hidden, head = (value.to(device, LOW) for value in given(128, 384))
    (total, _), _ = values_and_gradients(quack_linear_cross_entropy, [hidden.unsqueeze(0), head], *others)
    expected, _ = head_and_loss(*given(128, 384), ids[0, 1:].cpu(), torch.ones(128), 384, 0.0)
    assert_close(total, expected, 1e-2)


@pytest.mark.parametrize("what", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)], ids=["nan", "inf"])
def test_hidden_states_that_are_no_numbers_give_a_loss_that_is_none(device, what):
    hidden, head = (value.to(device, LOW) for value in given(128, 192))
    hidden[5, 3] = what
    others = (targets_for(192, 128).to(device), torch.ones(128, device=device), 192, 0.0)
    total, _ = quack_linear_cross_entropy(hidden.requires_grad_(), head, *others)
    assert not torch.isfinite(total)


def test_losses_alone_take_the_kernel_that_writes_no_gradient(device):
    hidden, head = (value.to(device, LOW) for value in given(16, 448))
    head.requires_grad_()  # as a parameter does, also where no gradient is wanted
    others = (targets_for(448, 16).to(device), random(16, seed=3).abs().float().to(device), 448, 0.0)
    both = (quack_linear_cross_entropy, triton_linear_cross_entropy)
    with torch.no_grad(), watched_gradients() as made:
        found, wanted = (function(hidden, head, *others) for function in both)
    assert torch.equal(found[1], wanted[1])
    assert made == []


@pytest.fixture
def problem_in_trial(device, monkeypatch):
    monkeypatch.setattr(trial, "DEVICE", device)
    linear_cross_entropy.problem_in_trial.cache_clear()
    yield linear_cross_entropy.problem_in_trial
    linear_cross_entropy.problem_in_trial.cache_clear()


@pytest.mark.slow
def test_the_trial_passes_what_is_right(problem_in_trial):
    assert problem_in_trial() is None


@pytest.mark.slow
def test_the_trial_names_what_is_wrong(device, problem_in_trial, monkeypatch):
    if device != "cpu":
        pytest.skip("a wrong QuACK is made from the formulas that stand in for it where there is no GPU")
    monkeypatch.setattr(sys.modules[OURS], "identity_epi", Epilogue(lambda acc: {"D": acc * 1.1}))
    assert "wrong by" in str(problem_in_trial())
