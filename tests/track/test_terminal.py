"""A run in the terminal: what a frame says, and the live view in a real pseudo-terminal."""

import math
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

from tests.processes import Screen
from zero2all.cli import main
from zero2all.track import MetricsWriter
from zero2all.track.frame import Canvas, change_of, frame
from zero2all.track.reader import RunReader

ROOT = Path(__file__).parents[2]


def write_run(folder: Path) -> None:
    with MetricsWriter(folder) as run:
        for step in range(300):
            loss = 3 + 5 * math.exp(-step / 30)
            values = {"loss": loss + 4 * (step == 250), "loss/en": loss - 1, "loss/中文": loss, "bpb/en": loss / 3}
            values |= {"eval/valid/bpb/en": 1.25, "eval/valid/loss/en": 2.5} if step % 100 == 99 else {}
            values |= {"tokens_per_second": 18_400.0, "mfu/model": 0.412, "memory/peak": 7.1e10, "lr": 3e-4}
            values["memory/checkpoint_stall"] = 0.07  # seconds
            run.log(values, step=step, tokens=step * 1000, at=1e9 + step / 18.4)
        run.event("spike", step=250, data={"metric": "loss", "value": 7.0})
    (folder / "config.yaml").write_text("train:\n  name: x\n  steps: 600\n")


def text_of(folder: Path, columns: int = 80, rows: int = 24, note: str = "") -> str:
    return "\n".join(line.plain for line in frame(RunReader(folder), columns, rows, time.time(), note))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    folder = tmp_path_factory.mktemp("runs") / "my-run"
    write_run(folder)
    return folder


def test_a_frame_says_how_the_run_stands(finished):
    said = text_of(finished, note="gpu-box: live")
    assert re.search(r"my-run  ● finished  step 299/600 \(50%\)", said)
    assert re.search(r"training loss 3\.000\d  smoothed 3\.00\d\d .*1 spike", said)
    assert re.search(r"all +3\.000[0-9] +[+-]0\.\d{4}", said)
    assert re.search(r"en +2\.000[0-9] +1\.000[0-9] +-0\.\d{4} +1\.2500", said)
    assert re.search(r"中文 +3\.00", said)
    assert re.search(r"tokens/s +18\.4k", said)
    assert re.search(r"MFU model +41\.2%", said)
    assert re.search(r"memory peak +71\.0GB", said)
    assert "stall" not in said
    assert "250 spike metric loss" in said
    assert "gpu-box: live" in said


def test_the_end_of_a_run_is_one_event_in_plain_words(tmp_path):
    with MetricsWriter(tmp_path / "run") as run:
        run.log({"loss": 1.0}, step=525, tokens=1_075_200)
        run.event("start", step=525, data={"notes": ["the first note", "the second"]})
        run.event("finish", step=525, data={"tokens": 1_075_200, "seconds": 90.0})
    said = text_of(tmp_path / "run", 132, 30)
    assert re.search(r"525 finished 1,075,200 tokens in ", said)
    assert "525 start the first note; the second" in said
    assert "end reason" not in said


@pytest.mark.parametrize("columns", [80, 132])
def test_training_and_held_out_figures_are_told_apart(finished, columns):
    lines = text_of(finished, columns, 30).splitlines()
    above, names = next((line, lines[at + 1]) for at, line in enumerate(lines) if "held-out" in line)
    values = next(line for line in lines if re.search(r"\ben +2\.000", line))
    held_out = values.index("1.2500") + len("1.2500")
    assert above[:held_out].endswith("held-out"), "the column of the held-out figure, and no other, is called so"
    assert names[:held_out].endswith("bpb")
    assert "training" in above[: held_out - 8]


@pytest.mark.parametrize("size", [(80, 24), (132, 43), (40, 10), (200, 60), (5, 3)])
def test_every_size_is_filled_exactly_and_nothing_is_wider(finished, size):
    lines = frame(RunReader(finished), *size, time.time())
    assert len(lines) == max(size[1], 10)
    assert all(cell_len(line.plain) <= max(size[0], 40) for line in lines)


def test_the_spike_is_drawn_and_the_steep_start_does_not_flatten_the_rest(finished):
    chart = text_of(finished).splitlines()[2:14]
    column = 9 + round(250 / 299 * 70)
    drawn = sum(any(line[at : at + 1] not in ("", " ") for at in (column - 1, column, column + 1)) for line in chart)
    assert drawn >= 9, "from the curve up to the edge"


def test_the_time_left_is_that_of_the_last_rows(tmp_path):
    metrics = tmp_path / "run" / "metrics"
    metrics.mkdir(parents=True)
    now = time.time()
    row = '{{"step":{},"time":{},"tokens":0,"values":{{"loss":1.0}}}}\n'
    (metrics / "train-1.jsonl").write_text("".join(row.format(step, now - 200 + 2 * step) for step in range(101)))
    (tmp_path / "run" / "config.yaml").write_text("train:\n  steps: 1900\n")
    assert "● running  step 100/1,900 (5%)  1h00m left" in text_of(tmp_path / "run")


def test_a_run_without_metrics_or_with_only_nan_still_has_a_frame(tmp_path):
    (tmp_path / "empty" / "metrics").mkdir(parents=True)
    assert "no metrics yet" in text_of(tmp_path / "empty")
    with MetricsWriter(tmp_path / "nan") as run:
        run.log({"loss": math.nan}, step=1, tokens=1)
    assert "1 not finite" in text_of(tmp_path / "nan")
    with MetricsWriter(tmp_path / "run") as run:
        for step, loss in enumerate([9, 9, 9, 9, 4, 6, 1, math.nan]):
            run.log({"loss": loss}, step=step, tokens=0)
    assert change_of(RunReader(tmp_path / "run").series("loss")) == pytest.approx(1 - 5), (
        "the last rows to those before"
    )
    assert change_of(RunReader(tmp_path / "run").series("absent")) is None


def test_control_characters_from_a_run_do_not_reach_the_terminal(tmp_path):
    with MetricsWriter(tmp_path / "evil") as run:
        run.log({"loss/\x1b[2J": 1.0, "loss": 1.0}, step=1, tokens=1)
        run.event("note\x07", step=1, data={"text": "\x1b]0;owned\x07\nsecond line"})
    said = text_of(tmp_path / "evil")
    assert not any(ord(character) < 32 and character != "\n" for character in said)
    assert "\x9b" not in said


def test_once_prints_one_frame_into_a_pipe(finished, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    assert main(["watch", str(finished), "--once"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 29
    assert "step 299/600" in out


# ---- live ----


def widest_line(drawn: bytes) -> int:
    """Of any frame: each begins with the cursor's way home, and its last line ends there."""
    lines = re.split(rb"\r?\n|\x1b\[H", drawn)
    return max(len(re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", line).decode(errors="replace")) for line in lines)


@contextmanager
def terminal(*words: str) -> Iterator[tuple[Screen, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    screen = Screen(ours)
    screen.resize(80, 24)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "zero2all", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    try:
        yield screen, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_the_live_view_follows_the_run_and_the_window_and_ends_with_q(tmp_path):
    with MetricsWriter(tmp_path / "run") as run:
        run.log({"loss": 2.0}, step=1, tokens=1)
        with terminal("watch", str(tmp_path / "run")) as (screen, process):
            screen.wait_for(b"step 1")
            assert b"\x1b[?1049h" in screen.seen, "on the second screen"
            run.event("checkpoint", step=1)
            run.log({"loss": 1.5}, step=2_000, tokens=2)
            screen.wait_for(b"step 2,000")
            screen.seen = b""
            screen.resize(150, 40)
            # What is left of the narrow frame may still be on its way: the wide one is there when a wide line is.
            screen.wait_until(lambda: widest_line(screen.seen) > 100, "a frame as wide as the window")
            screen.wait_for(b"last events")
            os.write(screen.handle, b"q")
            screen.wait_for(b"\x1b[?1049l")
            assert process.wait(300) == 0


# ---- curves of braille dots ----


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_the_four_corners_are_the_four_corner_dots():
    canvas = Canvas(1, 1, (0, 1), (0, 1))
    canvas.curve(array(0), array(0))
    assert canvas.lines() == ["⡀"]
    for x, y, dot in ((0, 1, "⠁"), (1, 1, "⠈"), (1, 0, "⢀")):
        canvas = Canvas(1, 1, (0, 1), (0, 1))
        canvas.curve(array(x), array(y))
        assert canvas.lines() == [dot]


def test_a_straight_line_leaves_no_gap():
    canvas = Canvas(4, 2, (0, 1), (0, 1))
    canvas.curve(array(0, 1), array(0, 1))
    dots = canvas._dots[0]
    assert dots.any(axis=0).all(), "every column"
    assert canvas.lines() == ["⠀⠀⡠⠊", "⡠⠊⠀⠀"]


def test_a_one_step_spike_reaches_from_the_curve_to_its_top():
    low, high = np.zeros(40), np.zeros(40)
    high[20] = 1.0
    canvas = Canvas(20, 5, (0, 39), (0, 1))
    canvas.curve(np.arange(40.0), low, high)
    assert canvas._dots[0][:, 20].all()
    assert canvas._dots[0][:10].sum() < 20


def test_what_lies_outside_is_drawn_at_the_edge_and_what_is_not_finite_is_left_out():
    canvas = Canvas(3, 1, (0, 2), (0, 1))
    canvas.curve(array(0, 1, 2), array(1e300, np.nan, -np.inf))
    assert canvas.lines() == ["⠁⠀⠀"]
    canvas.curve(array(-5, 99), array(0, 0))
    assert canvas.lines() == ["⠁⠀⠀"], "no place on the canvas"


def test_the_topmost_layer_gives_the_color():
    canvas = Canvas(2, 1, (0, 1), (0, 1), layers=2)
    canvas.curve(array(0, 1), array(0, 0), layer=0)
    canvas.curve(array(1), array(1), layer=1)
    assert canvas.top_layers().tolist() == [[0, 1]]


def test_any_size_and_a_flat_world_work():
    for size in ((0, 0), (1, 1), (300, 90)):
        canvas = Canvas(*size, (5, 5), (2, 2))
        canvas.curve(array(5, 5), array(2, 2))
        assert len(canvas.lines()) == max(size[1], 1)
        assert all(len(line) == max(size[0], 1) for line in canvas.lines())
