"""`z2a WORDS…` as tests type it."""

import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from zero2all.cli import main

# What lets root read and write everywhere is given up first.
WITHOUT_RIGHTS = """
import ctypes, sys
from zero2all.cli import main
version_and_pid, no_rights_at_all = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(version_and_pid, no_rights_at_all) == 0
sys.exit(main(sys.argv[1:]))
"""


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


class CommandLine:
    """Call it with the words of a command, or expect how it ends."""

    def __init__(self, run: Callable[[list[str]], Ended]) -> None:
        self.run = run

    def __call__(self, *words: object) -> Ended:
        return self.run([str(word) for word in words])

    def done(self, *words: object) -> str:
        """What it printed; it must succeed."""
        ended = self(*words)
        assert ended.code == 0, ended.err
        return ended.out

    def refused(self, code: int, *words: object) -> str:
        """What it said when it ended with this code."""
        ended = self(*words)
        assert ended.code == code, ended
        assert "Traceback" not in ended.err
        return ended.err


@pytest.fixture
def z2a(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `z2a WORDS…` in this process."""

    def run(words: list[str]) -> Ended:
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as end:  # argparse ends the process itself
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return CommandLine(run)


@pytest.fixture
def z2a_without_rights() -> CommandLine:
    """Run `z2a WORDS…` in a process that may not read and write everywhere."""

    def run(words: list[str]) -> Ended:
        done = subprocess.run([sys.executable, "-c", WITHOUT_RIGHTS, *words], capture_output=True, text=True)
        return Ended(done.returncode, done.stdout, done.stderr)

    return CommandLine(run)
