"""Checkpoints in memory: what a killed run continues from, and what it never takes."""

import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.train.ranks import CODE
from tests.train.states import bits, flip, steps_of
from zero2all.common.errors import AnomalyError
from zero2all.common.peers import Peers
from zero2all.resilience import slots
from zero2all.train.checkpoints.layout import checkpoint_folder
from zero2all.train.checkpoints.memory import MemoryStore, _index, _is_whole
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.hooks.replica_check import check_rerun

STEPS, NEVER = 14, 99
SHARD = "en/train/tokens-00000.bin"
TWO_PROCESSES = pytest.param(2, "clean", False, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def undone(lab):
    """After a test the lab is as it was: its runs have the same names."""
    good = (lab.packed / SHARD).read_bytes()
    yield
    (lab.packed / SHARD).write_bytes(good)
    shutil.rmtree(lab.runs, ignore_errors=True)


@pytest.fixture(scope="module")
def whole(ranks, lab, config):
    """The losses and the last bits of a run that nothing happened to, by its number of processes."""
    found = {}

    def of(processes=1):
        if processes not in found:
            chosen = settings(config, lab.root, "whole", every=0, zero=processes - 1)
            found[processes] = losses(ranks.finished(chosen, processes)), bits(lab.run("whole"), STEPS)
        return found[processes]

    return of


@pytest.fixture
def ram(tmp_path) -> Path:
    """A RAM file system of the test's own; an ordinary folder serves as well."""
    folder = tmp_path / "ram"
    folder.mkdir()
    return folder


def settings(config, ram: Path, name: str = "run", every: int = 1, resilience=None, save_every=5, **parallel):
    train, valid = {"name": name, "steps": STEPS, "tokens_per_step": 160}, {"every_steps": 0, "tokens_per_source": 128}
    memory = {"memory_every_steps": every, "memory_folder": str(ram), **(resilience or {})}
    saves = {"every_steps": save_every}
    return config(train=train, checkpoint=saves, validation=valid, resilience=memory, parallel=parallel)


def in_memory(ram: Path) -> list[Path]:
    return list(next(ram.iterdir()).iterdir())


def buffers(ram: Path) -> dict[str, int]:
    """The steps of the whole buffers of the only run, by name."""
    (folder,) = in_memory(ram)
    return {found.path.name: found.step for found in slots.whole_slots(folder)}


def losses(launch) -> dict[int, float]:
    return {record.step: record.loss for record in launch.steps()}


def kill(ranks, chosen, processes: int = 1, code: str = CODE) -> None:
    """In step 9; the steps 7 and 8, or 6 and 7, are in memory, 5 on disk."""
    signals = dict.fromkeys(range(processes), (9, signal.SIGKILL, 0.0))
    saved = checkpoint_folder(ranks.root / "runs" / chosen.train.name, 5) if chosen.checkpoint.every_steps else None
    launch = ranks(chosen, processes, signals=signals, awaited=saved, code=code)
    assert set(launch.wait()) <= {-signal.SIGKILL, 1}, launch.text()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_was_killed_continues_from_memory_with_the_same_bits(ranks, lab, config, ram, whole, processes):
    wanted_losses, wanted_bits = whole(processes)
    broken = settings(config, ram, "broken", zero=processes - 1)
    kill(ranks, broken, processes)
    assert max(steps_of(lab.run("broken"))) == 5
    newest = max(buffers(ram).values())
    assert newest in (7, 8), "killed in step 9, or before the save of step 8 was finished"
    resumed = ranks.finished(broken, processes)
    assert "from memory" in resumed.text()
    first = resumed.steps()[0].step
    assert first in (newest, newest + 1)
    assert losses(resumed) == {step: loss for step, loss in wanted_losses.items() if step >= first}
    assert bits(lab.run("broken"), STEPS) == wanted_bits
    assert in_memory(ram) == [], "a finished run leaves nothing in memory"


def test_damage_in_memory_means_the_older_buffer_then_the_disk(ranks, lab, config, ram):
    kill(ranks, settings(config, ram))
    steps, (folder,) = buffers(ram), in_memory(ram)
    newest, older = sorted(steps, key=steps.get, reverse=True)
    shutil.copytree(folder, ram.parent / "kept")
    flip(folder / newest, slots.PAGE + 1000)  # a value
    words = {0: ["--train.steps", str(steps[newest]), "--accept-changes"]}
    text = ranks.finished(settings(config, ram), words=words).text()
    assert "Removed a damaged checkpoint in memory" in text
    assert f"resumed run at step {steps[older]} from memory" in text
    shutil.rmtree(lab.run("run") / f"checkpoints/step-{steps[newest]:08d}")
    shutil.copytree(ram.parent / "kept", folder)
    for name in steps:
        flip(folder / name, 20)  # the header
    (lab.run("run") / "checkpoints/latest.json").unlink()
    text = ranks.finished(settings(config, ram), words={0: ["--accept-changes"]}).text()
    assert "resumed run at step 5 from step-00000005" in text


def checking_late(steps: int = 7, is_killed: bool = False, then: str = "pass") -> str:
    """A program that checks shards after so many steps of an attempt; it may be killed when it gives up its states."""
    return f"""
import json, os, signal, sys, time
from pathlib import Path
from zero2all.packed import verify
from zero2all.train.hooks import shard_check
read, record = verify._SlowReading.__call__, Path(json.loads(sys.argv[1])["record"])
give_up = shard_check.ShardCheck._give_up
def made() -> int:
    return record.read_text().count("\\n") if record.exists() else 0
def late(self, number):
    while made() < {steps}:
        if self.stopped:
            return None
        time.sleep(0.005)
    return read(self, number)
def killed(self, damage):
    give_up(self, damage)
    os.kill(os.getpid(), signal.SIGKILL)
verify._SlowReading.__call__ = late
if {is_killed}:
    shard_check.ShardCheck._give_up = killed
{then}
{CODE}
"""


def spoil(lab) -> bytes:
    whole = (lab.packed / SHARD).read_bytes()
    (lab.packed / SHARD).write_bytes(bytes(byte ^ 1 if place % 2 == 0 else byte for place, byte in enumerate(whole)))
    return whole


@pytest.mark.parametrize(
    ("processes", "before", "killed"), [(1, "clean", False), (1, "nothing", True), (1, "damaged", False), TWO_PROCESSES]
)
def test_what_was_trained_on_a_damaged_shard_comes_back_from_nowhere(
    ranks, lab, config, ram, whole, processes, before, killed
):
    """The damage is found after some steps of an attempt, when memory has states that were trained on it. `before`: an
    attempt that was killed in step 9, before there was damage or before it was found."""
    wanted_losses, wanted_bits = whole(processes)
    chosen = settings(config, ram, save_every=5 if before == "clean" else 0, zero=processes - 1)
    good = (lab.packed / SHARD).read_bytes()
    if before == "clean":
        kill(ranks, chosen, processes)
    spoil(lab)
    if before == "damaged":
        kill(ranks, chosen, processes, code=checking_late(NEVER))
    stopped = ranks(chosen, processes, code=checking_late(3, killed))
    assert stopped.wait() == ([-signal.SIGKILL] if killed else [3, 10][:processes]), stopped.text()
    assert ("from memory" in stopped.text()) is (before != "nothing")
    assert "which was not saved" in stopped.text() or killed
    (lab.packed / SHARD).write_bytes(good)
    again = ranks.finished(chosen, processes)
    assert "from memory" not in again.text()
    assert again.steps()[0].step == (6 if before == "clean" else 1)
    assert losses(again).items() <= wanted_losses.items()
    assert bits(lab.run("run"), STEPS) == wanted_bits
    assert in_memory(ram) == [], "what was given up is swept"
    assert not (lab.run("run") / "shard_check.json").exists()


def test_the_checkpoint_before_a_damaged_shard_was_read_stays_until_the_check_has_ended(ranks, lab, config, ram, whole):
    launch = ranks(settings(config, ram, every=0), signals={0: (6, signal.SIGTERM, 0.0)})
    assert launch.wait() == [10], launch.text()
    good = spoil(lab)
    often = settings(config, ram, every=0, save_every=1)
    often = replace(often, guards=replace(often.guards, rollback_margin_steps=1))
    assert ranks(often, code=checking_late()).wait() == [3]
    assert steps_of(lab.run("run")) == [13, 12, 7]
    (lab.packed / SHARD).write_bytes(good)
    assert "back behind step 7" in ranks.finished(often).text()
    assert bits(lab.run("run"), STEPS) == whole()[1]
    assert steps_of(lab.run("run")) == [STEPS, STEPS - 1]


def test_damage_that_is_found_by_reading_it_is_left_as_that_which_the_check_finds(ranks, lab, config, ram, whole):
    """The run trains on a damaged shard; after three steps there are ids in it that no token has."""
    chosen = settings(config, ram, save_every=0)
    good = spoil(lab)
    worse = f"""
def worsening(self, number):
    while not self.stopped:
        if made() >= 3:
            with open({str(lab.packed / SHARD)!r}, "r+b") as file:
                file.write(b"\\xff" * {len(good)})
        time.sleep(0.005)
verify._SlowReading.__call__ = worsening
"""
    stopped = ranks(chosen, code=checking_late(then=worse))
    assert stopped.wait() == [3], stopped.text()
    assert "A file was damaged or changed after packing" in stopped.text()
    assert len(stopped.steps()) >= 3
    (lab.packed / SHARD).write_bytes(good)
    assert "from memory" not in ranks.finished(chosen).text()
    assert bits(lab.run("run"), STEPS) == whole()[1]


def test_a_run_that_ends_before_its_shards_were_checked_says_so(ranks, lab, config, ram):
    spoil(lab)
    late = checking_late(NEVER, then="shard_check.FINISH_SECONDS = 0.0")
    late = late.replace("return None", "raise verify.ReadersEndedError")
    assert "ends before all of its shards were checked" in ranks.finished(settings(config, ram), code=late).text()


def test_checkpoints_trained_on_a_damaged_shard_are_taken_only_when_a_person_says_so(ranks, lab, config, ram):
    good = spoil(lab)
    chosen = settings(config, ram, every=0)
    assert ranks(chosen, code=checking_late()).wait() == [3]
    (lab.packed / SHARD).write_bytes(good)
    again = ranks(chosen)
    assert again.wait() == [3], again.text()
    assert "are from after step 0, and may have been trained on damaged data" in " ".join(again.text().split())
    assert "resumed run at step 5 from step-00000005" in ranks.finished(chosen, words={0: ["--accept-changes"]}).text()


def test_memory_is_taken_by_another_number_of_processes_but_not_by_another_run_or_one_started_over(ranks, config, ram):
    kill(ranks, settings(config, ram, "one", zero=1), processes=2)
    (kept,) = in_memory(ram)
    shutil.copytree(kept, ram.parent / "kept")
    assert "from memory" not in ranks.finished(settings(config, ram, "two")).text()
    assert "from memory" in ranks.finished(settings(config, ram, "one")).text()
    shutil.copytree(ram.parent / "kept", kept)
    words = {0: ["--fresh", "--train.steps", "3"]}
    assert "from memory" not in ranks.finished(settings(config, ram, "one"), words=words).text()
    assert in_memory(ram) == []


def test_without_room_the_disk_is_used_and_the_start_says_so(ranks, config, ram):
    small = ram / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=False).returncode:
        pytest.skip("no right to mount a file system")
    try:
        text = ranks.finished(settings(config, small)).text()
        assert in_memory(small) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert "no checkpoints in memory" in text
    assert "are free there" in text


def test_replicas_that_differ_are_found_at_the_next_check(ranks, lab, config, ram):
    chosen = settings(config, ram, every=0, resilience={"replica_check_every_steps": 2})
    launch = ranks(chosen, 2, spoiled={1: 7})
    assert launch.wait() == [12, 12], launch.text()
    assert "The replicas of ranks 0 and 1 differ" in launch.text()
    assert max(record.step for record in launch.steps()) == 8
    again = ranks.finished(chosen, 2)
    assert "step 8 was computed again: rank 1 had other bits before, so it was wrong then" in again.text()
    assert not (lab.run("run") / "replicas.json").exists()


def test_a_step_computed_twice_changes_nothing_and_a_wrong_one_is_named(ranks, lab, config, ram, whole):
    chosen = settings(config, ram, "twice", every=0, resilience={"rerun_every_steps": 3}, zero=1)
    assert losses(ranks.finished(chosen, 2)) == whole(2)[0]
    assert bits(lab.run("twice"), STEPS) == whole(2)[1]
    results = [SimpleNamespace(step=3, loss=1.0, grad_norm=2.0, row_nats=np.ones(5)) for _ in range(2)]
    check_rerun(*results, 2)
    results[1].row_nats[4] += 1e-15
    with pytest.raises(AnomalyError, match="differ in the loss of batch rank 1"):
        check_rerun(*results, 2)


def test_what_one_machine_of_several_has_is_not_taken_for_the_whole():
    """With ZeRO over machines a tensor may lie on another one alone: it is known by name, and not loaded from here."""
    about = {"boxes": [["model/a", "F32", [2], [0], [2], 0]], "elsewhere": [["model/b", "F32", [3]]]}
    found = slots.WholeSlot(Path("a-00000"), 4, 8, about)
    assert not _is_whole([found])
    assert {name: entry.shape for name, entry in _index([found])[0].items()} == {"model/a": (2,), "model/b": (3,)}
    assert _is_whole([slots.WholeSlot(found.path, 4, 8, {**about, "elsewhere": []})])


class TwoMachines(Peers):
    """The other one has the same steps, saved by other processes."""

    def gather(self, value):
        other = [[step, "another"] for step, _ in value] if isinstance(value, list) else value
        return [value, other]


def test_what_lies_in_memory_in_another_form_is_saved_again_at_once_and_memory_that_is_full_ends_nothing(tmp_path):
    def store_of(peers=None, ram=tmp_path):
        return MemoryStore(tmp_path / "run", peers or Peers(), ram, "key", print)

    parts = Snapshot.of_tensors({"model/weight": torch.arange(5000.0)}).parts
    (tmp_path / "run").mkdir()
    assert f"there is no folder {tmp_path}/none" in store_of(ram=tmp_path / "none").prepare(parts, None)
    store = store_of()
    assert store.prepare(parts, None) is None
    assert store.save(4, Snapshot(parts), {}) is True
    store.close(-1)
    assert store_of(TwoMachines()).newest(-1) is None, "a machine that was away is not believed"
    larger = Snapshot.of_tensors({"model/weight": torch.arange(9000.0)}).parts
    store = store_of()
    assert store.newest(-1).step == 4
    assert store.prepare(larger, None) is None
    assert store.save(4, Snapshot(larger), {}) is True
    store.wait()
    found = store_of().newest(-1)
    assert found.index["model/weight"].shape == (9000,), "the file of step 4 was of another size, so it is gone"

    def full(_step: int) -> None:
        raise OSError(28, "No space left on device")

    for slot in store._slots:
        slot.begin = full
    assert store.save(8, Snapshot(larger), {}) is True
    assert "No space left" in store.problem
    store.close(-1)
