"""Starts one process per GPU of this machine, where torchrun has not done so, under the supervisor.

Our own few lines instead of torchrun, because of how a run ends: torchrun turns every exit code into 1 and gives its
processes 30 seconds after SIGTERM. Here a signal is forwarded once, a save may take as long as it needs, and the
command ends with the exit code of the process that failed first. `zero2all.resilience.supervisor` starts, watches and
restarts; this file says what each process gets: ranks, addresses, the socket of the store, which is new in every
attempt.

torch's store knows no secret, so it listens on loopback only. Ranks on other machines find it on their own loopback,
too: what connects there is passed on to the coordinator (`resilience.coordinator`), which asks for the secret, and from
there to the store.
"""

import importlib.util
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from zero2all.common.connections import dial, is_of_this_user, join, listen
from zero2all.common.errors import UsageError
from zero2all.common.secret import run_secret
from zero2all.parallel.config import DeviceKind, ParallelConfig
from zero2all.parallel.nodes import RENDEZVOUS, Nodes, data_address
from zero2all.parallel.run_config import SpreadConfig, why_not_spread
from zero2all.resilience.config import ResilienceConfig
from zero2all.resilience.member import LOOPBACK, Member, Rules
from zero2all.resilience.supervisor import Environment, Watch, supervise

STORE_SOCKET = "Z2A_STORE_SOCKET"
"""File descriptor of the socket on which rank 0 waits for the others."""
ATTEMPT = "Z2A_ATTEMPT"
"""The id of an attempt that several machines agreed on: of the keys in its store, and in the lock of the run."""
COMMAND_STARTED = "Z2A_COMMAND_STARTED"
ALONE = Nodes()
MOST_DESCRIPTORS = 1 << 16


def local_processes(config: ParallelConfig) -> int:
    """How many processes to start on this machine: as configured, else one per GPU, else one."""
    if "LOCAL_RANK" in os.environ:  # this process was started by torchrun or by us
        return 1
    if config.processes == 1 or (config.processes == "auto" and config.device == "cpu"):
        return 1
    gpus = count_gpus() if config.device != "cpu" else 0
    if config.processes == "auto":
        return max(1, gpus)
    if config.device == "cuda" and config.processes > gpus:
        raise UsageError(
            f"parallel.processes is {config.processes}, but this machine has {gpus} GPUs in all, and each process "
            f"needs one. Set it to auto or to at most {gpus}."
        )
    return config.processes


def start_ranks(count: int, device: DeviceKind, words: Sequence[str]) -> int:
    """Run `z2a WORDS…` in so many processes of this machine, outside of a run."""
    return run_processes(local_processes(ParallelConfig(processes=count, device=device)), words)


def count_gpus() -> int:
    """The GPUs that torch will see. Where that is plain, without the seconds that it takes to import torch."""
    plain = not any(Path(name).exists() for name in ("/dev/kfd", "/dev/dxg"))  # AMD; Windows' subsystem
    if plain and not any(name.startswith("CUDA_") for name in os.environ):
        nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        spec = importlib.util.find_spec("torch")
        version = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
        return 0 if re.search(r"^cuda\b.*= *None$", version, re.MULTILINE) else len(nodes)
    import torch

    return torch.cuda.device_count()


def command_started() -> float:
    """When this process began (seconds of the clock), or the command that started it."""
    import psutil

    return float(os.environ.get(COMMAND_STARTED) or psutil.Process().create_time())


def make_rules(
    config: SpreadConfig, settings: ResilienceConfig, nodes: Nodes, processes: int, supervised: bool, run: Path
) -> Rules | None:
    """With which machines a run goes on; None: there is one. UsageError where it fits on none of their numbers."""
    if not supervised and nodes.least < nodes.count:
        raise UsageError(
            f"--nodes {nodes.least}:{nodes.count} needs the supervisor. Set resilience.supervise to true and leave "
            f"--no-supervisor out, or give one number of machines."
        )
    if nodes.count == 1:
        return None
    if not supervised:  # a failure ends the run, on all machines
        settings = replace(settings, restarts=0, peers=0)
    counts = [count for count in range(nodes.least, nodes.count + 1) if count % settings.node_multiple == 0]
    if all(why_not_spread(config, count * processes) for count in counts):
        why = why_not_spread(config, nodes.count * processes)
        raise UsageError(
            f"No number of machines from {nodes.least} to {nodes.count} fits this run (resilience.node_multiple is "
            f"{settings.node_multiple}). {why}"
        )
    return Rules(
        run=config.train.name,
        least=nodes.least,
        most=nodes.count,
        fits=lambda world: not why_not_spread(config, world),
        settings=settings,
        join_seconds=config.parallel.join_seconds,
        ports=config.parallel.free_ports,
        has_memory=settings.memory_every_steps != 0,
        secret=run_secret(run),
    )


def run_processes(
    processes: int,
    words: Sequence[str],
    watch: Watch | None = None,
    nodes: Nodes = ALONE,
    module: bool = True,
    rules: Rules | None = None,
) -> int:
    """Run `z2a WORDS…`, or any command where it is no `module`, in `processes` processes that form one group; returns
    the exit code of the command. With `rules` there are other machines, which meet before each attempt."""
    # A module in the current folder that is named as one of ours must not be imported, as with `z2a` itself.
    safe = [] if {"", str(Path.cwd())} & set(sys.path) else ["-P"]
    command = [sys.executable, *safe, "-m", "zero2all", *words] if module else list(words)
    member = copies = far_store = None
    if nodes.count > 1:  # who reaches the ports of gloo can use up the descriptors of a rank: it gets many
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, MOST_DESCRIPTORS)), most))
    if rules is not None:
        if rules.settings.peers and watch is not None and watch.run is not None:
            from zero2all.resilience.copies import Copies  # numpy and checksums take a tenth of a second

            base = Path(rules.settings.memory_folder) if rules.settings.memory_folder else None
            copies = Copies(watch.run, base, data_address(nodes.host) or LOOPBACK, rules.secret, rules.ports)
        member = _join(nodes, processes, rules, copies.address if copies else None)
        far_store = _lead_to_store((nodes.host, nodes.port), rules.secret) if nodes.rank else None

    def environments(stack: ExitStack) -> list[Environment]:
        first, world, store = 0, processes, far_store
        shared = {COMMAND_STARTED: str(command_started()), "LOCAL_WORLD_SIZE": str(processes)}
        if member is not None:
            if copies is not None:
                copies.begin(member.order)
            first, world, shared[ATTEMPT] = member.order["first"], member.order["world"], member.order["token"]
            shared[RENDEZVOUS] = f"{nodes.host}:{nodes.port}"
        if store is None:  # rank 0 inherits it, so that no other program takes the port
            store = listen(LOOPBACK) if member is None else socket.socket(fileno=member.order["store"])
            stack.callback(store.close)
        shared |= {"WORLD_SIZE": str(world), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.getsockname()[1])}
        # When a process dies, torch's warnings about it, with stacks of C++, would hide the cause.
        shared["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        found: list[Environment] = []
        for rank in range(processes):
            own = {**shared, "RANK": str(first + rank), "LOCAL_RANK": str(rank)}
            inherited = []
            if rank == 0 and store is not far_store:
                own[STORE_SOCKET] = str(store.fileno())
                inherited.append(store.fileno())
            found.append((own, inherited))
        return found

    return supervise(command, environments, watch, member)


def _join(nodes: Nodes, processes: int, rules: Rules, copies: tuple[str, int] | None) -> Member:
    """Take part as a member; machine 0 also runs the coordinator."""
    if nodes.rank > 0:
        return Member((nodes.host, nodes.port), nodes.rank, processes, rules, copies=copies)
    from zero2all.resilience.coordinator import MachineCoordinator

    listener = nodes.listen()
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(nodes.bind_host, nodes.bind_host)
    address = (host, listener.getsockname()[1])
    return Member(address, 0, processes, rules, MachineCoordinator(listener, rules).close, copies)


def _lead_to_store(coordinator: tuple[str, int], secret: bytes) -> socket.socket:
    """A listening socket on loopback, for the ranks of this machine: who connects reaches the store of the attempt."""
    listener = listen(LOOPBACK)

    def accept() -> None:
        while True:
            try:
                threading.Thread(target=pass_on, args=(listener.accept()[0],), daemon=True).start()
            except (OSError, RuntimeError):  # no more descriptors or threads
                time.sleep(0.05)

    def pass_on(near: socket.socket) -> None:
        with near:
            if is_of_this_user(near):
                with suppress(OSError):  # the coordinator has ended; the rank sees that
                    join(near, dial(coordinator, secret, "coordinator", {"service": "store"}).socket)

    threading.Thread(target=accept, name="z2a-store", daemon=True).start()
    return listener
