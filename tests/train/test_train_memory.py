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

from tests.train.ranks import CODE, RankStarter
from zero2all.common.errors import AnomalyError
from zero2all.common.peers import Peers
from zero2all.common.workspace import Workspace
from zero2all.resilience import slots
from zero2all.train.checkpoints.layout import checkpoint_folder, list_checkpoints, step_of
from zero2all.train.checkpoints.memory import MemoryStore, _index, _is_whole
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.hooks.replica_check import check_rerun

STEPS = 14


@pytest.fixture
def lab(shared_work, tmp_path) -> Workspace:
    shutil.copytree(shared_work.root, tmp_path / "work")
    return Workspace(tmp_path / "work")


@pytest.fixture
def ranks(warm, lab, tmp_path):
    (tmp_path / "ranks").mkdir()
    starter = RankStarter(warm, lab.root, tmp_path / "ranks")
    yield starter
    starter.stop()


@pytest.fixture
def ram(tmp_path) -> Path:
    """A RAM file system of the test's own; an ordinary folder serves as well."""
    folder = tmp_path / "ram"
    folder.mkdir()
    return folder


def settings(config, ram: Path, name: str, every: int = 1, resilience=None, checkpoint=None, **parallel):
    return config(
        train={"name": name, "steps": STEPS, "tokens_per_step": 160},
        checkpoint=checkpoint or {"every_steps": 5},
        validation={"every_steps": 0, "tokens_per_source": 128},
        resilience={"memory_every_steps": every, "memory_folder": str(ram), **(resilience or {})},
        parallel=parallel,
    )


def buffers(ram: Path) -> dict[str, int]:
    """The steps of the whole buffers, by name."""
    folders = list(next(ram.iterdir()).iterdir())
    assert len(folders) == 1
    return {found.path.name: found.step for found in slots.whole_slots(folders[0])}


def losses(launch) -> dict[int, float]:
    return {record.step: record.loss for record in launch.steps()}


def last_bits(run: Path) -> dict[str, bytes]:
    folder = run / f"checkpoints/step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize(("processes", "spread"), [(1, {}), (2, {"zero": 1})])
def test_a_run_whose_processes_were_all_killed_continues_from_memory_with_the_same_bits(
    ranks, lab, config, ram, processes, spread
):
    whole = ranks.finished(settings(config, ram, "whole", every=0, **spread), processes)
    broken = settings(config, ram, "broken", **spread)
    signals, saved = dict.fromkeys(range(processes), (9, signal.SIGKILL, 0.0)), checkpoint_folder(lab.run("broken"), 5)
    killed = ranks(broken, processes, signals=signals, awaited=saved)
    assert set(killed.wait()) <= {-signal.SIGKILL, 1}, killed.text()
    assert max(map(step_of, list_checkpoints(lab.run("broken")))) == 5
    newest = max(buffers(ram).values())
    assert newest in (7, 8), "killed in step 9, or before the save of step 8 was finished"
    resumed = ranks.finished(broken, processes)
    assert "from memory" in resumed.text()
    first = resumed.steps()[0].step
    assert first in (newest, newest + 1)
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step >= first}
    assert last_bits(lab.run("broken")) == last_bits(lab.run("whole"))
    assert list(next(ram.iterdir()).iterdir()) == [], "a finished run leaves nothing in memory"


def killed_at(ranks, config, ram, name: str = "run", processes: int = 1, code: str = CODE, **options) -> None:
    """Kill a run in step 9; the steps 7 and 8, or 6 and 7, are in memory, 5 on disk."""
    signals = dict.fromkeys(range(processes), (9, signal.SIGKILL, 0.0))
    saved = None if "checkpoint" in options else checkpoint_folder(ranks.root / "runs" / name, 5)
    ranks(settings(config, ram, name, **options), processes, signals=signals, awaited=saved, code=code).wait()


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_damage_in_memory_means_the_older_buffer_then_the_disk(ranks, lab, config, ram):
    killed_at(ranks, config, ram)
    steps = buffers(ram)
    newest, older = sorted(steps, key=steps.get, reverse=True)
    folder = next(next(ram.iterdir()).iterdir())
    shutil.copytree(folder, ram.parent / "kept")
    flip(folder / newest, slots.PAGE + 1000)  # a value
    words = {0: ["--train.steps", str(steps[newest]), "--accept-changes"]}
    text = ranks.finished(settings(config, ram, "run"), words=words).text()
    assert "Removed a damaged checkpoint in memory" in text
    assert f"resumed run at step {steps[older]} from memory" in text
    shutil.rmtree(lab.run("run") / f"checkpoints/step-{steps[newest]:08d}")
    shutil.copytree(ram.parent / "kept", folder)
    for name in steps:
        flip(folder / name, 20)  # the header
    (lab.run("run") / "checkpoints/latest.json").unlink()
    text = ranks.finished(settings(config, ram, "run"), words={0: ["--accept-changes"]}).text()
    assert "resumed run at step 5 from step-00000005" in text


LATE_CHECK = f"""
import json, os, signal, sys, time
from pathlib import Path
from zero2all.packed import verify
from zero2all.train.hooks import shard_check
read, record = verify._SlowReading.__call__, Path(json.loads(sys.argv[1])["record"])
def late(self, number):
    while not record.exists() or record.read_text().count("\\n") < 7:
        if self.stopped:
            return None
        time.sleep(0.005)
    return read(self, number)
verify._SlowReading.__call__ = late
give_up = shard_check.ShardCheck._give_up
def killed(self, damage):
    give_up(self, damage)
    os.kill(os.getpid(), signal.SIGKILL)
KILLED = False
if KILLED:
    shard_check.ShardCheck._give_up = killed
{CODE}
"""
"""Shards are checked after seven steps of an attempt."""


def spoil(shard: Path) -> bytes:
    """Change every token of a shard; returns what it was."""
    whole = shard.read_bytes()
    shard.write_bytes(bytes(byte ^ 1 if place % 2 == 0 else byte for place, byte in enumerate(whole)))
    return whole


@pytest.mark.parametrize(
    ("processes", "before", "killed"),
    [
        (1, "clean", False),
        (1, "nothing", True),
        (1, "damaged", False),
        pytest.param(2, "clean", False, marks=pytest.mark.slow),
        pytest.param(1, "nothing", False, marks=pytest.mark.slow),
    ],
)
def test_what_was_trained_on_a_damaged_shard_comes_back_from_nowhere(
    ranks, lab, config, ram, processes, before, killed
):
    """The damage is found after some steps of an attempt, when memory has states that were trained on it. `before`: an
    attempt that was killed in step 9, before there was damage or before it was found."""
    whole = ranks.finished(settings(config, ram, "whole", every=0), processes)
    shard = lab.packed / "en/train/tokens-00000.bin"
    good = spoil(shard) if before == "damaged" else shard.read_bytes()
    options = {} if before == "clean" else {"checkpoint": {"every_steps": 0}}
    if before != "nothing":
        never = LATE_CHECK.replace("< 7", "< 99")
        killed_at(ranks, config, ram, processes=processes, code=CODE if before == "clean" else never, **options)
    if before != "damaged":
        spoil(shard)
    late = LATE_CHECK.replace("< 7", "< 3").replace("KILLED = False", f"KILLED = {killed}")
    chosen = settings(config, ram, "run", **options)
    stopped = ranks(chosen, processes, code=late)
    assert stopped.wait() == ([-signal.SIGKILL] if killed else [3, 10][:processes]), stopped.text()
    assert ("from memory" in stopped.text()) is (before != "nothing")
    assert "which was not saved" in stopped.text() or killed
    shard.write_bytes(good)
    again = ranks.finished(chosen, processes)
    assert "from memory" not in again.text()
    assert again.steps()[0].step == (6 if before == "clean" else 1)
    assert losses(again).items() <= losses(whole).items()
    assert last_bits(lab.run("run")) == last_bits(lab.run("whole"))
    assert list(next(ram.iterdir()).iterdir()) == [], "what was given up is swept"
    assert not (lab.run("run") / "shard_check.json").exists()


def test_the_checkpoint_before_a_damaged_shard_was_read_stays_until_the_check_has_ended(ranks, lab, config, ram):
    ranks.finished(settings(config, ram, "whole", every=0))
    launch = ranks(settings(config, ram, "run", every=0), signals={0: (6, signal.SIGTERM, 0.0)})
    assert launch.wait() == [10], launch.text()
    shard = lab.packed / "en/train/tokens-00000.bin"
    good = spoil(shard)
    often = settings(config, ram, "run", every=0, checkpoint={"every_steps": 1})
    often = replace(often, guards=replace(often.guards, rollback_margin_steps=1))
    assert ranks(often, code=LATE_CHECK).wait() == [3]
    assert [step_of(folder) for folder in list_checkpoints(lab.run("run"))] == [13, 12, 7]
    shard.write_bytes(good)
    again = ranks.finished(often)
    assert "back behind step 7" in again.text()
    assert last_bits(lab.run("run")) == last_bits(lab.run("whole"))
    assert [step_of(folder) for folder in list_checkpoints(lab.run("run"))] == [STEPS, STEPS - 1]


def test_damage_that_is_found_by_reading_it_is_left_as_that_which_the_check_finds(ranks, lab, config, ram):
    """The run trains on a damaged shard; after three steps there are ids in it that no token has."""
    chosen = settings(config, ram, "run", checkpoint={"every_steps": 0})
    ranks.finished(replace(chosen, train=replace(chosen.train, name="whole")))
    shard = lab.packed / "en/train/tokens-00000.bin"
    good = spoil(shard)
    worse = f"""
        if record.exists() and record.read_text().count("\\n") >= 3:
            with open({str(shard)!r}, "r+b") as file:
                file.write(b"\\xff" * {len(good)})
        time.sleep(0.005)"""
    stopped = ranks(chosen, code=LATE_CHECK.replace("< 7", "< 99").replace("\n        time.sleep(0.005)", worse))
    assert stopped.wait() == [3], stopped.text()
    assert "A file was damaged or changed after packing" in stopped.text()
    assert len(stopped.steps()) >= 3
    shard.write_bytes(good)
    again = ranks.finished(chosen)
    assert "from memory" not in again.text()
    assert last_bits(lab.run("run")) == last_bits(lab.run("whole"))


def test_a_run_that_ends_before_its_shards_were_checked_says_so(ranks, lab, config, ram):
    spoil(lab.packed / "en/train/tokens-00000.bin")
    late = LATE_CHECK.replace("< 7", "< 99").replace("KILLED = False", "shard_check.FINISH_SECONDS = KILLED = 0.0")
    late = late.replace("return None", "raise verify.ReadersEndedError")
    assert (
        "ends before all of its shards were checked" in ranks.finished(settings(config, ram, "run"), code=late).text()
    )


def test_checkpoints_that_were_all_trained_on_a_damaged_shard_are_taken_only_when_a_person_says_so(
    ranks, lab, config, ram
):
    shard = lab.packed / "en/train/tokens-00000.bin"
    good = spoil(shard)
    chosen = settings(config, ram, "run", every=0)
    assert ranks(chosen, code=LATE_CHECK).wait() == [3]
    shard.write_bytes(good)
    again = ranks(chosen)
    assert again.wait() == [3], again.text()
    assert "are from after step 0, and may have been trained on damaged data" in " ".join(again.text().split())
    kept = ranks.finished(chosen, words={0: ["--accept-changes"]})
    assert "resumed run at step 5 from step-00000005" in kept.text()


def test_memory_of_another_run_or_of_one_started_over_is_not_taken(ranks, lab, config, ram):
    killed_at(ranks, config, ram, "one")
    text = ranks.finished(settings(config, ram, "two")).text()
    assert "from memory" not in text
    words = {0: ["--fresh", "--train.steps", "3"]}
    assert "from memory" not in ranks.finished(settings(config, ram, "one"), words=words).text()
    assert list(next(ram.iterdir()).iterdir()) == []


def test_a_machine_that_was_away_with_another_save_of_the_same_step_is_not_believed(ranks, lab, config, ram):
    class TwoMachines(Peers):
        """The other one has the same steps, saved by other processes."""

        def gather(self, value):
            other = [[step, "another"] for step, _ in value] if isinstance(value, list) else value
            return [value, other]

    killed_at(ranks, config, ram)
    assert MemoryStore(lab.run("run"), Peers(), ram, "", print).newest(0) is not None
    assert MemoryStore(lab.run("run"), TwoMachines(), ram, "", print).newest(0) is None


def test_another_number_of_processes_loads_what_is_in_memory(ranks, lab, config, ram):
    killed_at(ranks, config, ram, processes=2, zero=1)
    text = ranks.finished(settings(config, ram, "run")).text()
    assert "from memory" in text


def test_without_room_the_disk_is_used_and_the_start_says_so(ranks, lab, config, ram):
    small = ram / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=False).returncode:
        pytest.skip("no right to mount a file system")
    try:
        text = ranks.finished(settings(config, small, "run")).text()
        assert list(next(small.iterdir()).iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert "no checkpoints in memory" in text
    assert "are free there" in text


def test_without_a_ram_file_system_the_disk_is_used_and_the_start_says_so(ranks, lab, config, ram):
    text = ranks.finished(settings(config, ram / "none", "run")).text()
    assert f"no checkpoints in memory: there is no folder {ram}/none. A restart continues from the disk." in text


def test_replicas_that_differ_are_found_at_the_next_check(ranks, lab, config, ram):
    chosen = settings(config, ram, "run", every=0, resilience={"replica_check_every_steps": 2})
    launch = ranks(chosen, 2, spoiled={1: 7})
    assert launch.wait() == [12, 12], launch.text()
    assert "The replicas of ranks 0 and 1 differ" in launch.text()
    assert max(record.step for record in launch.steps()) == 8
    again = ranks.finished(chosen, 2)
    assert "step 8 was computed again: rank 1 had other bits before, so it was wrong then" in again.text()
    assert not (lab.run("run") / "replicas.json").exists()


def test_a_step_computed_twice_changes_nothing_and_a_wrong_one_is_named(ranks, lab, config, ram):
    plain = ranks.finished(settings(config, ram, "plain", every=0), 2)
    twice = ranks.finished(settings(config, ram, "twice", every=0, resilience={"rerun_every_steps": 3}), 2)
    assert losses(plain)[STEPS] == losses(twice)[STEPS]
    assert last_bits(lab.run("plain")) == last_bits(lab.run("twice"))
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


def test_what_lies_in_memory_in_another_form_is_saved_again_at_once_and_memory_that_is_full_ends_nothing(tmp_path):
    parts = Snapshot.of_tensors({"model/weight": torch.arange(5000.0)}).parts
    store = MemoryStore(tmp_path / "run", Peers(), tmp_path, "key", print)
    (tmp_path / "run").mkdir()
    assert store.prepare(parts, None) is None
    assert store.save(4, Snapshot(parts), {}) is True
    store.close(-1)
    larger = Snapshot.of_tensors({"model/weight": torch.arange(9000.0)}).parts
    store = MemoryStore(tmp_path / "run", Peers(), tmp_path, "key", print)
    assert store.newest(-1).step == 4
    assert store.prepare(larger, None) is None
    assert store.save(4, Snapshot(larger), {}) is True
    store.wait()
    found = MemoryStore(tmp_path / "run", Peers(), tmp_path, "key", print).newest(-1)
    assert found.index["model/weight"].shape == (9000,), "the file of step 4 was of another size, so it is gone"

    def full(_step: int) -> None:
        raise OSError(28, "No space left on device")

    for slot in store._slots:
        slot.begin = full
    assert store.save(8, Snapshot(larger), {}) is True
    assert "No space left" in store.problem
    store.close(-1)
