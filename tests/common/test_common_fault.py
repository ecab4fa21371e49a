"""When the faults of a plan happen, and what some of them do."""

import json
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from zero2all.common.fault import FAULTS, KINDS, InjectedError, fault_point
from zero2all.resilience.chaos import PlannedFault, happened, install_plan


@pytest.fixture
def plan(tmp_path, monkeypatch):
    def install(*faults: PlannedFault, fresh: bool = False):
        path = install_plan(faults, tmp_path / "chaos", tmp_path / "run", None, fresh)
        monkeypatch.setenv(FAULTS, str(path))
        return path

    return install


def strikes(point: str, step: int) -> bool:
    with suppress(InjectedError):
        fault_point(point, step)
        return False
    return True


def test_a_fault_happens_once_at_its_step_point_and_rank_also_after_a_restart(plan, monkeypatch):
    faults = [PlannedFault("raise", 0, step=3), PlannedFault("raise", 1, step=4), PlannedFault("raise", point="file")]
    path = plan(*faults)
    assert [strikes("step", step) for step in (1, 2, 3, 3, 4)] == [False, False, True, False, False]
    assert strikes("file", 9)
    monkeypatch.setenv("RANK", "1")
    assert strikes("step", 4)
    assert {number: where["step"] for number, where in happened(path).items()} == {0: 3, 1: 4, 2: 9}
    plan(*faults)  # the same command again
    assert not strikes("step", 4)
    plan(*faults, fresh=True)
    assert strikes("step", 4)


def test_all_means_each_rank_once_and_every_means_each_time(plan, monkeypatch):
    plan(PlannedFault("raise", "all", step=3), PlannedFault("raise", 2, point="update", every=True))
    found = []
    for rank in (0, 1, 2, 2):
        monkeypatch.setenv("RANK", str(rank))
        found.append((strikes("step", 3), strikes("update", 1), strikes("update", 2)))
    assert found == [(True, False, False), (True, False, False), (True, True, True), (False, True, True)]


def test_a_fault_happens_after_its_time_which_counts_from_the_start_of_the_command_and_not_when_it_is_over(plan):
    plan(PlannedFault("raise", step=3, before=1e-6), PlannedFault("raise", step=4, before=100.0))
    assert [strikes("step", step) for step in (3, 4)] == [False, True]
    before = time.monotonic()
    path = plan(PlannedFault("raise", after=100.0), fresh=True)
    assert before <= json.loads(path.read_text())[0]["due"] - 100 <= time.monotonic()
    assert not strikes("step", 5)


def test_what_faults_change(tmp_path):
    batch = SimpleNamespace(tokens=torch.arange(12).view(2, 6))
    KINDS["poison_batch"]({"batch": batch})
    assert sorted(batch.tokens.view(-1).tolist()) == list(range(12))
    assert (batch.tokens.view(-1) != torch.arange(12)).sum() > 6
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    KINDS["weight_bit"]({"state": SimpleNamespace(model=model)})
    assert torch.equal(model.weight.detach().view(-1)[:1], -before.view(-1)[:1])
    assert torch.equal(model.weight.detach().view(-1)[1:], before.view(-1)[1:])
    for step in (4, 8):
        folder = tmp_path / f"run/checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(500))
    KINDS["flip_file"]({"run": str(tmp_path / "run")})
    changed = [path.parent.name for path in tmp_path.rglob("*.safetensors") if path.read_bytes().count(0) == 499]
    assert changed == ["step-00000008"]
