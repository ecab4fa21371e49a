"""SwiGLU in one kernel each way."""

import pytest
import torch

from tests.ops import formulas
from tests.ops.agreement import assert_agrees, assert_close, dtypes, random
from zero2all.ops.kernels import swiglu
from zero2all.ops.kernels.swiglu import new_peaks, swiglu_backward, swiglu_forward, triton_swiglu


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 140), (23, 6), (2, 2 * 1030), (5, 2 * 1024)], ids=str)
def test_gate_times_its_sigmoid_times_up(device, dtype, shape):
    assert_agrees(triton_swiglu, formulas.swiglu, [random(*shape)], dtype, device=device)


def test_large_gates_neither_overflow_nor_vanish(device):
    gates = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], dtype=torch.float64)
    pairs = torch.stack((gates, random(7)), dim=-1).view(1, 14)
    assert_agrees(triton_swiglu, formulas.swiglu, [pairs], torch.float32, device=device)


def test_nothing_is_written_behind_the_last_unit(device):
    pairs, dh = random(2 * 21).float().to(device), random(21, seed=1).float().to(device)
    h, dpairs = torch.full((32,), 9.0, device=device), torch.full((64,), 9.0, device=device)
    swiglu._swiglu_forward[(2,)](pairs, h, pairs, 21, SLOTS=0, BLOCK=16)
    swiglu._swiglu_backward[(2,)](dh, pairs, dpairs, h, pairs, 21, WRITE_H=True, SLOTS=0, BLOCK=16)
    assert_close(h[:21], formulas.swiglu(pairs.double()), 3e-6)
    assert (h[21:] == 9.0).all()
    assert (dpairs[42:] == 9.0).all()
    assert (dpairs[:42] != 9.0).all()


def test_rows_that_are_not_contiguous_are_read_as_they_are(device):
    found, wanted = (lambda x, of=function: of(x.t()) for function in (triton_swiglu, formulas.swiglu))
    assert_agrees(found, wanted, [random(10, 6)], torch.float32, device=device)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("slots", [2, 1024])
def test_both_passes_can_note_the_largest_magnitude_they_write(device, dtype, slots, monkeypatch):
    monkeypatch.setattr(swiglu, "PEAK_SLOTS", slots)
    monkeypatch.setattr(swiglu, "BLOCK", 16)
    pairs, dh = random(5, 60).to(device, dtype), random(5, 30, seed=1).to(device, dtype)
    peaks = new_peaks(torch.device(device))
    h = swiglu_forward(pairs, peaks)
    assert_close(peaks.max(), h.double().abs().max(), 4e-3)
    peaks = new_peaks(torch.device(device))
    dpairs, _ = swiglu_backward(dh, pairs, peaks=peaks)
    assert_close(peaks.max(), dpairs.double().abs().max(), 4e-3)


@dtypes(torch.float32, torch.bfloat16)
def test_backward_can_make_the_product_again_bit_for_bit(device, dtype):
    pairs, dh = random(5, 60).to(device, dtype), random(5, 30, seed=1).to(device, dtype)
    alone, nothing = swiglu_backward(dh, pairs)
    dpairs, h = swiglu_backward(dh, pairs, again=True)
    assert nothing is None
    assert torch.equal(alone, dpairs)
    assert torch.equal(h, swiglu_forward(pairs))
