"""`z2a doctor --network`: the way to other machines, what NCCL and gloo should be told, and how fast every pair is.

Each machine runs `z2a doctor --network --listen PORT`. One more command with all of them as peers asks each in turn to
measure the way to every later one. The request is the hello of a connection (`common.connections`), so only who knows
the secret of the listener is answered. A listener does only three things: echo single bytes, count what it is sent, and
measure the way to another listener for about a second.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from zero2all.common.connections import Connection, ConnectionListener, NotOfThisRunError, dial
from zero2all.common.connections import listen as open_port
from zero2all.common.errors import UsageError
from zero2all.common.language import message
from zero2all.measure.doctor.finding import Area, DoctorFinding
from zero2all.measure.doctor.gpus import grade_topology, read_topology
from zero2all.measure.doctor.host import look_at_network
from zero2all.parallel.network import fast_ports, interface_to, network_variables, said_bits

NETWORK, VARIABLES, BETWEEN = Area("network"), Area("variables"), Area("between the machines")
STREAMS = 4
SECONDS = 0.6
CONNECT_SECONDS = 5.0
BLOCK = 1 << 17
ROUNDS = 20


def look_at_ways(peers: Sequence[str] = ()) -> Iterator[DoctorFinding]:
    """Interface, fast ports, links between GPUs, and the variables that follow."""
    host = split_address(peers[0])[0] if peers else None
    interface = interface_to(host)
    if interface is None:
        advice = "Check the name and the routing table (`ip route`)."
        yield NETWORK.error(f"there is no way to {host or 'other machines'}", "", advice)
    else:
        speed = f", {said_bits(1e6 * interface.mbit)}" if interface.mbit > 0 else ""
        yield NETWORK.ok(f"{interface.name} ({interface.address}{speed}) is used: {interface.why}")
    yield from look_at_network()
    ports = fast_ports()
    if not ports:
        yield NETWORK.ok("no InfiniBand or RoCE card: TCP between machines")
    yield from _links()
    for one in network_variables(interface, ports):
        grade = "set by you; `z2a train` leaves it" if one.is_users else f"`z2a train` sets it: {one.why}"
        yield VARIABLES.ok(f"{one.name}={one.value}: {grade}")


def _links() -> Iterator[DoctorFinding]:
    topology = read_topology()
    if isinstance(topology, DoctorFinding):
        yield topology
        return
    yield from grade_topology(topology)
    if any(not link.startswith("NV") for link in topology.between_gpus().values()):
        why = "Where P2P is missing, NCCL goes through shared memory by itself."
        advice = "Only if the first collective hangs (IOMMU, ACS): `export NCCL_P2P_DISABLE=1`."
        yield VARIABLES.note("some pairs of GPUs have no NVLink", why, advice)


def split_address(text: str) -> tuple[str, int]:
    """`host:port`, with an IPv6 host in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--peer {text} is not an address. Expected HOST:PORT, such as 10.0.0.2:29700.")
    return host.strip("[]"), int(port)


def listen(host: str, port: int, secret: bytes, ready: Callable[[str], None]) -> None:
    """Answer others until the process is stopped; `ready` gets the address once it can. `host` empty: that of the
    interface that is used."""
    if not host:
        interface = interface_to(None)
        host = interface.address if interface else "127.0.0.1"
    try:
        listener = open_port(host, (port,))
    except OSError as error:
        raise UsageError(
            f"--listen {host}:{port}: this machine cannot listen there: {os.strerror(error.errno or 0)}. Choose "
            f"another address or port, or end the program that uses it."
        ) from error
    ConnectionListener(listener, secret, lambda connection: _answer(connection, secret), "doctor")
    ready(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    threading.Event().wait()


def _answer(connection: Connection, secret: bytes) -> None:
    with connection, suppress(OSError, UsageError):  # it went away
        asked, connected = connection.hello, connection.socket
        connected.settimeout(CONNECT_SECONDS)
        if asked.get("do") == "echo":
            while byte := connected.recv(1):
                connected.sendall(byte)
        elif asked.get("do") == "count":
            count, buffer = 0, bytearray(BLOCK)
            while got := connected.recv_into(buffer):
                count += got
            connection.send({"bytes": count})
        elif asked.get("do") == "measure":
            connection.send(measure_to(str(asked.get("to")), secret).__dict__)


@dataclass(frozen=True)
class Measured:
    """The way from one machine to another."""

    latency: float = 0.0  # seconds there and back
    one_stream: float = 0.0  # bits per second
    streams: float = 0.0
    problem: str = ""


def measure_to(address: str, secret: bytes) -> Measured:
    """Latency, and bandwidth with one connection and with several, from here to a listener."""
    try:
        with dial(split_address(address), secret, "doctor", {"do": "echo"}) as connection:
            connection.socket.settimeout(CONNECT_SECONDS)
            times = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                connection.socket.sendall(b"x")
                if connection.socket.recv(1) != b"x":
                    return Measured(problem=message("something answers there, but it is not z2a doctor"))
                times.append(time.perf_counter() - started)
        return Measured(min(times), _bandwidth(address, secret, 1), _bandwidth(address, secret, STREAMS))
    except NotOfThisRunError as error:
        return Measured(problem=str(error))
    except ConnectionRefusedError:
        return Measured(problem=message("nothing listens on that port"))
    except TimeoutError:
        return Measured(problem=message("no answer: a firewall drops the packets, or it is not z2a doctor"))
    except (ConnectionError, ValueError):
        return Measured(problem=message("something answers there, but it is not z2a doctor"))
    except OSError as error:
        return Measured(problem=error.strerror or str(error))


def _bandwidth(address: str, secret: bytes, streams: int) -> float:
    """Bits per second that arrived, over all connections at once."""
    started = time.perf_counter()

    def send(_: int) -> int:
        with dial(split_address(address), secret, "doctor", {"do": "count"}) as connection:
            block = bytes(BLOCK)
            while time.perf_counter() - started < SECONDS:
                connection.socket.sendall(block)
            connection.socket.shutdown(socket.SHUT_WR)
            return int(connection.receive(CONNECT_SECONDS)["bytes"])

    with ThreadPoolExecutor(streams) as pool:
        arrived = sum(pool.map(send, range(streams)))
    return 8 * arrived / (time.perf_counter() - started)


def measure_pairs(peers: Sequence[str], secret: bytes) -> dict[tuple[str, str], Measured]:
    """From here to every peer, and between every two peers, one after the other so that they share no link."""
    found = {("here", peer): measure_to(peer, secret) for peer in peers}
    for number, first in enumerate(peers):
        for second in peers[number + 1 :]:
            try:
                with dial(split_address(first), secret, "doctor", {"do": "measure", "to": second}) as connection:
                    found[first, second] = Measured(**connection.receive(4 * CONNECT_SECONDS))
            except (OSError, ValueError, TypeError) as error:
                found[first, second] = Measured(problem=message(f"{first} did not measure it: {error}"))
    return found


def pair_findings(found: dict[tuple[str, str], Measured]) -> list[DoctorFinding]:
    """An error for each way that could not be measured."""
    return [
        BETWEEN.error(
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
