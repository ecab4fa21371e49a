"""The processes of a run: the rank of this one, and how it communicates with the others.

A run of one process needs no process group and makes none; everything here then does nothing. With several, torchrun
or `z2a train` itself (`launch`) sets the environment variables with ranks and addresses.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from traceback import walk_tb
from typing import TypeVar

import torch
import torch.distributed as dist

from zero2all.common.errors import PeerFailureError, UserError, error_from, error_values, exceeded_limit, for_all_ranks
from zero2all.common.peers import Peers
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.device import bind_near, local_processes, local_rank
from zero2all.parallel.health import HealthRules, check_health
from zero2all.parallel.mesh import Mesh, make_mesh
from zero2all.parallel.network import Variable, measure_ring, set_network_variables, speed_note
from zero2all.parallel.rendezvous import Facts, facts_of, meet, open_store

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World(Peers):
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    mesh: Mesh = field(default_factory=Mesh)
    control: dist.ProcessGroup | None = None
    """For small values between hosts, as JSON, so that this never waits for a device."""
    notes: tuple[str, ...] = ()
    """What was set and measured when the processes met."""

    def run_together(self, work: Callable[[], T]) -> T:
        """Run `work`, which does not communicate, on all ranks and return its result. If it ends with a UserError on
        some of them, all raise that of the first of these: none waits for one that has ended."""
        result: list[T] = []
        problem: UserError | None = None
        try:
            result.append(work())
        except UserError as error:
            problem = error
        said = self.gather(None if problem is None else [error_values(problem), socket.gethostname()])
        failed = [(rank, *each) for rank, each in enumerate(said) if each is not None]
        if not failed:
            return result[0]
        rank, values, host = failed[0]
        first = problem if problem is not None and rank == self.rank else error_from(values)
        assert isinstance(first, UserError), "others end their process"
        if len(failed) < self.size:  # else it is everyone's
            first.args = (f"Rank {rank} on {host}: {first}",)
        if self.rank == rank and rank >= local_processes():
            raise first  # it is said on that machine too: the others have their own terminal
        raise for_all_ranks(first)


def asked_processes() -> int:
    """The number of processes of the run, from the environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def known_processes() -> int:
    """The same, or that of the process group where there is one already."""
    return dist.get_world_size() if dist.is_initialized() else asked_processes()


def is_failed_collective(error: BaseException) -> bool:
    """Whether `error` is a collective that failed because another process has died or hangs. NCCL and the store have
    types for it; gloo raises a bare RuntimeError, so the test is whether torch.distributed raised it."""
    if isinstance(error, dist.DistError):
        return True
    # torch's other errors, such as OutOfMemoryError, have types of their own; a limit of this process has none.
    if type(error) is not RuntimeError or exceeded_limit(error):
        return False
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    while modules and modules[-1] == "torch._ops":  # the entry to operators in C++, collectives of DTensors among them
        modules.pop()
    return bool(modules) and modules[-1].startswith("torch.distributed.")


@contextmanager
def join_world(
    device: torch.device, config: ParallelConfig, settings: Facts | None = None, health: HealthRules | None = None
) -> Iterator[World]:
    """Join the process group, and leave it at the end of the block; `settings` must be equal in all processes. With
    `health` they are checked before. A process that fails aborts the group at once: destroying it properly would wait
    for collectives that the others may never start."""
    sizes = config.sizes(known_processes())
    if asked_processes() == 1 and not dist.is_initialized():
        yield World(device=device)
        return
    timeout = timedelta(seconds=config.timeout_seconds)
    own = not dist.is_initialized()  # tests bring a group of their own
    if device.type == "cuda":
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    notes, variables = [bind_near(device)], []
    if own:
        rank, size = int(os.environ["RANK"]), asked_processes()
        if size > local_processes():
            variables = set_network_variables(os.environ["MASTER_ADDR"])
            notes.append(f"network variables: {', '.join(map(str, variables)) or 'none are needed'}")
        with _explained(rank):
            store = open_store(rank, config.join_seconds)
            meet(store, rank, size, facts_of(settings or {}, size), config.join_seconds)
            if health is not None:
                verdict = check_health(store, rank, size, device, health)
                notes += [verdict.note(), *(f"warning: {text}" for text in verdict.slow.values())]
            dist.init_process_group(
                "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo",
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        world = World(dist.get_rank(), dist.get_world_size(), device, make_mesh(sizes, timeout), control)
        if variables:
            notes.append(_speed_between_machines(world, variables))
        yield replace(world, notes=tuple(filter(None, notes)))
    except BaseException:
        if own and device.type == "cuda":
            own = False
            with suppress(Exception):  # the first error is the one to see
                dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if own:
            dist.destroy_process_group()


@contextmanager
def _explained(rank: int) -> Iterator[None]:
    """An error of the store or of a group that cannot be made, without its stack of C++."""
    try:
        yield
    except Exception as error:
        if not is_failed_collective(error):
            raise
        raise PeerFailureError(
            f"Rank {rank} lost the connection to rank 0 before the first step. If rank 0 printed an error, that is "
            f"the cause. The error of the store: {str(error).partition(chr(10))[0]}"
        ) from error


def _speed_between_machines(world: World, variables: list[Variable]) -> str:
    """Latency and bandwidth of the slowest pair in a ring of the machines, by the first process of each; under 2 s."""
    firsts = [rank for rank, local in enumerate(world.gather(local_rank())) if local == 0]
    if len(firsts) == 1:
        return ""
    group = dist.new_group(firsts, backend="gloo")
    if world.rank not in firsts:
        return ""
    here = firsts.index(world.rank)

    def exchange(size: int) -> None:
        sent = dist.isend(torch.zeros(size, dtype=torch.uint8), firsts[(here + 1) % len(firsts)], group)
        dist.recv(torch.empty(size, dtype=torch.uint8), firsts[here - 1], group)
        assert sent is not None, "this process belongs to the group"
        sent.wait()

    def slowest(seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group)
        return value.item()

    note = speed_note(len(firsts), *measure_ring(exchange, slowest), variables)
    dist.destroy_process_group(group)
    return note
