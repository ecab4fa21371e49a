"""The secret of a run: who knows it may take part (`common.connections`).

It comes from a file that the user names, from Z2A_SECRET, or from a file beside the run that the first of its processes
makes: machines that share the folder of their runs need nothing else. Only its user may read the file.
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from zero2all.common.errors import UsageError

VARIABLE = "Z2A_SECRET"
MAKE_ONE = "z2a launch secret z2a.secret"
"""The command that makes one for machines that share no folder."""
SHARE_ONE = (
    f"machines that share no folder need one secret: `{MAKE_ONE}` on one of them, copy it to the others, and "
    f"--secret-file z2a.secret on all"
)
LEAST_BYTES, MOST_BYTES = 16, 4096
WRITE_SECONDS = 5.0


def run_secret(run: Path) -> bytes:
    """The secret of the run in this folder: what the user gave, else the file beside it, whose content `--fresh`
    removes."""
    return given_secret(None) or shared_secret(run.with_name(f"{run.name}.secret"))


def given_secret(path: Path | None) -> bytes | None:
    """The secret that the user gave: in the file, else in the variable. None: in neither."""
    if path is not None:
        return _read(path)
    if (text := os.environ.get(VARIABLE)) is None:
        return None
    return _checked(text.encode(errors="surrogateescape"), VARIABLE)


def shared_secret(path: Path) -> bytes:
    """The secret in this file, which is made if it is not there. All who share its folder get the same one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        make_secret(path)
    if not path.exists():
        raise UsageError(f"{path} is a link to a file that is not there. Remove the link; the secret is made anew.")
    deadline = time.monotonic() + WRITE_SECONDS
    while path.stat().st_size == 0 and time.monotonic() < deadline:  # another process has just made it
        time.sleep(0.02)
    return _read(path)


def new_secret() -> str:
    """One of 256 random bits."""
    return secrets.token_urlsafe(32)


def make_secret(path: Path) -> None:
    """A new secret in a new file; FileExistsError where there is one, or a link."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(new_secret() + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"The secret of the run cannot be read from {path}: {error.strerror or error}. Make one with "
            f"`{MAKE_ONE}`, copy it to every machine, and give it with --secret-file."
        ) from error
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{path} holds the secret of a run, but belongs to another user. Make your own: `{MAKE_ONE}`.")
    if found.st_mode & 0o077:
        raise UsageError(f"{path} holds the secret of a run, but other users may read it. Run: chmod 600 {path}")
    return _checked(text, str(path))


def _checked(text: bytes, where: str) -> bytes:
    secret = text.strip()
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise UsageError(
            f"{where} holds {len(secret)} bytes. A secret has {LEAST_BYTES} to {MOST_BYTES}. Make one with "
            f"`{MAKE_ONE}`."
        )
    return secret
