"""`z2a scaling fit`: which runs of a workspace count, and what their law says of a budget."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from zero2all.common.files import write_json
from zero2all.common.workspace import Workspace, open_workspace
from zero2all.config.training import AnnealConfig
from zero2all.estimate.run_calculators import LAWS
from zero2all.experiments.law import worth
from zero2all.experiments.scaling import read_points
from zero2all.experiments.study import BRANCH_FILE
from zero2all.model.config import parameter_counts
from zero2all.packed.shard_format import open_split
from zero2all.track import MetricsWriter
from zero2all.train.anneal import ANNEAL_FILE
from zero2all.train.checkpoints.layout import list_checkpoints
from zero2all.train.checkpoints.manifest import read_manifest
from zero2all.train.saved_config import FINETUNE_FILE, load_run_config, save_run_config

LAW = replace(LAWS["refit"], A=30.0, B=40.0)


@pytest.fixture
def work(trained_workspace: Workspace, tmp_path: Path) -> Workspace:
    """Its packed text and its one real run, `tiny`."""
    shutil.copytree(trained_workspace.root, tmp_path / "work")
    return open_workspace(tmp_path / "work")


def unique_of(work: Workspace) -> int:
    return sum(open_split(work.packed, source, "train").tokens for source in ("en", "zh"))


def written(work: Workspace, name: str, size: int, steps: int, **changes: object) -> Path:
    """A run as a trainer leaves it, without weights: its config, and metrics up to `until`. Its loss is the law's."""
    config = load_run_config(work.run("tiny"))
    until = int(str(changes.pop("until", steps)))
    model = replace(config.model, hidden_size=size, **changes.pop("model", {}))  # type: ignore[arg-type]
    schedule = replace(config.schedule, kind=str(changes.pop("kind", "wsd")))  # type: ignore[arg-type]
    config = replace(config, train=replace(config.train, name=name, steps=steps), model=model, schedule=schedule)
    run = work.run(name)
    run.mkdir()
    save_run_config(config, run)
    tokens = until * config.train.tokens_per_step
    loss = changes.pop("loss", LAW.loss(parameter_counts(model)["matmul"], float(worth(tokens, unique_of(work)))))
    with MetricsWriter(run) as metrics:
        metrics.log({"eval/valid/loss": loss}, step=until, tokens=tokens)
    return run


def ladder(work: Workspace) -> None:
    for size in (64, 128, 256, 512):
        for steps in (20, 100, 500):
            written(work, f"ladder-{size}-{steps}", size, steps)


def test_a_run_that_was_trained_is_a_point_with_its_own_held_out_loss(trained_workspace, tiny_config):
    points, left_out = read_points(trained_workspace, ["t*"])
    recorded = read_manifest(list_checkpoints(trained_workspace.run("tiny"))[0])["held_out"]
    assert (len(points), left_out) == (1, {})
    assert points[0].loss == pytest.approx(recorded["loss"])
    assert (points[0].run, points[0].tokens) == ("tiny", 30 * 1024)
    assert points[0].unique_tokens == unique_of(trained_workspace)
    assert points[0].n == parameter_counts(load_run_config(trained_workspace.run("tiny")).model)["matmul"]


def test_runs_without_a_finished_decay_are_left_out_by_name(work):
    written(work, "constant", 64, 100, kind="constant")
    written(work, "half", 64, 100, until=50)
    (written(work, "taught", 64, 100) / FINETUNE_FILE).write_text("{}")
    (work.runs / "empty").mkdir()
    points, left_out = read_points(work, ["*"])
    assert [point.name for point in points] == ["tiny"]
    assert "does not fall" in left_out["constant"]
    assert "step 100" in left_out["half"]
    assert "fine-tuned" in left_out["taught"]
    assert "There is no run" in left_out["empty"]


def test_an_anneal_ends_a_run_and_a_branch_belongs_to_its_trunk(work):
    written(work, "trunk", 64, 1000, until=400, kind="constant")
    run = written(work, "trunk-a", 64, 1000, until=120, kind="constant")
    write_json(run / ANNEAL_FILE, vars(AnnealConfig(from_step=100, steps=20)))
    write_json(run / BRANCH_FILE, {"of": "trunk", "from_step": 100})
    points, left_out = read_points(work, ["trunk*"])
    assert [(point.name, point.run, point.tokens) for point in points] == [("trunk-a", "trunk", 120 * 1024)]
    assert list(left_out) == ["trunk"]


def test_the_law_of_a_ladder_is_printed_with_its_check_and_what_budgets_buy(work, z2a):
    ladder(work)
    written(work, "ladder-constant", 64, 100, kind="constant")
    ended = z2a("scaling", "fit", "ladder-*", "--flops", "1e15", "--beyond", "2", "--work", work.root)
    assert ended.code == 0
    assert "left out: ladder-constant: its learning rate does not fall" in ended.err
    for words in ("alpha", "ladder-512-500", "+0.0", "off the law of smaller", "flops for best", "beyond the runs"):
        assert words in ended.out
    assert "beyond 2 times the law is a guess" in ended.out


def test_json_has_the_same_and_the_picture_is_a_png(work, z2a, tmp_path):
    ladder(work)
    words = ("scaling", "fit", "ladder-*", "--work", work.root, "--json", "--out", tmp_path / "law.png")
    found = json.loads(z2a.done(*words))
    assert found["law"][0]["alpha"][0] == pytest.approx(LAW.alpha, rel=0.05)
    assert found["law"][0]["E"][1] <= found["law"][0]["E"][2]
    assert max(abs(row["off the law"]) for row in found["runs"]) < 0.001
    checked = [row["off the law of smaller"] for row in found["runs"] if row["off the law of smaller"] is not None]
    assert len(checked) == 3
    assert max(map(abs, checked)) < 0.01
    largest, further = found["budgets"]
    assert further["flops"] == pytest.approx(10 * largest["flops"])
    assert further["loss"][0] < largest["loss"][0]
    assert len(found["sizes"]) == 10
    assert (tmp_path / "law.png").read_bytes().startswith(b"\x89PNG")
    tokens = json.loads(z2a.done("scaling", "fit", "ladder-*", "--tokens", "2M", "--work", work.root, "--json"))
    assert tokens["budgets"][0]["tokens"][0] == pytest.approx(2e6, rel=0.05)


def test_runs_whose_losses_do_not_fit_say_that_the_size_is_open(work, z2a):
    for size, losses in {64: (4.0, 1.2), 128: (2.7, 0.9), 256: (1.5, 0.8)}.items():
        for steps, loss in zip((20, 100), losses, strict=True):
            written(work, f"odd-{size}-{steps}", size, steps, loss=loss)
    assert "leave the best size open" in z2a.done("scaling", "fit", "odd-*", "--work", work.root)


def test_bad_input_is_refused_with_what_to_do(work, z2a):
    assert "It needs at least:\n  models of 3 sizes" in z2a.refused(2, "scaling", "fit", "tiny", "--work", work.root)
    assert "has no run `nothing-*`" in z2a.refused(3, "scaling", "fit", "nothing-*", "--work", work.root)
    written(work, "wide", 64, 100, model={"vocab_size": 800})
    said = z2a.refused(2, "scaling", "fit", "tiny", "wide", "--work", work.root)
    assert "These losses are of different tokens: compare bits per byte, or fit one group.\n  tiny: en, zh" in said
