"""The acceptance table is whole; `z2a chaos` on real training in two ranks: plans, and the faults of many rows."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.resilience.rows import ROWS
from tests.train.conftest import small_config
from tests.train.states import bits, events
from tests.waiting import wait_until
from zero2all.common.errors import UsageError
from zero2all.config import config_yaml
from zero2all.resilience.chaos import read_plan
from zero2all.track.reader import read_run
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.load import verified_checkpoint

ROOT = Path(__file__).parents[2]


def decorators(test: str) -> str | None:
    """What stands above a test; None where it does not exist."""
    file, name = test.split("::")
    found = re.search(rf"((?:^@.*\n(?:^[ )\]].*\n)*)*)^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)
    return None if found is None else found[1]


def test_every_row_has_a_test_that_exists_or_a_reason_and_15_are_quick():
    assert list(ROWS) == list(range(1, 53))
    tests = {row: tests for row, tests in ROWS.items() if isinstance(tests, list)}
    assert [name for names in tests.values() for name in names if decorators(name) is None] == []
    marks = re.compile(r"^@pytest.mark.(slow|chaos|soak)", re.MULTILINE)
    quick = [row for row, names in tests.items() if any(not marks.search(decorators(name) or "") for name in names)]
    assert len(quick) >= 15
    for guide in ("resilience.md", "resilience.zh.md"):
        text = (ROOT / "docs" / guide).read_text()
        assert [row for row in ROWS if not re.search(rf"^\| {row} \|", text, re.MULTILINE)] == []


def test_all_problems_of_a_plan_are_named_at_once(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "- {fault: kil, rank: 7, step: 80}\n"
        "- {fault: kill, point: stp}\n"
        "- {fault: disk_full, point: step}\n"
        "- {fault: kill}\n"
        "- {fault: kill, stepp: 3}\n"
    )
    with pytest.raises(UsageError) as error:
        read_plan(plan, ranks=2, steps=12)
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "fault 1.fault: got 'kil', expected a fault. Did you mean `kill`?",
        "fault 1.rank: got 7, expected a rank of this run (0 to 1), or all.",
        "fault 1.step: got 80, expected at most train.steps, 12.",
        "fault 2.point: got 'stp', expected a point. Did you mean `step`?",
        "fault 3.point: got 'step', expected one of file, manifest, rename.",
        "fault 4: got 'kill', expected step, point or after: when it happens.",
        "`fault 5` has no field `stepp`. Did you mean `step`?",
    ]


STEPS = 16
SECTIONS = {
    "model": {"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0},
    "train": {"steps": STEPS},
    "checkpoint": {"every_steps": 5},
    "validation": {"every_steps": 0, "tokens_per_source": 128},
    "parallel": {"device": "cpu", "cpu_threads": 1, "processes": 2},
}


@pytest.fixture(scope="module")
def lab(shared_work, tmp_path_factory):
    root = tmp_path_factory.mktemp("chaos") / "work"
    shutil.copytree(shared_work.root, root)
    (root / "ram").mkdir()
    lab = Lab(root)
    lab.ends_well("whole", command="train")
    return lab


class Lab:
    def __init__(self, root: Path) -> None:
        self.root = root
        limits = {"start": 600.0, "first_step": 60.0, "step": 10.0, "data": 10.0, "save": 60.0}  # for a busy machine
        memory = {"memory_every_steps": 2, "memory_folder": str(self.root / "ram")}
        config = small_config(**SECTIONS, resilience={"supervise": True, "limits": limits, **memory})
        (self.root / "config.yaml").write_text(config_yaml(config))

    def start(self, name: str, *faults: dict, command: str = "chaos") -> subprocess.Popen:
        plan = self.root / f"{name}.json"
        plan.write_text(json.dumps(faults))
        words = [*([plan] if command == "chaos" else []), self.root / "config.yaml", "--work", self.root]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "Z2A_LANG": "en"}
        line = [sys.executable, "-m", "zero2all", command, *map(str, words), "--train.name", name]
        with (self.root / f"{name}.log").open("a") as log:
            return subprocess.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT)

    def ended(self, process: subprocess.Popen) -> int:
        try:
            return process.wait(timeout=900)
        finally:
            process.kill()

    def ends_well(self, name: str, *faults: dict, command: str = "chaos") -> None:
        assert self.ended(self.start(name, *faults, command=command)) == 0, self.said(name)

    def run(self, name: str) -> Path:
        return self.root / "runs" / name

    def said(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()

    def starts(self, name: str) -> list[int | None]:
        """Of each start, the step from which it continued."""
        files = sorted(self.run(name).glob("metrics/train-*.jsonl"))
        return [json.loads(path.open().readline())["data"]["resumed_from"] for path in files]

    def check_same(self, name: str) -> None:
        """What holds in every row: bits, losses, and nothing left behind."""
        assert bits(self.run(name), STEPS) == bits(self.run("whole"), STEPS)
        losses = [read_run(self.run(each)).series["loss"].value.tolist() for each in (name, "whole")]
        assert losses[0] == losses[1]
        for folder in list_checkpoints(self.run(name)):
            verified_checkpoint(folder)
        assert list((self.run(name) / "checkpoints").glob("*.partial-*")) == []
        assert list((self.root / "ram").glob("zero2all-*/*/[ab]-*")) == []
        assert not [one for one in psutil.process_iter(["cmdline"]) if name in (one.info["cmdline"] or [])]


KILL = {"fault": "kill", "rank": 1, "step": 10}  # on disk is step 5, in memory are 6 and 8
CASES = {
    "1-kill": ([KILL], 8),
    "2-kill-all": ([{**KILL, "rank": "all"}], 8),
    "7-stop": ([{**KILL, "fault": "stop"}], 8),
    "9-hold-gil": ([{**KILL, "fault": "hold_gil"}], 8),
    "10-segfault": ([{**KILL, "fault": "segfault"}], 8),
    "10-abort": ([{**KILL, "fault": "abort"}], 8),
    "12-raise": ([{**KILL, "fault": "raise"}], 8),
    "13-in-copy": ([{**KILL, "rank": 0, "step": 8, "point": "memory"}], 6),
    # The loop goes on while a save is written: there may be a later one in memory.
    "14-file": ([{**KILL, "point": "file"}], 8),
    "15-manifest": ([{**KILL, "rank": 0, "point": "manifest"}], 8),
    "15-rename": ([{**KILL, "rank": 0, "point": "rename"}], 8),
    "15-renamed": ([{**KILL, "rank": 0, "point": "renamed"}], 10),
    "16-delete": ([{"fault": "kill", "rank": 0, "point": "delete"}], 15),
    "19-memory": ([{**KILL, "fault": "flip_memory"}, KILL], 6),
    "44-memory": ([{**KILL, "fault": "out_of_memory"}], 8),
    "22-disk-full": ([{**KILL, "fault": "disk_full", "rank": 0}], None),
    "25-io-error": ([{**KILL, "fault": "io_error", "rank": 0, "point": "manifest"}], None),
    "26-slow-disk": ([{"fault": "slow", "rank": 0, "point": "file", "seconds": 1.0, "every": True}], None),
    "29-one-rank": ([{**KILL, "fault": "io_error"}], None),
}  # row and name -> the plan, and the step from which the run must continue; None: it is not interrupted


@pytest.mark.chaos
@pytest.mark.parametrize("case", CASES)
def test_the_run_ends_with_the_bits_of_the_undisturbed_one(lab, case):
    faults, step = CASES[case]
    lab.ends_well(case, *faults)
    lab.check_same(case)
    assert "did not happen" not in lab.said(case)
    incidents = [event.data for event in events(lab.run(case), "incident")]
    if step is None:
        assert incidents == []
        failed = re.findall(r"The checkpoint of step (\d+) was not saved", lab.said(case))
        assert failed == [str(each["step"]) for each in faults if "step" in each]
        return
    (incident,) = incidents
    assert incident["kind"] == ("hang" if case in ("7-stop", "9-hold-gil") else "crash")
    assert incident["rank"] == faults[0]["rank"] or case == "2-kill-all"
    _, resumed = lab.starts(case)
    assert resumed == step if "point" not in faults[0] or case == "13-in-copy" else resumed >= step


@pytest.mark.chaos
def test_a_flipped_bit_of_a_weight_is_found_and_the_run_starts_again_from_its_checkpoint(lab):
    lab.ends_well("41-weight", {"fault": "weight_bit", "rank": 1, "step": 8})
    assert "replicas" in lab.said("41-weight")
    lab.check_same("41-weight")


@pytest.mark.chaos
def test_after_a_loss_of_everything_in_memory_the_disk_is_used(lab):
    process = lab.start("4-reboot", {"fault": "stop", "rank": "all", "step": 14})
    wait_until(lambda: lab.said("4-reboot").count("stop in rank") == 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in children:  # nobody is asked to save
        child.kill() if child.is_running() else None
    saved = max(step_of(folder) for folder in list_checkpoints(lab.run("4-reboot")))  # 10, if that save had ended
    shutil.rmtree(next((lab.root / "ram").glob("zero2all-*")))
    lab.ends_well("4-reboot", {"fault": "stop", "rank": "all", "step": 14})
    assert lab.starts("4-reboot") == [None, saved]
    lab.check_same("4-reboot")


@pytest.mark.chaos
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)], ids=["twice", "interrupt"])
def test_signals_during_a_save_leave_no_half_checkpoint(lab, numbers):
    name = f"6-{len(numbers)}"
    process = lab.start(name, {"fault": "slow", "rank": 0, "step": 10, "point": "file", "seconds": 3.0})
    wait_until(lambda: "slow in rank 0 (file" in lab.said(name))
    for number in numbers:
        process.send_signal(number)
        time.sleep(1.2)
    assert lab.ended(process) in (10, 130), lab.said(name)
    for folder in list_checkpoints(lab.run(name)):
        verified_checkpoint(folder)
    lab.ends_well(name, {"fault": "slow", "step": STEPS, "seconds": 0.1})
    lab.check_same(name)
