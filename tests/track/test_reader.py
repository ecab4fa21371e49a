"""All attempts of a run read as one run, whatever state its files are in."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from zero2all.common.errors import BadInputError
from zero2all.track import Run
from zero2all.track.reader import read_run


def write(folder: Path, steps: range, value: float, writer: str = "train", key: str = "loss") -> None:
    with Run(folder, writer=writer) as run:
        for step in steps:
            run.log({key: value + step}, step=step, tokens=10 * step)


def test_one_attempt_reads_back_as_written(tmp_path):
    write(tmp_path / "small", range(5), 0.5)
    run = read_run(tmp_path / "small")
    loss = run.series["loss"]
    assert run.name == "small"
    assert loss.step.tolist() == [0, 1, 2, 3, 4]
    assert loss.value.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert loss.tokens.tolist() == [0, 10, 20, 30, 40]
    assert (np.diff(loss.time) >= 0).all()
    assert (loss.step.dtype, loss.value.dtype, loss.tokens.dtype) == (np.int64, np.float64, np.int64)
    assert (run.rows, run.skipped_lines, run.superseded_values, run.problems) == (5, 0, 0, [])


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(tmp_path):
    write(tmp_path, range(0, 31), 0.0)  # reached 30, checkpoint at 20
    write(tmp_path, range(21, 26), 100.0)  # died again at 25
    run = read_run(tmp_path)
    loss = run.series["loss"]
    assert loss.step.tolist() == list(range(26)), "steps 26 to 30 belong to a past that was taken back"
    assert loss.value.tolist() == [*range(21), *range(121, 126)]
    assert run.superseded_values == 10
    assert run.resumed_at_steps == [21]


def test_a_third_attempt_from_further_back_wins_over_both(tmp_path):
    write(tmp_path, range(0, 31), 0.0)
    write(tmp_path, range(21, 41), 100.0)
    write(tmp_path, range(11, 16), 200.0)
    assert read_run(tmp_path).series["loss"].value.tolist() == [*range(11), *range(211, 216)]


def test_attempt_ten_is_later_than_attempt_nine(tmp_path):
    for attempt in range(1, 12):
        write(tmp_path, range(0, 2), 100.0 * attempt)
    assert read_run(tmp_path).series["loss"].value.tolist() == [1100.0, 1101.0]


def test_an_attempt_that_wrote_no_rows_takes_nothing_back(tmp_path):
    write(tmp_path, range(3), 0.0)
    with Run(tmp_path) as run:
        run.event("start", step=0, data={})
    assert len(read_run(tmp_path).series["loss"]) == 3


def test_an_evaluation_at_the_resumed_step_does_not_erase_that_steps_loss(tmp_path):
    write(tmp_path, range(21), 0.0)
    with Run(tmp_path) as run:
        run.log({"eval/valid/bpb/en": 1.5}, step=20, tokens=200)
        run.log({"loss": 99.0}, step=21, tokens=210)
    series = read_run(tmp_path).series
    assert series["loss"].value.tolist() == [*range(21), 99.0]
    assert series["eval/valid/bpb/en"].step.tolist() == [20]


def test_late_evaluations_of_earlier_steps_replace_only_their_own_step(tmp_path):
    write(tmp_path, range(50), 0.0)
    for step, value in ((40, 1.0), (10, 2.0), (40, 3.0)):
        with Run(tmp_path, writer="eval") as run:
            run.log({"eval/set/score": value}, step=step, tokens=0)
    run_data = read_run(tmp_path)
    assert run_data.series["eval/set/score"].step.tolist() == [10, 40]
    assert run_data.series["eval/set/score"].value.tolist() == [2.0, 3.0]
    assert len(run_data.series["loss"]) == 50


def test_rows_in_any_order_of_steps_come_out_sorted(tmp_path):
    with Run(tmp_path) as run:
        for step in (0, 3, 1, 2):
            run.log({"loss": float(step)}, step=step, tokens=step)
    assert read_run(tmp_path).series["loss"].value.tolist() == [0, 1, 2, 3]


def test_half_a_last_line_and_garbage_are_skipped_counted_and_named(tmp_path):
    write(tmp_path, range(3), 0.0)
    path = tmp_path / "metrics" / "train-1.jsonl"
    good = path.read_bytes()
    garbage = [
        b"\x00\xff\xfe binary",
        b"[1, 2, 3]",
        b'{"step": "five", "time": 1, "tokens": 1, "values": {}}',
        b'{"step": 99999999999999999999999, "time": 1, "tokens": 1, "values": {"loss": 1}}',
        b'{"step": 5, "time": 1, "values": {"loss": 1}}',
        b'{"step": 5, "time": 1, "kind": 7, "data": {}}',
        b"[" * 100_000,
        "{'python': 中文}".encode(),
    ]
    path.write_bytes(b"\n".join(garbage) + b"\n\n" + good + b'{"step":3,"time":1.5,"tokens":30,"val')
    run = read_run(tmp_path)
    assert run.series["loss"].step.tolist() == [0, 1, 2]
    assert run.skipped_lines == len(garbage) + 1
    assert len(run.problems) == 1
    assert "train-1.jsonl" in run.problems[0]


def test_values_that_are_no_numbers_are_counted_and_the_rest_of_the_row_is_used(tmp_path):
    (tmp_path / "metrics").mkdir()
    row = {"step": 1, "time": 2.0, "tokens": 3, "values": {"loss": 1.0, "a": None, "b": "text", "c": [1], "d": True}}
    (tmp_path / "metrics" / "train-1.jsonl").write_text(json.dumps(row) + "\n")
    run = read_run(tmp_path)
    assert list(run.series) == ["loss"]
    assert run.skipped_values == 4


def test_nan_and_infinity_come_back_as_numbers(tmp_path):
    with Run(tmp_path) as run:
        for step, value in enumerate((math.nan, math.inf, -math.inf, 1.0)):
            run.log({"loss": value}, step=step, tokens=0)
    values = read_run(tmp_path).series["loss"].value
    assert math.isnan(values[0])
    assert values[1:].tolist() == [math.inf, -math.inf, 1.0]


def test_events_of_all_attempts_are_kept_in_order_of_time(tmp_path):
    for attempt in (1, 2):
        with Run(tmp_path) as run:
            run.event("start", step=10 - attempt, data={"attempt": attempt})
            run.log({"loss": 1.0}, step=10 - attempt, tokens=0)
    events = read_run(tmp_path).events
    assert [(event.kind, event.step, event.attempt, event.writer) for event in events] == [
        ("start", 9, 1, "train"),
        ("start", 8, 2, "train"),
    ]
    assert events[1].data == {"attempt": 2}


def test_foreign_files_are_left_alone_and_a_run_without_metrics_is_empty(tmp_path):
    assert read_run(tmp_path).series == {}
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "notes.txt").write_text("hello")
    (tmp_path / "metrics" / "train-1.jsonl").mkdir()
    assert read_run(tmp_path).series == {}
    assert read_run(tmp_path).skipped_lines == 0


def test_a_folder_that_does_not_exist_is_a_clear_error(tmp_path):
    with pytest.raises(BadInputError, match="no run in"):
        read_run(tmp_path / "absent")


def test_a_running_run_can_be_read(tmp_path):
    run = Run(tmp_path)
    run.log({"loss": 1.0}, step=1, tokens=1)
    seen = 0
    for _ in range(500):
        seen = len(read_run(tmp_path).series.get("loss", ()))  # type: ignore[arg-type]
        if seen:
            break
    run.close()
    assert seen == 1
