"""Signs of life of the processes of a run, in shared memory that the supervisor reads from outside.

Every rank has a slot of a file without a name (both sides inherit its descriptor, so nothing is left behind after a
kill). The training loop writes its phase, its step and the monotonic time at its own moments: no thread proves life, so
a loop that hangs falls silent even where other threads run. How long each phase took at most is kept there too; the
supervisor learns its limits from that.

A thread of the rank waits for the supervisor's pipe. If the pipe closes, the supervisor is dead: the rank stops as
after SIGTERM. A byte asks for the numbers of the collectives (torch's flight recorder).
"""

import ctypes
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

PHASES = ("start", "data", "step", "save", "validate", "end", "groups")
TIMED = (*PHASES, "first_step")
"""Whose times are kept: `first_step` are the steps that compile or fill caches."""
HEARTBEAT = "Z2A_HEARTBEAT"
"""Descriptors for a rank: heartbeat file, its slot, the supervisor's pipe, the file for stacks."""
ATTEMPT_NUMBER = "Z2A_ATTEMPT_NUMBER"
"""Which attempt of the supervisor this is, from 1."""
SLOT_BYTES = 12288
HEAD = struct.Struct("=qqdqq")
"""Beats so far, phase, when it began, step, first step."""
SEEN = struct.Struct("=qd")
"""Of one phase: how often it ended, and the longest time."""
TEXT = struct.Struct("=dI")
"""When a text was written, and its bytes, which follow."""
SEEN_AT, ERROR_AT, COLLECTIVES_AT, DEVICE_AT = 64, 512, 4096, 8192
LONGEST_TEXT = 3000
WARM_UP_STEPS = 2
"""Steps that compile or fill caches; their time teaches nothing about the others."""
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Beat:
    """What a slot says."""

    beats: int = 0
    phase: str = "start"
    since: float = 0.0
    step: int = -1
    """-1: training has not begun."""
    first_step: int = -1
    """With which this process began."""
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)


def heartbeat_file(ranks: int) -> int:
    """A file of empty slots; returns its descriptor."""
    try:
        file = os.memfd_create("z2a-heartbeat")
    except (AttributeError, OSError):  # not Linux
        with tempfile.TemporaryFile() as other:
            file = os.dup(other.fileno())
    os.ftruncate(file, ranks * SLOT_BYTES)
    return file


class Slots:
    """All slots, as the supervisor sees them."""

    def __init__(self, file: int, ranks: int) -> None:
        self._memory = mmap.mmap(file, ranks * SLOT_BYTES)

    def beat(self, rank: int) -> Beat:
        """The last beat of a rank."""
        at = rank * SLOT_BYTES
        beats, phase, since, step, first = HEAD.unpack_from(self._memory, at)
        if not beats:
            return Beat()
        seen = {name: SEEN.unpack_from(self._memory, at + SEEN_AT + i * SEEN.size) for i, name in enumerate(TIMED)}
        return Beat(beats, PHASES[phase], since, step, first, seen)

    def error(self, rank: int) -> tuple[float, str]:
        """When the rank failed, and its error; an empty text where it said nothing."""
        return self._text(rank * SLOT_BYTES + ERROR_AT)

    def collectives(self, rank: int) -> dict[str, tuple[int, int, str]]:
        """By process group: the number of the last collective that was begun, of the last that ended, and its name."""
        text = self._text(rank * SLOT_BYTES + COLLECTIVES_AT)[1]
        return {name: tuple(values) for name, values in json.loads(text or "{}").items()}

    def device(self, rank: int) -> tuple[int, str] | None:
        """How far the GPU of the rank has come, and what it has begun and not finished; None: nothing, or no answer."""
        text = self._text(rank * SLOT_BYTES + DEVICE_AT)[1]
        found = json.loads(text) if text else None
        return None if found is None else (int(found[0]), str(found[1]))

    def has_answered(self, rank: int) -> bool:
        """Whether the rank has written its collectives and its device."""
        return self._text(rank * SLOT_BYTES + DEVICE_AT)[0] > 0

    def _text(self, at: int) -> tuple[float, str]:
        when, size = TEXT.unpack_from(self._memory, at)
        return when, self._memory[at + TEXT.size : at + TEXT.size + size].decode(errors="replace")

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class Heartbeat:
    """The slot of this process."""

    def __init__(self, file: int, slot: int) -> None:
        self._memory = mmap.mmap(file, os.fstat(file).st_size)
        self._at = slot * SLOT_BYTES
        self._beats, self._phase, self._since, self._step, self._first = 0, 0, time.monotonic(), -1, -1
        self._seen = [(0, 0.0)] * len(TIMED)
        self._warm_up = WARM_UP_STEPS

    def beat(self, phase: str, step: int | None) -> None:
        """Begin a phase; a step of None is the one before."""
        now, before = time.monotonic(), self._phase
        self._learn(before, now - self._since)
        self._beats, self._phase, self._since = self._beats + 1, PHASES.index(phase), now
        if step is not None:
            self._step = step
        self._first = self._step if self._first < 0 else self._first
        HEAD.pack_into(self._memory, self._at, self._beats, self._phase, now, self._step, self._first)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Another phase in the middle of this one."""
        before = PHASES[self._phase]
        self.beat(phase, self._step)
        try:
            yield
        finally:
            self.beat(before, self._step)

    def warm_up(self) -> None:
        """The next steps may take long: shapes have changed."""
        self._warm_up = WARM_UP_STEPS
        self._set_seen(PHASES.index("step"), 0, self._seen[PHASES.index("step")][1])

    def write(self, at: int, text: str) -> None:
        """Leave a text in the slot."""
        data = text.encode(errors="replace")[:LONGEST_TEXT]
        start = self._at + at
        self._memory[start + TEXT.size : start + TEXT.size + len(data)] = data
        TEXT.pack_into(self._memory, start, time.monotonic(), len(data))

    def _learn(self, phase: int, seconds: float) -> None:
        if PHASES[phase] == "step" and self._warm_up:
            self._warm_up -= 1
            phase = TIMED.index("first_step")
        count, longest = self._seen[phase]
        if self._beats:
            self._set_seen(phase, count + 1, max(longest, seconds))

    def _set_seen(self, phase: int, count: int, longest: float) -> None:
        self._seen[phase] = (count, longest)
        SEEN.pack_into(self._memory, self._at + SEEN_AT + phase * SEEN.size, count, longest)


_own: Heartbeat | None = None
_is_attached = False
_unfinished: Callable[[], tuple[int, str] | None] | None = None


def watch_device(unfinished: Callable[[], tuple[int, str] | None]) -> None:
    """What is asked when the process is silent: `Slots.device`."""
    global _unfinished
    _unfinished = unfinished


def attach() -> None:
    """Connect this process with the supervisor that started it, if there is one. Called once, before the work."""
    global _own, _is_attached
    if _is_attached:
        return
    _is_attached = True
    numbers = os.environ.pop(HEARTBEAT, None)  # not for processes that this one starts
    if numbers is None:
        return
    file, slot, pipe, stacks = map(int, numbers.split(","))
    for descriptor in (file, pipe, stacks):
        os.set_inheritable(descriptor, False)
    _own = Heartbeat(file, slot)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    with suppress(OSError, AttributeError):  # Linux with Yama: a process that is not our parent may read our stacks
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    threading.Thread(target=_listen, args=(_own, pipe), name="z2a-supervisor", daemon=True).start()


def beat(phase: str, step: int | None = None) -> None:
    """Say that the work goes on, and with what. Costs two microseconds; nothing without a supervisor."""
    if _own is not None:
        _own.beat(phase, step)


@contextmanager
def waiting_for_groups() -> Iterator[None]:
    """While the block runs, no limit of a step, save or validation counts: other groups decide how long it lasts."""
    if _own is None:
        yield
        return
    with _own.within("groups"):
        yield


def warm_up() -> None:
    """The next two steps may take long: they compile, or their shapes are new."""
    if _own is not None:
        _own.warm_up()


def failed(error: BaseException) -> bool:
    """Leave the error for the process that started this one; whether there is one."""
    if _own is not None:
        _own.write(ERROR_AT, f"{type(error).__name__}: {error}")
    return _own is not None


def _listen(own: Heartbeat, pipe: int) -> None:
    while os.read(pipe, 1):
        device = None
        with suppress(Exception):  # a GPU that has failed
            device = _unfinished() if _unfinished else None  # first: it selects the GPU for this thread
        own.write(COLLECTIVES_AT, json.dumps(_collectives()))
        own.write(DEVICE_AT, json.dumps(device))
    os.kill(os.getpid(), signal.SIGTERM)


def _collectives() -> dict[str, tuple[int, int, str]]:
    """What torch's flight recorders know, by process group; as in `Slots.collectives`. NCCL has one of its own."""
    found: dict[str, tuple[int, int, str]] = {}
    if "torch" not in sys.modules:
        return found
    for prefix, name in (("", "_dump_fr_trace_json"), ("nccl ", "_dump_nccl_trace_json")):
        with suppress(Exception):  # another version of torch
            found |= {prefix + group: values for group, values in _recorded(name).items()}
    return found


def _recorded(name: str) -> dict[str, tuple[int, int, str]]:
    """What one recorder knows."""
    dump = getattr(sys.modules["torch"]._C._distributed_c10d, name, None)
    record = json.loads(dump(includeCollectives=True, onlyActive=False)) if dump is not None else {}
    # By group and number; also the last one of each group, for a group where all have ended.
    entries = {(str(entry["pg_id"]), int(entry["collective_seq_id"])): entry for entry in record.get("entries", [])}
    last = {group: entry for (group, _), entry in entries.items()}
    found = {}
    for group, state in record.get("pg_status", {}).items():
        begun, ended = (int(state[f"last_{word}_collective"]) for word in ("enqueued", "completed"))
        entry = entries.get((group, ended + 1)) or last.get(group) or {}
        label = entry.get("process_group", [group])[0]  # the same in all ranks; pg_id counts in each process
        found[str(label)] = (begun, ended, str(entry.get("profiling_name", "")))
    return found
