"""Two machines on one: two network namespaces joined by a virtual cable, which may be slow, filtered or forwarded.

    sudo python benchmarks/two_machines.py [--mbit 100]      hold them until Ctrl-C, and print how to use them
    sudo python benchmarks/two_machines.py --relay 7000 10.213.0.1:7001      forward a port, inside of one

Needs root and iproute2 (`ip`, `tc`). The rate limit is a token bucket. The firewall is a routing rule that drops what
comes in for some ports, and a forwarded port is a small relay: neither needs a module that small kernels leave out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

ADDRESSES = ("10.213.0.1", "10.213.0.2")
WIRE = "wire"
"""The name of the interface in both."""


def why_not() -> str:
    """Why there can be no namespaces here; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found: apt-get install iproute2"
    name = f"z2a-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"network namespaces are not permitted here: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Machines:
    """The two namespaces."""

    spaces: tuple[str, str]
    stack: ExitStack

    def command(self, machine: int, *words: str) -> list[str]:
        """The words that run a command on one of them."""
        return ["ip", "netns", "exec", self.spaces[machine], *words]

    def limit(self, bits_per_second: float | None) -> None:
        """Slow the cable down, in both directions. None: as fast as it can be again."""
        if bits_per_second is None:
            for machine in (0, 1):
                _run(*self.command(machine, "tc", "qdisc", "replace", "dev", WIRE, "root", "pfifo"))
            return
        limit = ["rate", f"{bits_per_second / 1e3:.0f}kbit", "burst", "64kb", "latency", "400ms"]
        for machine in (0, 1):
            _run(*self.command(machine, "tc", "qdisc", "replace", "dev", WIRE, "root", "tbf", *limit))

    def block(self, machine: int, ports: str) -> None:
        """A firewall: what comes in for these TCP ports (`29500` or `30000-60000`) is dropped without an answer."""
        rule = ["ip", "-n", self.spaces[machine], "rule"]
        _run(*rule, "add", "pref", "10", "iif", WIRE, "ipproto", "tcp", "dport", ports, "blackhole")
        _run(*rule, "add", "pref", "20", "lookup", "local")  # this is asked first, unless it is moved behind
        _run(*rule, "del", "pref", "0")

    def forward(self, machine: int, port: int, to: str) -> None:
        """Forward a port of this machine to HOST:PORT, as seen from there, until the end."""
        words = self.command(machine, sys.executable, __file__, "--relay", str(port), to)
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()  # it listens


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Two namespaces and their cable, gone afterwards. Each process that asks has its own."""
    spaces = (f"z2a-{os.getpid()}-0", f"z2a-{os.getpid()}-1")
    with ExitStack() as stack:
        for space in spaces:
            _run("ip", "netns", "add", space)
            stack.callback(_run, "ip", "netns", "del", space)
        ends = (f"z2a{os.getpid()}a", f"z2a{os.getpid()}b")
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, address, end in zip(spaces, ADDRESSES, ends, strict=True):
            _run("ip", "link", "set", end, "netns", space, "name", WIRE)
            _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", WIRE)
            for device in ("lo", WIRE):
                _run("ip", "-n", space, "link", "set", "dev", device, "up")
        yield Machines(spaces, stack)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def relay(port: int, to: str) -> None:
    """Accept connections on a port and pass their bytes on, both ways."""
    host, _, number = to.rpartition(":")
    with socket.create_server(("", port)) as listener:
        print("listening", flush=True)
        while True:
            near = listener.accept()[0]
            try:
                far = socket.create_connection((host, int(number)), 10)
            except OSError:
                near.close()
                continue
            for pair in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: Any, target: Any) -> None:
    try:
        source.settimeout(None)
        while block := source.recv(1 << 16):
            target.sendall(block)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the other side has gone
        source.close()
        target.close()


def main() -> None:
    """Hold the namespaces, or be a relay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, help="limit the cable to so many Mbit/s")
    parser.add_argument("--relay", nargs=2, metavar=("PORT", "HOST:PORT"), help="forward a port")
    arguments = parser.parse_args()
    if arguments.relay:
        relay(int(arguments.relay[0]), arguments.relay[1])
    if problem := why_not():
        raise SystemExit(problem)
    with two_machines() as machines:
        if arguments.mbit:
            machines.limit(arguments.mbit * 1e6)
        for machine, address in enumerate(ADDRESSES):
            print(f"{address}: {' '.join(machines.command(machine, 'bash'))}")
        print("Ctrl-C removes them.", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
