"""Several machines in one run: how many there are, which of them this one is, and where they meet.

Each machine runs the same command. What the flags do not say is taken from Slurm's variables, if `srun` started the
command with one task per machine. Machine r of n, with p processes on each, gets the ranks r*p to r*p + p - 1; under
supervisors and a coordinator (`resilience.coordinator`), the machines that are there share the ranks in each attempt.

The address where the others find machine 0 (`--rendezvous`) and the one where it listens (`--rendezvous-bind`) are two
settings: in a container the first belongs to the host, which forwards the port, and cannot be bound inside. Without the
second, machine 0 listens at the first, and at no other address of its own. If it does not have that address, it does
not guess where a translated one arrives: it may as well be another machine that was given the number 0 by mistake.
"""

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from zero2all.common.connections import listen, split_address
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import say

DEFAULT_PORT = 29500
SLURM_PORTS = range(20_000, 30_000)
"""Below the ports that Linux gives to outgoing connections."""
PUBLIC = ("192.0.2.1", "2001:db8::1")
"""Addresses that belong to nobody: the way to them is the default route. Nothing is sent."""
RENDEZVOUS = "Z2A_RENDEZVOUS"
"""Variable of the processes: where the machines meet. The store is reached over loopback."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, seen from one of them; without more said, it is alone."""

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    bind_host: str = "127.0.0.1"
    bind_port: int = 0
    least: int = 1
    """With how many of `count` the run goes on (`--nodes MIN:MAX`); equal where a run has a fixed number."""

    def listen(self) -> socket.socket:
        """On the first machine: the socket where it waits for the others."""
        try:
            return listen(self.bind_host, (self.bind_port,))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"Port {self.bind_port} is in use: is another machine 0 of this run running here? Give each "
                    f"machine its own --node-rank. If another program has the port, choose another one with "
                    f"--rendezvous, the same on all machines, or with --rendezvous-bind."
                ) from error
            raise UsageError(
                f"This machine cannot listen on {self.bind_host}, port {self.bind_port}: {error.strerror or error}. "
                f"Give an address of this machine and a free port with --rendezvous-bind; --rendezvous is what the "
                f"other machines connect to."
            ) from error


def find_nodes(
    counts: tuple[int, int] | None = None,
    rank: int | None = None,
    rendezvous: str | None = None,
    bind: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Nodes:
    """The machines of a run, by the flags (`counts`: the least and the most), and what they leave open by Slurm; all
    problems at once."""
    slurm = _of_slurm(environment)
    least, count = counts or ((slurm.count, slurm.count) if slurm else (1, 1))
    if count == 1:
        needless = [f"--{name}" for name, value in (("rendezvous", rendezvous), ("rendezvous-bind", bind)) if value]
        if needless or rank or (rank is not None and counts is None):
            raise UsageError(
                f"{', '.join(needless) or '--node-rank'} needs the number of machines. Add --nodes N, with N from 2."
            )
        return Nodes()
    is_own_flag = rendezvous is not None
    if slurm and slurm.count == count:
        rank = slurm.rank if rank is None else rank
        rendezvous = rendezvous or f"{slurm.host}:{slurm.port}"
    problems = []
    if rank is None or not 0 <= rank < count:
        got = "missing" if rank is None else str(rank)
        problems.append(t(f"--node-rank is {got}: expected 0 to {count - 1}, another number on each machine."))
    if rendezvous is None:
        problems.append(t("--rendezvous is missing: expected HOST:PORT of machine 0, as the others reach it."))
    if problems:
        raise UsageError(f"--nodes is {count}. {' '.join(problems)}")
    assert rank is not None, "checked above"
    assert rendezvous is not None, "checked above"
    host, port = read_address(rendezvous, "--rendezvous")
    if is_own_flag and not re.search(r":\d+$", rendezvous):
        say(f"z2a: --rendezvous has no port: {DEFAULT_PORT} is used.")
    if bind is not None:
        return Nodes(count, rank, host, port, *read_address(bind, "--rendezvous-bind"), least)
    return Nodes(count, rank, host, port, "" if rank else _door_address(host, port), port, least)


def _door_address(host: str, port: int) -> str:
    """Where machine 0 listens: at the address of this machine that --rendezvous names."""
    address = own_address(host)
    try:
        known = {str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        known, address = set(), outer_address()
    if address in known:
        return address
    if known and not all(map(_is_loopback, known)):
        here = outer_address() or "ADDRESS"
        bind = f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
        raise UsageError(
            f"{host} of --rendezvous is no address of this machine, which has --node-rank 0. If that is another "
            f"machine's, give this one its own number. If the address or the port is forwarded to this machine, say "
            f"where it listens: --rendezvous-bind {bind}"
        )
    if address is None:
        raise UsageError(f"This machine has no network over which others reach {host} of --rendezvous.")
    if known:
        say(f"z2a: {host} means loopback on this machine, which no other one reaches: it listens on {address} instead.")
    else:
        say(f"z2a: warning: this machine does not know the name {host} of --rendezvous. It listens on {address}.")
    return address


def read_counts(text: str) -> tuple[int, int]:
    """N or MIN:MAX as the least and the most machines of a run; ValueError where it is neither."""
    least, colon, most = text.partition(":")
    counts = (int(least), int(most if colon else least))
    if not 1 <= counts[0] <= counts[1]:
        raise ValueError(text)
    return counts


def read_address(text: str, flag: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPV6]:PORT as host and port."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([\w.-]+))(?::(\d{1,5}))?", text, re.ASCII)
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if not found or not 0 < port < 1 << 16:
        raise UsageError(f"{flag} is {text!r}. Expected HOST:PORT, such as 10.0.0.1:29500 or [fd00::1]:29500.")
    return found[1] or found[2], port


def _of_slurm(environment: Mapping[str, str]) -> Nodes | None:
    """The machines of a Slurm step, or None outside of one and where it has one machine."""
    if "SLURM_STEP_NODELIST" not in environment:
        if int(environment.get("SLURM_NNODES", "1")) > 1:
            say("z2a: this Slurm job has several machines, but this command runs on one. Start it with `srun`.")
        return None
    count = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1"))
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or count)
    if tasks != count:
        raise UsageError(
            f"Slurm started {tasks} tasks on {count} machines. z2a starts the processes of a machine itself: use one "
            f"task per machine (srun --ntasks-per-node=1), with all of its GPUs."
        )
    if count == 1:
        return None
    # Two jobs that share a machine get different ports.
    port = SLURM_PORTS[int(environment.get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)]
    return Nodes(count, int(environment["SLURM_NODEID"]), first_host(environment["SLURM_STEP_NODELIST"]), port)


def first_host(hosts: str) -> str:
    """The first name of a list of Slurm's, such as gpu[03-04,07],big1."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else hosts)


def use_interface(name: str) -> None:
    """Let gloo and NCCL use this network interface."""
    import psutil

    known = psutil.net_if_addrs()
    if name not in known:
        raise UsageError(f"--interface is {name!r}. This machine has: {', '.join(sorted(known))}.")
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # without the sign NCCL takes every name that begins like this


def data_address(host: str) -> str | None:
    """The address of this machine that gloo's connections use: that of its interface, else the one towards `host`."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not name:
        return own_address(host) or outer_address()  # a name may not be known yet
    import psutil

    places = psutil.net_if_addrs().get(name, ())
    families = (socket.AF_INET, socket.AF_INET6)
    return next((one.address for family in families for one in places if one.family == family), None)


def rendezvous_host(values: Mapping[str, str] = os.environ) -> str:
    """For a rank: the host at which the machines of its run meet."""
    return split_address(values[RENDEZVOUS])[0] if RENDEZVOUS in values else values["MASTER_ADDR"]


def own_address(host: str) -> str | None:
    """The address of this machine that packets to `host` leave from; None where no route leads there. The own name of a
    machine often means loopback in its /etc/hosts (127.0.1.1 on Debian), and another address everywhere else."""
    address = _source(host)
    if address is None or not _is_loopback(address) or host == "localhost" or _is_loopback(host):
        return address
    return outer_address() or address


def outer_address() -> str | None:
    """The address of the default route, else any that is not loopback."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    places = [one for places in psutil.net_if_addrs().values() for one in places if one.family in families]
    others = [one.address for one in places if not _is_loopback(one.address) and "%" not in one.address]
    return next((found for found in (*map(_source, PUBLIC), *others) if found), None)


def _source(host: str) -> str | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
