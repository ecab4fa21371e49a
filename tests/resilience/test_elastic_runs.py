"""`z2a train --nodes 1:2` in two network namespaces: one is cut off and heals, machine 0 is killed and comes back."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.elastic_soak import Soak, soak_on, surviving_rows
from benchmarks.two_machines import why_not
from tests.waiting import wait_until
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.load import verified_checkpoint

pytestmark = pytest.mark.slow
STEPS = 1500
SECTIONS = {
    "model": {"residual_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0},
    "validation": {"every_steps": 0, "tokens_per_source": 128},
}


@pytest.fixture
def soak(work, config_file) -> Iterator[Soak]:
    if problem := why_not():
        pytest.skip(problem)
    with soak_on(str(config_file(**SECTIONS)), work.root) as found:
        for node in (0, 1):
            found.start(node, "run", STEPS)
        until(lambda: len(rows_of(found)) > 5, found)
        yield found


def log(soak: Soak, node: int) -> str:
    return (soak.folder / f"run-{node}.log").read_text()


def rows_of(soak: Soak) -> dict:
    return surviving_rows(soak.folder / "run")[0]


def until(holds: Callable[[], bool], soak: Soak, seconds: float = 120.0) -> float:
    return wait_until(holds, seconds, lambda: log(soak, 0) + "\n---\n" + log(soak, 1))


def ranks_on(soak: Soak, node: int) -> list[psutil.Process]:
    children = psutil.Process(soak.started[node].pid).children(recursive=True)
    return [child for child in children if child.name().startswith("z2a rank")]


def check_whole(soak: Soak, run: Path) -> None:
    """Every step has its four rows once, and the last checkpoint is intact."""
    rows = rows_of(soak)
    assert (sorted(rows), {count.total() for count in rows.values()}) == (list(range(1, STEPS + 1)), {4})
    assert verified_checkpoint(list_checkpoints(run)[0]).step == STEPS


def test_a_machine_that_is_cut_off_commits_nothing_and_joins_again_when_the_network_heals(soak, work):
    soak.cable(False)
    seconds = until(lambda: "attempt 2 begins on 1 machine" in log(soak, 0), soak)
    print(f"one machine went on {seconds:.1f} s after the cut")
    until(lambda: not ranks_on(soak, 1), soak)
    assert json.loads((work.run("run") / "lock").read_text() or "{}").get("host", "node0") == "node0"
    before = max(rows_of(soak))
    until(lambda: max(rows_of(soak)) > before, soak)
    assert not ranks_on(soak, 1), "the side without machine 0 trains"
    soak.cable(True)
    soak.wait("run", 200)
    assert re.search(r"attempt [3-9] begins on 2 machines", log(soak, 0))
    (page,) = work.run("run").glob("incidents/*-lost.md")
    assert "Machine 1 (node1): silent for 8 s" in page.read_text()
    check_whole(soak, work.run("run"))


def test_when_machine_0_is_lost_the_other_ends_its_ranks_and_goes_on_once_it_is_back(soak, work):
    soak.kill(0)
    seconds = until(lambda: not ranks_on(soak, 1), soak, 60)
    print(f"ranks of machine 1 ended {seconds:.1f} s after the loss")
    soak.start(0, "run", STEPS)
    soak.wait("run", 200)
    check_whole(soak, work.run("run"))
