"""Checkpoints are evaluated as they are committed: beside training, shared, exactly once, whoever is killed."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.processes import Z2A
from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json, write_json
from zero2all.common.lock import this_process
from zero2all.evals.options import report_path, write_report
from zero2all.evals.watch import Watcher
from zero2all.track.reader import RunReader
from zero2all.train.checkpoints.layout import checkpoint_folder, list_checkpoints
from zero2all.train.checkpoints.retention import claim_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints, as far as their names go, whose training goes on."""
    for step in (10, 20, 30):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    return tmp_path


def report_of(step: int) -> dict:
    return {"run": "r", "step": step, "tokens": 100 * step, "documents": {"en": {"bits_per_byte": 1 / step}}}


def watch_once(run: Path, **settings) -> Watcher:
    watcher = Watcher(run, settings.pop("evaluate", report_of), say=lambda _: None, **settings)
    watcher.watch(once=True)
    return watcher


def reports(run: Path) -> list[int]:
    return sorted(read_json(path)["step"] for path in (run / "eval").glob("step-*.json"))


def test_every_checkpoint_is_evaluated_at_its_step_oldest_first_and_only_once(run):
    assert watch_once(run, is_wanted=lambda step: step == 20).evaluated == [20]
    assert (watch_once(run).evaluated, reports(run)) == ([10, 30], [10, 20, 30])
    assert watch_once(run).evaluated == []
    points = RunReader(run).series("eval/documents/bpb/en")
    found = list(zip(points.step, points.tokens, points.value, strict=True))
    assert found == [(step, 100 * step, 1 / step) for step in (10, 20, 30)]


def test_a_checkpoint_that_another_watcher_has_is_left_to_it(run):
    def evaluate(step):
        with claim_step(run, step) as claim:
            assert claim is None, "it is claimed while it is evaluated"
        return report_of(step)

    with claim_step(run, 10):
        assert watch_once(run, evaluate=evaluate).evaluated == [20, 30]
    assert watch_once(run).evaluated == [10]
    assert list((run / "checkpoints/claims").iterdir()) == []


def test_a_checkpoint_deleted_before_it_was_evaluated_is_named(run):
    def evaluate(step):
        if step == 10:
            for gone in (20, 30):
                checkpoint_folder(run, gone).rmdir()
            write_json(report_path(run, 30), report_of(30))  # another watcher has done it in time
        return report_of(step)

    watcher = watch_once(run, evaluate=evaluate)
    assert (watcher.evaluated, list(watcher.left_out)) == ([10], [20])


def test_a_report_with_other_settings_is_kept_under_another_name(run):
    said: list[str] = []
    for limit in (1, 1, 2, 3):
        report = {**report_of(10), "settings": {"limit": limit, "texts": ()}}
        write_report(report_path(run, 10, "harness-"), report, said.append)
    assert len(said) == 2
    assert "harness-step-00000010.earlier-1.json" in said[0]
    kept = {path.name: read_json(path)["settings"]["limit"] for path in (run / "eval").iterdir()}
    names = {"": 3, ".earlier-1": 1, ".earlier-2": 2}
    assert kept == {f"harness-step-00000010{name}.json": limit for name, limit in names.items()}


def test_a_damaged_or_deleted_checkpoint_is_reported_and_skipped_and_tried_again_by_the_next_watcher(run):
    def evaluate(step):
        if step == 10:
            checkpoint_folder(run, 10).rmdir()
            raise FileNotFoundError("model-00000-00000.safetensors")
        if step == 20:
            raise BadInputError("a byte has changed")
        return report_of(step)

    watcher = watch_once(run, evaluate=evaluate)
    gone = "its checkpoint was deleted or moved while it was being read"
    assert (watcher.evaluated, watcher.left_out) == ([30], {10: gone, 20: "a byte has changed"})
    with pytest.raises(ZeroDivisionError):  # any other error ends the watcher and frees the checkpoint
        watch_once(run, evaluate=lambda step: step / 0)
    assert watch_once(run).evaluated == [20]


def test_what_a_watcher_found_after_it_lost_its_claim_is_dropped(run):
    def evaluate(step):
        if step == 10:
            write_json(run / "checkpoints/claims/step-00000010.json", {**this_process(), "token": "theirs"})
        return report_of(step)

    assert watch_once(run, evaluate=evaluate).evaluated == [20, 30]
    assert not report_path(run, 10).exists()


def bits(run: Path) -> dict[str, bytes]:
    folder = checkpoint_folder(run, 30)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def test_training_beside_a_watcher_that_is_killed_and_restarted_ends_with_its_bits(trained_workspace, tmp_path, start):
    """The run of all tests was trained alone; here it is trained once more, with a watcher beside it."""
    alone = trained_workspace.run("tiny")
    work = tmp_path / "work"
    shutil.copytree(trained_workspace.root, work, ignore=shutil.ignore_patterns("runs"))
    run, every_step = work / "runs/tiny", list(range(3, 31, 3))
    saves = ("--checkpoint.every_steps", "3", "--checkpoint.keep_last", "20")
    training = start("train", alone / "config.yaml", "--work", work, *saves)
    training.wait_until(lambda: bool(list_checkpoints(run)))

    asked = ("--max-bytes", "1000", "--probes", "none", "--pairs", "none")
    watch = ("eval", "watch", "tiny", "--work", work, "--poll-seconds", "0.05", "--niceness", "0", *asked)
    claims = run / "checkpoints/claims"
    killed = f"signal_when(lambda: any(Path({str(claims)!r}).glob('*.json')))"
    code = f"from pathlib import Path; from tests.moments import signal_when; {killed}; {Z2A}"
    assert start(*watch, code=code).wait() == -signal.SIGKILL
    assert len(list(claims.glob("*.json"))) == 1, "killed in the middle of an evaluation"
    done_before = reports(run)
    second = start(*watch)
    assert training.wait() == 0, training.text()
    assert second.wait() == 0, second.text()

    assert bits(run) == bits(alone)
    assert reports(run) == every_step, "nothing is lost"
    assert RunReader(run).series("eval/documents/bpb/en").step.tolist() == every_step
    assert f"{len(every_step) - len(done_before)} checkpoints evaluated" in second.text()
    assert list(claims.glob("*.json")) == []
