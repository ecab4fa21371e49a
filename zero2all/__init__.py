"""zero2all: from raw text to a language model of your own.

Nothing heavy is imported here: `z2a --help` must answer at once, and a stage must not pay for its neighbours. The names
of the Python API (`api`) are looked up when they are used.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero2all.api import Model, Score, load, metrics, train_run

__version__ = "0.1.0"
__all__ = ["Model", "Score", "__version__", "load", "metrics", "train_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zero2all import api

    return getattr(api, name)


def numba_cache(package: Path) -> Path | None:
    """Where numba keeps compiled code if it finds no place by itself: beside the code and in the user's cache folder
    it does. In a container that runs as another user neither may be writable, and importing a kernel fails."""
    if "NUMBA_CACHE_DIR" in os.environ or os.access(package, os.W_OK):
        return None
    import atexit
    import shutil
    import tempfile

    home = Path(os.environ.get("HOME") or "/")
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "zero2all" / "numba"
    # numba loads what it finds there as code: a folder for this user alone, as `common.files.private_folder` checks it.
    for folder in (user_cache, Path(tempfile.gettempdir()) / f"zero2all-numba-{os.getuid()}"):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.lstat()
            is_own = facts.st_uid == os.getuid() and not facts.st_mode & 0o077  # a link has mode 0777
            if is_own and os.access(folder, os.W_OK):
                return folder
    made = Path(tempfile.mkdtemp(prefix="zero2all-numba-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


# Here, because numba reads the variable when it is imported, and every worker process imports this first.
if (_cache := numba_cache(Path(__file__).parent)) is not None:
    os.environ["NUMBA_CACHE_DIR"] = str(_cache)
