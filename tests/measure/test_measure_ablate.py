"""The ablation as a person runs it: rows in processes of their own, sittings that go on where the last one stopped."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import Program, WarmProcess
from zero2all.cli.main import main
from zero2all.common.errors import UsageError
from zero2all.config import load_config
from zero2all.estimate.flops import flops_per_token
from zero2all.estimate.run.batch import SEED_BATCH, BatchShape
from zero2all.measure.ablate import RESULTS_FILE, AblateOptions, Ablation, Results, ablate, row_key
from zero2all.measure.child import beside_others
from zero2all.measure.seed_table import seed_rows
from zero2all.measure.summary import batch_tables, cells, heading, notes, write_report
from zero2all.measure.variants import BY_NAME, named_variants

BATCH = BatchShape(1, 16, 1)
ROW = "import sys; from zero2all.measure.child import main; sys.exit(main())"


def lines_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / RESULTS_FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def options(tiny_path, tmp_path_factory) -> AblateOptions:
    return AblateOptions(
        source=str(tiny_path),
        output=tmp_path_factory.mktemp("ablation"),
        batches=[BATCH],
        variants=named_variants(["all-fused", "naive"]),
        seconds=0.0,
        warm_up_seconds=0.0,
    )


@pytest.fixture(scope="module")
def measured(warm: WarmProcess, tmp_path_factory) -> Callable[[AblateOptions], Ablation]:
    """`ablate`: the row `naive` in a fresh process, the others in processes that need not import torch again."""
    said = tmp_path_factory.mktemp("rows") / "said.txt"

    def run(command: list[str], **how: Any) -> Any:
        if "naive" in command:
            return subprocess.run(command, **how)
        assert command[:3] == [sys.executable, "-m", "zero2all.measure.child"]
        return SimpleNamespace(returncode=Program(warm, ROW, command[3:], said).wait())

    def call(options: AblateOptions) -> Ablation:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys.modules["zero2all.measure.child"], "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run})
            )
            return ablate(options)

    return call


@pytest.fixture(scope="module")
def first(options, measured) -> Ablation:
    return measured(options)


@pytest.fixture(scope="module")
def second(options, first, measured) -> Ablation:
    """Another day: one more row."""
    return measured(dataclasses.replace(options, variants=named_variants(["all-fused", "naive", "fp8"])))


def test_every_row_is_measured_and_on_disk(first, options):
    assert first.pending == []
    assert [(line["row"], line["status"]) for line in first.lines] == [("all-fused", "measured"), ("naive", "measured")]
    got = {name: choice["got"] for name, choice in first.lines[1]["result"]["ops"].items()}
    assert got["attention"] == "math"
    assert got["linear_cross_entropy"] == "off"


def test_a_rerun_measures_nothing_and_a_later_sitting_only_its_anchor_and_what_is_new(first, second, options):
    assert [(line["sitting"], line["row"]) for line in lines_in(options.output)] == [
        *((1, "all-fused"), (1, "naive")),
        *((2, "all-fused"), (2, "fp8")),
    ]
    again = ablate(options)
    assert again.pending == []
    assert len(lines_in(options.output)) == 4


def test_a_row_that_cannot_run_here_is_a_line_of_the_table_with_its_reason(second):
    (table,) = batch_tables(second)
    assert [row[1] for row in cells(table)][-1] == "cannot run here"
    assert any("CUDA" in note for note in notes(second, [table]))


def test_a_budget_that_is_too_small_starts_nothing_and_says_what_is_left(options, tmp_path, capsys):
    found = ablate(dataclasses.replace(options, output=tmp_path, budget_seconds=1.0))
    assert found.lines == []
    assert [variant.name for _, variant in found.pending] == ["all-fused", "naive"]
    assert "again to continue" in capsys.readouterr().err


def test_a_row_that_takes_too_long_is_a_result_and_is_tried_again_next_time(options, tmp_path):
    broken = dataclasses.replace(
        options, output=tmp_path, variants=named_variants(["all-fused"]), row_timeout_seconds=0.2
    )
    found = ablate(broken)
    assert [line["status"] for line in found.lines] == ["failed"]
    assert "not finished after" in found.lines[0]["result"]["reason"]
    assert [variant.name for _, variant in found.pending] == ["all-fused"]


def test_rows_that_share_a_file_are_prepared_beside_each_other_and_measured_one_at_a_time(tmp_path):
    both_prepare, at_once, seen = threading.Barrier(2), threading.Semaphore(1), []

    def row(name: str) -> None:
        with beside_others(tmp_path / "turns") as alone:
            both_prepare.wait(10)
            alone()
            assert at_once.acquire(blocking=False)
            time.sleep(0.05)
            seen.append(name)
            at_once.release()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(row, ["a", "b"]))
    assert sorted(seen) == ["a", "b"]


def test_a_line_that_was_cut_off_is_passed_over_and_the_next_one_is_whole(tmp_path):
    results = Results(tmp_path)
    results.append({"key": "a", "sitting": 1, "status": "measured"})
    with open(results.path, "a") as file:
        file.write('{"key": "b", "sit')
    results = Results(tmp_path)
    results.append({"key": "c", "sitting": 2, "status": "measured"})
    assert [line["key"] for line in Results(tmp_path).lines] == ["a", "c"]


def test_other_versions_or_another_batch_are_other_results(options, first, monkeypatch):
    monkeypatch.setattr("zero2all.measure.ablate.environment", lambda: {"gpu": "another", "torch": "9"})
    found = ablate(dataclasses.replace(options, budget_seconds=0.0))
    assert len(found.pending) == 2


# ---- tables ----------------------------------------------------------------------------------------------------------


def made_up(ablation: Ablation) -> Ablation:
    """The same ablation as if measured on an H200, the second sitting's card 10 % slower."""
    lines = []
    for line in ablation.lines:
        slow = 1.1 if line["sitting"] == 2 else 1.0
        seconds = {"all-fused": 2.0, "naive": 8.0, "fp8": 1.5}[line["row"]] * slow
        result = {
            "seconds_per_iteration": seconds,
            "tokens_per_second": 65536 / seconds,
            "mfu": {"seed": 0.6 / slow, "palm": 0.55, "causal": 0.5},
            "mfu_note": None,
            "peak_gib": 55.5,
            "state_gib": 21.0,
            "first_step_seconds": 9.0,
        }
        lines.append(line | {"status": "measured", "result": result})
    return dataclasses.replace(ablation, lines=lines)


def test_rows_are_compared_with_the_anchor_of_their_own_sitting(second):
    found = made_up(second)
    (table,) = batch_tables(found)
    assert table.anchors == {1: 2.0, 2: pytest.approx(2.2)}
    assert table.drifted
    rows = {row[0]: dict(zip(heading(table), row, strict=True)) for row in cells(table)}
    assert rows["all fused"]["x fused"] == "1.000"
    assert rows["naive"]["x fused"] == "4.000"
    fp8 = rows["all fused, fp8 linears"]
    assert (fp8["s/iter"], fp8["scaled s"], fp8["x fused"]) == ("1.650", "1.500", "0.750")
    assert any("anchor" in note for note in notes(found, [table]))


def as_the_seed_measured(ablation: Ablation, **model: object) -> Ablation:
    """The same rows as if of the reference project's model and batch, with some fields of the model changed."""
    config = load_config("z2all-1b")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    lines = []
    for line in made_up(ablation).lines:
        key = row_key(config, BY_NAME[line["row"]], SEED_BATCH, ablation.environment)
        lines.append(line | {"key": key, "batch": str(SEED_BATCH)})
    return dataclasses.replace(ablation, config=config, batches=[SEED_BATCH], lines=lines)


def test_the_seeds_figures_stand_beside_its_model(second):
    found = as_the_seed_measured(second)
    (table,) = batch_tables(found)
    rows = {row[0]: dict(zip(heading(table), row, strict=True)) for row in cells(table)}
    naive = rows["naive"]
    assert [naive[f"A800 {name}"] for name in ("s", "x fused", "MFU %", "GB")] == [
        "9.85 / 9.72",
        "3.050 / 2.785",
        "18.41 / 18.66",
        "71.32 / 72.85",
    ]
    assert naive["MFU % seed/palm/causal"] == "60.0 / 55.0 / 50.0"
    assert rows["all fused, fp8 linears"]["A800 s"] == ""
    assert any("A800" in note for note in notes(found, [table]))


def test_all_three_published_tables_have_a_row_of_ours_and_agree_with_their_seconds():
    model = load_config("z2all-1b").model
    published = [row for name in BY_NAME for row in seed_rows(name, model) if row]
    assert len(published) == 9 + 9 + 10
    per_second = 65536 * flops_per_token(model, 2048)["seed"] / 312e12
    off = [row for row in published if abs(100 * per_second / row.seconds / row.mfu_percent - 1) > 0.005]
    assert [row.mfu_percent for row in off] == [49.23]  # the compiled all-fused row, as published
    assert seed_rows("compile-without-swiglu", model) == [None]  # published as an error


def test_another_model_has_none_of_the_seeds_figures(second):
    for found in (made_up(second), as_the_seed_measured(second, layers=24), as_the_seed_measured(second, kv_heads=4)):
        (table,) = batch_tables(found)
        assert not any("A800" in name for name in heading(table))
        assert {len(row) for row in cells(table)} == {len(heading(table))}
        assert not any("A800" in note for note in notes(found, [table]))


def test_a_row_without_figures_fills_its_line(second):
    found = as_the_seed_measured(second)
    last = found.lines[-1] | {"status": "out of memory", "result": {"reason": "CUDA out of memory"}}
    for ablation in (dataclasses.replace(found, lines=[*found.lines[:-1], last]), second):
        (table,) = batch_tables(ablation)
        assert {len(row) for row in cells(table)} == {len(heading(table))}


def test_the_report_is_json_markdown_and_a_small_picture(second, tmp_path):
    said = write_report(made_up(second), tmp_path, "tiny on one NVIDIA H200")
    assert said[-1].endswith(".png")
    picture = (tmp_path / "ablation.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) <= 200_000
    rows = json.loads((tmp_path / "ablation.json").read_text())["batches"]["1x16x1"]["rows"]
    assert rows["fp8"]["scaled_seconds"] == pytest.approx(1.5)
    table = [line for line in (tmp_path / "ablation.md").read_text().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + 3


def test_without_matplotlib_there_is_no_picture_and_that_is_said(second, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = write_report(made_up(second), tmp_path, "tiny")
    assert "no picture" in said[-1]
    assert not (tmp_path / "ablation.png").exists()


def test_the_verb_prints_the_table_and_how_to_continue(second, options, tiny_path, capsys):
    words = ["perf", "bench", "ablate", str(tiny_path), "--out", str(options.output), "--batch", "1x16x1"]
    words += ["--rows", "all-fused,naive,fp8,float32", "--budget-seconds", "0"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "all fused" in out
    assert "cannot run here" in out
    assert "no MFU: the peak" in out
    assert "1 rows are left: 1x16x1 float32" in out


def test_results_brought_from_another_machine_can_be_shown_here(second, options, tiny_path, tmp_path, capsys):
    for line in second.lines:
        Results(tmp_path).append(line | {"environment": {**second.environment, "gpu": "NVIDIA H900"}})
    # The key holds the environment, so it is the other machine's.
    text = (tmp_path / RESULTS_FILE).read_text()
    found = Results(tmp_path)
    found.path.write_text(text.replace(second.lines[0]["key"], rekeyed(second, "all-fused")))
    words = ["perf", "bench", "ablate", str(tiny_path), "--out", str(tmp_path), "--batch", "1x16x1", "--report"]
    assert main(words) == 0
    assert "NVIDIA H900" in capsys.readouterr().out
    assert main([*words[:4], "--out", str(tmp_path / "none"), "--report"]) == 3


def rekeyed(ablation: Ablation, row: str) -> str:
    elsewhere = {**ablation.environment, "gpu": "NVIDIA H900"}
    return row_key(ablation.config, named_variants([row])[0], BATCH, elsewhere)


def test_the_verb_lists_the_rows_without_measuring(tiny_path, capsys):
    assert main(["perf", "bench", "ablate", str(tiny_path), "--list"]) == 0
    assert "without-rms-norm" in capsys.readouterr().out


def test_sequences_that_the_model_is_too_short_for_are_refused_before_anything_runs(options):
    with pytest.raises(UsageError, match="max_seq_len"):
        ablate(dataclasses.replace(options, batches=[BatchShape(2, 2048, 16)]))
