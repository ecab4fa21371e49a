"""What stays: the newest, the multiples, the pinned, and always two that are whole."""

from pathlib import Path

import pytest

from zero2all.common.errors import BadInputError, LostRunError
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.manifest import best_step, chosen_step
from zero2all.train.checkpoints.retention import (
    Retention,
    VerifiedSteps,
    claim_step,
    is_good,
    note_proven,
    pin,
    pins,
    prune,
    sweep,
    withdraw_after,
)
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore, write_checkpoint


@pytest.fixture
def saved(tmp_path, tensors_of):
    """A run with checkpoints at 10, 20, …, 60."""
    for step in range(10, 70, 10):
        write_checkpoint(tmp_path, step, Snapshot.of_tensors(tensors_of(step)), {})
    return tmp_path


def steps_of(run: Path) -> list[int]:
    return [step_of(folder) for folder in list_checkpoints(run)]


def spoil(run: Path, *steps: int) -> None:
    for step in steps:
        path = run / f"checkpoints/step-{step:08d}/model-00000-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def test_the_newest_and_the_multiples_stay(saved):
    assert prune(saved, Retention(keep_last=2, keep_every_steps=20), VerifiedSteps()) == [10, 30]
    assert steps_of(saved) == [60, 50, 40, 20]
    assert prune(saved, Retention(keep_last=2), VerifiedSteps()) == [20, 40]
    assert prune(saved, Retention(keep_last=2), VerifiedSteps()) == []
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == [
        "latest.json",
        "step-00000050",
        "step-00000060",
    ]


def test_pinned_ones_stay(saved):
    pin(saved, 10, "last good")
    pin(saved, 30, "for the paper")
    assert pins(saved) == {10: "last good", 30: "for the paper"}
    prune(saved, Retention(), VerifiedSteps())
    assert steps_of(saved) == [60, 50, 30, 10]


def validated(run, tensors_of, step, loss, tokens=1000.0):
    """A checkpoint with its held-out loss, and what was deleted after it."""
    store = CheckpointStore(run, retention=Retention(keep_last=2, keep_best=True))
    details = {} if loss is None else {"held_out": {"loss": loss, "tokens": tokens, "channels": {}}}
    result = store.save(step, Snapshot.of_tensors(tensors_of(step)), details, wait=True).result
    store.close()
    return result.deleted_steps


def test_the_one_with_the_lowest_held_out_loss_stays(tmp_path, tensors_of):
    losses = {10: 3.0, 20: 2.5, 30: None, 40: 2.7, 50: 2.9, 60: 2.4, 70: 2.6, 80: 2.8}
    deleted = [validated(tmp_path, tensors_of, step, loss) for step, loss in losses.items()]
    assert deleted == [[], [], [10], [], [30], [20, 40], [50], []]
    assert steps_of(tmp_path) == [80, 70, 60]
    assert (best_step(tmp_path), chosen_step(tmp_path, "best"), chosen_step(tmp_path, None)) == (60, 60, None)
    withdraw_after(tmp_path, 60, "a rollback")
    assert best_step(tmp_path) == 60
    assert Retention(2, 0).most_at_once([10, 20, 30, 40, 50]) == 3
    assert Retention(2, 0, keep_best=True).most_at_once([10, 20, 30, 40, 50]) == 4


def test_losses_over_other_tokens_are_not_compared_and_what_cannot_be_read_is_left_out(saved, tensors_of):
    assert best_step(saved) is None
    with pytest.raises(BadInputError, match="was validated when it was saved, so none is known to be the best"):
        chosen_step(saved, "best")
    for step, loss, tokens in ((61, 1.0, 500.0), (62, 2.0, 1000.0), (63, 3.0, 1000.0)):
        validated(saved, tensors_of, step, loss, tokens)
    assert best_step(saved) == 62
    (saved / "checkpoints/step-00000062/manifest.json").write_text("{}")
    assert best_step(saved) == 63


def test_one_that_is_being_read_stays_until_it_is_not(saved):
    with claim_step(saved, 10), claim_step(saved, 30):
        assert prune(saved, Retention(), VerifiedSteps()) == [20, 40]
    assert steps_of(saved) == [60, 50, 30, 10]
    assert prune(saved, Retention(), VerifiedSteps()) == [10, 30]


def test_two_whole_ones_are_left_however_many_of_the_newest_are_damaged(saved):
    spoil(saved, 60, 40)
    prune(saved, Retention(keep_last=2), VerifiedSteps())
    assert steps_of(saved) == [60, 50, 30]  # 50 and 30 are whole; what is damaged among the newest is not judged here
    spoil(saved, 50)
    assert prune(saved, Retention(keep_last=2), VerifiedSteps()) == []


def test_the_last_good_one_is_left_however_many_came_after_it(saved, tensors_of):
    for step in (70, 80, 90):
        write_checkpoint(
            saved, step, Snapshot.of_tensors(tensors_of(step)), {"not_good": "steps 65 to 89 were refused"}
        )
    assert prune(saved, Retention(keep_last=2), VerifiedSteps()) == [10, 20, 30, 40, 50, 70]
    assert steps_of(saved) == [90, 80, 60]
    spoil(saved, 60)
    write_checkpoint(saved, 100, Snapshot.of_tensors(tensors_of(1)), {"not_good": "still"})
    assert prune(saved, Retention(keep_last=2), VerifiedSteps()) == [60, 80], "a damaged one is none"


def save(run, tensors_of, step, doubt=None, margin=8):
    store = CheckpointStore(run, retention=Retention(keep_last=2, margin_steps=margin))
    details = {} if doubt is None else {"not_good": doubt}
    result = store.save(step, Snapshot.of_tensors(tensors_of(step)), details, wait=True).result
    store.close()
    return result.deleted_steps


def test_a_save_in_doubt_deletes_no_good_one_and_leaves_at_most_keep_last_of_its_kind(saved, tensors_of):
    prune(saved, Retention(), VerifiedSteps())
    assert [save(saved, tensors_of, step, "unproven") for step in (61, 62, 63, 64)] == [[], [], [61], [62]]
    assert steps_of(saved) == [64, 63, 60, 50]


def test_what_was_saved_in_doubt_is_good_once_the_run_saves_without_doubt_so_much_later(saved, tensors_of):
    save(saved, tensors_of, 61, "unproven")
    folder = saved / "checkpoints/step-00000061"
    assert save(saved, tensors_of, 68) == [10, 20, 30, 40, 50]
    assert not is_good(folder), "7 steps later"
    assert save(saved, tensors_of, 69) == [60, 61]
    save(saved, tensors_of, 70, "refused")
    save(saved, tensors_of, 78)
    assert is_good(saved / "checkpoints/step-00000070")
    note_proven(saved, at_most=69)  # the run goes back: what it saves there again is yet to be proven
    assert not is_good(saved / "checkpoints/step-00000070")
    assert steps_of(saved) == [78, 70]


def test_of_the_newest_no_step_was_computed_so_a_good_one_before_it_stays(saved, tensors_of):
    save(saved, tensors_of, 61, "unproven")
    save(saved, tensors_of, 62)
    assert steps_of(saved) == [62, 61, 60]


def test_nothing_is_deleted_once_the_run_is_lost(saved):
    def fence():
        raise LostRunError("taken over")

    with pytest.raises(LostRunError):
        prune(saved, Retention(), VerifiedSteps(), fence)
    assert len(steps_of(saved)) == 6


def test_nothing_is_deleted_when_fewer_than_two_are_whole(saved):
    spoil(saved, 10, 20, 30, 40, 50)
    assert prune(saved, Retention(keep_last=2), VerifiedSteps()) == []
    assert len(steps_of(saved)) == 6


def test_bytes_are_read_once_but_a_lost_file_is_noticed_every_time(saved):
    verified = VerifiedSteps({60, 50})
    spoil(saved, 60)  # known to be whole, so not read again
    assert verified.is_whole(saved / "checkpoints/step-00000060")
    (saved / "checkpoints/step-00000060/state.json").unlink()
    assert not verified.is_whole(saved / "checkpoints/step-00000060")
    assert verified.is_whole(saved / "checkpoints/step-00000040")
    assert verified.steps == {50, 40}


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"ten": "x"}', '{"10": 3}'])
def test_when_the_pins_cannot_be_read_nothing_is_deleted_and_the_save_still_counts(saved, tensors_of, text):
    (saved / "checkpoints/pins.json").write_text(text)
    with pytest.raises(BadInputError, match=r"pins.json"):
        prune(saved, Retention(), VerifiedSteps())
    store = CheckpointStore(saved, retention=Retention())
    result = store.save(70, Snapshot.of_tensors(tensors_of(1)), {}, wait=True).result
    store.close()
    assert result.folder.is_dir()
    assert "pins.json" in result.notes[0]
    assert len(steps_of(saved)) == 7


def test_a_store_deletes_after_a_commit_and_says_what(tmp_path, tensors_of):
    store = CheckpointStore(tmp_path, retention=Retention(keep_last=2, keep_every_steps=30))
    deleted = [
        store.save(step, Snapshot.of_tensors(tensors_of(step)), {}, wait=True).result.deleted_steps
        for step in range(10, 70, 10)
    ]
    store.close()
    assert deleted == [[], [], [10], [20], [], [40]]
    assert steps_of(tmp_path) == [60, 50, 30]


def test_fewer_than_two_cannot_be_asked_for():
    with pytest.raises(ValueError, match="at least 2 checkpoints must stay"):
        Retention(keep_last=1)


def test_the_disk_space_of_a_whole_run_can_be_told_before_it():
    assert Retention(keep_last=2).most_at_once([10, 20, 30, 40]) == 3
    assert Retention(keep_last=2, keep_every_steps=20).most_at_once([10, 20, 30, 40, 50, 60]) == 6
    assert Retention(keep_last=3).most_at_once([10]) == 1


def test_what_killed_saves_and_deletions_left_is_swept(saved):
    folder = saved / "checkpoints"
    (folder / "step-00000070.partial-123-1").mkdir()
    (folder / "step-00000070.partial-123-1/model-00000-00000.safetensors").write_bytes(b"half")
    (folder / "latest.json.partial-9").write_bytes(b"")
    (folder / "step-00000005.partial-trash").symlink_to(folder / "step-00000010")
    assert len(sweep(saved)) == 3
    assert not list(folder.glob("*.partial-*"))
    assert steps_of(saved) == [60, 50, 40, 30, 20, 10]
