"""What two processes of a run say to each other: nothing between ordinary steps, and what one alone knows in time."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import WarmProcess
from tests.train.ranks import CODE, RankStarter
from zero2all.common.workspace import Workspace
from zero2all.config.training import AnnealConfig
from zero2all.train.anneal import read_anneal, request_anneal

STEPS, STEP_TOKENS = 8, 160
QUIET = {"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}


@pytest.fixture(scope="module")
def lab(shared_work, tmp_path_factory) -> Workspace:
    """A workspace that all tests here share."""
    root = tmp_path_factory.mktemp("control") / "work"
    shutil.copytree(shared_work.root, root)
    return Workspace(root)


@pytest.fixture(scope="module")
def ranks(warm, lab, tmp_path_factory):
    starter = RankStarter(warm, lab.root, tmp_path_factory.mktemp("ranks"))
    yield starter
    starter.stop()


def settings(config, name, **data):
    return config(
        model=QUIET,
        data=data,
        train={"name": name, "steps": STEPS, "tokens_per_step": STEP_TOKENS, "precision": "float64"},
        checkpoint={"every_steps": 0},
        validation={"every_steps": 0, "tokens_per_source": 128},
    )


# ---- inside a process ----


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


def request_after_step(step: int, run: Path) -> None:
    """Ask for an anneal of 3 steps after a step, and let the watch look at once."""
    from zero2all.train import trainer
    from zero2all.train.hooks import anneal

    anneal.WATCH_SECONDS = 0.001
    train_step = trainer.train_step

    def asking(state: Any, *rest: Any) -> Any:
        pending = train_step(state, *rest)
        if state.step == step:
            request_anneal(run, 3, "linear", 0.0)
        return pending

    trainer.train_step = asking


LISTINGS = ("os.listdir", "os.scandir")
FOUND = "between steps: "
HERE = "from tests.train import test_train_control as here"


# ---- the tests ----


def test_between_two_steps_no_collective_begins_and_no_folder_is_listed_on_any_rank(ranks, config):
    launch = ranks.finished(settings(config, "silent"), 2, code=f"{HERE}; here.count_traffic(); {CODE}")
    for trainer in launch.trainers:
        lines = [line for line in trainer.text().splitlines() if line.startswith(FOUND)]
        found = [json.loads(line.removeprefix(FOUND)) for line in lines]
        assert found == [{"step": step, "collectives": 0, "listed": []} for step in range(1, STEPS)]


def test_a_request_that_only_rank_0_finds_anneals_all_from_the_same_step(ranks, lab, config):
    run = lab.run("asked")
    code = f"{HERE}; from pathlib import Path; here.request_after_step(1, Path({str(run)!r})); {CODE}"
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
