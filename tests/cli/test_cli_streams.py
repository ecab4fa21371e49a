"""Commands whose output nobody reads, or that were started without any output at all."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zero2all.common import progress


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_its_streams_closed(tmp_path, closed):
    command = f'"{sys.executable}" -m zero2all corpus rules en {closed}'
    finished = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr.decode()


def test_a_table_that_nobody_reads_is_no_error(tmp_path):
    command = f'"{sys.executable}" -m zero2all corpus rules en | true; exit ${{PIPESTATUS[0]}}'
    finished = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, b"")


def test_work_goes_on_when_nobody_reads_its_output(tmp_path):
    script = "from zero2all.cli.main import outlive_readers; outlive_readers(); print('x' * 10**6, flush=True); "
    script += f"open({str(tmp_path / 'made')!r}, 'w').write('whole')"
    command = f'"{sys.executable}" -c "{script}" 2>&1 | true; exit ${{PIPESTATUS[0]}}'
    finished = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (finished.returncode, finished.stdout) == (0, b"")
    assert (tmp_path / "made").read_text() == "whole"


@pytest.mark.parametrize(("flag", "stream"), [("-u", "stdout"), ("", "stderr")])
def test_what_is_written_at_once_to_a_pipe_still_is(flag, stream):
    script = "import os, sys; from zero2all.cli.main import outlive_readers; outlive_readers(); "
    script += f"print('now', file=sys.{stream}); os._exit(0)"  # without the flush of an ordinary end
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *flag.split(), "-c", script]
    assert getattr(subprocess.run(command, capture_output=True, env=environment), stream) == b"now\n"


def test_words_about_progress_that_nobody_reads_do_not_end_the_work(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(pipe, write_through=True))
        with progress.progress("work", total=1, unit="B") as bar:
            bar.advance(1)


CTRL_C_AT_AN_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == os.environ["CTRL_C_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "program", [["-m", "zero2all"], [str(Path(sys.executable).with_name("z2a"))]], ids=["-m", "z2a"]
)
@pytest.mark.parametrize("module", ["zero2all.cli.main", "zero2all.common.language", "zero2all.cli.corpus"])
def test_ctrl_c_while_the_program_loads_leaves_no_traceback(tmp_path, program, module):
    (tmp_path / "sitecustomize.py").write_text(CTRL_C_AT_AN_IMPORT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "CTRL_C_AT": module}
    finished = subprocess.run(
        [sys.executable, *program, "corpus", "rules", "en"],
        env=environment,
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    )
    assert finished.returncode in (-signal.SIGINT, 130)
    assert (b"Traceback" in finished.stderr, finished.stdout) == (False, b"")
