"""Progress: a live bar for a person at a terminal, plain lines for a log file."""

import os
import pty
import re
import subprocess
import sys
import textwrap
from contextlib import suppress

from zero2all.common import progress as module
from zero2all.common.progress import counted, human_count, human_seconds, progress


def test_in_a_log_file_the_end_is_one_plain_line_with_share_speed_and_note(capsys):
    with progress("pack", total=2000, unit="B") as bar:
        bar.advance(500)
        bar.advance(1500, note="news/train")
    out, err = capsys.readouterr()
    assert out == "", "standard output belongs to results"
    assert re.fullmatch(r"pack       2\.0k/2\.0k B \(100%\)  \S+ B/s  news/train\n", err), "no terminal codes in a file"


def test_in_a_log_file_a_line_comes_every_so_many_seconds_with_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr(module, "LOG_EVERY_SECONDS", 0.0)
    with progress("train", total=100, unit="tok", done=50) as bar:
        bar.advance(10)
        bar.advance(10, note="loss 2.5")
    first, second = capsys.readouterr().err.splitlines()  # the end says nothing new
    assert [words for words in ("60/100 tok (60%)", "left") if words not in first] == []
    assert "70/100 tok (70%)" in second
    assert second.endswith("loss 2.5")


def test_what_was_done_before_counts_in_the_share_and_not_in_the_speed_and_a_total_may_come_late_or_never(capsys):
    with progress("train", total=10**9, unit="tok", done=10**9):
        pass
    with progress("eval", total=None, unit="B") as bar:
        bar.advance(12)
    with progress("eval", total=None, unit="B") as bar:
        bar.set_total(24)
        bar.advance(12)
    done, unknown, corrected = capsys.readouterr().err.splitlines()
    assert [words for words in ("1.0G/1.0G tok (100%)", " 0 tok/s") if words not in done] == []
    assert unknown.startswith("eval       12 B ")
    assert corrected.startswith("eval       12/24 B (50%)")


def test_who_imports_the_package_gets_records_of_the_module_that_says_it_and_nothing_is_printed():
    script = """
        import logging, sys
        from zero2all.common.progress import progress, say
        say("before")
        seen = []
        class Keep(logging.Handler):
            def emit(self, record):
                seen.append((record.name, record.levelname, record.getMessage()))
        logging.getLogger("zero2all").addHandler(Keep())
        logging.getLogger("zero2all").setLevel("INFO")
        with progress("pack", total=10, unit="B") as bar:
            bar.advance(10)
        say("a path with %d in it")
        assert [each[:2] for each in seen] == [("zero2all.common.progress", "INFO"), ("zero2all", "INFO")]
        assert seen[0][2].startswith("pack       10/10 B (100%)")
        assert seen[1][2] == "a path with %d in it"
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_work_that_fails_prints_no_line_of_success(capsys):
    with suppress(RuntimeError), progress("pack", total=10, unit="B") as bar:
        bar.advance(5)
        raise RuntimeError
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_live_bar_with_label_share_speed_and_note():
    script = """
        from zero2all.common.progress import progress
        with progress("pack", total=1000, unit="B") as bar:
            bar.set_total(2000)
            bar.advance(1000, note="half")
            bar.advance(1000, note="news/train")
    """
    screen, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, stderr=terminal, stdout=subprocess.PIPE, env=environment)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # how Linux says that the other side has closed
        while piece := os.read(screen, 4096):
            shown += piece
    os.close(screen)
    assert (process.communicate()[0], process.returncode) == (b"", 0)
    text = shown.decode()
    assert [part for part in ("pack", "100%", "B/s", "news/train", "\x1b[") if part not in text] == []
    assert "\x1b[?25l\x1b[?25h" in text, "the cursor stays: what is stopped or killed cannot give it back"


def test_counts_and_seconds_in_words():
    counts = {0: "0", 999: "999", 1500: "1.5k", 999_999: "1.0M", 2.5e9: "2.5G", 3e13: "30.0T"}
    assert {count: human_count(count) for count in counts} == counts
    seconds = {-3: "0s", 59.4: "59s", 59.6: "1m00s", 75: "1m15s", 3725: "1h02m"}
    assert {each: human_seconds(each) for each in seconds} == seconds
    assert [counted(count, "step") for count in (0, 1, 2, 12345)] == ["0 steps", "1 step", "2 steps", "12,345 steps"]
