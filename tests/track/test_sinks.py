"""A run sent to other trackers: every row once, again after a failure, and never from the training process."""

from __future__ import annotations

import csv
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from zero2all.cli import main
from zero2all.common.errors import BadInputError, UsageError
from zero2all.track import MetricsWriter
from zero2all.track.listing import media_file
from zero2all.track.sinks import TensorboardSink, WandbSink, export, export_csv
from zero2all.track.tensorboard import Damage, TensorboardEvent, event_files, read_events


def write_run(folder: Path, steps: range = range(5)) -> None:
    with MetricsWriter(folder) as run:
        for step in steps:
            run.log({"loss": 5.0 - step, "lr": math.nan if step == 2 else 0.5}, step=step, tokens=10 * step)
        run.event("spike", step=3, data={"value": 9.5})
        run.event("text", step=4, data={"name": "sample", "text": "<b>hello"})


def events_in(folder: Path) -> tuple[list[TensorboardEvent], Damage]:
    damage = Damage()
    return [event for path in event_files(folder) for event in read_events(path, damage)], damage


def losses(events: list[TensorboardEvent]) -> list[tuple[int, Any]]:
    return [(event.step, content) for event in events for tag, content in event.values if tag == "loss"]


# ---- TensorBoard ----


def test_a_whole_run_goes_to_tensorboard(tmp_path):
    write_run(tmp_path / "run")
    sent = export(tmp_path / "run", TensorboardSink(tmp_path / "tb"))
    events, damage = events_in(tmp_path / "tb")
    assert damage == Damage()
    assert losses(events) == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    texts = {tag: content for event in events for tag, content in event.values if isinstance(content, str)}
    assert texts["sample"] == "<b>hello"
    assert '"value": 9.5' in str(texts["events/spike"])
    assert sent.skipped_lines == 0


def test_a_second_export_sends_only_what_is_new(tmp_path):
    write_run(tmp_path / "run")
    export(tmp_path / "run", TensorboardSink(tmp_path / "tb"))
    write_run(tmp_path / "run", range(5, 7))
    export(tmp_path / "run", TensorboardSink(tmp_path / "tb"))
    assert [step for step, _ in losses(events_in(tmp_path / "tb")[0])] == list(range(7))


def test_a_folder_that_holds_another_runs_export_is_not_mistaken_for_this_ones(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    export(tmp_path / "a", TensorboardSink(tmp_path / "tb"))
    export(tmp_path / "b", TensorboardSink(tmp_path / "tb"))
    assert len(losses(events_in(tmp_path / "tb")[0])) == 10


def test_a_resumed_run_tells_tensorboard_where_it_goes_on(tmp_path):
    metrics = tmp_path / "run" / "metrics"
    metrics.mkdir(parents=True)
    row = {"step": 20, "time": 1.0, "kind": "segment", "data": {"resumed_from": 20}}
    (metrics / "train-2.jsonl").write_text(json.dumps(row) + "\n")
    export(tmp_path / "run", TensorboardSink(tmp_path / "tb"))
    assert [(event.step, event.is_restart) for event in events_in(tmp_path / "tb")[0]] == [(21, True)]


def test_half_lines_wait_and_garbage_is_counted(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics" / "train-1.jsonl"
    with open(path, "ab") as file:
        file.write(b'garbage\n{"step":9,"time":1,"tokens":0,"values":{"loss"')
    sent = export(tmp_path / "run", TensorboardSink(tmp_path / "tb"))
    assert sent.skipped_lines == 1
    with open(path, "ab") as file:
        file.write(b":0.25}}\n")
    export(tmp_path / "run", TensorboardSink(tmp_path / "tb"))
    assert losses(events_in(tmp_path / "tb")[0])[-1] == (9, 0.25)


def test_following_ends_with_the_run_and_sends_its_last_rows(tmp_path):
    run = MetricsWriter(tmp_path / "run")
    run.log({"loss": 3.0}, step=0, tokens=0)
    looks = 0

    def wait(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            run.log({"loss": 2.0}, step=1, tokens=0)
        if looks == 3:
            run.log({"loss": 1.0}, step=2, tokens=0)
            run.close()

    export(tmp_path / "run", TensorboardSink(tmp_path / "tb"), follow=True, wait=wait)
    assert [step for step, _ in losses(events_in(tmp_path / "tb")[0])] == [0, 1, 2]
    assert looks == 3


class FlakySink:
    """Fails twice, then takes everything."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state.json"
        self.taken: list[int] = []
        self.failures = 2

    def send(self, rows: list[dict[str, Any]], _: Path) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no network")
        self.taken += [row["step"] for row in rows if "values" in row]

    def close(self) -> None:
        self.taken.append(-1)


def test_a_tracker_that_fails_gets_the_same_rows_again_with_growing_pauses(tmp_path):
    write_run(tmp_path / "run")
    sink, pauses = FlakySink(tmp_path), []
    sent = export(tmp_path / "run", sink, follow=True, wait=pauses.append)
    assert sink.taken == [0, 1, 2, 3, 4, -1]
    assert pauses == [1.0, 2.0]
    assert sent.failures == ["ConnectionError: no network"] * 2
    with pytest.raises(ConnectionError):
        export(tmp_path / "run", FlakySink(tmp_path / "other"))


@pytest.mark.parametrize("name", ["../metrics/train-1.jsonl", "/etc/hostname", "", None, 7, "absent.png", "a\0b"])
def test_an_image_event_cannot_name_a_file_outside_media(tmp_path, name):
    write_run(tmp_path)
    (tmp_path / "media").mkdir()
    assert media_file(tmp_path, name) is None


def test_pictures_and_histograms_go_along(tmp_path):
    with MetricsWriter(tmp_path / "run") as run:
        run.event("image", step=1, data={"name": "p", "file": "p.png", "width": 2, "height": 3})
        run.event("histogram", step=1, data={"name": "h", "edges": [0, 1, 2], "counts": [5, 6]})
        run.event("histogram", step=1, data={"name": "broken", "edges": [0, 1], "counts": "many"})
    (tmp_path / "run" / "media").mkdir(exist_ok=True)
    (tmp_path / "run" / "media" / "p.png").write_bytes(b"png")
    export(tmp_path / "run", TensorboardSink(tmp_path / "tb"))
    events, damage = events_in(tmp_path / "tb")
    assert damage.values == {"image": 1, "histogram": 1}
    assert [tag for event in events for tag, _ in event.values] == ["events/histogram"], "the broken one, as text"


# ---- wandb ----


class FakeWandbRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[Any] = []
        self.finished = False

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in with the five names of the package that are used; the real one is not installed with zero2all."""
    module = types.ModuleType("wandb")
    module.runs = []  # type: ignore[attr-defined]

    def init(**options: Any) -> FakeWandbRun:
        module.options = options  # type: ignore[attr-defined]
        module.runs.append(FakeWandbRun())  # type: ignore[attr-defined]
        return module.runs[-1]  # type: ignore[attr-defined,no-any-return]

    module.init, module.Settings = init, dict  # type: ignore[attr-defined]
    module.Html, module.Image = lambda text: ("html", text), lambda path: ("image", path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_every_row_over_a_step_of_our_own(tmp_path, wandb):
    write_run(tmp_path / "run")
    export(tmp_path / "run", WandbSink("project", tmp_path / "run", tmp_path / "state.json"))
    [run] = wandb.runs
    assert run.finished
    assert ("*", {"step_metric": "step"}) in run.metrics, "so that late evaluations are not dropped"
    assert run.logged[1] == {"step": 1, "loss": 4.0, "lr": 0.5, "tokens": 10}
    assert math.isnan(run.logged[2]["lr"])
    assert run.logged[-1]["sample"] == ("html", "<pre>&lt;b&gt;hello</pre>"), "text from a run is never markup"
    first_id = wandb.options["id"]
    export(tmp_path / "run", WandbSink("project", tmp_path / "run", tmp_path / "state.json"))
    assert wandb.runs[1].logged == [], "everything was sent already"
    assert (wandb.options["id"], wandb.options["resume"]) == (first_id, "allow")


@pytest.mark.parametrize("found", [None, types.ModuleType("wandb")], ids=["absent", "a folder of that name"])
def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch, found):
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(UsageError, match="pip install wandb"):
        WandbSink("project", tmp_path, tmp_path / "state.json")


# ---- CSV ----


def test_a_csv_has_a_row_per_step_and_empty_cells_where_nothing_was_logged(tmp_path):
    with MetricsWriter(tmp_path / "run") as run:
        run.log({"loss": 2.5}, step=0, tokens=0)
        run.log({"loss": math.inf, "eval/a,b": 0.1}, step=10, tokens=100)
        run.log({"=cmd()": 1.0}, step=20, tokens=200)
    assert export_csv(tmp_path / "run", tmp_path / "out.csv") == 3
    with open(tmp_path / "out.csv", newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == ["step", "tokens", "time", "'=cmd()", "eval/a,b", "loss"]
    assert [row[:2] + row[3:] for row in table[1:]] == [
        ["0", "0", "", "", "2.5"],
        ["10", "100", "", "0.1", "inf"],
        ["20", "200", "1.0", "", ""],
    ]
    assert export_csv(tmp_path / "run", tmp_path / "out.csv", ["loss"]) == 2


def test_a_metric_or_a_run_that_is_not_there_is_a_clear_error(tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(UsageError, match="no metric `los`"):
        export_csv(tmp_path / "run", tmp_path / "out.csv", ["los"])
    with pytest.raises(BadInputError, match="no metrics"):
        export_csv(tmp_path, tmp_path / "out.csv")
    with pytest.raises(BadInputError, match="no metrics"):
        export(tmp_path / "nowhere", TensorboardSink(tmp_path / "tb"))


# ---- the command line ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "mlflow"], "--to mlflow is unknown"),
        (["--to", "wandb"], "--project"),
        (["--to", "csv"], "needs one path"),
        (["--to", "tensorboard"], "needs one path"),
        (["--to", "csv", "x.csv", "--follow"], "cannot be followed"),
    ],
)
def test_export_explains_what_is_missing(tmp_path, capsys, words, said):
    write_run(tmp_path / "run")
    assert main(["track", "export", str(tmp_path / "run"), *words]) == 2
    assert said in capsys.readouterr().err


def test_export_from_the_command_line(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert main(["track", "export", str(tmp_path / "run"), "--to", "tensorboard", str(tmp_path / "tb")]) == 0
    assert main(["track", "export", str(tmp_path / "run"), "--to", "csv", str(tmp_path / "x.csv")]) == 0
    out = capsys.readouterr().out
    assert "rows sent" in out
    assert "x.csv: 5 steps" in out
