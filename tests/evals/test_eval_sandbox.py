"""Programs that behave, and programs that do not."""

from __future__ import annotations

import socket
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from zero2all.evals import sandbox
from zero2all.evals.sandbox import Limits, protection, run_program

QUICK = Limits(seconds=0.7, memory_bytes=1 << 29)


def run(program: str, limits: Limits | None = None) -> str:
    return run_program(textwrap.dedent(program), limits or Limits(seconds=120))


def allowed(attempts: Sequence[str]) -> str:
    """Which of the attempts (statements in one line) raised no error: all in one program, to start one process."""
    program = f"""
        did = []
        for attempt in {list(attempts)!r}:
            try:
                exec(attempt, {{}})
            except Exception:
                continue
            did.append(attempt)
        assert not did, did
    """
    return run(program)


def test_a_right_program_passes_and_a_wrong_one_says_how_it_failed():
    right = """
        import math, collections, re, heapq, itertools, hashlib
        from typing import List
        def f(x: List[int]) -> int:
            return sum(x)
        print("x" * 1000)
        assert f([1, 2]) == 3 and hashlib.md5(b"").hexdigest()
    """
    assert run(right) == "passed"
    assert run("assert 1 == 2, 'no'") == "failed: AssertionError: no"
    assert run("def f(:\ud800").startswith("failed: SyntaxError")


def test_linux_has_the_kernels_own_filter():
    assert protection() == ("seccomp" if sys.platform == "linux" else "audit hook")


def test_time_is_limited():
    assert run("import time\ntime.sleep(60)", QUICK) == "out of time"
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"
    assert run(stubborn, QUICK) == "out of time"
    assert run("while True: pass", Limits(seconds=20, cpu_seconds=1)) == "out of time"


def test_memory_is_limited():
    limits = Limits(seconds=20, memory_bytes=1 << 28)
    assert run("x = 'x' * (1 << 33)", limits) == "out of memory"
    assert run("x = []\nwhile True: x.append(bytearray(1 << 24))", limits) == "out of memory"


@pytest.fixture(params=["the machine's best", "audit hook"])
def guarded(request, monkeypatch, tmp_path):
    """Both protections: the second is what machines without the first have."""
    if request.param == "audit hook":
        source, decision = sandbox.CHILD.read_text(encoding="utf-8"), "is_filtered = filter_system_calls()"
        assert decision in source
        (tmp_path / "child.py").write_text(source.replace(decision, "is_filtered = False"), encoding="utf-8")
        monkeypatch.setattr(sandbox, "CHILD", tmp_path / "child.py")


FILE_ATTEMPTS = (
    "open({0!r}, 'w').write('gone')",
    "open({0!r}, 'a').write('more')",
    "open({0!r}, 'r+').write('more')",
    "open('here.txt', 'w').write('x' * 1000000)",
    "import os; os.remove({0!r})",
    "import os; os.rename({0!r}, {0!r} + '2')",
    "import os; os.truncate({0!r}, 0)",
    "import os; os.chmod({0!r}, 0)",
    "import os; os.mkdir('folder')",
    "import os; os.open({0!r}, os.O_WRONLY | os.O_TRUNC)",
    "import shutil, os; shutil.rmtree(os.path.dirname({0!r})); assert not os.path.exists({0!r})",
    "import tempfile; tempfile.TemporaryFile()",
    "import mmap, os; mmap.mmap(os.open({0!r}, os.O_RDWR), 0)[0] = 1",
)


def test_no_file_is_written_changed_or_removed(guarded, tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("ours")
    assert allowed([attempt.format(str(precious)) for attempt in FILE_ATTEMPTS]) == "passed"
    assert precious.read_text() == "ours"


def test_there_is_no_network(guarded):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as listener:
        server.settimeout(0)
        listener.settimeout(0)
        listener.bind(server.getsockname())
        place = server.getsockname()
        attempts = (
            f"import socket; socket.create_connection({place})",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{place[1]}', timeout=1)",
            f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', {place})",
            "import socket; socket.socketpair()",
        )
        assert allowed(attempts) == "passed"
        for reached in (server.accept, lambda: listener.recv(1)):
            with pytest.raises(BlockingIOError):
                reached()


def test_no_process_is_started_or_disturbed(guarded):
    attempts = (
        "import os; os.fork()",
        "import os; assert os.system('true') == 0",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import multiprocessing; multiprocessing.get_context('fork').Process(target=print).start()",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
        "import os, signal; os.kill(-1, 0)",
        "while True:\n    __import__('os').fork()",
    )
    assert allowed(attempts) == "passed"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's filter is Linux's")
def test_the_filter_holds_below_python_too(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("ours")
    calls = (
        "libc.socket(2, 1, 0)",
        f"libc.unlink({str(precious)!r}.encode())",
        f"libc.open({str(precious)!r}.encode(), 1)",
        "libc.fork()",
        "libc.kill(libc.getppid(), 15)",
        "libc.memfd_create(b'x', 0)",
        "libc.syscall(425, 8, None)",  # io_uring_setup, which could do all of these by itself
        "libc.prctl(22, 0, 0, 0, 0)",
    )
    listed = ", ".join(calls)
    assert run(f"import ctypes\nlibc = ctypes.CDLL(None)\nassert [{listed}] == [-1] * {len(calls)}") == "passed"
    assert precious.read_text() == "ours"


@pytest.mark.parametrize(
    "attempt",
    [
        "import os; os._exit(0)",
        "import os\nfor n in range(3, 32):\n  try: os.write(n, b'passed' * 10000)\n  except OSError: pass\nos._exit(0)",
        "import sys; print('passed'); sys.exit(0)",
    ],
)
def test_a_program_cannot_claim_to_have_passed(attempt):
    assert run(attempt) != "passed"


def test_it_sees_nothing_of_our_environment(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert run("import os\nassert 'MY_TOKEN' not in os.environ and os.listdir('.') == []") == "passed"


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("pass") == "passed"
    assert list(Path(tmp_path).iterdir()) == []
