"""The health check: does every process compute right and fast, and does every pair of machines exchange data?

It runs before the process group of the run is made, because a bad GPU or link would hang there without a name. First
every process multiplies the same matrices: the bits must be those of most processes with such a device, and the time
near theirs. Then the machines (of one machine: its processes) exchange data in pairs, in two rounds with other pairs.
One that is in bad pairs and in no good one is bad.

Results go through the store of the rendezvous, so that a process that hangs or dies holds nobody up: at most
PRODUCT_SECONDS and twice PAIR_SECONDS, and it is named.
"""

import json
import shlex
import socket
import statistics
import subprocess
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zero2all.common.errors import PeerFailureError, UnhealthyError, for_all_ranks
from zero2all.common.fault import fault_point
from zero2all.common.files import human_bytes
from zero2all.common.language import message
from zero2all.common.progress import say
from zero2all.parallel.device import local_processes
from zero2all.parallel.rendezvous import LAST_WORD_SECONDS, SLOWER_SECONDS, wait_for_keys

PRODUCT_SECONDS, PAIR_SECONDS = 40.0, 30.0
MEASURE_SECONDS = 0.3
SIZES = {"cpu": 256, "cuda": 8192}
PAIR_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
PAIR_TRIES = 5
SLOW = 2.0
"""How many times slower than the lower half of its kind counts as slow."""
ISOLATE_SECONDS = 60.0


@dataclass(frozen=True)
class HealthRules:
    """What is done about a bad machine."""

    excludes: bool = False
    """Only its machine ends with exit code 16; the others may start again without it. Else all end."""
    isolate_command: str | None = None
    """Run by rank 0 with the name of the machine as its last word."""


@dataclass
class Verdict:
    """What was found. A unit is a machine; of a run on one machine, a process."""

    per_unit: int
    """Processes of a unit."""
    broken: dict[int, str] = field(default_factory=dict)
    """By unit: wrong bits, no answer, no data."""
    slow: dict[int, str] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Of each that answered: rank, host, device, seconds, bits."""
    pairs: list[dict[str, Any]] = field(default_factory=list)
    """Of each pair: units, bytes per second, problem."""

    def note(self) -> str:
        """One line about all machines."""
        times = [1e3 * one["seconds"] for one in self.ranks] or [0.0]
        speeds = [one["speed"] for one in self.pairs if one["speed"]] or [0.0]
        return message(
            f"health: {len(self.ranks)} ranks, product {min(times):.3g} to {max(times):.3g} ms, "
            f"pairs {human_bytes(min(speeds))} to {human_bytes(max(speeds))} per second"
        )


def check_health(store: dist.Store, rank: int, size: int, device: torch.device, rules: HealthRules) -> Verdict:
    """Check all processes of a run; every one calls it. Raises UnhealthyError where a bad one must not take part, and
    PeerFailureError in the others if these may go on without it."""
    verdict = find_bad(store, rank, size, device)
    bad = {**verdict.slow, **verdict.broken} if rules.excludes else verdict.broken
    if not bad:
        return verdict
    per_unit = verdict.per_unit
    if rank == 0 and rules.isolate_command:
        _isolate(rules.isolate_command, {one["host"] for one in verdict.ranks if one["rank"] // per_unit in bad})
    said, own = "; ".join(bad.values()), bad.get(rank // per_unit)
    if not rules.excludes or size == local_processes():
        raise for_all_ranks(
            UnhealthyError(
                f"The health check found: {said}. Nothing was started. Replace the machine or GPU, or leave it out, "
                f"and run the same command again. With several machines, resilience.exclude_bad leaves bad ones out."
            )
        )
    if own is None:
        raise PeerFailureError(f"The health check found a bad machine: {said}. The others start again without it.")
    raise UnhealthyError(f"The health check found this machine bad: {own}. It takes no part in the run.")


def _isolate(command: str, hosts: Iterable[str]) -> None:
    """Run `resilience.isolate_command` for each bad machine."""
    for host in sorted(hosts):
        try:
            subprocess.run([*shlex.split(command), host], timeout=ISOLATE_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"z2a: resilience.isolate_command failed for {host}: {error}")


def find_bad(store: dist.Store, rank: int, size: int, device: torch.device) -> Verdict:
    """Measure, exchange and judge; the same verdict in all processes that answer."""
    store = dist.PrefixStore("health", store)
    per_unit = local_processes() if size > local_processes() else 1
    fault_point("health", 0)
    store.set(f"0/{rank}", json.dumps({"rank": rank, "host": socket.gethostname(), **product(device)}))
    came = set(range(size))
    for number in (1, 2):
        pairs = _next_pairs(store, number, came, size, per_unit) if rank == 0 else _from_rank0(store, f"pairs/{number}")
        fault_point("health", number)
        found: dict[str, Any] = {"speed": 0.0, "problem": ""}
        own = next((pair for pair in pairs if rank // per_unit in pair), None)
        if own is not None:
            found = exchange(dist.PrefixStore(f"{number}/{own}", store), _members(own, per_unit), rank, device)
        store.set(f"{number}/{rank}", json.dumps(found))
    if rank == 0:
        verdict = _collect(store, size, per_unit, came)
        store.set("verdict", json.dumps(asdict(verdict)))
        wait_for_keys(store, [f"seen/{other}" for other in sorted(came - {0})], LAST_WORD_SECONDS)  # it holds the store
        return verdict
    values = _from_rank0(store, "verdict")
    store.set(f"seen/{rank}", "")
    for name in ("broken", "slow"):
        values[name] = {int(unit): text for unit, text in values[name].items()}
    return Verdict(**values)


def _next_pairs(store: dist.Store, number: int, came: set[int], size: int, per_unit: int) -> list[list[int]]:
    """Rank 0: pair the ranks that have arrived; one that does not arrive is removed from `came`."""
    seconds = PRODUCT_SECONDS if number == 1 else PAIR_SECONDS + LAST_WORD_SECONDS
    missing = wait_for_keys(store, [f"{number - 1}/{other}" for other in sorted(came)], seconds)
    came -= {int(key.partition("/")[2]) for key in missing}
    absent = {other // per_unit for other in set(range(size)) - came}
    pairs = [list(pair) for pair in pairs_of([unit for unit in range(size // per_unit) if unit not in absent], number)]
    store.set(f"pairs/{number}", json.dumps(pairs))
    return pairs


def _from_rank0(store: dist.Store, key: str) -> Any:
    if wait_for_keys(store, [key], PRODUCT_SECONDS + PAIR_SECONDS + SLOWER_SECONDS):
        raise PeerFailureError("Rank 0 did not answer in the health check: it has died, or hangs.")
    return json.loads(store.get(key))


def _members(units: Sequence[int], per_unit: int) -> list[int]:
    return [unit * per_unit + place for unit in units for place in range(per_unit)]


def product(device: torch.device) -> dict[str, Any]:
    """The median time of a matrix product, and a checksum of its bits."""
    kind = device.type
    drawn = torch.Generator().manual_seed(1)
    size, dtype = SIZES[kind], torch.float32 if kind == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, generator=drawn).to(device, dtype) for _ in range(2))
    times: list[float] = []
    begun = time.monotonic()
    while len(times) < 5 or time.monotonic() - begun < MEASURE_SECONDS:
        started = time.perf_counter()
        result = left @ right
        if kind == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    bits = zlib.crc32(result.cpu().view(torch.uint8).numpy().tobytes())
    name = torch.cuda.get_device_name(device) if kind == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return {"device": name, "seconds": statistics.median(times[1:]), "bits": bits}


def pairs_of(units: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Neighbours in the first round, the other neighbours in the second; of an odd count another one rests."""
    turned = [*units[1:], *units[:1]] if number == 2 and len(units) % 2 == 0 else units[number - 1 :]
    return list(zip(turned[::2], turned[1::2], strict=False))


def exchange(store: dist.Store, members: Sequence[int], rank: int, device: torch.device) -> dict[str, Any]:
    """All-gather between the processes of a pair: bytes per second that each receives, or what went wrong. In a thread,
    because making a group of NCCL, or waiting for it, has no limit that leaves the process alive; with a connection of
    its own, because a store waits with its lock held."""
    found = {"speed": 0.0, "problem": f"nothing arrived within {PAIR_SECONDS:g} s"}

    def work() -> None:
        try:
            own: Any = store
            found.update(_all_gather(own.clone(), members, rank, device))
        except RuntimeError as error:
            found["problem"] = str(error).partition("\n")[0][:200] or type(error).__name__

    thread = threading.Thread(target=work, name="z2a-health", daemon=True)
    thread.start()
    thread.join(PAIR_SECONDS)
    return dict(found)


def _all_gather(store: dist.Store, members: Sequence[int], rank: int, device: torch.device) -> dict[str, Any]:
    place, bytes_each = members.index(rank), PAIR_BYTES[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo  # mypy has no stubs
    group = kind(store, place, len(members))
    own = torch.full((bytes_each // 4,), float(rank), device=device)
    parts = [torch.empty_like(own) for _ in members]
    times = []
    for _ in range(PAIR_TRIES):
        started = time.perf_counter()
        group.allgather([parts], [own]).wait()
        arrived = [(float(part.min()), float(part.max())) for part in parts]  # waits for the device, too
        times.append(time.perf_counter() - started)
    group.shutdown()
    if arrived != [(float(member), float(member)) for member in members]:
        return {"problem": "the data that arrived is wrong"}
    return {"speed": (len(members) - 1) * bytes_each / min(times), "problem": ""}


def _collect(store: dist.Store, size: int, per_unit: int, came: set[int]) -> Verdict:
    """Rank 0: what all said, and what follows."""
    wait_for_keys(store, [f"2/{other}" for other in sorted(came)], PAIR_SECONDS + LAST_WORD_SECONDS)
    ranks = [json.loads(store.get(f"0/{one}")) for one in range(size) if store.check([f"0/{one}"])]
    pairs: list[dict[str, Any]] = []
    silent: set[int] = set()
    for number in (1, 2):
        for units in json.loads(store.get(f"pairs/{number}")):
            keys = [f"{number}/{one}" for one in _members(units, per_unit)]
            said = [json.loads(store.get(key)) if store.check([key]) else {"problem": "no answer"} for key in keys]
            silent |= {int(key.partition("/")[2]) for key in keys if not store.check([key])}
            problem = next((one["problem"] for one in said if one["problem"]), "")
            speed = 0.0 if problem else min(one["speed"] for one in said)
            pairs.append({"units": units, "speed": speed, "problem": problem})
    return judge(ranks, pairs, size, per_unit, silent)


def judge(
    ranks: list[dict[str, Any]], pairs: list[dict[str, Any]], size: int, per_unit: int, silent: Iterable[int] = ()
) -> Verdict:
    """Which machines (or, with `per_unit` 1, processes) are broken or slow, and why; `silent` did not come back from
    an exchange."""
    verdict = Verdict(per_unit, ranks=ranks, pairs=pairs)
    answered = {one["rank"] for one in ranks}
    for rank in sorted(set(range(size)) - answered):
        verdict.broken[rank // per_unit] = message(
            f"rank {rank} did not finish a matrix product in {PRODUCT_SECONDS:g} s"
        )
    for rank in sorted(silent):
        verdict.broken[rank // per_unit] = message(f"rank {rank} stopped answering during the exchange")
    for device in sorted({one["device"] for one in ranks}):
        alike = [one for one in ranks if one["device"] == device]
        usual, count = Counter(one["bits"] for one in alike).most_common(1)[0]
        usual_seconds = sorted(one["seconds"] for one in alike)[(len(alike) - 1) // 2]
        for one in alike:
            unit, name = one["rank"] // per_unit, f"rank {one['rank']} on {one['host']}"
            if 2 * count <= len(alike) and len(alike) > 1:
                verdict.broken[unit] = message(
                    f"the product of {name} has other bits than that of others; each may be wrong"
                )
            elif one["bits"] != usual:
                verdict.broken[unit] = message(f"the product of {name} has other bits than those of most")
            elif one["seconds"] > SLOW * usual_seconds:
                ratio = one["seconds"] / usual_seconds
                verdict.slow[unit] = message(f"the product of {name} took {ratio:.1f} times as long as usual")
    speeds = sorted(one["speed"] for one in pairs if one["speed"])
    usual_speed = speeds[len(speeds) // 2] if speeds else 0.0
    failed = [one["units"] for one in pairs if one["problem"] and not set(one["units"]) & set(verdict.broken)]
    slow = [one["units"] for one in pairs if not one["problem"] and SLOW * one["speed"] < usual_speed]
    for units, found, words in ((failed, verdict.broken, "failed"), (slow, verdict.slow, "are slow")):
        good = {unit for one in pairs if one["units"] not in units for unit in one["units"]} | set(verdict.broken)
        left = [pair for pair in units if not set(pair) <= good]
        while left:  # the one with the most bad pairs explains them; of equal ones each may
            counts = Counter(unit for pair in left for unit in pair if unit not in good)
            for unit in [unit for unit in sorted(counts) if counts[unit] == max(counts.values())]:
                problem = next((f" ({one['problem']})" for one in pairs if one["problem"] and unit in one["units"]), "")
                found[unit] = message(f"all exchanges with {_name(unit, per_unit, ranks)} {words}{problem}")
            left = [pair for pair in left if not set(pair) & set(found)]
    for first, second in failed:
        if not {first, second} & set(verdict.broken):  # only the way between these two
            names = f"{_name(first, per_unit, ranks)} and {_name(second, per_unit, ranks)}"
            verdict.broken[second] = message(f"the exchange between {names} failed, though both reach others")
    verdict.slow = {unit: text for unit, text in verdict.slow.items() if unit not in verdict.broken}
    return verdict


def _name(unit: int, per_unit: int, ranks: Sequence[Mapping[str, Any]]) -> str:
    host = next((one["host"] for one in ranks if one["rank"] // per_unit == unit), "?")
    return f"rank {unit} on {host}" if per_unit == 1 else f"machine {unit} ({host})"
