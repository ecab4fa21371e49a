"""`z2a perf infer`: how fast a model writes."""

from __future__ import annotations

import json

import pytest

from zero2all.cli.main import main
from zero2all.common.errors import UsageError
from zero2all.common.workspace import Workspace
from zero2all.measure import infer
from zero2all.measure.infer import InferOptions, cells, measure_inference, write_picture


@pytest.fixture(scope="module")
def found(tiny_path):
    options = InferOptions(str(tiny_path), batches=(1, 3), prompt_tokens=20, new_tokens=6, device="cpu")
    seen = []
    measure_inference(options, lambda so_far: seen.append(len(so_far.rows)))
    assert seen == [1, 2, 3, 4]  # kept after every row
    return measure_inference(options, lambda _: None)


def test_rows_have_the_figures_of_their_batch(found):
    assert [(row.weights, row.batch) for row in found.rows] == [
        ("float32", 1),
        ("float32", 3),
        ("int8", 1),
        ("int8", 3),
    ]
    for row in found.rows:
        assert row.problem is None
        assert row.first_token_seconds > 0
        assert row.pass_seconds == pytest.approx(row.batch / row.tokens_per_second)
        expected = 100 * row.pass_bytes / row.pass_seconds / found.copy_bytes_per_second
        assert row.bandwidth_percent == pytest.approx(expected)
    # One layer, two key heads of 8 float32 numbers; a sequence has 23 positions in the middle of its answer.
    assert found.rows[1].pass_bytes - found.rows[0].pass_bytes == 2 * (2 * 2 * 8 * 23) * 4
    assert "CUDA" in found.decoder
    block, table = 32 * 64 + 32 * 32 + 3 * 32 * 64, 256 * 32
    assert found.rows[0].pass_bytes - found.rows[2].pass_bytes == 3 * (block + table)
    assert [line[:2] for line in cells(found)[1:]] == [[row.weights, str(row.batch)] for row in found.rows]


def test_command_prints_a_table_and_writes_json_and_a_picture(tiny_path, tmp_path, capsys):
    output = tmp_path / "results"
    words = ["--batch", "2", "--prompt", "5", "--new", "3", "--device", "cpu", "--out", str(output)]
    assert main(["perf", "infer", str(tiny_path), *words]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert json.loads((output / "inference.json").read_text())["rows"][0]["batch"] == 2
    assert (output / "inference.png").read_bytes()[:4] == b"\x89PNG"


def test_bad_requests_say_what_was_wrong(tiny_path, trained_workspace, capsys):
    assert main(["perf", "infer", str(tiny_path), "--batch", "1,x"]) == 2
    assert "--batch 1,x" in capsys.readouterr().err
    with pytest.raises(UsageError, match="max_seq_len"):
        measure_inference(InferOptions(str(tiny_path), prompt_tokens=60, new_tokens=5, device="cpu"), lambda _: None)
    assert main(["perf", "infer", "tiny", "--work", str(trained_workspace.root), "--model.layers", "1"]) == 2
    assert "--model.layers" in capsys.readouterr().err


def test_where_a_run_or_a_folder_is_called_like_a_preset_it_is_said_which_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    work = Workspace(tmp_path)
    (tmp_path / "z2all-1b").mkdir()
    work.run("quickstart").mkdir(parents=True)
    assert infer._is_model("quickstart", work)
    assert "measuring the run" in capsys.readouterr().err
    assert not infer._is_model("z2all-1b", work)
    assert "measuring the preset (for the folder: ./z2all-1b)" in capsys.readouterr().err
    assert infer._is_model("./z2all-1b", work)
    with pytest.raises(UsageError, match=r"no config file or preset `mine`.*Or name a run of .*: quickstart\."):
        infer._load(InferOptions("mine", work))


def test_run_of_a_workspace_is_measured_to_the_last_token_asked_for(trained_workspace):
    options = InferOptions("tiny", trained_workspace, batches=(2,), prompt_tokens=30, new_tokens=20, device="cpu")
    rows = measure_inference(options, lambda _: None).rows
    assert [row.problem for row in rows] == [None, None]


def test_row_that_does_not_fit_is_a_row_with_the_reason(found, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise UsageError("A cache is too small.\nMore of it.")

    monkeypatch.setattr(infer, "Engine", refuse)
    loaded = infer._load(InferOptions("quickstart", device="cpu"))
    row, _ = infer._row(loaded, 4, False, found, infer.Bar())
    assert row.problem == "A cache is too small."
    failed = infer.dataclasses.replace(found, rows=[row])
    assert cells(failed)[1][2] == "A cache is too small."
    assert write_picture(failed, tmp_path).startswith("no picture")
