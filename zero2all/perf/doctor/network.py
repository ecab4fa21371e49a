"""`z2a doctor --network`: the way to other machines, what NCCL and gloo should be told, and how fast every pair is.

Each machine runs `z2a doctor --network --listen PORT`. One more command with all of them as peers asks each in turn to
measure the way to every later one. A request is one line of JSON; a listener does only three things: echo single bytes,
count what it is sent, and measure the way to another listener for about a second.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.language import message
from zero2all.parallel.network import fast_ports, interface_to, network_variables, said_bits
from zero2all.perf.doctor.finding import Finding, output_of
from zero2all.perf.doctor.gpus import grade_topology
from zero2all.perf.doctor.host import look_at_network
from zero2all.perf.doctor.nvidia_smi import parse_topology

STREAMS = 4
SECONDS = 0.6
CONNECT_SECONDS = 5.0
BLOCK = 1 << 17
ROUNDS = 20
LINE_BYTES = 1024


def look_at_ways(peers: Sequence[str] = ()) -> Iterator[Finding]:
    """Interface, fast ports, links between GPUs, and the variables that follow."""
    host = split_address(peers[0])[0] if peers else None
    interface = interface_to(host)
    if interface is None:
        advice = "Check the name and the routing table (`ip route`)."
        yield Finding("network", "error", f"there is no way to {host or 'other machines'}", "", advice)
    else:
        speed = f", {said_bits(1e6 * interface.mbit)}" if interface.mbit > 0 else ""
        yield Finding("network", "ok", f"{interface.name} ({interface.address}{speed}) is used: {interface.why}")
    yield from look_at_network()
    ports = fast_ports()
    if not ports:
        yield Finding("network", "ok", "no InfiniBand or RoCE card: TCP between machines")
    yield from _links()
    for one in network_variables(interface, ports):
        grade = "set by you; `z2a train` leaves it" if one.is_users else f"`z2a train` sets it: {one.why}"
        yield Finding("variables", "ok", f"{one.name}={one.value}: {grade}")


def _links() -> Iterator[Finding]:
    text, problem = output_of(["nvidia-smi", "topo", "-m"])
    if text is None:
        yield Finding("links", "note", f"links between GPUs were not looked at: {problem}")
        return
    try:
        topology = parse_topology(text)
    except ValueError as error:
        yield Finding("links", "note", f"not looked at: the output of nvidia-smi topo -m was not understood ({error})")
        return
    yield from grade_topology(topology)
    if any(not link.startswith("NV") for link in topology.between_gpus().values()):
        found, why = (
            "some pairs of GPUs have no NVLink",
            "Where P2P is missing, NCCL goes through shared memory by itself.",
        )
        advice = "Only if the first collective hangs (IOMMU, ACS): `export NCCL_P2P_DISABLE=1`."
        yield Finding("variables", "note", found, why, advice)


def split_address(text: str) -> tuple[str, int]:
    """`host:port`, with an IPv6 host in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--peer {text} is not an address. Expected HOST:PORT, such as 10.0.0.2:29700.")
    return host.strip("[]"), int(port)


def listen(port: int, ready: Callable[[], None]) -> None:
    """Answer others until the process is stopped; `ready` is called once it can."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise UsageError(
            f"--listen {port}: this machine cannot listen there: {os.strerror(error.errno or 0)}. Choose another "
            f"port, or end the program that uses it."
        ) from error
    with server:
        ready()
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        try:
            connection.settimeout(CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = _read_line(connection)
            if asked.get("do") == "echo":
                while byte := connection.recv(1):
                    connection.sendall(byte)
            elif asked.get("do") == "count":
                count, buffer = 0, bytearray(BLOCK)
                while got := connection.recv_into(buffer):
                    count += got
                _write_line(connection, {"bytes": count})
            elif asked.get("do") == "measure":
                _write_line(connection, measure_to(str(asked.get("to"))).__dict__)
        except (OSError, ValueError, UsageError):  # not one of ours, or it went away
            return


def _write_line(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """One short JSON object, read byte by byte: what follows it belongs to the measurement."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > LINE_BYTES:
            raise ValueError("no request")
        line += byte
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("no request")
    return value


@dataclass(frozen=True)
class Measured:
    """The way from one machine to another."""

    latency: float = 0.0  # seconds there and back
    one_stream: float = 0.0  # bits per second
    streams: float = 0.0
    problem: str = ""


def _open(address: str, request: dict[str, Any], seconds: float = CONNECT_SECONDS) -> socket.socket:
    connection = socket.create_connection(split_address(address), timeout=seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _write_line(connection, request)
    return connection


def measure_to(address: str) -> Measured:
    """Latency, and bandwidth with one connection and with several, from here to a listener."""
    try:
        with _open(address, {"do": "echo"}) as connection:
            times = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                connection.sendall(b"x")
                if connection.recv(1) != b"x":
                    return Measured(problem=message("something answers there, but it is not z2a doctor"))
                times.append(time.perf_counter() - started)
        return Measured(min(times), _bandwidth(address, 1), _bandwidth(address, STREAMS))
    except ConnectionRefusedError:
        return Measured(problem=message("nothing listens on that port"))
    except TimeoutError:
        return Measured(problem=message("no answer: a firewall drops the packets, or it is not z2a doctor"))
    except (ConnectionError, ValueError):
        return Measured(problem=message("something answers there, but it is not z2a doctor"))
    except OSError as error:
        return Measured(problem=error.strerror or str(error))


def _bandwidth(address: str, streams: int) -> float:
    """Bits per second that arrived, over all connections at once."""
    started = time.perf_counter()

    def send(_: int) -> int:
        with _open(address, {"do": "count"}) as connection:
            block = bytes(BLOCK)
            while time.perf_counter() - started < SECONDS:
                connection.sendall(block)
            connection.shutdown(socket.SHUT_WR)
            return int(_read_line(connection)["bytes"])

    with ThreadPoolExecutor(streams) as pool:
        arrived = sum(pool.map(send, range(streams)))
    return 8 * arrived / (time.perf_counter() - started)


def measure_pairs(peers: Sequence[str]) -> dict[tuple[str, str], Measured]:
    """From here to every peer, and between every two peers, one after the other so that they share no link."""
    found = {("here", peer): measure_to(peer) for peer in peers}
    for number, first in enumerate(peers):
        for second in peers[number + 1 :]:
            try:
                with _open(first, {"do": "measure", "to": second}) as connection:
                    connection.settimeout(4 * CONNECT_SECONDS)
                    found[first, second] = Measured(**_read_line(connection))
            except (OSError, ValueError) as error:
                found[first, second] = Measured(problem=message(f"{first} did not measure it: {error}"))
    return found


def pair_findings(found: dict[tuple[str, str], Measured]) -> list[Finding]:
    """An error for each way that could not be measured."""
    return [
        Finding(
            "between the machines",
            "error",
            f"not measured, from {first} to {second}: {one.problem}",
            "",
            "Start `z2a doctor --network --listen PORT` on that machine, with the port of --peer.",
        )
        for (first, second), one in found.items()
        if one.problem
    ]


def pair_rows(found: dict[tuple[str, str], Measured]) -> list[list[str]]:
    """A table with its heading."""
    rows = [["from", "to", "latency", "1 connection", f"{STREAMS} connections", "problem"]]
    for (first, second), one in found.items():
        figures = [f"{1e3 * one.latency:.3g} ms", said_bits(one.one_stream), said_bits(one.streams)]
        rows.append([first, second, *(["", "", ""] if one.problem else figures), one.problem])
    return rows
