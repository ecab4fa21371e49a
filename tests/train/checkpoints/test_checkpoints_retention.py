"""What stays: the newest, the multiples, the pinned, those that are being read, and always two that are whole."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.checkpoints.conftest import MODEL, snapshot
from tests.train.states import flip, steps_of
from zero2all.common.errors import BadInputError, LostRunError
from zero2all.common.files import read_json, write_json
from zero2all.common.lock import this_process
from zero2all.train.checkpoints import retention
from zero2all.train.checkpoints.manifest import best_step, chosen_step
from zero2all.train.checkpoints.retention import Retention, VerifiedSteps, claim_step, claimed_steps, is_good, pin, pins
from zero2all.train.checkpoints.store import CheckpointStore, write_checkpoint


@pytest.fixture
def saved(tmp_path):
    """A run with checkpoints at 10, 20, …, 60."""
    for step in range(10, 70, 10):
        write_checkpoint(tmp_path, step, snapshot(step), {})
    return tmp_path


def folder_of(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08d}"


def pruned(run: Path, **rules: int) -> list[int]:
    return retention.prune(run, Retention(**rules), VerifiedSteps())


def save(run: Path, step: int, doubt: str | None = None, loss: float | None = None, tokens=1000.0, **rules) -> Any:
    """Returns what was deleted after it."""
    store = CheckpointStore(run, retention=Retention(keep_last=2, margin_steps=8, **rules))
    details = {} if doubt is None else {"not_good": doubt}
    details |= {} if loss is None else {"held_out": {"loss": loss, "tokens": tokens, "channels": {}}}
    result = store.save(step, snapshot(step), details, wait=True).result
    store.close()
    return result.deleted_steps


def test_the_newest_and_the_multiples_stay(saved):
    assert pruned(saved, keep_last=2, keep_every_steps=20) == [10, 30]
    assert steps_of(saved) == [60, 50, 40, 20]
    assert pruned(saved, keep_last=2) == [20, 40]
    assert pruned(saved, keep_last=2) == []
    names = sorted(path.name for path in (saved / "checkpoints").iterdir())
    assert names == ["latest.json", "step-00000050", "step-00000060"]


def test_pinned_ones_and_those_that_are_being_read_stay(saved):
    pin(saved, 10, "last good")
    assert pins(saved) == {10: "last good"}
    with claim_step(saved, 30):
        assert pruned(saved) == [20, 40]
    assert pruned(saved) == [30]
    assert steps_of(saved) == [60, 50, 10]


def test_the_one_with_the_lowest_held_out_loss_stays(tmp_path):
    losses = {10: 3.0, 20: 2.5, 30: None, 40: 2.7, 50: 2.9, 60: 2.4, 70: 2.6, 80: 2.8}
    deleted = [save(tmp_path, step, loss=loss, keep_best=True) for step, loss in losses.items()]
    assert deleted == [[], [], [10], [], [30], [20, 40], [50], []]
    assert steps_of(tmp_path) == [80, 70, 60]
    assert (best_step(tmp_path), chosen_step(tmp_path, "best"), chosen_step(tmp_path, None)) == (60, 60, None)
    retention.withdraw_after(tmp_path, 60, "a rollback")
    assert best_step(tmp_path) == 60


def test_two_stay_at_least_and_the_disk_space_of_a_whole_run_can_be_told_before_it():
    with pytest.raises(ValueError, match="at least 2 checkpoints must stay"):
        Retention(keep_last=1)
    assert Retention(keep_last=2).most_at_once([10, 20, 30, 40]) == 3
    assert Retention(keep_last=2, keep_best=True).most_at_once([10, 20, 30, 40]) == 4
    assert Retention(keep_last=2, keep_every_steps=20).most_at_once([10, 20, 30, 40, 50, 60]) == 6
    assert Retention(keep_last=3).most_at_once([10]) == 1


def test_losses_over_other_tokens_are_not_compared_and_what_cannot_be_read_is_left_out(saved):
    assert best_step(saved) is None
    with pytest.raises(BadInputError, match="was validated when it was saved, so none is known to be the best"):
        chosen_step(saved, "best")
    for step, loss, tokens in ((61, 1.0, 500.0), (62, 2.0, 1000.0), (63, 3.0, 1000.0)):
        save(saved, step, loss=loss, tokens=tokens, keep_best=True)
    assert best_step(saved) == 62
    (folder_of(saved, 62) / "manifest.json").write_text("{}")
    assert best_step(saved) == 63


def test_two_whole_ones_are_left_however_many_of_the_newest_are_damaged(saved):
    for step in (60, 40):
        flip(folder_of(saved, step) / MODEL)
    pruned(saved, keep_last=2)
    assert steps_of(saved) == [60, 50, 30]  # 50 and 30 are whole; what is damaged among the newest is not judged here
    flip(folder_of(saved, 50) / MODEL)
    assert pruned(saved, keep_last=2) == []


def test_the_last_good_one_is_left_however_many_came_after_it(saved):
    for step in (70, 80, 90):
        write_checkpoint(saved, step, snapshot(step), {"not_good": "steps were refused"})
    assert pruned(saved, keep_last=2) == [10, 20, 30, 40, 50, 70]
    assert steps_of(saved) == [90, 80, 60]
    flip(folder_of(saved, 60) / MODEL)
    write_checkpoint(saved, 100, snapshot(1), {"not_good": "still"})
    assert pruned(saved, keep_last=2) == [60, 80], "a damaged one is none"


def test_a_save_in_doubt_deletes_no_good_one_and_leaves_at_most_keep_last_of_its_kind(saved):
    pruned(saved)
    assert [save(saved, step, "unproven") for step in (61, 62, 63, 64)] == [[], [], [61], [62]]
    assert steps_of(saved) == [64, 63, 60, 50]


def test_what_was_saved_in_doubt_is_good_once_the_run_saves_without_doubt_so_much_later(saved):
    save(saved, 61, "unproven")
    assert save(saved, 68) == [10, 20, 30, 40, 50], "of the newest no step was computed, so 60 stays"
    assert not is_good(folder_of(saved, 61)), "7 steps later"
    assert save(saved, 69) == [60, 61]
    save(saved, 70, "refused")
    save(saved, 78)
    assert is_good(folder_of(saved, 70))
    retention.note_proven(saved, at_most=69)  # the run goes back: what it saves there again is yet to be proven
    assert not is_good(folder_of(saved, 70))
    assert steps_of(saved) == [78, 70]


def test_nothing_is_deleted_once_the_run_is_lost(saved):
    def fence():
        raise LostRunError("taken over")

    with pytest.raises(LostRunError):
        retention.prune(saved, Retention(), VerifiedSteps(), fence)
    assert len(steps_of(saved)) == 6


def test_bytes_are_read_once_but_a_lost_file_is_noticed_every_time(saved):
    verified = VerifiedSteps({60, 50})
    flip(folder_of(saved, 60) / MODEL)  # known to be whole, so not read again
    assert verified.is_whole(folder_of(saved, 60))
    (folder_of(saved, 60) / "state.json").unlink()
    assert not verified.is_whole(folder_of(saved, 60))
    assert verified.is_whole(folder_of(saved, 40))
    assert verified.steps == {50, 40}


@pytest.mark.parametrize("text", ["nonsense", '{"ten": "x"}', '{"10": 3}'])
def test_when_the_pins_cannot_be_read_nothing_is_deleted_and_the_save_still_counts(saved, text):
    (saved / "checkpoints/pins.json").write_text(text)
    with pytest.raises(BadInputError, match=r"pins.json"):
        pruned(saved)
    store = CheckpointStore(saved, retention=Retention())
    result = store.save(70, snapshot(1), {}, wait=True).result
    store.close()
    assert "pins.json" in result.notes[0]
    assert len(steps_of(saved)) == 7


def test_what_killed_saves_and_deletions_left_is_swept(saved):
    folder = saved / "checkpoints"
    (folder / "step-00000070.partial-123-1").mkdir()
    (folder / "step-00000070.partial-123-1" / MODEL).write_bytes(b"half")
    (folder / "latest.json.partial-9").write_bytes(b"")
    (folder / "step-00000005.partial-trash").symlink_to(folder / "step-00000010")
    assert len(retention.sweep(saved)) == 3
    assert not list(folder.glob("*.partial-*"))
    assert steps_of(saved) == [60, 50, 40, 30, 20, 10]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def claim_path(run: Path) -> Path:
    return run / "checkpoints" / "claims" / "step-00000007.json"


def test_one_reader_at_a_time_and_nothing_left_behind(run):
    with claim_step(run, 7) as claim:
        assert claim.is_held()
        assert claimed_steps(run) == {7}
        assert read_json(claim_path(run))["pid"] == os.getpid()
        with claim_step(run, 7) as second:
            assert second is None
        with claim_step(run, 8) as other:
            assert other is not None
        assert claim.is_held()
    assert claimed_steps(run) == set()
    assert list(claim_path(run).parent.iterdir()) == []


@pytest.mark.parametrize(("facts", "counts"), [({"host": "elsewhere"}, True), ({"pid": 2**22 + 1}, False)])
def test_the_claim_of_a_dead_reader_is_taken_over_and_one_from_elsewhere_once_it_is_silent(run, facts, counts):
    write_json(claim_path(run), {**this_process(), "token": "theirs", **facts})
    if counts:
        assert claimed_steps(run) == {7}
        with claim_step(run, 7) as claim:
            assert claim is None
        os.utime(claim_path(run), (1.0, 1.0))
    assert claimed_steps(run) == set()
    with claim_step(run, 7) as claim:
        assert claim is not None


@pytest.mark.parametrize(("content", "seconds"), [("", 6), ("damaged", 61)], ids=["killed before it wrote", "damaged"])
def test_a_claim_that_names_nobody_counts_while_it_is_fresh(run, content, seconds):
    claim_path(run).parent.mkdir()
    claim_path(run).write_text(content)
    for age, is_free in ((0, False), (seconds - 2, False), (seconds, True)):
        os.utime(claim_path(run), (time.time() - age,) * 2)
        with claim_step(run, 7) as claim:
            assert (claim is not None) == is_free
