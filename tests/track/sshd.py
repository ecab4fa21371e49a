"""A real OpenSSH server on loopback, for tests: its own port, host key, user key and configuration files."""

import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from tests.ports import free_port


@dataclass(frozen=True)
class Sshd:
    process: subprocess.Popen[bytes]
    command: list[str]  # the words that start a client with a configuration that knows this server
    alias: str = "far-box"

    def url(self, folder: Path) -> str:
        return f"ssh://{self.alias}{quote(str(folder))}"

    def signal_connections(self, number: signal.Signals) -> None:
        """SIGKILL ends them as a crash or a firewall does; after SIGSTOP the network looks like one without a route."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)


@contextmanager
def start_sshd(folder: Path) -> Iterator[Sshd]:
    """Serve on a free port until the block ends; skips the test where there is no OpenSSH server."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    binary = shutil.which("sshd", path=path)
    if binary is None or shutil.which("ssh") is None:
        pytest.skip("OpenSSH's sshd is not installed (Debian/Ubuntu: apt-get install openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it when root starts it
    for name in ("host_key", "user_key"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / name)]
        subprocess.run(key, check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    port = free_port()
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder / 'host_key'}\nPidFile none\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n"
    )
    (folder / "known_hosts").write_text(f"far-box {(folder / 'host_key.pub').read_text()}")
    (folder / "ssh_config").write_text(
        f"Host far-box\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias far-box\n  User {getpass.getuser()}\n"
        f"Host *\n  IdentityFile {folder / 'user_key'}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder / 'known_hosts'}\n  StrictHostKeyChecking yes\n"
    )
    command = ["ssh", "-F", str(folder / "ssh_config")]
    with open(folder / "sshd.log", "wb") as log:
        process = subprocess.Popen([binary, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        server = Sshd(process, command)
        _wait_until_it_answers(server, folder)
        yield server
        server.signal_connections(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()


def _wait_until_it_answers(server: Sshd, folder: Path) -> None:
    for _ in range(100):
        done = subprocess.run([*server.command, "-o", "BatchMode=yes", server.alias, "true"], capture_output=True)
        if done.returncode == 0:
            return
        if server.process.poll() is not None:
            break
        time.sleep(0.1)
    said = (folder / "sshd.log").read_text(errors="replace")[-500:]
    pytest.skip(f"this machine's sshd does not let us in: {done.stderr.decode(errors='replace').strip()} {said}")
