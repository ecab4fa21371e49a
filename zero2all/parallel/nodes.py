"""Several machines in one run: how many there are, which of them this one is, and where they meet.

Each machine runs the same command. What the flags do not say is taken from Slurm's variables, if `srun` started the
command with one task per machine. Machine r of n, with p processes on each, gets the ranks r*p to r*p + p - 1; under
supervisors, which meet (`resilience.meeting`), the machines that are there share the ranks in each attempt.

The address where the others find rank 0 (`--rendezvous`) and the one where it listens (`--rendezvous-bind`) are two
settings: in a container the first belongs to the host, which forwards the port, and cannot be bound inside.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import say

DEFAULT_PORT = 29500
SLURM_PORTS = range(20_000, 30_000)
"""Below the ports that Linux gives to outgoing connections."""
BACKLOG = 4096
"""Connections of ranks that wait to be accepted."""
ANY_ADDRESS = ("", "0.0.0.0", "::")
RENDEZVOUS = "ZERO2ALL_RENDEZVOUS"
"""Variable of the processes: where the others find rank 0, which rank 0 itself may reach by another address."""


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

    def listen(self, port: int | None = None) -> socket.socket:
        """On the first machine: the socket where it, or rank 0, waits for the others."""
        family = socket.AF_INET6 if ":" in self.bind_host else socket.AF_INET
        address = (self.bind_host, self.bind_port if port is None else port)
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"Port {address[1]} is in use: is another machine 0 of this run running here? Give each machine "
                    f"its own --node-rank. If another program has the port, choose another one with --rendezvous, the "
                    f"same on all machines, or with --rendezvous-bind."
                ) from error
            raise UsageError(
                f"This machine cannot listen on {self.bind_host or 'any address'}, port {self.bind_port}: "
                f"{error.strerror or error}. Give an address of this machine and a free port with --rendezvous-bind; "
                f"--rendezvous is what the other machines connect to."
            ) from error

    def variables(self, world: int, processes: int, listener: socket.socket | None) -> dict[str, str]:
        """The environment variables that are equal in all processes of this machine. Those of the first machine connect
        to where rank 0 listens: from inside a container the advertised address often does not lead back."""
        host, port = self.host, self.port
        if listener is not None:
            any_address = self.bind_host in ANY_ADDRESS
            host = (own_address(self.host) or "127.0.0.1") if any_address else self.bind_host
            port = listener.getsockname()[1]
        return {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            RENDEZVOUS: f"{self.host}:{self.port}",
        }


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
    if is_own_flag:
        _say_doubts(rendezvous, host, has_bind=bind is not None, is_first=rank == 0)
    bind_host, bind_port = read_address(bind, "--rendezvous-bind") if bind else ("::" if ":" in host else "", port)
    return Nodes(count, rank, host, port, bind_host, bind_port, least)


def _say_doubts(rendezvous: str, host: str, has_bind: bool, is_first: bool) -> None:
    """What may be wrong with --rendezvous; where ports are forwarded it may be right."""
    if not re.search(r":\d+$", rendezvous):
        say(f"z2a: --rendezvous has no port: {DEFAULT_PORT} is used.")
    if has_bind or not is_first:
        return
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        say(f"z2a: warning: this machine does not know the name {host} of --rendezvous. Do the others know it?")
        return
    for family, kind, _, _, place in places:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(place)  # only an address of this machine can be bound
            return
    say(
        f"z2a: warning: {host} of --rendezvous is no address of this machine, which is machine 0. That is right only "
        f"where its port is forwarded to here: give --rendezvous-bind then."
    )


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
        return own_address(host)
    import psutil

    addresses = [one.address for one in psutil.net_if_addrs().get(name, ()) if one.family == socket.AF_INET]
    return addresses[0] if addresses else None


def own_address(host: str) -> str | None:
    """The address of this machine that packets to `host` leave from; None where no route leads there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None
