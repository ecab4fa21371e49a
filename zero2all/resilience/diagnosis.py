"""What can be learned about processes that died or hang: stacks, states, kernel messages; and which of them began it.

All of it is seen from outside. Stacks are taken with py-spy where it is installed (without pausing a process that is
stopped already), else the process writes them itself on a signal, in C, so that a held GIL does not matter.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from zero2all.common.language import message
from zero2all.common.memory import group_folders
from zero2all.resilience.heartbeat import STACKS_SIGNAL, Beat

STACK_SECONDS = 5.0
OWN_STACK_SECONDS = 0.5
MOST_KERNEL_LINES = 20
KERNEL_WORDS = re.compile(r"out of memory|oom-kill|Killed process|NVRM: Xid|segfault at", re.IGNORECASE)
COLLECTIVE_WORDS = ("torch/distributed/", "zero2all/parallel/", "torch/autograd/graph.py")
VICTIM = ("PeerFailureError", "AbsentGroupsError")
"""The error of a rank that only noticed that another is gone."""
NATIVE_REASON = re.compile(r"CUDA error|Assertion .* failed|what\(\):|^Fatal |terminate called")
"""Lines that a native library prints before it aborts."""
MOST_REASON = 600
CLEAR_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass
class RankFacts:
    """All that is known about a rank when something went wrong."""

    rank: int
    pid: int
    code: int | None = None
    """Its exit code, negative for a signal; None while it runs."""
    state: str = ""
    """As the kernel says: T is stopped, R runs, S and D wait."""
    beat: Beat = field(default_factory=Beat)
    silent_seconds: float = 0.0
    limit_seconds: float | None = None
    is_over: bool = False
    failed_at: float = 0.0
    error: str = ""
    stack: str = ""
    collectives: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    device: tuple[int, str] | None = None
    """How far its GPU has come, and what it has begun and not finished."""
    output: list[str] = field(default_factory=list)
    """Its last lines."""

    def failure(self) -> str:
        """Its error in one line: what it said, else the last line that it printed, else nothing. The last line of one
        that a signal killed is about something else, but native code that aborts says why before."""
        text = self.error.strip().partition("\n")[0]
        lines = [line.strip() for line in self.output if line.strip()]
        if text or not lines or not self.code:
            return text
        if self.code > 0:
            return lines[-1]
        reasons = [line for line in lines if NATIVE_REASON.search(line)] if self.code == -signal.SIGABRT else []
        return " ".join(dict.fromkeys(reasons))[:MOST_REASON]


def process_state(pid: int) -> str:
    """One letter, empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def take_stacks(ranks: Sequence[RankFacts], files: Mapping[int, int]) -> None:
    """Fill in the stacks of those that live; `files`: where each writes its own on a signal."""
    from concurrent.futures import ThreadPoolExecutor  # only after a failure: a start need not wait for it

    living = [facts for facts in ranks if facts.code is None]
    for facts in living:
        facts.state = process_state(facts.pid)
    if living:
        with ThreadPoolExecutor(len(living)) as pool:
            for facts, stack in zip(living, pool.map(lambda one: _stack(one, files[one.rank]), living), strict=True):
                facts.stack = stack


def _stack(facts: RankFacts, file: int) -> str:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    tries: list[list[str]] = [["--nonblocking"]] if facts.state == "T" else [[], ["--nonblocking"]]
    for options in tries if program else []:
        command = [str(program), "dump", "--pid", str(facts.pid), *options]
        with suppress(OSError, subprocess.TimeoutExpired):
            found = subprocess.run(command, capture_output=True, text=True, timeout=STACK_SECONDS)
            if found.returncode == 0 and "Thread" in found.stdout:
                return _main_thread_first(found.stdout.split("\n\n", 1)[-1])
    if facts.beat.beats and facts.state != "T":  # only then it has a handler for the signal
        with suppress(ProcessLookupError):
            os.kill(facts.pid, STACKS_SIGNAL)
            time.sleep(OWN_STACK_SECONDS)
    return os.pread(file, 100_000, 0).decode(errors="replace").strip()


def _main_thread_first(text: str) -> str:
    head, *threads = re.split(r"(?m)^(?=Thread )", text)
    threads.sort(key=lambda thread: "MainThread" not in thread.partition("\n")[0])
    return "".join(threads).strip() or head.strip()


def main_stack(stack: str) -> str:
    """The frames of the first thread, without numbers that differ between equal processes."""
    first = re.split(r"(?m)^(?=Thread |Current thread )", stack)
    lines = (first[1] if len(first) > 1 else stack).strip().splitlines()[1:]
    return "\n".join(re.sub(r"0x[0-9a-f]+", "", line).strip() for line in lines)


def stack_groups(ranks: Sequence[RankFacts]) -> list[tuple[list[int], str]]:
    """Ranks with the same stack of the main thread, and one whole stack; the smallest group first."""
    groups: dict[str, list[RankFacts]] = {}
    for facts in ranks:
        if facts.stack:
            groups.setdefault(main_stack(facts.stack), []).append(facts)
    found = sorted(groups.values(), key=lambda group: (len(group), group[0].rank))
    return [([facts.rank for facts in group], group[0].stack) for group in found]


def culprit(ranks: Sequence[RankFacts]) -> tuple[RankFacts, str]:
    """The rank that failed first, and the evidence for that, as a text for a person."""
    crashed = [facts for facts in ranks if facts.code not in (None, 0)]
    if crashed:
        own = [facts for facts in crashed if not facts.error.startswith(VICTIM)] or crashed
        # One that raised knows when; of those that a signal ended nobody knows better than the order of their ends.
        return min(own, key=lambda facts: (facts.code is not None and facts.code > 0, facts.failed_at)), ""
    stopped = [facts for facts in ranks if facts.state == "T"]
    if stopped:
        return stopped[0], message("It is stopped (SIGSTOP).")
    if behind := _behind(ranks):
        return behind
    devices = sorted((facts.device[0], facts.rank, facts.device[1]) for facts in ranks if facts.device)
    if devices and (len(devices) == 1 or devices[0][0] < devices[1][0]):
        part = devices[0][2]
        return next(facts for facts in ranks if facts.rank == devices[0][1]), (
            message(f"Its GPU does not finish a kernel that it has begun, in the part {part} of a step.")
            if part
            else message("Its GPU does not finish a kernel that it has begun, between two steps.")
        )
    outside = [facts for facts in ranks if facts.stack and not _in_collective(facts.stack)]
    over = [facts for facts in ranks if facts.is_over] or list(ranks)
    if len(outside) == 1 and len(ranks) > 1:
        return outside[0], message("The others wait in a collective, and it does not.")
    groups = stack_groups(ranks)
    if len(groups) > 1 and len(groups[0][0]) == 1 < len(groups[-1][0]):
        return next(facts for facts in ranks if facts.rank == groups[0][0][0]), message(
            "Its stack differs from others'."
        )
    return max(over, key=lambda facts: facts.silent_seconds), ""


def _behind(ranks: Sequence[RankFacts]) -> tuple[RankFacts, str] | None:
    """The rank that has not begun a collective in which the others wait."""
    for group in sorted({name for facts in ranks for name in facts.collectives}):
        begun = {facts.rank: facts.collectives[group] for facts in ranks if group in facts.collectives}
        last = max(count for count, _, _ in begun.values())
        late = [facts for facts in ranks if begun.get(facts.rank, (last, 0, ""))[0] < last]
        if len(late) == 1:
            ended, name = next(values[1:] for values in begun.values() if values[0] == last)
            at = begun[late[0].rank][0]
            number = max(at, min(ended, last - 1)) + 1  # on a GPU the others have queued more behind it
            return late[0], message(
                f"It has not begun collective {number} ({name}, process group {group}), in which others wait; its last "
                f"one is {at}."
            )
    return None


def _in_collective(stack: str) -> bool:
    top = main_stack(stack).splitlines()[:12]
    return any(word in line for word in COLLECTIVE_WORDS for line in top)


def signal_words(code: int) -> str:
    """An exit code in words: 'killed by SIGKILL (exit code 137)'."""
    number = -code if code < 0 else code - 128 if 128 < code < 193 else 0
    if not number:
        return message(f"exit code {code}")
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return message(f"killed by {name} (exit code {128 + number})")


class MemoryKills:
    """Processes of this machine or container that the kernel killed because memory ran out, since the last look."""

    def __init__(self) -> None:
        self._count, self._since = _oom_kills(), time.monotonic()

    def evidence(self) -> list[str]:
        """Lines of the kernel, and the count of the container, since this object was made."""
        found = _kernel_lines(self._since)
        if (more := _oom_kills() - self._count) > 0:
            found.insert(0, message(f"The memory limit of this container was reached: {more} processes were killed."))
        return found


def _oom_kills() -> int:
    """The count in the memory files of our control group."""
    for version, folder in group_folders("memory"):
        with suppress(OSError):
            text = (folder / ("memory.events" if version == "v2" else "memory.oom_control")).read_text()
            if found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
                return int(found[1])
    return 0


def _kernel_lines(since: float) -> list[str]:
    """What the kernel's log says about memory, GPUs and crashes; empty where it may not be read."""
    found: list[str] = []
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return found
    try:
        while True:
            head, _, text = os.read(log, 8192).decode(errors="replace").partition(";")
            if float(head.split(",")[2]) / 1e6 >= since and KERNEL_WORDS.search(text):
                found.append(text.partition("\n")[0])
    except (OSError, ValueError, IndexError):  # the end, or a line that was overwritten
        return found[-MOST_KERNEL_LINES:]
    finally:
        os.close(log)
