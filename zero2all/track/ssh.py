"""One connection to a far machine over the person's own OpenSSH: list the files of runs, read ranges of their bytes.

The far side needs a POSIX shell with `find`, `ls`, `wc`, `tail` and `head`; nothing is installed or written there. One
ssh process runs one small shell program, `remote_agent.sh`, which answers requests. It is sent as one line: every
statement in it ends with `;`, and it has no comments.

- ssh gets a fixed command, and the address after `--`. The program, the folder and all file names travel as lines on
  its input and are only ever used as "$variables": no name can become an option or shell code, at either end.
- BatchMode, so ssh fails instead of asking; keys, jump hosts and known hosts come from the person's own configuration.
  A shared connection is used, but we never become its master, because others would be cut off when we end.
- Every answer begins and ends with a random mark, so what a login script prints is not taken for an answer, and a file
  that shrank while it was sent is noticed. Every answer is due within `ANSWER_SECONDS`.
"""

import os
import re
import secrets
import selectors
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import unquote_to_bytes, urlsplit

from zero2all.common.errors import UsageError
from zero2all.common.files import package_text
from zero2all.common.progress import terminal_safe

SCHEME = "ssh://"
COMMAND_VARIABLE = "Z2A_SSH"  # environment variable with another ssh command

ANSWER_SECONDS = 30.0
MAX_GREETING_BYTES = 1 << 20
MAX_LISTING_BYTES = 32 << 20
STDERR_BYTES_KEPT = 4_096
UNEXPECTED = "unexpected answer from the remote machine"
MAX_REQUESTS = 8
RANGE_NUMBER = re.compile(rb"-?[0-9]{1,18}")

HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")

OPTIONS = (
    *("-T", "-e", "none"),
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),
    *("-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no", "-o", "ForwardX11=no"),
    *("-o", "PermitLocalCommand=no", "-o", "RemoteCommand=none", "-o", "RequestTTY=no"),
)
"""Given before the person's configuration is read, so these win over it."""

FAR_COMMAND = """exec sh -c 'IFS= read -r program && eval "$program"'"""
"""All that the far side's login shell ever sees; sh, csh and fish read it alike."""


class SshError(Exception):
    """The connection cannot be used (any more); the message says why."""


@dataclass(frozen=True)
class Address:
    """Where the runs are: the parts of an ssh:// URL."""

    host: str
    path: str  # absolute, or relative to the home folder there (`./…`)
    user: str | None = None
    port: int | None = None

    @property
    def name(self) -> str:
        """The last part of the path: the name of the run, when the path is one run."""
        return self.path.rstrip("/").rpartition("/")[2]


def is_address(text: str) -> bool:
    """Whether this is meant as an ssh:// URL rather than as a path."""
    return text.lower().startswith(SCHEME)


def parse_address(url: str) -> Address:
    """Read `ssh://[user@]host[:port]/path`; `/~/path` is below the home folder. Raises UsageError."""

    def refuse(why: str) -> UsageError:
        return UsageError(
            f"{url!r} is not the address of a runs folder: {why}. Expected ssh://[user@]host[:port]/path/to/runs, for "
            f"example ssh://gpu-box/home/me/work/runs or ssh://me@gpu-box:2222/~/work/runs."
        )

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise refuse(str(error)) from None
    if parts.scheme != "ssh":
        raise refuse("it does not begin with ssh://")
    if parts.password is not None:
        raise refuse("it contains a password, which ssh does not accept; use a key")
    if parts.query or parts.fragment:
        raise refuse("in its path write '?' as %3F and '#' as %23")
    authority = parts.netloc.rpartition("@")[2]
    host = authority[1 : authority.index("]")] if authority.startswith("[") else authority.partition(":")[0]
    if not HOST.fullmatch(host):
        raise refuse(f"{host!r} is not a host name")
    if parts.username is not None and not USER.fullmatch(parts.username):
        raise refuse(f"{parts.username!r} is not a user name")
    try:
        path = unquote_to_bytes(parts.path).decode("utf-8")
    except UnicodeDecodeError:
        raise refuse("its path is not UTF-8") from None
    if not path.startswith("/"):
        raise refuse("it has no path; for your home folder write /~/")
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        raise refuse("its path has a line break or another control character")
    if path == "/~" or path.startswith("/~/"):
        path = f".{path[2:]}"
    return Address(host, path, parts.username, port)


@dataclass(frozen=True)
class RangeRequest:
    """Ask for at most `limit` bytes of a file, from `offset` on."""

    name: str
    offset: int
    limit: int


@dataclass(frozen=True)
class FileRange:
    """Some bytes of a far file."""

    size: int  # how large the whole file is now; -1 when it is gone or may not be read
    data: bytes


class SshConnection:
    """One live ssh process, for one thread; only `kill` may be called from another."""

    def __init__(self, address: Address, ssh: Sequence[str] | None = None) -> None:
        self.address = address
        self.received_bytes = 0
        self._mark = secrets.token_hex(16).encode()
        self._buffer = bytearray()
        default = shlex.split(os.environ.get(COMMAND_VARIABLE, "")) or ["ssh"]
        words = [*(default if ssh is None else ssh), *OPTIONS]
        words += ["-p", str(address.port)] if address.port is not None else []
        words += ["-l", address.user] if address.user is not None else []
        words += ["--", address.host, FAR_COMMAND]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise SshError(f"{words[0]} cannot be started ({error.strerror}); install the OpenSSH client") from error
        pipes: Any = self._process  # whose streams are not None
        self._input: IO[bytes] = pipes.stdin
        self._output: IO[bytes] = pipes.stdout
        self._errors = b""
        # Not waited for: the master of a shared connection, left behind by ssh, keeps the stream open for hours.
        reading = threading.Thread(target=self._read_errors, args=(pipes.stderr,), name="ssh-errors", daemon=True)
        reading.start()
        self._reading_errors = reading
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)

    def open(self) -> str:
        """Send the program and wait for its greeting; returns "run" or "runs": what the folder is."""
        program = " ".join(line.strip() for line in package_text(__package__, "remote_agent.sh").splitlines())
        self._send(program.encode(), self._mark, self.address.path.encode())
        self._skip_to_mark()
        answer = self._line().split()
        if answer == [b"missing"]:
            raise SshError(f"{self.address.host} has no folder {self.address.path}, or you may not read it")
        if len(answer) != 2 or answer[0] != b"ready" or answer[1] not in (b"run", b"runs"):
            raise SshError(UNEXPECTED)
        return answer[1].decode()

    def listing(self, again: bool = False) -> list[bytes] | None:
        """One `ls -lin` line per file; None when nothing changed since the last call (unless `again`)."""
        self._send(b"list again" if again else b"list")
        answer = self._answer()
        if answer == b"same":
            return None
        if answer == b"missing":
            raise SshError(f"the folder {self.address.path} on {self.address.host} has disappeared")
        if answer != b"files":
            raise SshError(UNEXPECTED)
        end = self._mark + b" end"
        lines: list[bytes] = []
        total = 0
        while (line := self._line()) != end:
            lines.append(line)
            total += len(line)
            if total > MAX_LISTING_BYTES:
                raise SshError(f"the remote machine lists more than {MAX_LISTING_BYTES:,} bytes of file names")
        return [line for line in lines if line]

    def ranges(self, requests: Sequence[RangeRequest]) -> Iterator[FileRange]:
        """The answers to `requests`, in their order. All are sent at once, so that many small files cost one trip."""
        assert len(requests) <= MAX_REQUESTS, "more would fill the pipe to ssh while nobody reads its answers"
        lines = []
        for request in requests:
            lines += [b"piece %d %d" % (request.offset, request.limit), request.name.encode()]
        self._send(*lines)
        for request in requests:
            words = self._answer().split()
            if len(words) != 3 or words[0] != b"piece" or not all(RANGE_NUMBER.fullmatch(word) for word in words[1:]):
                raise SshError(UNEXPECTED)
            size, count = int(words[1]), int(words[2])
            if not 0 <= count <= request.limit:
                raise SshError("the remote machine sends more than requested")
            data = self._exactly(count)
            if self._line() != self._mark + b" end":
                raise SshError("a file shrank while it was being read")
            yield FileRange(size, data)

    def kill(self) -> None:
        """End the ssh process: whatever waits for its answer fails with SshError."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """End the ssh process and give its streams back."""
        self.kill()
        self._process.wait()
        self._selector.close()
        for stream in (self._input, self._output):
            stream.close()

    def _send(self, *lines: bytes) -> None:
        try:
            self._input.write(b"".join(line + b"\n" for line in lines))
        except OSError:
            raise self._broken() from None

    def _skip_to_mark(self) -> None:
        """Throw away what the far side's login scripts print, up to the mark."""
        wanted = self._mark + b" "
        deadline = time.monotonic() + ANSWER_SECONDS
        while (found := self._buffer.find(wanted)) < 0:
            if self.received_bytes > MAX_GREETING_BYTES:
                raise SshError("the login scripts of the remote machine print too much")
            self._receive(deadline)
        del self._buffer[: found + len(wanted)]

    def _answer(self) -> bytes:
        line = self._line()
        if not line.startswith(self._mark + b" "):
            raise SshError(UNEXPECTED)
        return line[len(self._mark) + 1 :]

    def _line(self) -> bytes:
        deadline = time.monotonic() + ANSWER_SECONDS
        looked_at = 0
        while (end := self._buffer.find(b"\n", looked_at)) < 0:
            looked_at = len(self._buffer)
            if looked_at > MAX_LISTING_BYTES:
                raise SshError("the remote machine sends a line that is too long")
            self._receive(deadline)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _exactly(self, count: int) -> bytes:
        end = self._mark + b" end\n"
        while len(self._buffer) < count:
            if self._buffer.endswith(end):  # fewer bytes than announced, and no more will come
                raise SshError("a file shrank while it was being read")
            self._receive(time.monotonic() + ANSWER_SECONDS)  # as long as something comes, it may take its time
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _receive(self, deadline: float) -> None:
        try:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise SshError(f"no answer from {self.address.host} within {ANSWER_SECONDS:.0f} s")
            data = os.read(self._output.fileno(), 1 << 16)
        except OSError:
            raise self._broken() from None
        if not data:
            raise self._broken()
        self.received_bytes += len(data)
        self._buffer += data

    def _broken(self) -> SshError:
        try:
            code: int | None = self._process.wait(2)
        except subprocess.TimeoutExpired:
            code = None
        self._reading_errors.join(0.2)
        lines = [line.strip() for line in self._errors.decode("utf-8", "replace").splitlines() if line.strip()]
        if lines:
            return SshError(terminal_safe(lines[-1], "?")[:300])
        if code:
            return SshError(f"the connection to {self.address.host} was closed (ssh ended with code {code})")
        return SshError(f"the connection to {self.address.host} was closed")

    def _read_errors(self, stream: IO[bytes]) -> None:
        """Keep the end of what ssh writes to its error stream."""
        with stream:
            while data := stream.read(1 << 12):
                self._errors = (self._errors + data)[-STDERR_BYTES_KEPT:]
