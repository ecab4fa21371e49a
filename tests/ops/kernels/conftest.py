"""Our kernels run without a GPU too, through Triton's interpreter, which has to be chosen before Triton is imported.
Where there is a GPU the same tests run on it, compiled, and count as tests that need one."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise RuntimeError(
            "Something imported triton before the tests of the kernels could choose its interpreter. Import it inside "
            "the test that needs it, or run with TRITON_INTERPRET=1 in the environment."
        )
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_report_header() -> str | None:
    return None if HAS_TRITON else "tests/ops/kernels is left out: Triton is not installed"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them before pytest looks at the marks."""
    on_a_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    for item in items:
        if HERE not in item.path.parents:
            continue
        if on_a_gpu:
            item.add_marker(pytest.mark.gpu)
        # A CPU without bfloat16 says so and goes on; numpy, inside the interpreter, remarks on infinities.
        item.add_marker(pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"))
        item.add_marker(pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(scope="session")
def float8(device: str) -> None:
    """Skips where torch has no float8 matmul."""
    one = torch.ones((), device=device)
    small = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(small, small.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError) as problem:
        pytest.skip(f"no float8 matmul on {device}: {str(problem).splitlines()[0]}")


@pytest.fixture(scope="session", autouse=True)
def compute_as_a_gpu_does(device: str) -> Iterator[None]:
    """Let the interpreter round and multiply as a GPU does.

    Triton 3.9's cuts bfloat16 off instead, and loses the carry of a float8 whose digits round up to the next power
    of two, which halves the value. And it takes bfloat16 for whole numbers, bit by bit, when it multiplies tiles or
    makes bfloat16 of whole numbers.
    """
    if device != "cpu":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, float32 = interpreter.InterpreterBuilder, interpreter.tl.float32
    as_it_was, dot_as_it_was = interpreter._convert_float, builder.create_dot

    def converted(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        small = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}.get(str(wanted))
        if str(given) != "fp32" or small is None:
            return as_it_was(values, given, wanted, rounding)
        rounded = torch.from_numpy(np.array(values, dtype=np.float32)).to(small)
        bits = np.uint16 if small is torch.bfloat16 else np.uint8
        return rounded.view(torch.int16 if bits is np.uint16 else torch.int8).numpy().view(bits)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = [self.cast_impl(tile, float32) if str(tile.dtype) == "bf16" else tile for tile in (a, b)]
        return dot_as_it_was(self, *wide, *others)

    def to_float(self: Any, whole: Any, wanted: Any) -> Any:
        return self.cast_impl(self.cast_impl(whole, float32), wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", converted)
        patch.setattr(builder, "create_dot", dot)
        patch.setattr(builder, "create_si_to_fp", to_float)
        yield
