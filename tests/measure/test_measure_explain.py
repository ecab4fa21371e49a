"""`z2a perf explain`: every finding from a run made to have it, and only then."""

import json
import time

import pytest

from tests.measure.made_run import GIB, PARTS, MadeRun
from zero2all.common.errors import BadInputError
from zero2all.measure.explain import Explanation, as_json, explain, read_record


def explained(made: MadeRun) -> Explanation:
    return explain(read_record(made.folder))


def findings(made: MadeRun) -> dict[str, str]:
    return {each.what: f"{each.evidence} | {each.change} | {each.worth}" for each in explained(made).findings}


def test_the_time_of_a_run_is_cut_into_its_parts(tmp_path):
    made = MadeRun(tmp_path / "run", evaluate_every=50, save_every=20).write(1, 100, "failed")
    made.now += 20.0
    made.incident("hang", waited_seconds=20.0)
    made.now += 10.0
    made.write(81, 120, resumed_from=80)
    account = read_record(made.folder).account
    # 9 s: of steps 50 and 100, and of 100 again
    expected = {"steps": 120.0, "lost steps": 20.0, "start": 10.0, "load": 0.0, "save": 3.5, "validate": 9.0}
    expected |= {"hang wait": 20.0, "restart": 10.0, "other": 0.0}
    assert account.seconds == pytest.approx(expected, rel=0.02, abs=0.01)
    assert (account.steps, account.lost_steps, account.interruptions, account.stopped_seconds) == (120, 20, 1, 0.0)
    assert account.total_seconds == pytest.approx(made.now - 1_000_000.0)


def test_time_that_a_person_stopped_the_run_is_not_counted(tmp_path):
    made = MadeRun(tmp_path / "run").write(1, 100, "preempted")
    made.now += 1000.0
    account = read_record(made.write(101, 150, resumed_from=100).folder).account
    assert account.seconds["steps"] == pytest.approx(150, rel=0.02)
    assert (account.total_seconds, account.stopped_seconds) == pytest.approx((160, 1000), rel=0.02)
    assert (account.starts, account.interruptions) == (2, 0)
    assert "interruptions" not in findings(made)


def test_a_save_in_the_background_stalls_where_it_began(tmp_path):
    """It is reported some steps later, when it is complete."""

    def later(lines):
        for line in lines:
            line["time"] += 2.5 if line.get("kind") == "checkpoint" and line["step"] < 40 else 0.0
        return lines

    made = MadeRun(tmp_path / "run", save_every=10, evaluate_every=10).write(1, 40).rewrite(later)
    seconds = read_record(made.folder).account.seconds
    assert (seconds["save"], seconds["validate"]) == pytest.approx((2.0, 12.0))


def test_steps_after_a_rollback_are_counted_and_those_before_it_are_lost(tmp_path):
    def rolled_back(lines):
        for line in lines:
            line["step"] -= 20 if line["step"] > 30 and "values" in line else 0
        at = next(number for number, line in enumerate(lines) if line["step"] == 30) + 1
        event = {"step": 30, "time": lines[at - 1]["time"] + 1e-3, "kind": "rollback", "data": {"to_step": 10}}
        return [*lines[:at], event, *lines[at:]]

    account = read_record(MadeRun(tmp_path / "run").write(1, 40).rewrite(rolled_back).folder).account
    assert (account.steps, account.lost_steps) == (20, 20)
    assert account.seconds["lost steps"] == pytest.approx(20, rel=0.02)


def test_rows_of_every_tenth_step_stand_for_all_steps_and_mfu_needs_the_peak_of_the_device(tmp_path):
    made = MadeRun(tmp_path / "run").write(1, 200)
    made.rewrite(lambda lines: [line for line in lines if "values" not in line or line["step"] % 10 == 0])
    record = read_record(made.folder)
    account = record.account
    assert (account.seconds["steps"], account.steps) == (pytest.approx(200, rel=0.02), 200)
    assert record.mfu("causal") == pytest.approx(512 * record.flops["causal"] / 989e12, rel=0.01)
    assert read_record(MadeRun(tmp_path / "other", device="cpu").write(1, 20).folder).mfu() is None


@pytest.mark.parametrize(
    ("part", "what"),
    [("data_wait", "waiting for data"), ("reduce", "exposed communication"), ("bubble", "pipeline bubble")],
)
def test_parts_of_a_step_in_which_nothing_is_computed(tmp_path, part, what):
    made = MadeRun(tmp_path / "run", parts=PARTS | {part: 3.0}).write(1, 50)
    found = findings(made)
    assert [words for words in ("3e+03 ms of a step of", "more tokens/s") if words not in found[what]] == []
    limit = "waiting for data" if part == "data_wait" else "communication (reduce and bubble)"
    assert f"limited by {limit}: 7" in explained(made).limit


def test_interruptions_and_the_interval_that_would_suit_them(tmp_path):
    made = MadeRun(tmp_path / "run", save_every=40).write(1, 79, "failed").write(41, 79, "failed", resumed_from=40)
    assert "Daly" not in findings(made)["interruptions"], "one says nothing about the interval"
    for _ in range(2):
        made.write(41, 79, "failed", resumed_from=40)
    found = findings(made.write(41, 100, resumed_from=40))["interruptions"]
    assert [words in found for words in ("4 restarts and 0 rollbacks", "instead of 40 s", "Daly")] == [True] * 3


def test_a_run_that_gets_slower_and_a_good_one_that_has_nothing_to_change(tmp_path):
    assert "first quarter" in findings(MadeRun(tmp_path / "a", slowdown=0.3).write(1, 100))["speed falls over the run"]
    good = explained(MadeRun(tmp_path / "good", noise=0.05).write(1, 200))
    assert (good.findings, "limited by forward and backward" in good.limit) == ([], True)


def test_memory_that_is_nearly_full_fragmented_or_free(tmp_path):
    full = {"memory/peak": 120.0 * GIB, "memory/reserved": 138.0 * GIB, "memory/allocated": 20.0 * GIB}
    explanation = explained(MadeRun(tmp_path / "full", metrics=full).write(1, 20))
    assert [each.what for each in explanation.findings if each.is_urgent] == ["memory is nearly full"]
    assert "fragmented memory" in [each.what for each in explanation.findings]
    free = {"memory/peak": 30.0 * GIB, "memory/reserved": 31.0 * GIB, "memory/allocated": 10.0 * GIB}
    found = findings(MadeRun(tmp_path / "free", metrics=free).write(1, 20))
    assert "30.0 GiB allocated, 31.0 GiB reserved, card 140.0 GiB" in found["memory is free"]
    assert "z2a perf predict CONFIG --verify" in found["memory is free"]
    again = free | {"mfu/palm": 0.3, "hfu/palm": 0.39}
    found = findings(MadeRun(tmp_path / "again", metrics=again, config={"recompute": "full"}).write(1, 20))
    assert "at most 23.1% of the passes, which are computed twice" in found["memory is free"]


def test_padding_is_read_from_the_index_beside_the_run(tmp_path):
    made = MadeRun(tmp_path / "runs/run", config={"packing": "best_fit"}).write(1, 20)
    index = tmp_path / "packed/en/train/best-fit-32"
    index.mkdir(parents=True)
    (index / "manifest.json").write_text(json.dumps({"rows": 100, "seq_len": 32, "padding": 330}))
    assert "10.0% of the token slots" in findings(made)["padding"]


def test_validation_and_saves_that_take_too_much_and_failed_saves_come_first(tmp_path):
    made = MadeRun(tmp_path / "run", evaluate_every=10, save_every=5).write(1, 100)
    found = findings(made)
    assert "30 s of" in found["validation"]
    assert "20 saves" in found["checkpoint stalls"]
    event = made.event(100, "checkpoint_failed", {"problem": "the disk is full", "stall_seconds": 0.1})
    first = explained(made.rewrite(lambda lines: [*lines, event])).findings[0]
    assert first.what == "saves that failed"
    assert "1 of 21 saves failed, the last: the disk is full" in first.evidence


def test_what_is_missing_is_said_and_the_rest_is_used(tmp_path):
    made = MadeRun(tmp_path / "run", card_gib=None).write(1, 50, end=None)
    path = made.folder / "metrics/train-1.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{broken", *lines[2:]]) + "\nhalf a li")  # neither the segment nor the start event
    (made.folder / "config.yaml").write_text("model: [1, 2]")
    record = read_record(made.folder)
    missing = "\n".join(record.missing)
    for words in ("unreadable lines: 1", "config.yaml cannot be used", "no start event", "no memory metrics"):
        assert words in missing
    assert record.account.seconds["steps"] == pytest.approx(50, rel=0.02)
    assert record.speed is not None
    assert explain(record).findings == []
    json.dumps(as_json(explain(record)))


def test_a_run_that_is_still_going_gives_its_figures_so_far_and_one_without_times_says_so(tmp_path):
    record = read_record(MadeRun(tmp_path / "run", now=time.time() - 55.0).write(1, 50, end=None).folder)
    assert "the run is still going: these are its figures so far" in record.missing
    assert record.speed is not None
    row = {"step": 1, "time": 5.0, "tokens": 10, "values": {"loss": 3.0}}
    explanation = explained(MadeRun(tmp_path / "old").write(1, 1).rewrite(lambda _: [row]))
    assert explanation.limit == "The record does not tell: it has no times of steps."
    assert any(each.startswith("no time/step") for each in explanation.record.missing)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(BadInputError, match="There is no run in"):
        read_record(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match="no metrics yet"):
        read_record(tmp_path / "empty")
