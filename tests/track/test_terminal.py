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
from tests.track.logged import logged
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
    assert [words for words in ("250 spike metric loss", "gpu-box: live") if words not in said] == []


def test_every_size_is_filled_exactly_and_the_spike_is_drawn_though_the_start_is_steep(finished):
    for columns, rows in ((80, 24), (200, 60), (5, 3)):
        lines = frame(RunReader(finished), columns, rows, time.time())
        assert len(lines) == max(rows, 10)
        assert all(cell_len(line.plain) <= max(columns, 40) for line in lines)
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
    logged(tmp_path / "nan", {"loss": math.nan})
    assert "1 not finite" in text_of(tmp_path / "nan")
    logged(tmp_path / "run", *({"loss": loss} for loss in (9, 9, 9, 9, 4, 6, 1, math.nan)))
    last_rows_to_those_before = change_of(RunReader(tmp_path / "run").series("loss"))
    assert last_rows_to_those_before == pytest.approx(1 - 5)
    assert change_of(RunReader(tmp_path / "run").series("absent")) is None


def test_control_characters_from_a_run_do_not_reach_the_terminal(tmp_path):
    with MetricsWriter(tmp_path / "evil") as run:
        run.log({"loss/\x1b[2J": 1.0, "loss": 1.0}, step=1, tokens=1)
        run.event("note\x07", step=1, data={"text": "\x1b]0;owned\x07\nsecond line"})
    said = text_of(tmp_path / "evil")
    assert not any(ord(character) < 32 and character != "\n" for character in said)
    assert "\x9b" not in said


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
    command = [sys.executable, "-m", "zero2all", *words]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
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


def test_the_four_corners_are_the_four_corner_dots_and_a_canvas_without_room_or_extent_works():
    for x, y, dot in ((0, 0, "⡀"), (0, 1, "⠁"), (1, 1, "⠈"), (1, 0, "⢀")):
        canvas = Canvas(1, 1, (0, 1), (0, 1))
        canvas.curve(np.array([x]), np.array([y]))
        assert canvas.lines() == [dot]
    canvas = Canvas(0, 0, (5, 5), (2, 2))
    canvas.curve(np.array([5.0, 5.0]), np.array([2.0, 2.0]))
    assert [len(line) for line in canvas.lines()] == [1]


def test_a_line_leaves_no_gap_the_topmost_layer_gives_the_color_and_what_lies_outside_is_drawn_at_the_edge():
    canvas = Canvas(4, 2, (0, 1), (0, 1), layers=2)
    canvas.curve(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    assert canvas.lines() == ["⠀⠀⡠⠊", "⡠⠊⠀⠀"]
    canvas.curve(np.ones(1), np.ones(1), layer=1)
    assert canvas.top_layers()[0].tolist()[2:] == [0, 1]
    canvas = Canvas(3, 1, (0, 2), (0, 1))
    canvas.curve(np.array([0.0, 1.0, 2.0]), np.array([1e300, np.nan, -np.inf]))
    assert canvas.lines() == ["⠁⠀⠀"]
    canvas.curve(np.array([-5.0, 99.0]), np.zeros(2))
    assert canvas.lines() == ["⠁⠀⠀"], "no place on the canvas"
