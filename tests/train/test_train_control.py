"""What the processes of a run say to each other: nothing between ordinary steps, and what one alone knows in time. All
have the same settings, operators and folder of the run, or none of them starts."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.processes import WarmProcess
from tests.train.conftest import NO_DROPOUT
from tests.train.ranks import CODE, RankStarter
from zero2all.common.errors import BadInputError, UsageError, error_values
from zero2all.config.training import AnnealConfig
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.parallel.world import World
from zero2all.train import run as run_module
from zero2all.train.anneal import read_anneal, request_anneal
from zero2all.train.build import resolve_together
from zero2all.train.checkpoints.run_lock import LOCK_NAME, RunLock, hold_run
from zero2all.train.resume import changed_operators

STEPS, STEP_TOKENS = 8, 160
LISTINGS = ("os.listdir", "os.scandir")
FOUND = "between steps: "
HERE = "from tests.train import test_train_control as here"


def settings(config, name, **data):
    train = {"name": name, "steps": STEPS, "tokens_per_step": STEP_TOKENS, "precision": "float64"}
    valid = {"every_steps": 0, "tokens_per_source": 128}
    return config(model=NO_DROPOUT, data=data, train=train, checkpoint={"every_steps": 0}, validation=valid)


def count_traffic() -> None:
    """Print before every step what happened since the step before: collectives outside of steps, on any group and in
    any thread, and folders that were listed."""
    import torch.distributed as dist

    from zero2all.train import trainer

    listed: list[str] = []
    before: dict[str, int] = {}
    train_step = trainer.train_step
    sys.addaudithook(lambda event, arguments: listed.append(str(arguments)) if event in LISTINGS else None)

    def collectives() -> int:
        """All that this process has begun, of pickled objects too: groups count them."""
        return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)

    def counted(state: Any, *rest: Any) -> Any:
        if before:
            found = {"step": state.step, "collectives": collectives() - before["collectives"], "listed": listed}
            print(f"{FOUND}{json.dumps(found)}", flush=True)
        pending = train_step(state, *rest)
        listed.clear()
        before["collectives"] = collectives()
        return pending

    trainer.train_step = counted


def request_after_step_1(run: Path) -> None:
    """Ask for an anneal of 3 steps, and let the watch look at once."""
    from zero2all.train import trainer
    from zero2all.train.hooks import anneal

    anneal.WATCH_SECONDS = 0.001
    train_step = trainer.train_step

    def asking(state: Any, *rest: Any) -> Any:
        pending = train_step(state, *rest)
        if state.step == 1:
            request_anneal(run, 3, "linear", 0.0)
        return pending

    trainer.train_step = asking


def test_between_two_steps_no_collective_begins_and_no_folder_is_listed_on_any_rank(ranks, config):
    launch = ranks.finished(settings(config, "silent"), 2, code=f"{HERE}; here.count_traffic(); {CODE}")
    for trainer in launch.trainers:
        lines = [line for line in trainer.text().splitlines() if line.startswith(FOUND)]
        found = [json.loads(line.removeprefix(FOUND)) for line in lines]
        assert found == [{"step": step, "collectives": 0, "listed": []} for step in range(1, STEPS)]


def test_a_request_that_only_rank_0_finds_anneals_all_from_the_same_step(ranks, lab, config):
    run = lab.run("asked")
    code = f"{HERE}; from pathlib import Path; here.request_after_step_1(Path({str(run)!r})); {CODE}"
    launch = ranks.finished(settings(config, "asked"), 2, code=code)
    record = read_anneal(run, 99)
    assert record == AnnealConfig(record.from_step, 3, "linear", 0.0)
    assert 1 < record.from_step <= STEPS  # a thread looks, so not at a step known beforehand
    rates = [[step.lr for step in launch.steps(rank)] for rank in range(2)]
    assert rates[0] == rates[1]
    assert len(rates[0]) == record.from_step + 3
    assert rates[0][-1] == 0.0


def test_four_ranks_train_save_and_resume_where_no_process_can_read_a_pickle(lab, config, tmp_path):
    hook = Path(__file__).with_name("no_pickle")  # its sitecustomize is imported before torch
    warm = WarmProcess(PYTHONPATH=os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])]))
    starter = RankStarter(warm, lab.root, tmp_path)
    code = f"import pickle; assert pickle.loads.__module__ == 'sitecustomize'; {CODE}"
    asked = [settings(config, "no pickle", reader_kind=kind) for kind in ("thread", "process")]
    try:
        stopped = starter(asked[0], 4, signals={2: (3, signal.SIGTERM, 0.0)}, code=code)
        assert stopped.wait() == [10] * 4, stopped.text()
        resumed = starter.finished(asked[1], 4, code=code)
    finally:
        starter.stop()
        warm.process.communicate()
    assert [step.step for step in stopped.steps() + resumed.steps()] == list(range(1, STEPS + 1))
    assert "a pickle is read by" not in stopped.text() + resumed.text()


def test_a_process_with_another_setting_ends_all_of_them_before_the_first_step(ranks, config):
    launch = ranks(config(train={"steps": 4}), processes=2, words={1: ["--ops.attention", "math"]})
    assert launch.wait() == [2, 2], launch.text()
    said = "ops.attention 'math' instead of 'auto'"
    assert all(said in trainer.text() for trainer in launch.trainers), launch.text()
    assert launch.steps() == []


def of_two(other):
    """Rank 0 of two processes; what rank 1 says is `other` of what rank 0 says."""

    class WorldOfTwo(World):
        def gather(self, value):
            return [value, other(value)]

    return WorldOfTwo(0, 2)


def test_processes_that_choose_different_operators_or_find_none_all_end():
    """The same settings: only the machines differ."""

    def takes_another(value):
        return {**value, "attention": "math"} if isinstance(value, dict) else value

    with pytest.raises(UsageError, match="attention is sdpa on rank 0 and math on rank 1"):
        resolve_together(OpsConfig(), OpContext("cpu"), of_two(takes_another))
    none = [error_values(UsageError("no kernel")), "there"]
    with pytest.raises(UsageError, match="Rank 1 on there: no kernel"):
        resolve_together(OpsConfig(), OpContext("cpu"), of_two(lambda value: none if value is None else value))


def test_changed_operators_are_told_and_unknown_and_renamed_ones_are_not():
    before = {"attention": {"got": "sdpa"}, "rope": {"got": "eager"}, "linear": {"got": "into32"}}
    now = {"attention": "fa4", "rope": "eager", "swiglu": "torch", "linear": "fp32_wgrad"}
    assert changed_operators(before, now) == ["attention sdpa -> fa4"]


def test_a_rank_that_does_not_see_the_lock_of_rank_0_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "SHARED_SECONDS", 0.3)
    with hold_run(tmp_path / "here") as lock:
        run_module.require_shared(World(), lock)
        for path in (tmp_path / "there" / LOCK_NAME, lock.path):  # no folder; and a folder with a lock of its own
            with pytest.raises(BadInputError, match=r"do not share the folder of the run.*not seen by rank 0 on"):
                run_module.require_shared(World(), RunLock(path, lock.token if path != lock.path else "another", []))


def test_a_file_that_is_seen_late_is_waited_for(tmp_path):
    with hold_run(tmp_path / "here") as lock:
        late = RunLock(tmp_path / "late", lock.token, [])
        threading.Timer(0.5, lambda: late.path.write_bytes(lock.path.read_bytes())).start()
        run_module.require_shared(World(), late)
