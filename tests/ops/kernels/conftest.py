"""Our kernels run without a GPU too, through Triton's interpreter, which has to be chosen before Triton is imported.

Where there is a GPU the same tests run on it, compiled, and count as tests that need one (`make gpu`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise RuntimeError(
            "Something imported triton before the tests of the kernels could choose its interpreter. Import it inside "
            "the test that needs it, or run with TRITON_INTERPRET=1 in the environment."
        )
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them before pytest looks at the marks."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
