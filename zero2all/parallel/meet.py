"""The processes of a run meet before anything else: all are there, and all are alike.

Each process writes what it is (settings, version and code of the package, number of processes) into the store of the
rendezvous. Rank 0 waits for all of them, at most `parallel.join_seconds`, compares, and writes its verdict, which the
others wait for. A process that does not come, or that is another one, is named with what differs; nobody goes on then,
and nobody waits for ever.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero2all import __version__
from zero2all.common.errors import PeerFailureError, UsageError
from zero2all.parallel.launch import STORE_SOCKET

Facts = Mapping[str, Any]
"""What must be equal in all processes, by its name; JSON values."""
SLOWER_SECONDS = 30.0
"""How much longer than rank 0 the others wait for its verdict."""
LAST_WORD_SECONDS = 5.0
"""How long rank 0, which may hold the store, stays so that the others can read a bad verdict."""
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
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = os.environ.pop(STORE_SOCKET, None)  # not for processes that this one starts
    try:
        store: dist.Store = dist.TCPStore(
            host,
            port,
            is_master=rank == 0 and not of_agent,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=None if listener is None else int(listener),
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise PeerFailureError(
                f"Port {port} (MASTER_PORT) is used by another program, so rank 0 cannot wait there for the others. "
                f"Choose another MASTER_PORT, the same for all ranks."
            ) from error
        raise PeerFailureError(
            f"Rank {rank} did not reach rank 0 at {host}:{port} within parallel.join_seconds ({seconds:g} s). Check "
            f"that rank 0 was started, that MASTER_ADDR and MASTER_PORT are the same everywhere, and that no firewall "
            f"blocks the port. The error of the store: {str(error).splitlines()[0]}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"z2a/{attempt}", store)


def meet(store: dist.Store, rank: int, size: int, facts: Facts, seconds: float) -> None:
    """Return when all processes have come and are alike; else raise, in all of them, an error that names who differs in
    what, or who did not come."""
    store.set(f"host/{rank}", socket.gethostname())
    store.set(f"facts/{rank}", json.dumps(facts, default=str))
    problem: UsageError | PeerFailureError | None
    if rank == 0:
        problem = _judge(store, size, facts, seconds)
        store.set("verdict", f"{type(problem).__name__} {problem}" if problem else "alike")
        if problem:
            came = [f"seen/{other}" for other in range(1, size) if store.check([f"facts/{other}"])]
            _wait(store, came, LAST_WORD_SECONDS)
    else:
        problem = _learn_verdict(store, rank, facts, seconds)
    if problem:
        raise problem


def _judge(store: dist.Store, size: int, facts: Facts, seconds: float) -> UsageError | PeerFailureError | None:
    """Rank 0: what is wrong with the others."""
    missing = _wait(store, [f"facts/{rank}" for rank in range(size)], seconds)
    if missing:
        names = ", ".join(key.removeprefix("facts/") for key in missing)
        return PeerFailureError(
            f"These ranks of {size} did not join within parallel.join_seconds ({seconds:g} s): {names}. Look for their "
            f"errors, check that they were started with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and start "
            f"all of them again. On a slow machine, raise parallel.join_seconds."
        )
    first = json.loads(json.dumps(facts, default=str))
    lines = []
    for rank in range(1, size):
        theirs = json.loads(store.get(f"facts/{rank}"))
        host = store.get(f"host/{rank}").decode()
        if found := differences(first, theirs):
            lines.append(f"  rank {rank} on {host}: {found}")
    if not lines:
        return None
    return UsageError(
        "\n".join(
            [
                "The processes of this run differ. Nothing was started. Compared with rank 0:",
                *lines,
                "Start all of them with the same command, config and version of zero2all.",
            ]
        )
    )


def differences(first: Facts, other: Facts) -> str:
    """In what two processes differ, in words; empty: in nothing."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    shown = [f"{name} {other.get(name)!r} instead of {first.get(name)!r}" for name in names[:MOST_NAMED]]
    if len(names) > MOST_NAMED:
        shown.append("…")
    return "; ".join(shown)


def _learn_verdict(store: dist.Store, rank: int, facts: Facts, seconds: float) -> UsageError | PeerFailureError | None:
    """The others: what rank 0 found. One that rank 0 does not know of (another WORLD_SIZE) sees that by itself."""
    try:
        if _wait(store, ["verdict"], seconds + SLOWER_SECONDS):
            return PeerFailureError(
                f"Rank {rank} heard nothing from rank 0 within parallel.join_seconds ({seconds:g} s): rank 0 was not "
                f"started, or hangs. Look for its error, and start all processes again."
            )
        kind, _, text = store.get("verdict").decode().partition(" ")
        own = differences(json.loads(store.get("facts/0")), json.loads(json.dumps(facts, default=str)))
        store.set(f"seen/{rank}", "")  # from now on rank 0, which holds the store, may be gone
    except dist.DistError as error:
        return PeerFailureError(
            f"Rank {rank} lost the connection to rank 0 before the first step. If rank 0 printed an error, that is the "
            f"cause. The error of the store: {str(error).splitlines()[0]}"
        )
    if kind != "alike":
        return (UsageError if kind == "UsageError" else PeerFailureError)(text)
    return UsageError(f"Rank {rank} differs from rank 0: {own}. Nothing was started.") if own else None


def _wait(store: dist.Store, keys: list[str], seconds: float) -> list[str]:
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
