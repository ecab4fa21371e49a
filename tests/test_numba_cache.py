"""numba finds a folder for compiled code also where neither the package nor the home folder can be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero2all import numba_cache

NOWHERE = Path("/proc/nowhere")  # cannot be made, not even by root
CHOOSE = f"import zero2all, pathlib; chosen = zero2all.numba_cache(pathlib.Path('{NOWHERE}'))"


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


def output_of(program: str, temporary: Path) -> str:
    """Where no folder of the user can be written."""
    environment = {**os.environ, "HOME": "/proc", "TMPDIR": str(temporary)}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plant_link(place: Path, other: Path) -> None:
    other.mkdir(mode=0o700)
    place.symlink_to(other)


def plant_open(place: Path, _other: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def plant_foreign(place: Path, _other: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
PLANTED = [plant_link, plant_open, pytest.param(plant_foreign, marks=needs_root)]


@pytest.mark.parametrize("plant", PLANTED)
def test_compiled_code_is_never_taken_from_a_folder_that_others_could_fill(tmp_path, plant):
    temporary, other = tmp_path / "tmp", tmp_path / "other"
    temporary.mkdir()
    plant(temporary / f"zero2all-numba-{os.getuid()}", other)
    program = f"{CHOOSE}; print(chosen, chosen.stat().st_mode & 0o777, chosen.is_dir())"
    path, *facts = output_of(program, temporary).split()
    assert Path(path).parent == temporary
    assert Path(path).name != f"zero2all-numba-{os.getuid()}"
    assert facts == [str(0o700), "True"]
    assert not Path(path).exists()  # it was for that process
    assert not other.exists() or not list(other.iterdir())


def test_a_kernel_is_cached_there(tmp_path: Path) -> None:
    program = (
        f"import os; {CHOOSE}; os.environ['NUMBA_CACHE_DIR'] = str(chosen);"
        "import zero2all.corpus.channel_kernels; print(len(list(chosen.rglob('*.nbi'))))"
    )
    assert int(output_of(program, tmp_path)) > 0
