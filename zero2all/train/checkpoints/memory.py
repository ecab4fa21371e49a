"""Checkpoints in host memory, for a restart that loses few steps: the same boxes as on disk, in `resilience.slots`.

Every rank has two buffers in the RAM file system of its machine. A machine keeps all boxes that its ranks hold, each of
them once, so that its ranks can load without the others. A save costs the training loop the checks before it and, on a
GPU, the copy of the weights; moments are copied while the next passes run, checksums are computed in a thread.

A checkpoint counts when it is whole on every machine at the same step. Ranks finish a save at different times, so
before the next one they agree which step all of them have, and none overwrites that one.
"""

import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.fault import fault_point
from zero2all.common.lock import boot_id
from zero2all.common.peers import Peers
from zero2all.parallel.parts import TensorPart
from zero2all.resilience import slots
from zero2all.resilience.slots import PAGE, NoMemoryFolderError, Slot, WholeSlot
from zero2all.train.checkpoints.index import Index, Place, StoredBox, TensorEntry, check_filling
from zero2all.train.checkpoints.load import Checkpoint
from zero2all.train.checkpoints.planning import SaveLayout, plan_save, signature_of
from zero2all.train.checkpoints.snapshot import HostBuffers, PinnedBlock, Snapshot, page_starts
from zero2all.train.checkpoints.tensor_file import Header, TensorInfo, byte_count

LARGEST_BUFFER_BYTES = 4 << 30


class MemoryStore:
    """The memory checkpoints of a run. Methods are called by all ranks at the same point."""

    def __init__(self, run: Path, peers: Peers, base: Path | None, key: str, say: Callable[[str], None]) -> None:
        """`base` is the RAM file system (None: the usual one); `key` names the config."""
        self._run, self._peers, self._base, self._say = run, peers, base, say
        self._hosts = [str(host) for host in peers.gather(f"{socket.gethostname()} {boot_id()}")]
        self._here = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[peers.rank]]
        self._is_leader = self._here[0] == peers.rank
        self._key = f"{key} {','.join(str(self._hosts.index(host)) for host in self._hosts)}"
        self._folder: Path | None = None
        self._lock: int | None = None
        self._layout: SaveLayout | None = None
        self._slots: list[Slot] = []
        self._buffers: list[HostBuffers] = []
        self._steps: list[int] = []  # of each buffer; -1: none
        self._block: PinnedBlock | None = None
        self._thread: threading.Thread | None = None
        self.problem: str | None = None
        """Why the last save of this rank was not finished."""

    def newest(self, after: int) -> Checkpoint | None:
        """The newest checkpoint later than step `after` that is whole on every machine. Damaged ones are removed."""
        usable = self._usable(self._existing_folder())
        # A machine that was away may have another save of the same step, of a history that was given up.
        saves = [[step, found[0].about["save"]] for step, found in usable.items()]
        common = set.intersection(*({tuple(each) for each in said} for said in self._peers.gather(saves)))
        for step, _ in sorted(common, reverse=True):
            if step <= after:
                break
            problem, found = None, usable[step]
            try:
                for each in found[self._here.index(self._peers.rank) :: len(self._here)]:
                    slots.read_slot(each.path, with_data=True)
            except BadInputError as error:
                problem = str(error)
            problems = [str(each) for each in self._peers.gather(problem) if each is not None]
            if not problems:
                return _checkpoint(found, self._peers)
            self._say(f"Removed a damaged checkpoint in memory: {problems[0]}")
            self.forget_after(step - 1, only=step)
        return None

    def _existing_folder(self) -> Path | None:
        name = self._peers.gather(slots.run_id(self._run))[0]
        if name is None:
            return None
        with suppress(NoMemoryFolderError):
            home = slots.ram_home(self._base)
            if (home / name).is_dir():
                slots.own_folder(home / name)
                self._folder = home / name
                return self._folder
        return None

    def _usable(self, folder: Path | None) -> dict[int, list[WholeSlot]]:
        """By step, the buffers on this machine of saves that its ranks can load: none is missing, and the ranks wrote
        them themselves, or the boxes fill every tensor."""
        found: dict[int, list[WholeSlot]] = {}
        for each in slots.whole_slots(folder) if folder is not None else ():
            found.setdefault(each.step, []).append(each)
        return {
            step: group
            for step, group in found.items()
            if sorted(each.about["rank"] for each in group) == group[0].about["ranks"]
            and len({(each.about["key"], each.about["save"]) for each in group}) == 1
            and ((group[0].about["key"], group[0].about["ranks"]) == (self._key, self._here) or _is_whole(group))
        }

    def prepare(self, parts: Mapping[str, TensorPart], block: PinnedBlock | None) -> str | None:
        """Make the buffers, or take those that are there; returns why there are none, the same on all ranks. `block`:
        where the tensors of a GPU go through."""
        layout = plan_save(parts, self._peers, LARGEST_BUFFER_BYTES, self._hosts)
        sizes = [file.data_bytes for file in layout.files]
        starts, own_bytes = page_starts(sizes)
        data_bytes = [max(int(count), PAGE) for count in self._peers.gather(own_bytes)]
        name = self._peers.gather(slots.run_id(self._run, create=True) if self._peers.is_first else None)[0]
        rank = self._peers.rank

        def enter() -> None:
            home = slots.ram_home(self._base)
            if self._is_leader:
                slots.make_run_folder(home, name, self._run)
                slots.sweep_stale(home, name)
            self._folder = home / name
            self._lock = slots.lock_folder(self._folder, self._is_leader)

        def make_room() -> None:
            assert self._folder is not None, "entered"
            needed = {
                path: PAGE + data_bytes[one] for one in self._here for path in slots.slot_paths(self._folder, one)
            }
            for path in self._folder.glob("[ab]-*"):
                if path not in needed:  # of an attempt with more ranks
                    path.unlink()
            there = sum(path.stat().st_size for path in needed if path.exists())
            slots.require_room(self._folder, max(0, sum(needed.values()) - there))

        def allocate() -> None:
            assert self._folder is not None, "entered"
            for path in slots.slot_paths(self._folder, rank):
                self._slots.append(Slot(path, data_bytes[rank], is_mapped=block is None))
                self._steps.append(self._step_in(path))
            if block is not None:
                block.reserve(sizes)
                block.reserve([data_bytes[rank]])

        problem = (
            self._together(enter if self._is_leader else None)
            or self._together(None if self._is_leader else enter)
            or self._together(make_room if self._is_leader else None)
            or self._together(allocate)
        )
        if problem is not None:
            is_mine = self._is_leader and self._lock is not None
            self._release()
            if is_mine and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            return problem
        self._layout, self._starts, self._block = layout, starts, block
        for slot in self._slots:
            buffers = None
            if block is None:
                whole = torch.frombuffer(slot.data, dtype=torch.uint8)
                buffers = [whole[at : at + size] for at, size in zip(starts, sizes, strict=True)]
            self._buffers.append(HostBuffers(layout, block, buffers))
        return None

    def _step_in(self, path: Path) -> int:
        """The step of a save of these same ranks in a file; -1: none."""
        try:
            found = slots.read_slot(path)
        except BadInputError:
            return -1
        return found.step if (found.about["key"], found.about["ranks"]) == (self._key, self._here) else -1

    def _together(self, work: Callable[[], None] | None) -> str | None:
        """Run `work` where there is some; the first problem of any rank, on all of them."""
        problem = None
        try:
            if work is not None:
                work()
        except (NoMemoryFolderError, OSError) as error:
            problem = str(error)
        return next((str(each) for each in self._peers.gather(problem) if each is not None), None)

    def save(self, step: int, snapshot: Snapshot, details: Mapping[str, Any]) -> torch.cuda.Event | bool:
        """Begin a save. False: the one before is not finished on some rank, and nothing was done. An event: until it,
        the optimizer's state may not change. True: everything may change."""
        is_busy = self._thread is not None and self._thread.is_alive()
        holds_block = self._block is not None and not is_busy and self._block.lock.acquire(blocking=False)
        job = None
        try:
            done, job = self._begin(step, snapshot, details, is_busy or (self._block is not None and not holds_block))
        finally:
            if self._block is not None and holds_block and job is None:
                self._block.lock.release()
        self._thread = job or self._thread
        return done

    def _begin(
        self, step: int, snapshot: Snapshot, details: Mapping[str, Any], is_busy: bool
    ) -> tuple[torch.cuda.Event | bool, threading.Thread | None]:
        """Begin a save. Returns what `save` returns, and the thread that finishes it; None: there is nothing to do."""
        assert self._layout is not None, "prepared"
        can_save = not is_busy and self._layout.signature == signature_of(snapshot.parts)
        record = jsonio.dumps_exact(dict(snapshot.record)).decode() if self._peers.is_first else None
        said = self._peers.gather([can_save, self._steps, record, secrets.token_hex(8)])
        common = max(set.intersection(*(set(each[1]) for each in said)), default=-1)
        can_all = all(each[0] for each in said)
        if not can_all or common == step:
            return can_all, None
        # All ranks have `common`; of the other buffer some may have another step, or have failed.
        at = next(number for number, held in enumerate(self._steps) if held != common or common < 0)
        slot, self._steps[at] = self._slots[at], -1
        try:
            slot.begin(step)
        except OSError as error:  # no room; the other ranks see at the next save that this one lacks the step
            self.problem = str(error)
            return True, None
        about = {
            "key": self._key,
            "save": said[0][3],
            "rank": self._peers.rank,
            "ranks": self._here,
            "boxes": self._boxes(),
            "elsewhere": [[name, one.dtype, one.shape] for name, one in self._layout.index.items() if not one.boxes],
            "record": said[0][2],
            "details": jsonio.dumps_exact(dict(details)).decode(),
        }
        copied = self._buffers[at].begin_copy(snapshot.parts)
        job = threading.Thread(target=self._finish, args=(at, step, about, copied), name="memory-save", daemon=True)
        job.start()
        return True if copied is None else copied, job

    def _finish(self, at: int, step: int, about: dict[str, Any], copied: torch.cuda.Event | None) -> None:
        """The job of the thread."""
        try:
            if self._block is not None and copied is not None:
                torch.cuda.set_device(self._block.device)  # else this thread would use the first GPU
                copied.synchronize()
            fault_point("memory", step)
            slot = self._slots[at]
            memory = None if self._block is None else self._block.views([slot.data_bytes])[0].numpy()
            slot.finish(step, about, memory)
            self._steps[at], self.problem = step, None
        except Exception as error:  # the buffer stays unfinished; the other one is whole
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            if self._block is not None:
                self._block.lock.release()

    def _boxes(self) -> list[Any]:
        """Of each box in this rank's buffer: tensor, dtype, shape, where it begins, its shape, and its place there."""
        assert self._layout is not None, "prepared"
        starts = {file.name: start for file, start in zip(self._layout.files, self._starts, strict=True)}
        infos = {file.name: file.infos for file in self._layout.files}
        return [
            [name, entry.dtype, entry.shape, *box.place, starts[box.file] + infos[box.file][box.key].begin]
            for name, entry in self._layout.index.items()
            for box in entry.boxes
            if box.file in starts
        ]

    def forget_after(self, step: int, only: int | None = None) -> None:
        """Drop the checkpoints after `step`, or `only` one of them; waits for a save under way."""
        self.wait()
        for at, slot in enumerate(self._slots):
            if self._steps[at] > step and only in (None, self._steps[at]):
                slot.begin(0)
                self._steps[at] = -1
        if not self._slots and self._is_leader and self._folder is not None:
            for found in list(slots.whole_slots(self._folder)):
                if found.step > step and only in (None, found.step):
                    found.path.unlink()
        self._peers.gather(None)

    def wait(self) -> None:
        """Wait for the save under way."""
        if self._thread is not None:
            self._thread.join()

    def remove(self) -> None:
        """Remove everything: the run has ended, or is started over."""
        self.wait()
        self._release()
        if self._is_leader:
            slots.remove(self._run, self._base)
        self._peers.gather(None)

    def close(self, saved_step: int) -> None:
        """The end of a process. When the disk has all that the memory has, or the run has given it up, the files are
        removed. No collectives: the others may be dead."""
        self.wait()
        self._release()
        if self._is_leader and self._folder is not None:
            kept = (found.step for found in slots.whole_slots(self._folder))
            if saved_step >= max(kept, default=-1) or slots.run_id(self._run) != self._folder.name:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _release(self) -> None:
        for buffers in self._buffers:
            buffers.release()
        for slot in self._slots:
            slot.close()
        if self._lock is not None:
            os.close(self._lock)
        self._buffers, self._slots, self._steps, self._lock = [], [], [], None


def _index(group: list[WholeSlot]) -> tuple[Index, dict[str, Header]]:
    """The index of a checkpoint and the places in its buffers."""
    index: Index = {}
    headers: dict[str, Header] = {}
    for found in group:
        infos = {}
        for name, dtype, shape in found.about.get("elsewhere", ()):  # other machines hold all of it
            index.setdefault(name, TensorEntry(dtype, tuple(shape), ()))
        for name, dtype, shape, offsets, lengths, begin in found.about["boxes"]:
            place, key = Place(tuple(offsets), tuple(lengths)), f"{name}@{offsets}"
            before = index[name].boxes if name in index else ()
            index[name] = TensorEntry(dtype, tuple(shape), (*before, StoredBox(place, found.path.name, key)))
            infos[key] = TensorInfo(dtype, place.shape, begin, begin + byte_count(dtype, place.shape))
        headers[found.path.name] = Header(PAGE, infos)
    return index, headers


def _is_whole(group: list[WholeSlot]) -> bool:
    """Whether the boxes on this machine fill every tensor: then any number of ranks can load them."""
    try:
        for name, entry in _index(group)[0].items():
            check_filling(name, entry, "memory")
    except BadInputError:
        return False
    return True


def _checkpoint(group: list[WholeSlot], peers: Peers) -> Checkpoint:
    folder, about = group[0].path.parent, group[0].about
    details, record = (jsonio.loads_exact(about[part].encode(), str(folder)) for part in ("details", "record"))
    index, headers = _index(group)
    return Checkpoint(folder, {**details, "step": group[0].step, "files": {}}, index, headers, record, peers, True)
