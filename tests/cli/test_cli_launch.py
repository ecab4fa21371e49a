"""Files that start a run on a cluster, and a run started over a real ssh server."""

import math
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.track.sshd import Sshd, start_sshd
from tests.waiting import wait_until
from zero2all.common.errors import GAVE_UP_CODE, NEVER_AGAIN, PeerFailureError, PreemptedError, UserError
from zero2all.parallel.job_files import slurm_seconds
from zero2all.parallel.ssh import run_on_hosts
from zero2all.resilience.supervisor import FINAL_CODES


def test_the_slurm_file_is_a_shell_script_that_starts_one_task_per_machine_and_leaves_time_to_save(z2a, tmp_path):
    path = tmp_path / "job.sh"
    words = ["launch", "slurm", "quickstart", "--nodes", "2", "--out", path, "--data.mixture", "{en: 2, zh: 1}"]
    assert f"sbatch {path}" in z2a.done(*words)
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    options = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=TERM@300", "--requeue")
    assert [option for option in options if f"#SBATCH {option}\n" not in text] == []
    joined = text.replace("\\\n", "").splitlines()
    started = next(shlex.split(line) for line in joined if line.strip().startswith("srun "))
    assert started[5:9] == [sys.executable, "-m", "zero2all", "train"]
    assert "--data.mixture {en: 2, zh: 1} --nodes 2 --node-rank $1" in " ".join(started)
    assert "--no-kill" not in text
    assert "#SBATCH --no-kill\n" in z2a("launch", "slurm", "quickstart", "--nodes", "1:2").out
    off = z2a("launch", "slurm", "quickstart", "--nodes", "2", "--resilience.supervise", "false").out
    assert "--resilience.supervise false --resilience.supervise true" in off.replace("\\\n", "")


SRUN = """
number=$(echo "$@" | sed 's/.*--node-rank \\([0-9]*\\).*/\\1/')
echo "$@" >> $FOLDER/started-$number
[ "$number" = 1 ] && [ $(wc -l < $FOLDER/started-1) = 1 ] && exit 137
while [ ! -s $FOLDER/started-1 ] || [ $(wc -l < $FOLDER/started-1) -lt 2 ]; do sleep 0.05; done
exit "$CODE"
"""


def test_what_the_slurm_file_does_when_a_machine_is_lost_and_at_the_end(z2a, tmp_path, monkeypatch):
    """A machine that was killed starts again and joins; codes 10 and 1 go back to the queue, 1 at most three times in a
    row, and others do not: with stand-ins for Slurm's two programs."""
    monkeypatch.chdir(tmp_path)
    text = z2a("launch", "slurm", "quickstart", "--nodes", "1:2").out
    hosts = f'[ "$1" = show ] && echo "gpu3 gpu7" || echo "$@" >> {tmp_path}/asked'
    for name, lines in (("srun", SRUN), ("scontrol", hosts), ("sleep", '[ "$1" = 5 ] || /bin/sleep 0.02')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    for code, restarts in ((10, 0), (1, 1), (16, 2), (1, 3), (1, 4), (10, 5), (1, 6)):
        path = f"{tmp_path}:{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "CODE": str(code), "FOLDER": str(tmp_path), "SLURM_JOB_ID": "30007"}
        variables["SLURM_RESTART_COUNT"] = str(restarts)
        ended = subprocess.run(["bash", "-c", text], env=variables, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == code
        assert ("missing 4 times in a row" in ended.stderr) is (restarts == 4), ended.stderr
    assert (tmp_path / "asked").read_text() == "requeue 30007\n" * 5
    words = (tmp_path / "started-1").read_text().splitlines()
    assert len(words) >= 2
    assert all("--nodelist=gpu7" in each and each.endswith("--rendezvous gpu3:20007") for each in words)


def test_the_manifest_gives_each_pod_its_number_and_time_to_save(z2a):
    out = z2a.done("launch", "kubernetes", "quickstart", "--nodes", "3", "--gpus-per-node", "4", "--claim", "data")
    secret, job = yaml.safe_load_all(out)
    assert (job["kind"], job["metadata"]["name"]) == ("JobSet", "z2a-quickstart")
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["command"][:4] == ["python", "-m", "zero2all", "train"]
    meeting = "z2a-quickstart-node-0-0.z2a-quickstart:29500 --rendezvous-bind [$(POD_IP)]:29500"
    words = f"--nodes 3 --node-rank $(NODE_RANK) --rendezvous {meeting}"
    assert container["command"][-8:] == words.split()
    given = {one["name"]: one["valueFrom"] for one in container["env"]}
    assert given["Z2A_SECRET"] == {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "secret"}}
    assert (secret["kind"], len(secret["stringData"]["secret"])) == ("Secret", 43)
    assert spec["backoffLimit"] > 0, "a pod that fails must be replaced"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "data"}


def all_kinds(kind):
    return {kind}.union(*map(all_kinds, kind.__subclasses__()))


def test_no_code_that_would_come_again_is_tried_again_by_supervisor_slurm_or_kubernetes(z2a):
    """Every error of ours is final, or one of the two that another attempt cures; nobody keeps a list of his own."""
    known = {error.exit_code for error in all_kinds(UserError)} | {GAVE_UP_CODE}
    final = sorted(known - {PeerFailureError.exit_code, PreemptedError.exit_code})
    assert list(NEVER_AGAIN) == final == [2, 3, 4, 12, 13, 14, 15, 16]
    assert set(final) < set(FINAL_CODES)
    slurm = z2a("launch", "slurm", "quickstart", "--nodes", "2").out
    assert f"            {'|'.join(map(str, [0, 10, *final]))}) return $code ;;" in slurm
    for nodes, whole in (("2", final), ("1:3", [code for code in final if code != 16])):
        _, job = yaml.safe_load_all(z2a("launch", "kubernetes", "quickstart", "--nodes", nodes).out)
        spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
        rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
        assert rules["FailJob"]["onExitCodes"]["values"] == whole
    assert rules["FailIndex"]["onExitCodes"]["values"] == [16], "the run goes on without a bad machine"
    assert (spec["maxFailedIndexes"], spec["backoffLimitPerIndex"]) == (2, 1000)


def test_partition_account_a_file_name_with_a_blank_and_one_machine_without_the_flags_of_several(z2a, tmp_path):
    path = tmp_path / "a job.sh"
    words = ["--nodes", "2", "--partition", "gpu", "--account", "lab", "--out", path]
    assert f"sbatch '{path}'" in z2a.done("launch", "slurm", "quickstart", *words)
    assert "#SBATCH --partition=gpu\n#SBATCH --account=lab\n#SBATCH --nodes=2\n" in path.read_text()
    for kind in ("slurm", "kubernetes"):
        text = z2a.done("launch", kind, "quickstart", "--nodes", "1").replace("which is its --node-rank", "")
        assert [words for words in ("--rendezvous", "Secret", "--node-rank") if words in text] == []


def test_a_time_limit_is_read_as_slurm_reads_it():
    read = {"90": 5400, "1:30": 90, "1:00:00": 3600, "2-12": 216000, "1-0:1:1": 86461, "UNLIMITED": math.inf}
    assert {text: slurm_seconds(text) for text in read} == read


def test_a_job_that_could_not_run_is_refused(z2a):
    for words, said in (
        ("slurm --nodes 2 --time banana", "--time is 'banana'. Expected a time limit as Slurm reads it"),
        ("slurm --nodes 2 --time 5", "--save-seconds is 300, and --time 5 is not longer"),
        ("slurm --nodes 2 --diloco.groups [a:1,b:1]", "Start one job per group"),
        ("ssh --hosts a,a", "--hosts is 'a,a'. Expected two or more different hosts"),
        ("ssh --hosts [fd00::1],[fd00::2]", "--hosts is '[fd00::1],[fd00::2]'. Expected two or more different"),
    ):
        kind, *flags = words.split()
        assert said in z2a.refused(2, "launch", kind, "quickstart", *flags)


def test_a_secret_is_made_once_and_a_manifest_with_one_is_for_its_user_only(z2a, tmp_path):
    path, job = tmp_path / "z2a.secret", tmp_path / "job.yaml"
    assert f"--secret-file {path}" in z2a("launch", "secret", str(path)).out
    assert (path.stat().st_mode & 0o777, len(path.read_text().strip())) == (0o600, 43)
    again = z2a("launch", "secret", str(path))
    assert (again.code, f"{path} cannot be made: File exists" in again.err) == (2, True)
    z2a("launch", "kubernetes", "quickstart", "--nodes", "2", "--out", str(job))
    assert job.stat().st_mode & 0o777 == 0o600


def test_what_the_pods_cannot_see_is_said(z2a, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("train: {steps: 5}\n")
    ended = z2a("launch", "kubernetes", str(path), "--nodes", "2", "--work", "/data/ws")
    assert "--work /data/ws is not in /workspace" in ended.err
    assert f"the pods read the config at {path}" in ended.err
    assert z2a("launch", "kubernetes", "quickstart", "--nodes", "2", "--work", "ws").err == ""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    with start_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


SECRET = "a secret of sixteen bytes or more"


def on_two(sshd: Sshd, folder: Path, *scripts: str) -> int:
    hosts = dict(zip((sshd.alias, f"root@{sshd.alias}"), (["sh", "-c", script] for script in scripts), strict=True))
    return run_on_hosts(hosts, str(folder), [*sshd.command, "-T", "-o", "BatchMode=yes"], SECRET)


def once_there(folder: Path, pattern: str, count: int, act: Callable[[], object]) -> threading.Thread:
    def wait():
        wait_until(lambda: len(list(folder.glob(pattern))) == count)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_host_gets_the_secret_but_no_command_line_shows_it(sshd, tmp_path):
    waits = 'echo "$Z2A_SECRET" > got; until [ -e seen ]; do sleep 0.05; done; exit 0'
    shown = []

    def look():
        shown.extend(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
        (tmp_path / "seen").touch()

    looking = once_there(tmp_path, "got", 1, look)
    assert on_two(sshd, tmp_path, waits, "exit 0") == 0
    looking.join(30)
    assert (tmp_path / "got").read_text() == f"{SECRET}\n"
    assert any("until [ -e seen ]" in line for line in shown)
    assert not any(SECRET in line for line in shown)


def test_hosts_print_with_their_name_and_the_first_failure_is_the_end_of_all(sshd, tmp_path, capfd):
    fails = "pwd; until [ -e ready ]; do sleep 0.05; done; exit 7"
    saves = "trap 'echo saved; exit 10' TERM; touch ready; while :; do sleep 0.1; done"
    assert on_two(sshd, tmp_path, fails, saves) == 7
    said = capfd.readouterr()
    assert [words for words in (f"far-box: {tmp_path}\n", "root@far-box: saved\n") if words not in said.out] == []
    assert "far-box ended with code 7" in said.err


def test_ctrl_c_reaches_every_host(sshd, tmp_path):
    once_there(tmp_path, "ready-*", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    wait = "trap 'exit 10' TERM; touch ready-{}; while :; do sleep 0.1; done"
    assert on_two(sshd, tmp_path, wait.format(0), wait.format(1)) == 10


def test_a_far_command_ends_when_the_connection_is_lost(sshd, tmp_path):
    def cut():
        next(child for child in psutil.Process().children() if child.name() == "ssh").kill()

    once_there(tmp_path, "ready", 1, cut)
    wait = "trap 'touch ended; exit 10' TERM; touch ready; while :; do sleep 0.1; done"
    assert on_two(sshd, tmp_path, wait, "exit 0") == 128 + signal.SIGKILL
    wait_until(lambda: (tmp_path / "ended").exists())
