"""SwiGLU in one kernel each way."""

import pytest
import torch
from agreement import assert_agrees, assert_close, dtypes, random, values_and_gradients
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.kernels import swiglu
from zero2all.ops.kernels.swiglu import new_peaks, swiglu_backward, swiglu_forward, triton_swiglu


def reference(gate_up: Tensor) -> Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return gate * torch.sigmoid(gate) * up


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 140), (23, 6), (2, 2 * 1030)], ids=str)
def test_gate_times_its_sigmoid_times_up(device, dtype, shape):
    assert_agrees(triton_swiglu, reference, [random(*shape)], dtype, device=device)


def test_large_gates_neither_overflow_nor_vanish(device):
    gates = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], dtype=torch.float64)
    gate_up = torch.cat((gates, random(7))).unsqueeze(0)
    found, gradients = values_and_gradients(triton_swiglu, [gate_up.float().to(device)])
    expected, wanted = values_and_gradients(reference, [gate_up])
    assert_close(found[0], expected[0], 3e-6)
    assert_close(gradients[0], wanted[0], 3e-6)


def test_rows_that_are_not_contiguous_are_read_as_they_are(device):
    inputs = [random(10, 6)]
    assert_agrees(lambda x: triton_swiglu(x.t()), lambda x: reference(x.t()), inputs, torch.float32, device=device)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("slots", [2, 1024])
def test_both_passes_can_note_the_largest_magnitude_they_write(device, dtype, slots, monkeypatch):
    monkeypatch.setattr(swiglu, "PEAK_SLOTS", slots)
    monkeypatch.setattr(swiglu, "BLOCK", 16)
    gate_up, dh = random(5, 60).to(device, dtype), random(5, 30, seed=1).to(device, dtype)
    peaks = new_peaks(torch.device(device))
    h = swiglu_forward(gate_up, peaks)
    assert_close(peaks.max(), h.double().abs().max(), 4e-3)
    peaks = new_peaks(torch.device(device))
    dgate_up, _ = swiglu_backward(dh, gate_up, peaks=peaks)
    assert_close(peaks.max(), dgate_up.double().abs().max(), 4e-3)


@dtypes(torch.float32, torch.bfloat16)
def test_backward_can_make_the_product_again_bit_for_bit(device, dtype):
    gate_up, dh = random(5, 60).to(device, dtype), random(5, 30, seed=1).to(device, dtype)
    alone, nothing = swiglu_backward(dh, gate_up)
    dgate_up, h = swiglu_backward(dh, gate_up, again=True)
    assert nothing is None
    assert torch.equal(alone, dgate_up)
    assert torch.equal(h, swiglu_forward(gate_up))
