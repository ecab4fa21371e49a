"""Half of a symmetric product, mirrored, against the whole one in float64."""

import os
import subprocess
import sys

import pytest
import torch

from tests.ops.agreement import random

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.kernels import symmetric
from zero2all.ops.kernels.symmetric import times_transposed


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """Several tiles; on a GPU as they are, because the matrices may be large there."""
    if device == "cpu":
        monkeypatch.setattr(symmetric, "TILE", 16)
        monkeypatch.setattr(symmetric, "DEPTH", 16)


@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize("shape", [(2, 40, 56), (1, 16, 24), (3, 5, 9)])
def test_half_of_a_product_is_mirrored(device, shape, is_tall):
    n, rows, columns = (shape[0], *(size * (1 if device == "cpu" else 24) for size in shape[1:]))
    x = random(n * rows * columns, seed=1).view(n, rows, columns).bfloat16().to(device)
    x = x.mT.contiguous().mT if is_tall else x
    exact = x.double() @ x.double().mT
    found = times_transposed(x)
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found.double(), exact, rtol=8e-3, atol=8e-3 * columns**0.5)
    product = (found / columns).contiguous()
    exact = 0.5 * product.double() @ product.double() - 1.25 * product.double() + 2.0 * torch.eye(rows, device=device)
    found = times_transposed(product, 0.5, product, -1.25, 2.0)
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found.double(), exact, rtol=8e-3, atol=8e-3)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zero2all.ops.kernels.symmetric import DEPTH, STAGES, TILE, WARPS, _times_transposed as kernel

for adds in (False, True):
    constants = {"ADDS": adds, "TILE": TILE, "DEPTH": DEPTH, "stride_column": 1}
    kinds = {name: "*bf16" for name in ("x", "added", "result")}
    kinds |= {name: "fp32" for name in ("factor", "added_factor", "diagonal")}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
               if name not in constants and kinds.get(name, "i32") != "fp32"}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": WARPS, "num_stages": STAGES},
    )
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 113 * 1024, "two programs share a processor"
print("compiled")
"""


def test_the_kernel_compiles_for_a_hopper_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 2048, 5632), (2, 5632, 2048), (3, 1408, 512), (1, 1000, 3000)])
def test_muon_with_the_kernel_is_as_near_to_orthogonal_as_without(shape):
    from zero2all.train.optimizers.muon import of_unit_length, orthogonalise

    x = of_unit_length(
        torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)), torch.float64
    )
    exact = orthogonalise(x, 5)
    errors = [
        float((orthogonalise(x.bfloat16(), 5, kernels).double() - exact).norm() / exact.norm())
        for kernels in (False, True)
    ]
    assert errors[0] < 0.05
    assert errors[1] < 1.5 * errors[0]
