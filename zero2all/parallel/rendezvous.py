"""The processes of a run meet before anything else: all are there, once, all are alike, and their machines reach each
other.

Each process writes what it is (settings, version and code of the package, number of processes) into the store of the
rendezvous. Rank 0 waits for all of them, at most `parallel.join_seconds`, compares, and writes its verdict, which the
others wait for. A process that does not come, that comes twice, or that is another one, is named with what differs;
nobody goes on then, and nobody waits for ever.

After `NOTICE_SECONDS` of waiting it is said for whom and why, but the run goes on waiting: on a cluster the last
machine may come minutes later, while a person at the terminal wants to see the mistake at once.

With several machines, the first process of each then connects to those of all others, at the addresses that gloo and
NCCL will use, and like them at a port that the system chooses. Behind a firewall, or in containers of which only one
port is forwarded, these would otherwise try for `parallel.timeout_seconds`.
"""

import functools
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero2all import __version__
from zero2all.common.connections import listen
from zero2all.common.errors import PeerFailureError, UsageError
from zero2all.common.language import message
from zero2all.common.language import translate as t
from zero2all.common.progress import say
from zero2all.parallel.device import local_processes, local_rank
from zero2all.parallel.launch import ATTEMPT, STORE_SOCKET
from zero2all.parallel.nodes import RENDEZVOUS, data_address, own_address, rendezvous_host
from zero2all.resilience.heartbeat import ATTEMPT_NUMBER

Facts = Mapping[str, Any]
"""What must be equal in all processes, by its name; JSON values."""
SLOWER_SECONDS = 30.0
"""How much longer than rank 0 the others wait for its verdict."""
LAST_WORD_SECONDS = 5.0
"""How long rank 0, which may hold the store, stays so that the others can read a bad verdict."""
NOTICE_SECONDS = 10.0
"""After so long it is said who is missing."""
STRAGGLER_SECONDS = 5.0
"""How long rank 0 still waits for the others once it knows that one differs."""
CONNECT_SECONDS = 5.0
MOST_NAMED = 6


@cache
def code_fingerprint() -> str:
    """A hash of every Python file of the package."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def facts_of(settings: Facts, processes: int) -> dict[str, Any]:
    """What this process is, with `settings` by dotted name."""
    return {"processes": processes, "zero2all": __version__, "code of zero2all": code_fingerprint(), **settings}


def open_store(rank: int, seconds: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 holds, or torchrun's agent; does not wait for the others."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = os.environ.pop(STORE_SOCKET, None)  # not for processes that this one starts
    if is_master and listener is None:  # torch itself would listen on all addresses
        host = own_address(host) or host
        try:
            listener = str(listen(host, (port,)).detach())
        except OSError as error:
            raise PeerFailureError(
                f"Rank 0 cannot wait for the others at {host}:{port} (MASTER_ADDR, MASTER_PORT): "
                f"{error.strerror or error}. Rank 0 was started twice, another program uses the port, or the address "
                f"is another machine's. Choose others, the same for all ranks."
            ) from error
    opening: Future[dist.Store] = Future()

    def work() -> None:
        """In a thread: where a port accepts and stays silent, torch waits for ever, and at the end of its own time it
        prints stacks of C++. So that time is long, and the caller has its own."""
        options: dict[str, Any] = {"timeout": timedelta(days=1), "wait_for_workers": False, "multi_tenant": True}
        options["master_listen_fd"] = None if listener is None else int(listener)
        try:
            opening.set_result(dist.TCPStore(host, port, is_master=is_master, **options))
        except Exception as error:
            opening.set_exception(error)

    threading.Thread(target=work, name="z2a-store", daemon=True).start()
    notice = min(NOTICE_SECONDS, seconds)
    try:
        try:
            store = opening.result(notice)
        except TimeoutError:
            say(f"z2a: {_not_reached(rank, host, port)}")
            store = opening.result(seconds - notice)
    except TimeoutError:
        raise PeerFailureError(
            f"{_not_reached(rank, host, port)} It tried for parallel.join_seconds ({seconds:g} s). Check that rank 0 "
            f"was started, that the address and port are the same everywhere, and that no firewall blocks the port."
        ) from None
    store.set_timeout(timedelta(seconds=seconds))
    attempt = os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"z2a/{attempt}", store)


def _not_reached(rank: int, host: str, port: int) -> str:
    """Why rank 0 cannot be reached, as far as one attempt shows it."""
    if ATTEMPT in os.environ:  # the machines have met
        return f"Rank {rank} has not reached rank 0 at {os.environ[RENDEZVOUS]}: rank 0 is still starting."
    why = (
        why_not_reached(host, port)
        or "something answers there, but it is not the store of a run: rank 0 is still starting, or the port is wrong"
    )
    return f"Rank {rank} has not reached rank 0 at {host}:{port}: {why}."


def why_not_reached(host: str, port: int, who: str = "rank 0") -> str:
    """Why no connection can be made; empty: one can. `who` may not be there yet; empty: it is."""
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except socket.gaierror:
        return "this machine does not know that name"
    except ConnectionRefusedError:
        if not who:  # it listens, somewhere
            return "refused: that address is another machine, seen from here, or a firewall refuses"
        return f"nothing listens on that port: {who} is not there yet, or the port is wrong"
    except TimeoutError:
        return "no answer: a firewall drops the packets, or the address is wrong"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def meet(store: dist.Store, rank: int, size: int, facts: Facts, seconds: float) -> None:
    """Return when all processes have come and are alike; else raise, in all of them, an error that names who differs in
    what, who connected twice, or who did not come."""
    facts = json.loads(json.dumps(facts, default=str))
    with ExitStack() as stack:
        own: dict[str, Any] = {"host": socket.gethostname(), "facts": facts}
        own["process"] = f"{own['host']} (process {os.getpid()})"
        own["folder"] = str(Path(__file__).parents[1])
        if store.add(f"came/{rank}", 1) > 1:  # this one ends; the others too, unless their run has begun
            twice = (
                f"Rank {rank} connected twice: from {json.loads(store.get(f'rank/{rank}'))['process']} and from "
                f"{own['process']}. Give each machine its own --node-rank, or each process its own RANK, and the same "
                f"number of processes to all machines."
            )
            store.set("twice", twice)
            raise UsageError(message(twice))
        if size > local_processes() and local_rank() == 0 and (address := data_address(rendezvous_host())):
            door = stack.enter_context(listen(address))
            own["door"] = [address, door.getsockname()[1]]
        store.set(f"rank/{rank}", json.dumps(own))
        learn = functools.partial(_learn_verdict, store, rank, seconds=seconds, own=own)
        judge = functools.partial(_judge, store, size, own, seconds)
        verdict = _verdict(store, rank, size, "joined", judge, learn)
        doors = {int(other): door for other, door in verdict["doors"].items()}
        if len(doors) > 1:
            if rank in doors:
                others = {other: door for other, door in doors.items() if other != rank}
                store.set(f"blocked/{rank}", _first_blocked(others))
            _verdict(store, rank, size, "reached", functools.partial(_judge_doors, store, doors), learn)


def _verdict(
    store: dist.Store,
    rank: int,
    size: int,
    key: str,
    judge: Callable[[], dict[str, Any]],
    learn: Callable[[str], dict[str, Any]],
) -> dict[str, Any]:
    """What rank 0 finds (`judge`), in all processes (`learn`); raises the problem if there is one."""
    if rank == 0:
        verdict = judge()
        store.set(key, json.dumps(verdict))
        if verdict.get("problem"):
            came = [other for other in range(1, size) if store.check([f"rank/{other}"])]
            wait_for_keys(store, [f"seen/{key}/{other}" for other in came], LAST_WORD_SECONDS)
    else:
        verdict = learn(key)
    if problem := verdict.get("problem"):
        raise (UsageError if problem[0] == "UsageError" else PeerFailureError)(problem[1])
    return verdict


def _judge(store: dist.Store, size: int, own: Facts, seconds: float) -> dict[str, Any]:
    """Rank 0: what is wrong with the others; if nothing, the doors of the machines."""
    deadline, notice = time.monotonic() + seconds, time.monotonic() + NOTICE_SECONDS
    came: dict[int, dict[str, Any]] = {0: dict(own)}
    lines: list[str] = []
    while len(came) < size and time.monotonic() < deadline:
        for other in range(1, size):
            if other not in came and store.check([f"rank/{other}"]):
                came[other] = json.loads(store.get(f"rank/{other}"))
                if found := differences(own["facts"], came[other]["facts"]):
                    lines.append(f"  rank {other} on {came[other]['host']}, code in {came[other]['folder']}: {found}")
                    deadline = min(deadline, time.monotonic() + STRAGGLER_SECONDS)
        if store.check(["twice"]):
            return _problem(UsageError(store.get("twice").decode()))
        if not lines and time.monotonic() > notice:
            notice = float("inf")
            say(
                f"z2a: waiting for rank {_missing(came, size)} of {size}, until parallel.join_seconds ({seconds:g} s) "
                f"are over. Were they started, with the same address and port, each machine with its own number?"
            )
        time.sleep(0.02)
    if lines:
        return _problem(
            UsageError(
                "\n".join(
                    [
                        "The processes of this run differ. Nothing was started. Compared with rank 0 "
                        f"on {own['host']}, code in {own['folder']}:",
                        *lines,
                        "Start all of them with the same command, config and version of zero2all.",
                    ]
                )
            )
        )
    if len(came) < size:
        return _problem(
            PeerFailureError(
                f"These ranks of {size} did not join within parallel.join_seconds ({seconds:g} s): "
                f"{_missing(came, size)}. Look for their errors, check that they were started with the same address "
                f"and port and number of processes, and start all of them again. On a slow machine, raise "
                f"parallel.join_seconds."
            )
        )
    return {"doors": {other: came[other]["door"] for other in came if "door" in came[other]}}


def _missing(came: Mapping[int, Any], size: int) -> str:
    return ", ".join(str(other) for other in range(size) if other not in came)


def _problem(error: UsageError | PeerFailureError) -> dict[str, Any]:
    return {"problem": [type(error).__name__, str(error)]}


def _first_blocked(doors: Mapping[int, list[Any]]) -> str:
    """The first of the other machines that cannot be reached from here, and why; empty: all can."""
    for other, (address, port) in doors.items():
        if why := why_not_reached(address, port, ""):
            return f"rank {other} at {address}: {why}"
    return ""


def _judge_doors(store: dist.Store, doors: Mapping[int, Any]) -> dict[str, Any]:
    """Rank 0: which machines do not reach each other."""
    wait_for_keys(store, [f"blocked/{rank}" for rank in doors], CONNECT_SECONDS + STRAGGLER_SECONDS)
    said = {rank: store.get(f"blocked/{rank}").decode() for rank in doors if store.check([f"blocked/{rank}"])}
    ways = "; ".join([t(f"from rank {rank} to {blocked}") for rank, blocked in said.items() if blocked][:MOST_NAMED])
    if not ways:
        return {}
    # In the first attempt a person must mend it; in a later one, the network may be back soon.
    kind = UsageError if os.environ.get(ATTEMPT_NUMBER, "1") == "1" else PeerFailureError
    text = message(
        f"The machines of this run meet, but cannot connect to each other for data: {ways}. gloo and NCCL need "
        f"addresses that lead from machine to machine, on any port: choose the network with --interface, open the "
        f"firewall between the machines, or give the containers the network of their host. Where only single ports are "
        f"forwarded, train one group per machine, with diloco."
    )
    return _problem(kind(text))


def differences(first: Facts, other: Facts) -> str:
    """In what two processes differ, in words; empty: in nothing."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    shown = [f"{name} {other.get(name)!r} instead of {first.get(name)!r}" for name in names[:MOST_NAMED]]
    if len(names) > MOST_NAMED:
        shown.append("…")
    return "; ".join(shown)


def _learn_verdict(store: dist.Store, rank: int, key: str, seconds: float, own: Facts) -> dict[str, Any]:
    """The others: what rank 0 found. One that rank 0 does not know of (another WORLD_SIZE) sees that by itself."""
    deadline = time.monotonic() + seconds + SLOWER_SECONDS
    while wait_for_keys(store, [key], 0.5):
        if time.monotonic() > deadline:
            return _problem(
                PeerFailureError(
                    f"Rank {rank} heard nothing from rank 0 within parallel.join_seconds ({seconds:g} s): rank 0 was "
                    f"not started, or hangs. Look for its error, and start all processes again."
                )
            )
    verdict: dict[str, Any] = json.loads(store.get(key))
    found = differences(json.loads(store.get("rank/0"))["facts"], own["facts"])
    store.set(f"seen/{key}/{rank}", "")  # from now on rank 0, which holds the store, may be gone
    if "problem" not in verdict and found:
        return _problem(UsageError(f"Rank {rank} differs from rank 0: {found}. Nothing was started."))
    return verdict


def wait_for_keys(store: dist.Store, keys: list[str], seconds: float) -> list[str]:
    """Wait until all keys are there, at most so long; those that are not."""
    deadline = time.monotonic() + seconds
    missing = list(keys)
    while missing:
        missing = [key for key in missing if not store.check([key])]
        if time.monotonic() > deadline:
            return missing
        if missing:
            time.sleep(0.02)
    return []
