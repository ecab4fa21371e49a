"""Head and loss with the softmax in the epilogues of QuACK's matmuls; without a GPU, formulas stand in for these."""

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops import agreement, formulas
from tests.ops.agreement import assert_agrees, assert_close, random, values_and_gradients
from zero2all.ops import linear_cross_entropy, trial
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
    u, by_columns = values["u"], transform.kind == "colvec_ktile"
    assert u.is_contiguous()
    wide = u.t().repeat_interleave(tile_k, dim=1) if by_columns else u.repeat_interleave(64, dim=0)
    assert wide.shape == matrix.shape
    return transform.fn(matrix.double(), wide.double())


class Transform(NamedTuple):
    fn: Callable[..., Tensor]
    kind: str


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
        "quack.operand_transform": {"a_transform": lambda args, **_: lambda fn: Transform(fn, args["u"])},
        "quack.operand_transform.host": {"transform_a_operand": operand},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    monkeypatch.setitem(sys.modules, OURS, importlib.import_module(OURS))


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


def others_of(vocab_size: int, rows: int, z: float = 0.0, device: str = "cpu") -> tuple[Tensor, Tensor, int, float]:
    """Targets, weights and what follows them."""
    targets = agreement.random_ids(vocab_size, rows)
    targets[:4] = torch.tensor([0, vocab_size - 1, -1, -100])
    return targets.to(device), random(rows, seed=3).abs().float().to(device), vocab_size, z


def given(rows: int, columns: int, spread: float = 1.0) -> list[Tensor]:
    return [random(rows, 64) / 8 * spread, random(columns, 64, seed=1)]


def assert_is_the_formula(device: str, inputs: list[Tensor], vocab_size: int, z: float) -> None:
    others = others_of(vocab_size, len(inputs[0]), z)
    assert_agrees(quack_linear_cross_entropy, formulas.head_and_loss, inputs, LOW, *others, device=device)


@pytest.mark.parametrize(
    ("rows", "vocab_size", "columns", "z"),
    [
        pytest.param(128, 192, 192, 0.0, id="one tile"),
        pytest.param(128, 448, 448, Z, id="some behind"),
        pytest.param(128, 574, 576, Z, id="padding in a tile"),
        pytest.param(128, 150, 192, Z, id="no tile"),
        pytest.param(20, 448, 448, Z, id="fewer rows than a tile"),
        pytest.param(128, 577, 640, Z, id="one id behind", marks=pytest.mark.slow),
        pytest.param(300, 448, 448, Z, id="two chunks and rows behind", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_the_formula(device, rows, vocab_size, columns, z, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "EPILOGUE_CHUNK_ROWS", 128)
    assert_is_the_formula(device, given(rows, columns), vocab_size, z)


def test_padding_takes_no_part_and_receives_exactly_nothing(device):
    hidden, head = given(128, 448)
    head[400:] = 1000.0
    there = [value.to(device, LOW) for value in (hidden, head)]
    (total, _), gradients = values_and_gradients(quack_linear_cross_entropy, there, *others_of(400, 128, Z, device))
    assert not gradients[1][400:].any()
    assert_close(total, formulas.head_and_loss(hidden, head, *others_of(400, 128, Z))[0], 1e-2)


def test_logits_far_apart_lose_nothing(device):
    # The targets' tiles lie up to 60 nats below the largest logit.
    assert_is_the_formula(device, given(128, 576, spread=16.0), 576, 0.0)


def test_gradient_of_the_head_is_added_to_the_sink_over_micro_batches(device):
    hidden, head = given(128, 384)
    both, others = (quack_linear_cross_entropy, formulas.head_and_loss), others_of(384, 128)
    agreement.assert_sinks_gather(*both, [hidden], [head], *others, device=device)


def test_targets_may_begin_anywhere(device):
    # So do the ids behind the first one, where a batch is one row.
    ids = agreement.random_ids(384, 129).to(device).unsqueeze(0)
    others = (ids[:, 1:], torch.ones(1, 128, device=device), 384, 0.0)
    hidden, head = (value.to(device, LOW) for value in given(128, 384))
    (total, _), _ = values_and_gradients(quack_linear_cross_entropy, [hidden.unsqueeze(0), head], *others)
    expected = formulas.head_and_loss(*given(128, 384), ids[0, 1:].cpu(), torch.ones(128), 384, 0.0)
    assert_close(total, expected[0], 1e-2)


def test_hidden_states_that_are_no_numbers_give_a_loss_that_is_none(device):
    hidden, head = (value.to(device, LOW) for value in given(128, 192))
    hidden[5, 3] = math.nan
    total, _ = quack_linear_cross_entropy(hidden.requires_grad_(), head, *others_of(192, 128, device=device))
    assert not torch.isfinite(total)


def test_losses_alone_take_the_kernel_that_writes_no_gradient(device):
    hidden, head = (value.to(device, LOW) for value in given(16, 448))
    head.requires_grad_()  # as a parameter does, also where no gradient is wanted
    both, others = (quack_linear_cross_entropy, triton_linear_cross_entropy), others_of(448, 16, device=device)
    with torch.no_grad(), watched_gradients() as made:
        found, wanted = (function(hidden, head, *others) for function in both)
    assert torch.equal(found[1], wanted[1])
    assert made == []


@pytest.mark.slow
def test_the_trial_passes_what_is_right_and_names_what_is_wrong(device, monkeypatch):
    monkeypatch.setattr(trial, "DEVICE", device)
    problem_in_trial = linear_cross_entropy.problem_in_trial.__wrapped__  # which keeps what it found
    assert problem_in_trial() is None
    if device == "cpu":  # where formulas stand in for QuACK
        monkeypatch.setattr(sys.modules[OURS], "identity_epi", Epilogue(lambda acc: {"D": acc * 1.1}))
        assert "wrong by" in str(problem_in_trial())
