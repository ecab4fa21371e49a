"""Programs in processes of their own, forked from one that has imported torch (warm_process.py); terminals for them."""

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Z2A = "import sys; from zero2all.cli import main; sys.exit(main())"
LONG_SECONDS = 600.0
"""For what must happen. A shared machine may be ten times slower for minutes; a hang still ends here."""


class WarmProcess:
    """The other side of warm_process.py."""

    def __init__(self, **environment: str) -> None:
        words, pipe = [sys.executable, str(Path(__file__).with_name("warm_process.py"))], subprocess.PIPE
        environment = {**os.environ, **environment}
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.is_ready = False

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self.is_ready:
            self.process.stdout.readline()
            self.is_ready = True
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


class Program:
    """One started process."""

    def __init__(self, warm: WarmProcess, code: str, arguments: list[str], output: Path) -> None:
        self.warm, self.output = warm, output
        self.pid: int = warm.ask({"code": code, "arguments": arguments, "output": str(output)})
        self.exit_code: int | None = None

    def text(self) -> str:
        """What it printed so far."""
        return self.output.read_text() if self.output.exists() else ""

    def poll(self) -> int | None:
        if self.exit_code is None:
            self.exit_code = self.warm.ask({"wait": self.pid})
        return self.exit_code

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        self.wait_until(lambda: self.poll() is not None)
        assert self.exit_code is not None
        return self.exit_code

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited too long; it printed: {self.text()}"
            time.sleep(0.004)

    def signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


Start = Callable[..., Program]


class Screen:
    """The other side of a pseudo-terminal: everything that was written to it so far."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.seen = b""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.handle, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, wanted: bytes, times: int = 1) -> None:
        self.wait_until(lambda: self.seen.count(wanted) >= times, repr(wanted))

    def wait_until(self, is_there: Callable[[], bool], what: str, seconds: float = LONG_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not is_there():
            left = deadline - time.monotonic()
            assert left > 0, f"{what} was not drawn: {self.seen[-2000:]!r}"
            if select.select([self.handle], [], [], left)[0]:
                try:
                    self.seen += os.read(self.handle, 1 << 16)
                except OSError:  # the program ended
                    time.sleep(0.01)
