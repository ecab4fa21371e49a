"""The chart library of the board's page (uPlot, MIT): fetched once with npm, checked, and kept beside the page.

`make` does this when it sets up, and wheels contain the library. After `pip install` from the repository's address it
is missing until `z2a board --fetch-charts` fetches it.
"""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from zero2all.common.errors import BadInputError
from zero2all.common.files import write_atomic

NAME, VERSION = "uplot", "1.6.32"
SHA256 = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
VENDOR = Path(__file__).parent / "web" / "vendor"
CHART_LIBRARY = VENDOR / "uPlot.iife.min.js"
FETCH_COMMAND = "z2a board --fetch-charts"
MISSING = (
    f"The chart library is missing, so the page shows no curves. Fetch it once with `{FETCH_COMMAND}`, which needs npm."
)
LONGEST_FETCH_SECONDS = 300


def has_charts() -> bool:
    """Whether the right version is there."""
    try:
        return hashlib.sha256(CHART_LIBRARY.read_bytes()).hexdigest() == SHA256
    except OSError:
        return False


def fetch_charts() -> bool:
    """Fetch the library with npm; False where the right version was there already."""
    if has_charts():
        return False
    npm = shutil.which("npm")
    if npm is None:
        raise BadInputError(
            "npm was not found; it fetches the chart library. Install Node (Debian/Ubuntu: apt-get install npm), then "
            f"run `{FETCH_COMMAND}` again. Everything else works without it."
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--ignore-scripts", f"{NAME}@{VERSION}"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONGEST_FETCH_SECONDS)
        except subprocess.TimeoutExpired:
            raise BadInputError(
                f"npm did not answer for {LONGEST_FETCH_SECONDS} seconds. Check the connection to your npm registry, "
                f"then run `{FETCH_COMMAND}` again."
            ) from None
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or len(packed) != 1:
            reason = (done.stderr or done.stdout).strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            raise BadInputError(
                f"npm could not fetch {NAME} {VERSION}: {reason}. Check the connection to your npm registry, then run "
                f"`{FETCH_COMMAND}` again."
            )
        _unpack(packed[0])
    return True


def _unpack(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        files = {name: tar.extractfile(f"package/{name}") for name in ("dist/uPlot.iife.min.js", "LICENSE")}
        library, licence = (file.read() if file else b"" for file in files.values())
    if hashlib.sha256(library).hexdigest() != SHA256:
        raise BadInputError(
            f"What npm fetched as {NAME} {VERSION} is not the file that zero2all was tested with, so it is not used. "
            f"Check which registry npm uses (`npm config get registry`), then run `{FETCH_COMMAND}` again."
        )
    write_atomic(VENDOR / "LICENSE", licence)
    write_atomic(CHART_LIBRARY, library)
