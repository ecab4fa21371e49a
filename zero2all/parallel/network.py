"""The network between the machines of a run: which interface, which variables of NCCL and gloo, how fast.

NCCL takes the first interface by name and gloo the one that the host name resolves to: in a container often a bridge or
the loopback, and the processes never meet. The interface that the route to rank 0 leaves through is the right one.
A variable that the user set is never changed.
"""

import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from zero2all.common.cores import read
from zero2all.common.errors import UsageError
from zero2all.parallel.nodes import RENDEZVOUS, outer_address, own_address, rendezvous_host

SYS = Path("/sys")


@dataclass(frozen=True)
class Chosen:
    """The interface for the traffic between machines."""

    name: str
    address: str
    why: str
    mbit: int  # 0: not known


def interface_to(host: str | None = None) -> Chosen | None:
    """The interface that traffic to `host` (default: anywhere else) leaves through; None: there is no way to it."""
    address = own_address(host) if host else outer_address()
    why = f"the route to {host} leaves through it" if host else "the default route leaves through it"
    for name, places in psutil.net_if_addrs().items():
        if address and any(place.address.partition("%")[0] == address for place in places):
            return Chosen(name, address, why, int(psutil.net_if_stats()[name].speed))
    return None


def interfaces() -> list[str]:
    """The network interfaces of this machine."""
    return sorted(psutil.net_if_stats())


@dataclass(frozen=True)
class FastPort:
    """A port of an InfiniBand or RoCE card."""

    name: str
    is_active: bool
    state: str
    rate: str


def fast_ports(system: Path = SYS) -> list[FastPort]:
    """The InfiniBand and RoCE ports of this machine."""
    found = []
    for port in sorted((system / "class/infiniband").glob("*/ports/*")):
        state = read(port / "state")
        found.append(FastPort(f"{port.parents[1].name}/{port.name}", "ACTIVE" in state, state, read(port / "rate")))
    return found


@dataclass(frozen=True)
class Variable:
    """A variable that follows from the network of this machine."""

    name: str
    value: str
    why: str
    is_users: bool = False

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({'set by you' if self.is_users else self.why})"


def network_variables(
    interface: Chosen | None, ports: Sequence[FastPort], values: Mapping[str, str] = os.environ
) -> list[Variable]:
    """What NCCL and gloo should be told for a run over several machines; the user's own value where there is one."""
    wanted = []
    if interface is not None:
        wanted.append(Variable("NCCL_SOCKET_IFNAME", f"={interface.name}", interface.why))
        wanted.append(Variable("GLOO_SOCKET_IFNAME", interface.name, interface.why))
    if ports and not any(port.is_active for port in ports):
        wanted.append(Variable("NCCL_IB_DISABLE", "1", "no InfiniBand or RoCE port is active"))
    said = {one.name: one for one in wanted}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if name in values:
            said[name] = Variable(name, values[name], "", is_users=True)
    return list(said.values())


def set_network_variables(master: str, values: MutableMapping[str, str] = os.environ) -> list[Variable]:
    """Before the processes of several machines join: set what the user has not set."""
    unknown = [name for name in values.get("GLOO_SOCKET_IFNAME", "").split(",") if name and name not in interfaces()]
    if unknown:
        raise UsageError(
            f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, but this machine has only the interfaces "
            f"{', '.join(interfaces())}. Set it to one of these, or unset it."
        )
    host = rendezvous_host(values) if RENDEZVOUS in values else master
    found = network_variables(interface_to(host) or interface_to(), fast_ports(), values)
    values.update({one.name: one.value for one in found})
    return found


LATENCY_ROUNDS = 5
FIRST_BYTES, MOST_BYTES = 1 << 16, 32 << 20
BUDGET_SECONDS = 0.4


def measure_ring(exchange: Callable[[int], None], slowest: Callable[[float], float]) -> tuple[float, float]:
    """Seconds of a small exchange and bits per second of a large one. `exchange(n)` sends n bytes to the next machine
    and takes n from the one before; `slowest` is the maximum over all machines, so that all send the same size."""

    def timed(size: int) -> float:
        started = time.perf_counter()
        exchange(size)
        return time.perf_counter() - started

    timed(1)  # the first one sets up the connection
    latency = slowest(min(timed(1) for _ in range(LATENCY_ROUNDS)))
    size, seconds = FIRST_BYTES, slowest(timed(FIRST_BYTES))
    while seconds < BUDGET_SECONDS / 4 and size < MOST_BYTES:  # a token bucket lets the first bytes through at once
        size = min(MOST_BYTES, 4 * size)
        seconds = slowest(timed(size))
    return latency, 8 * size / max(seconds - latency, 1e-9)


def speed_note(machines: int, latency: float, bits: float, variables: Sequence[Variable]) -> str:
    """One line for the start of a run."""
    told = next((one for one in variables if one.name == "GLOO_SOCKET_IFNAME"), None)
    over = f"over {told.value} ({'set by you' if told.is_users else told.why})" if told else "over an unknown interface"
    return f"network: {machines} machines {over}; slowest pair {1e3 * latency:.3g} ms, {said_bits(bits)}"


def said_bits(bits: float) -> str:
    """A speed with its unit."""
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
