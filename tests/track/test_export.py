"""A run sent to other programs: every row once, again after a failure, and never from the training process."""

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from zero2all.cli import main
from zero2all.common.errors import BadInputError, UsageError
from zero2all.track import MetricsWriter
from zero2all.track.export import EventFolder, export, export_csv


def write_run(folder: Path, steps: range = range(5)) -> None:
    with MetricsWriter(folder) as run:
        for step in steps:
            run.log({"loss": 5.0 - step, "lr": math.nan if step == 2 else 0.5}, step=step, tokens=10 * step)
        run.event("spike", step=3, data={"value": 9.5})


def events_in(folder: Path) -> list[Any]:
    """What TensorBoard's own reader finds, without the first record of a file."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = sorted(folder.glob("*tfevents*"))
    found = [Event.FromString(data) for path in files for data in RawEventFileLoader(str(path)).Load()]
    return [event for event in found if not event.file_version]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, each.simple_value) for event in events_in(folder) for each in event.summary.value
            if each.tag == "loss"]  # fmt: skip


def test_a_whole_run_goes_to_tensorboard_and_a_second_export_sends_only_what_is_new(tmp_path):
    write_run(tmp_path / "run")
    sent = export(tmp_path / "run", EventFolder(tmp_path / "tb"))
    assert losses(tmp_path / "tb") == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    [text] = [each for event in events_in(tmp_path / "tb") for each in event.summary.value if each.HasField("tensor")]
    assert (text.tag, text.metadata.plugin_data.plugin_name) == ("events/spike", "text")
    assert b'"value": 9.5' in text.tensor.string_val[0]
    assert sent.skipped_lines == 0
    write_run(tmp_path / "run", range(5, 7))
    export(tmp_path / "run", EventFolder(tmp_path / "tb"))
    assert [step for step, _ in losses(tmp_path / "tb")] == list(range(7))
    write_run(tmp_path / "other")  # another run is not mistaken for this one
    export(tmp_path / "other", EventFolder(tmp_path / "tb"))
    assert len(losses(tmp_path / "tb")) == 12


def test_a_resumed_run_tells_tensorboard_where_it_goes_on(tmp_path):
    MetricsWriter(tmp_path / "run", resumed_from=20).close()
    export(tmp_path / "run", EventFolder(tmp_path / "tb"))
    assert [(event.step, event.session_log.status) for event in events_in(tmp_path / "tb")] == [(21, 1)]


def test_half_lines_wait_garbage_is_counted_and_odd_names_and_values_pass(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics" / "train-1.jsonl"
    odd = {"step": 8, "time": 1, "tokens": 0, "values": {"loss": 1e300, "\ud800": "NaN", "text": "no number"}}
    with open(path, "a") as file:
        file.write(f'garbage\n{json.dumps(odd)}\n{{"step":9,"time":1,"tokens":0,"values":{{"loss"')
    sent = export(tmp_path / "run", EventFolder(tmp_path / "tb"))
    assert sent.skipped_lines in (1, 2), "a name that is no text is damage, or written with an escape"
    with open(path, "ab") as file:
        file.write(b":0.25}}\n")
    export(tmp_path / "run", EventFolder(tmp_path / "tb"))
    assert losses(tmp_path / "tb")[-1] == (9, 0.25)


def test_following_ends_with_the_run_and_sends_its_last_rows(tmp_path):
    run = MetricsWriter(tmp_path / "run")
    run.log({"loss": 3.0}, step=0, tokens=0)
    looks = 0

    def wait(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            run.log({"loss": 2.0}, step=1, tokens=0)
            run.close()

    export(tmp_path / "run", EventFolder(tmp_path / "tb"), follow=True, wait=wait)
    assert ([step for step, _ in losses(tmp_path / "tb")], looks) == ([0, 1], 2)


class FlakySink:
    def __init__(self, folder: Path) -> None:
        self.state = folder / "state.json"
        self.taken: list[int] = []
        self.failures = 2

    def send(self, rows: list[dict[str, Any]]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no network")
        self.taken += [row["step"] for row in rows if "values" in row]

    def close(self) -> None:
        self.taken.append(-1)


def test_a_target_that_fails_gets_the_same_rows_again_with_growing_pauses(tmp_path, capsys):
    write_run(tmp_path / "run")
    sink, pauses = FlakySink(tmp_path), []
    export(tmp_path / "run", sink, follow=True, wait=pauses.append)
    assert (sink.taken, pauses) == ([0, 1, 2, 3, 4, -1], [1.0, 2.0])
    assert capsys.readouterr().err.count("export: ConnectionError: no network; trying again in ") == 2
    with pytest.raises(ConnectionError):
        export(tmp_path / "run", FlakySink(tmp_path / "other"))


def test_without_the_package_the_error_says_what_to_install_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(UsageError, match=r"zero2all\[tensorboard\]"):
        EventFolder(tmp_path / "tb")
    assert not any(tmp_path.iterdir())


def test_a_csv_has_a_row_per_step_and_empty_cells_where_nothing_was_logged(tmp_path):
    with MetricsWriter(tmp_path / "run") as run:
        run.log({"loss": 2.5}, step=0, tokens=0)
        run.log({"loss": math.inf, "eval/a,b": 0.1}, step=10, tokens=100)
        run.log({"=cmd()": 1.0}, step=20, tokens=200)
    assert export_csv(tmp_path / "run", tmp_path / "out.csv") == 3
    with open(tmp_path / "out.csv", newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == ["step", "tokens", "time", "'=cmd()", "eval/a,b", "loss"]
    rows = [["0", "0", "", "", "2.5"], ["10", "100", "", "0.1", "inf"], ["20", "200", "1.0", "", ""]]
    assert [row[:2] + row[3:] for row in table[1:]] == rows
    assert export_csv(tmp_path / "run", tmp_path / "out.csv", ["loss"]) == 2


def test_a_metric_or_a_run_that_is_not_there_is_a_clear_error(tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(UsageError, match="no metric `los`"):
        export_csv(tmp_path / "run", tmp_path / "out.csv", ["los"])
    with pytest.raises(BadInputError, match="no metrics"):
        export_csv(tmp_path, tmp_path / "out.csv")
    with pytest.raises(BadInputError, match="no metrics"):
        export(tmp_path / "nowhere", FlakySink(tmp_path))


def test_export_from_the_command_line_explains_what_is_missing(tmp_path, capsys):
    write_run(tmp_path / "run")
    for words, said in (
        (["--to", "mlflow"], "--to mlflow is unknown"),
        (["--to", "wandb", "--follow"], "wandb sync FOLDER"),
        (["--to", "csv"], "needs one path"),
        (["--to", "tensorboard"], "needs one path"),
        (["--to", "csv", "x.csv", "--follow"], "cannot be followed"),
    ):
        assert main(["track", "export", str(tmp_path / "run"), *words]) == 2
        assert said in capsys.readouterr().err
    for kind, said in (("tensorboard", "rows sent"), ("csv", "csv: 5 steps")):
        assert main(["track", "export", str(tmp_path / "run"), "--to", kind, str(tmp_path / kind)]) == 0
        assert said in capsys.readouterr().out
