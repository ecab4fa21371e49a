"""Programs that behave, and programs that do not."""

import ctypes
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Collection, Sequence

import pytest

from zero2all.evals.sandbox import OUTCOMES, SandboxLimits, is_isolated, protection, run_program

QUICK = SandboxLimits(seconds=0.7, memory_bytes=1 << 29)


def run(program: str, limits: SandboxLimits | None = None, without: Collection[str] = ()) -> str:
    return run_program(textwrap.dedent(program), limits or SandboxLimits(seconds=120), without)


def allowed(attempts: Sequence[str], without: Collection[str] = ()) -> list[str]:
    """Which of the attempts (statements in one line) raised no error: all in one program, to start one process."""
    program = f"""
        did = []
        for attempt in {list(attempts)!r}:
            try:
                exec(attempt, {{}})
            except Exception:
                continue
            did.append(attempt)
        assert not did
    """
    if run(program, without=without) == "passed":
        return []
    return [attempt for attempt in attempts if run(attempt, without=without) == "passed"] or ["all of them together"]


@pytest.fixture(
    params=[(), ("landlock",), ("landlock", "namespace"), ("landlock", "namespace", "seccomp")],
    ids=lambda without: "without " + " ".join(without) if without else "all",
)
def without(request):
    """All protections, and what machines have on which some are missing."""
    return request.param


def test_a_right_program_passes_and_a_wrong_one_says_how_it_failed(without):
    right = """
        import math, collections, re, heapq, itertools, hashlib, random, decimal, datetime, ssl, sqlite3, zoneinfo
        from typing import List
        def f(x: List[int]) -> int:
            return sum(x)
        print("x" * 1000)
        assert f([1, 2]) == 3 and hashlib.md5(b"").hexdigest() and zoneinfo.__file__
    """
    assert run(right, without=without) == "passed"
    assert run("assert 1 == 2, 'no'", without=without) == "failed: AssertionError"


def test_it_sees_nothing_of_our_environment_and_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "secret")
    seen = "import os\nassert not os.environ and os.listdir('.') == []"
    assert run(seen) == run(seen, without=["landlock"]) == "passed"
    assert run("def f(:\ud800") == "failed: SyntaxError"
    assert run("import json; json.loads('{')") == "failed: ValueError"  # of JSONDecodeError, the built-in base
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's protections are Linux's")
def test_the_kernel_protects_with_all_it_has_and_what_it_lacks_is_said(without):
    has = {"landlock": ctypes.CDLL(None).syscall(444, None, ctypes.c_long(0), 1) >= 1, "seccomp": True}
    has["namespace"] = subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0
    left = [name for name in ("landlock", "namespace", "audit hook") if has.get(name, True) and name not in without]
    calls = "audit hook" if "seccomp" in without else "seccomp"
    found = protection(without)
    assert found == {"files": left[0], "calls": calls}
    assert is_isolated(found) == ("audit hook" not in (left[0], calls))


def test_time_and_memory_are_limited():
    assert run("import time\ntime.sleep(60)", QUICK) == "out of time"
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"
    assert run(stubborn, QUICK) == "out of time"
    assert run("while True: pass", SandboxLimits(seconds=20, cpu_seconds=1)) == "out of time"
    assert run("x = 'x' * (1 << 33)", SandboxLimits(seconds=20, memory_bytes=1 << 28)) == "out of memory"


READ_ATTEMPTS = (
    "open({0!r}).read()",
    "import os; os.read(os.open({0!r}, os.O_RDONLY), 9)",
    "import io; io.open_code({0!r}).read()",
    "import mmap, os; mmap.mmap(os.open({0!r}, os.O_RDONLY), 0, access=mmap.ACCESS_READ)[:9]",
    "import ctypes; assert ctypes.CDLL(None).open({0!r}.encode(), 0) >= 0",
    "import subprocess; subprocess.run(['cat', {0!r}], check=True)",
    "import os; os.symlink({0!r}, 'link'); open('link').read()",
    "import os; os.link({0!r}, 'link'); open('link').read()",
    "import sys; sys.path.insert(0, __import__('os').path.dirname({0!r})); import precious",
    "import os; assert os.listdir(os.path.dirname({0!r}))",
    "import glob; assert glob.glob('/etc/pass*')",
    "open('/etc/passwd').read()",
    "open('/proc/self/environ').read()",
    "open('/proc/self/cmdline').read()",
    "open('/proc/self/mem', 'rb')",
    "open('/proc/self/root' + {0!r}).read()",
    "open('../' * 20 + {0!r}).read()",
    "import os; open('/proc/' + str(os.getppid()) + '/environ').read()",
    "import os; os.listdir('/proc/' + str(os.getppid()) + '/fd')",
    "import os; assert any(os.read(n, 1) for n in range(3))",
    "import numpy",
)


def test_no_file_is_read_but_the_standard_library(without, tmp_path):
    precious = tmp_path / "precious.py"
    precious.write_text("ours = 1")
    assert allowed([attempt.format(str(precious)) for attempt in READ_ATTEMPTS], without) == []


def test_no_descriptor_is_inherited(tmp_path):
    (tmp_path / "precious.txt").write_text("ours")
    handle = os.open(tmp_path / "precious.txt", os.O_RDONLY)
    try:
        os.set_inheritable(handle, True)
        assert allowed([f"import os; assert os.pread({number}, 1, 0)" for number in {*range(32), handle}]) == []
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    "attempt",
    [
        "import sys; sys.exit('precious')",
        "import os; os._exit(77)",
        "import builtins; builtins.precious = type('precious', (Exception,), {}); raise precious",
        "raise type('Precious', (Exception,), {'__str__': lambda self: 'precious'})",
        *(
            f"import os, sys; given = sys._getframe(2).f_locals; os.write(given['verdict'], {said}); os._exit(0)"
            for said in (
                "given['given']['secret'].encode() + b'failed: precious|landlock|seccomp'",
                "given['given']['secret'].encode() + b'\\xff\\0{precious'",
                "b'precious' * 100000",
            )
        ),
        # Nor can it claim to have passed.
        "import os; os._exit(0)",
        "import os\nfor n in range(3, 32):\n  try: os.write(n, b'passed' * 10000)\n  except OSError: pass\nos._exit(0)",
        "import sys; print('passed'); sys.exit(0)",
    ],
)
def test_only_words_that_we_know_come_back_and_none_that_the_program_could_have_read(attempt):
    assert all(word.isalpha() for outcome in OUTCOMES for word in outcome.replace(":", "").split())
    of_errors = {"failed: SystemExit", "failed: Exception"}
    assert run(attempt, SandboxLimits(seconds=2)) in {"ended early", "out of time", *of_errors}


FILE_ATTEMPTS = (
    "open({0!r}, 'w').write('gone')",
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


def test_no_file_is_written_changed_or_removed(without, tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("ours")
    assert allowed([attempt.format(str(precious)) for attempt in FILE_ATTEMPTS], without) == []
    assert precious.read_text() == "ours"


def test_there_is_no_network(without):
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
        assert allowed(attempts, without) == []
        for reached in (server.accept, lambda: listener.recv(1)):
            with pytest.raises(BlockingIOError):
                reached()


def test_no_process_is_started_or_disturbed(without):
    attempts = (
        "import os; os.fork()",
        "import os; assert os.system('true') == 0",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import multiprocessing; multiprocessing.get_context('fork').Process(target=print).start()",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
        "import os, signal; os.kill(-1, 0)",
        "while True:\n    __import__('os').fork()",
        "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",  # the kernel would send it SIGIO
        "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",  # TIOCSTI types into a terminal
    )
    assert allowed(attempts, without) == []


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
        "libc.fcntl(1, 8, libc.getppid())",  # F_SETOWN
        "libc.fcntl(1, 10, 9)",  # F_SETSIG
    )
    listed = ", ".join(calls)
    assert run(f"import ctypes\nlibc = ctypes.CDLL(None)\nassert [{listed}] == [-1] * {len(calls)}") == "passed"
    assert precious.read_text() == "ours"
