"""numba finds a folder for compiled code also where neither the package nor the home folder can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero2all import numba_cache

NOWHERE = Path("/proc/nowhere")  # cannot be made, not even by root


def test_a_folder_that_can_be_written_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert numba_cache(tmp_path) is None  # numba writes beside the code
    assert numba_cache(NOWHERE) == tmp_path / "cache" / "zero2all" / "numba"
    monkeypatch.setenv("XDG_CACHE_HOME", str(NOWHERE))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert numba_cache(NOWHERE) == tmp_path / f"zero2all-numba-{os.getuid()}"
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/mine")
    assert numba_cache(NOWHERE) is None


def test_a_kernel_is_cached_there(tmp_path: Path) -> None:
    program = (
        "import os, zero2all, pathlib; chosen = zero2all.numba_cache(pathlib.Path('/proc/nowhere'));"
        "os.environ['NUMBA_CACHE_DIR'] = str(chosen);"
        "import zero2all.corpus.channel_kernels; print(len(list(chosen.rglob('*.nbi'))))"
    )
    environment = {**os.environ, "HOME": "/proc", "TMPDIR": str(tmp_path)}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
