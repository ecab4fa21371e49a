"""A model learns the same through all our kernels together as through the reference operators."""

import dataclasses

import pytest

from tests.ops.small_run import EAGER, losses_of_a_run, resolved

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.embedding import triton_embedding
from zero2all.ops.linear import feed_forward, fp8_linear, fp32_wgrad_linear
from zero2all.ops.linear_cross_entropy import triton_linear_cross_entropy
from zero2all.ops.optimizer import triton_adamw
from zero2all.ops.registry import Ops
from zero2all.ops.rms_norm import lean_rms_norm, triton_rms_norm
from zero2all.ops.rope import triton_rope
from zero2all.ops.swiglu import triton_swiglu

STEPS, SMALL = 2, {"layers": 1, "samples": 2}


def with_our_kernels(rms_norm=triton_rms_norm, linear_name="fp32_wgrad", linear=fp32_wgrad_linear) -> Ops:
    """What `auto` takes on a GPU, attention apart, though the checks refuse it on a CPU."""
    eager = resolved(EAGER, "float32")
    choices = [
        dataclasses.replace(choice, got="triton") if choice.operator == "optimizer" else choice
        for choice in eager.choices
    ]
    return dataclasses.replace(
        eager,
        rope=triton_rope,
        rms_norm=rms_norm,
        swiglu=triton_swiglu,
        linear=linear,
        feed_forward=feed_forward("triton", triton_swiglu, linear_name, linear),
        embedding=triton_embedding,
        linear_cross_entropy=triton_linear_cross_entropy,
        optimizer=triton_adamw,
        choices=tuple(choices),
    )


@pytest.mark.parametrize(
    ("precision", "kernels", "largest"),
    [
        ("float32", {}, 1e-6),
        pytest.param("bfloat16", {}, 1e-3, marks=pytest.mark.slow),
        ("bfloat16", {"rms_norm": lean_rms_norm, "linear_name": "fp8", "linear": fp8_linear}, 5e-3),
    ],
    ids=["float32", "bfloat16", "lean norm and float8"],
)
def test_a_few_steps_with_our_kernels(device, precision, kernels, largest):
    small = {**SMALL, "qk_norm": precision == "float32"}
    ours = losses_of_a_run(with_our_kernels(**kernels), precision, STEPS, device, **small)
    reference = losses_of_a_run(resolved(EAGER, precision), precision, STEPS, device, **small)
    assert float((ours - reference).abs().max()) < largest
