"""The supervisor on small programs with heartbeats: what fails, who is named, what is tried again, and when it ends."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import textwrap
import threading
from contextlib import suppress
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import psutil
import pytest

from tests.processes import Screen
from tests.waiting import wait_until
from zero2all.common.fault import FAULTS
from zero2all.parallel.launch import run_processes
from zero2all.resilience import heartbeat, restarts, supervisor
from zero2all.resilience.config import ResilienceConfig
from zero2all.resilience.diagnosis import RankFacts
from zero2all.resilience.failure_page import Failure
from zero2all.resilience.heartbeat import ATTEMPT_NUMBER, Beat
from zero2all.resilience.restarts import Notices, Restarts
from zero2all.resilience.supervisor import Watch, phase_limit
from zero2all.track.reader import read_run

LOOP = """
    import os, pathlib, signal, sys, time
    from zero2all.common.fault import fault_point
    from zero2all.resilience import heartbeat

    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    done = folder / f"done-{os.environ['RANK']}"
    heartbeat.attach()
    if "DEVICES" in os.environ:  # how far the GPU of each rank has come
        heartbeat.watch_device(lambda: (int(os.environ["DEVICES"][int(os.environ["RANK"])]), "forward"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(10))
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    while "TOGETHER" in os.environ and len(list(folder.glob("pid-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    first = int(done.read_text()) if done.exists() else 0
    for step in range(first, steps):
        if (folder / "enough").exists(): break
        heartbeat.beat("step", step)
        fault_point("step", step + 1)
        done.with_suffix(".new").write_text(str(step + 1))
        done.with_suffix(".new").replace(done)
        time.sleep(0.01)
    heartbeat.beat("end", steps)
"""
STEPS = 40
LIMITS = {"step": 60.0, "first_step": 60.0, "start": 60.0}
HANG_LIMITS = LIMITS | {"step": 3.5}  # above PAUSED_SECONDS: a pause of the whole machine is no hang


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Run LOOP in some processes, with faults; returns the exit code and what the incidents say."""
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(LOOP))
    monkeypatch.setattr(supervisor, "PAUSED_SECONDS", 3.0)
    monkeypatch.setattr(Restarts, "pause_seconds", 0.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def is_rank(child: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # of another test; it has just ended
            return str(script) in child.cmdline()
        return False

    def run(*faults: dict, processes: int = 2, steps: int = STEPS, **settings) -> tuple[int, list[dict]]:
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps([{"point": "step", "step": 20, "rank": 1, **fault} for fault in faults]))
        monkeypatch.setenv(FAULTS, str(plan))
        words = [sys.executable, str(script), str(tmp_path), str(steps)]
        watch = Watch(ResilienceConfig(**{"limits": LIMITS, **settings}), tmp_path / "run", watches_phases=True)
        (tmp_path / "run").mkdir(exist_ok=True)
        code = run_processes(processes, words, watch, module=False)
        assert not [child for child in psutil.Process().children(recursive=True) if is_rank(child)]
        return code, pages_in(tmp_path / "run")

    return run


def pages_in(run) -> list[dict]:
    pages = sorted((run / "incidents").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(page.read_text()) for page in pages]


def is_stepping(folder) -> bool:
    return (folder / "done-0").exists() and (folder / "done-1").exists()


def once_stepping(folder, act) -> None:
    threading.Thread(target=lambda: (wait_until(lambda: is_stepping(folder)), act()), daemon=True).start()


CRASHES = {
    "kill": "killed by SIGKILL (exit code 137)",
    "segfault": "killed by SIGSEGV (exit code 139)",
    "abort": "killed by SIGABRT (exit code 134)",
    "raise": "InjectedError: injected by the fault plan",
}
HANGS = {"stop": "It is stopped (SIGSTOP)", "hold_gil": "silent for"}


@pytest.mark.parametrize(("kind", "said"), [("crash", CRASHES), ("hang", HANGS)], ids=["crash", "hang"])
def test_a_rank_that_fails_is_named_and_all_are_started_again(program, tmp_path, capfd, kind, said):
    # A busy machine takes seconds away: the short limit only where it must come to its end.
    faults = [{"fault": fault, "step": 10 * number} for number, fault in enumerate(said, 1)]
    code, incidents = program(*faults, limits=HANG_LIMITS if kind == "hang" else LIMITS, steps=STEPS + 5)
    assert code == 0
    assert (tmp_path / "done-0").read_text() == (tmp_path / "done-1").read_text() == str(STEPS + 5)
    errors = capfd.readouterr().err
    events = [event.data for event in read_run(tmp_path / "run").events if event.kind == "incident"]
    for number, (words, incident, event) in enumerate(zip(said.values(), incidents, events, strict=True), 1):
        step = 10 * number - 1
        found = (incident["kind"], incident["rank"], incident["step"], incident["phase"])
        assert found == (kind, 1, step, "step")
        assert words in incident["text"]
        assert incident["text"] in errors
        page = (tmp_path / f"run/incidents/{step}-{kind}.md").read_text()
        assert f"The supervisor restarts the run (attempt {number + 1})" in page
        assert kind == "crash" or words != "silent for" or "fault.py" in page, "the stack of the rank is not there"
        assert (event["page"], event["rank"]) == (f"{step}-{kind}.md", 1)


def test_of_ranks_that_all_hang_the_one_whose_gpu_is_behind_is_named(program, monkeypatch):
    monkeypatch.setenv("DEVICES", "75")
    monkeypatch.setenv("TOGETHER", "1")  # or one hangs for long before the other has come to that step
    code, (incident,) = program({"fault": "sleep", "rank": None, "times": 2}, limits=HANG_LIMITS)
    assert (code, incident["rank"]) == (0, 1)
    assert "Its GPU does not finish a kernel that it has begun, in the part forward of a step." in incident["text"]
    assert "Xid" in incident["advice"][0]


def test_all_ranks_killed_at_once_are_started_again(program, tmp_path):
    def kill() -> None:
        for number in [int(path.read_text()) for path in (tmp_path / "pid-0", tmp_path / "pid-1")]:
            os.kill(number, signal.SIGKILL)
        (tmp_path / "enough").touch()  # for the second attempt

    once_stepping(tmp_path, kill)
    code, (incident,) = program(steps=100_000)
    assert (code, [one["code"] for one in incident["ranks"]]) == (0, [-9, -9])


def test_the_same_error_at_the_same_step_is_tried_twice_and_then_given_up(program):
    code, incidents = program({"fault": "raise", "times": 9})
    assert (code, len(incidents)) == (15, 2)
    assert "the same error at the same step twice" in incidents[1]["done"]


def test_progress_gives_the_restarts_back(program):
    faults = [{"fault": "raise", "step": step} for step in (5, 10, 15)]
    code, incidents = program(*faults, restarts=1)
    assert (code, len(incidents)) == (0, 3)


def test_attempts_without_progress_are_counted_with_a_longer_pause_after_each_and_end_the_run():
    tried = Restarts(2)
    for pause in (0.0, 2.0):
        assert (tried.reason_to_end(5, 0, ""), tried.pause_seconds) == ("", pause)
    assert "(exit code 15): 3 attempts without progress" in tried.reason_to_end(5, 0, "")
    assert (tried.pause_seconds, tried.end_code(137)) == (4.0, 15)
    assert "restarts are switched off" in Restarts(0).reason_to_end(5, 0, "")
    assert Restarts(0).end_code(137) == 137


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Run lines in one process, which are told the number of the attempt: exit code, attempts, and pages."""
    monkeypatch.setattr(Restarts, "pause_seconds", 0.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    head = f"""
        import os, sys
        from zero2all.common.errors import AbsentGroupsError
        from zero2all.resilience import heartbeat
        attempt = int(os.environ['{ATTEMPT_NUMBER}'])
        open('{tmp_path}/tries', 'a').write('x')
        heartbeat.attach()
        heartbeat.beat('start', 0)
    """

    def run(lines: str, **settings) -> tuple[int, int, list[dict]]:
        command = [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(lines)]
        code = run_processes(1, command, Watch(ResilienceConfig(**settings), tmp_path), module=False)
        return code, len((tmp_path / "tries").read_text()), pages_in(tmp_path)

    return run


@pytest.mark.parametrize("code", [2, 4, 10, 14])
def test_errors_that_a_person_must_mend_are_passed_on_at_once(tmp_path, code):
    watch = Watch(ResilienceConfig(), tmp_path)
    assert run_processes(1, ["sh", "-c", f"echo x >> {tmp_path}/tries; exit {code}"], watch, module=False) == code
    assert (tmp_path / "tries").read_text() == "x\n"
    assert not (tmp_path / "incidents").exists()


@pytest.mark.parametrize(("absent_at", "code", "tries", "pages"), [(1, 1, 1, 0), (2, 0, 3, 2)])
def test_a_group_that_does_not_come_ends_only_the_first_attempt(small, capfd, absent_at, code, tries, pages):
    found = small(f"""
        if attempt == {absent_at}:
            heartbeat.failed(AbsentGroupsError('Group 1 did not join.'))
            sys.exit(1)
        if attempt < {absent_at}:
            os.abort()
    """)
    assert (*found[:2], len(found[2])) == (code, tries, pages)
    assert "Group 1 did not join." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "until", "code", "tries", "done"),
    [
        ("OSError(28, 'No space left on device')", 3, 0, 3, "restarts the run (attempt 3)"),
        ("OSError(28, 'No space left on device')", 9, 4, 3, "(exit code 4): 3 attempts without progress"),
        ("MemoryError()", 9, 4, 2, "restarts the run (attempt 2)"),  # a person must mend it
    ],
)
def test_a_restart_that_finds_the_disk_full_is_tried_again(small, error, until, code, tries, done):
    lines = f"""
        if attempt == 1:
            heartbeat.beat('step', 5)
            os.abort()
        if attempt < {until}:
            heartbeat.failed({error})
            sys.exit(4)
    """
    *found, pages = small(lines, restarts=2)
    assert found == [code, tries]
    assert done in pages[-1]["done"]


def test_ranks_that_only_noticed_the_end_of_another_are_heard_once_and_last(tmp_path, capfd):
    script = tmp_path / "lost.py"
    script.write_text(
        "import os, sys, time\n"
        "from zero2all.common.errors import PeerFailureError, UsageError\n"
        "from zero2all.resilience import heartbeat\n"
        "heartbeat.attach()\n"
        "said = [f'{sys.argv[1]}/said-{rank}' for rank in (0, 2)]\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not all(map(os.path.exists, said)): time.sleep(0.01)\n"
        "    time.sleep(0.5)\n"  # the others end first, but it does not matter
        "    sys.exit('the cause')\n"
        "assert heartbeat.failed(PeerFailureError('a rank is gone')), 'there is a parent'\n"
        "open(said[int(os.environ['RANK']) // 2], 'w').close()\n"
        "sys.exit(1)\n"
    )
    assert run_processes(3, [sys.executable, str(script), str(tmp_path)], module=False) == 1
    said = ["the cause", "z2a: a rank is gone", "z2a: Rank 2 says the same."]
    assert capfd.readouterr().err.splitlines() == said


def test_a_file_and_an_address_announce_the_end_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "LOOK_SECONDS", 0.0)
    by_file = Notices(ResilienceConfig(preempt_file=str(tmp_path / "notice")))
    assert by_file.due() == ""
    (tmp_path / "notice").write_text("TRUE")
    assert "announces that this machine will be taken away" in by_file.due()
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/notice"
        by_address = Notices(ResilienceConfig(preempt_url=url))
        wait_until(by_address.due)
        assert f"{url} announces" in by_address.due()
        server.shutdown()


def test_a_deadline_ends_in_a_save(program, capfd):
    assert program(steps=100_000, deadline=1.0) == (10, [])
    assert "the deadline (resilience.deadline) has come" in capfd.readouterr().err


def test_a_deadline_may_be_a_time_of_day_and_must_lie_ahead():
    assert 0 < ResilienceConfig(deadline="06:30").seconds_left() <= 86_400
    for wrong, said in (
        ({"deadline": "2020-01-01T06:30"}, "a moment in the future"),
        ({"deadline": "soon"}, "a time of day such as 06:30"),
        ({"limits": {"steps": 3.0}}, "a phase: start, first_step, data, step"),
    ):
        (problem,) = ResilienceConfig(**wrong).problems("resilience")
        assert said in str(problem)


SUPERVISED = """
import sys
from pathlib import Path
from zero2all.common.progress import show_log
from zero2all.parallel.launch import run_processes
from zero2all.resilience.config import ResilienceConfig
from zero2all.resilience.supervisor import Watch
show_log()
sys.exit(run_processes(2, sys.argv[2:], Watch(ResilienceConfig(), Path(sys.argv[1])), module=False))
"""


def test_nothing_survives_a_supervisor_that_is_killed_not_even_a_stopped_rank(program, tmp_path):
    words = [sys.executable, str(tmp_path / "loop.py"), str(tmp_path), "100000"]
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISED, str(tmp_path), *words])
    try:
        wait_until(lambda: is_stepping(tmp_path))
        children = psutil.Process(supervisor.pid).children(recursive=True)
        stopped = next(child for child in children if child.environ().get("RANK") == "1")
        stopped.suspend()
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_until(lambda: not any(is_there(child) for child in children))


def is_there(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


IN_TERMINAL = """
import os, signal, sys, time
def asked(*_):
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    os.write(2, b"asked\\n")  # a print may have been interrupted
signal.signal(signal.SIGINT, asked)
os.write(2, b"ready\\n")
while True:
    if os.environ["RANK"] == "0" and os.ttyname(1) == os.ttyname(2):  # or lines could overtake each other
        os.write(2, "size {} {}\\n".format(*os.get_terminal_size(2)).encode())
    time.sleep(0.02)
"""


def test_under_a_terminal_the_first_rank_has_its_size_and_obeys_its_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    ours, theirs = os.openpty()
    screen = Screen(ours)
    screen.resize(90, 40)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, str(tmp_path), sys.executable, "-c", IN_TERMINAL],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(theirs)
        screen.wait_for(b"ready", times=2)
        screen.wait_for(b"size 90 40")
        screen.resize(70, 30)
        screen.wait_for(b"size 70 30")
        ranks = [one for one in psutil.Process(supervisor.pid).children() if "RANK" in one.environ()]
        os.write(ours, b"\x1a")  # Ctrl-Z
        wait_until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in ranks))
        wait_until(lambda: psutil.Process(supervisor.pid).status() == psutil.STATUS_STOPPED)
        screen.seen = b""
        supervisor.send_signal(signal.SIGCONT)
        screen.wait_for(b"size")
        os.write(ours, b"\x03")
        screen.wait_for(b"asked", times=2)  # both ranks: two signals that wait are one
        os.write(ours, b"\x03")
        assert supervisor.wait(120) == 130
    finally:
        supervisor.kill()
        supervisor.wait()
        os.close(ours)


def test_limits_are_set_or_learned_and_the_first_steps_get_longer():
    seen = {"step": (50, 20.0), "save": (1, 3.0)}
    step = Beat(100, "step", seen=seen)
    assert phase_limit(step, {}, {}) == 100.0  # five times the longest
    assert phase_limit(step, {"step": 7.0}, {}) == 7.0
    assert phase_limit(Beat(3, "step", seen={"step": (0, 20.0)}), {"step": 7.0}, {}) == 1800.0
    assert phase_limit(Beat(3, "step", seen={"step": (0, 20.0)}), {"first_step": 9.0}, {}) == 9.0
    before = {"first_step": (2, 100.0)}  # in an attempt before
    assert phase_limit(Beat(3, "step", step=9, first_step=8, seen={"step": (0, 0.0)}), {}, before) == 500.0
    assert phase_limit(Beat(3, "step", step=9, first_step=8), {}, {"first_step": (2, 1.0)}) == 300.0
    assert phase_limit(Beat(3, "step", step=9, first_step=8), {}, {"first_step": (1, 1.0)}) == 1800.0
    assert phase_limit(Beat(3, "step", step=30, first_step=8), {}, before) == 1800.0  # another stage
    assert phase_limit(Beat(100, "save", seen=seen), {}, {}) == 1800.0  # seen once
    assert phase_limit(Beat(100, "save", seen=seen), {}, {"save": (1, 30.0)}) == 150.0
    assert phase_limit(Beat(100, "data", seen={"data": (50, 0.001)}), {}, {}) == 60.0
    assert phase_limit(Beat(), {}, {"start": (4, 0.1)}) == 1800.0  # not learned: imports may be slow this time
    waits = Beat(100, "groups", seen={"groups": (50, 0.1)})
    assert phase_limit(waits, {}, {}) == 1800.0  # another group decides how long it takes
    assert phase_limit(waits, {"groups": 9.0}, {}) == 9.0


def test_waiting_for_other_groups_is_a_phase_in_the_middle_of_another(monkeypatch):
    file = heartbeat.heartbeat_file(1)
    monkeypatch.setattr(heartbeat, "_own", heartbeat.Heartbeat(file, 0))
    slots, seen = heartbeat.Slots(file, 1), []
    heartbeat.beat("save", 7)
    with heartbeat.waiting_for_groups():
        seen.append(slots.beat(0))
    seen.append(slots.beat(0))
    assert [(one.phase, one.step) for one in seen] == [("groups", 7), ("save", 7)]
    slots.close()
    os.close(file)


ASSERT_LINES = [
    "kernel.cu:111: block: [0,0,0] Assertion `index < sizes[i]` failed.",
    "terminate called after throwing an instance of 'c10::AcceleratorError'",
    "  what():  CUDA error: device-side assert triggered",
    "frame #1: <unknown function>",
]


def test_native_code_that_aborts_has_said_why():
    aborted = RankFacts(0, 1, -signal.SIGABRT, output=["step 9 loss 3.1", *ASSERT_LINES])
    assert "Assertion `index < sizes[i]` failed" in aborted.failure()
    assert "device-side assert" in aborted.failure()
    assert "frame #1" not in aborted.failure()
    assert RankFacts(0, 1, -signal.SIGKILL, output=["what(): an old line"]).failure() == "", "it could say nothing"


def test_the_advice_tells_errors_of_programs_from_those_of_the_gpu():
    for output, kernel, words in (
        (ASSERT_LINES, ["NVRM: Xid (PCI:0000:00:06): 43, pid=9, name=z2a rank 0"], "A check in a kernel failed"),
        ([], ["NVRM: Xid (PCI:0000:00:06): 31, pid=9"], "that programs cause"),
        ([], ["NVRM: Xid (PCI:0000:00:06): 31, pid=9", "NVRM: Xid (PCI:0000:00:06): 79, pid=9"], "take this machine"),
    ):
        facts = RankFacts(0, 1, -signal.SIGABRT, output=output)
        assert words in Failure("crash", 0, 9, "step", "", "", 1, [facts], kernel).advice()[0]


def test_signals_reach_the_ranks_of_a_supervised_run(program, tmp_path):
    once_stepping(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert program(steps=100_000) == (10, [])
