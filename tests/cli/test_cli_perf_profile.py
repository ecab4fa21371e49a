"""`z2a perf shapes` and `z2a perf profile`, as a person calls them."""

from __future__ import annotations

import json

from zero2all.cli.main import main

MOE = """
model:
  {vocab_size: 200, hidden_size: 32, intermediate_size: 64, layers: 2, heads: 4, kv_heads: 2, max_seq_len: 64,
   moe: {experts: 4, experts_per_token: 2, expert_size: 32, dense_layers: 1}}
data: {seq_len: 32}
train: {tokens_per_step: 64, micro_batch_samples: 1}
parallel: {device: cpu, cpu_threads: 1}
"""


def test_without_a_config_the_six_rules_are_taught(capsys):
    assert main(["perf", "shapes"]) == 0
    out = capsys.readouterr().out
    assert "vocabulary" in out
    assert "pipeline stages" in out
    assert main(["perf", "shapes", "--model.layers", "3"]) == 2
    assert "--check" in capsys.readouterr().err


def test_a_config_is_checked_against_the_rules(capsys):
    words = ["perf", "shapes", "--check", "z2all-1b", "--gpu", "h100", "--parallel.tensor", "16"]
    assert main([*words, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    wrong = {(one["rule"], one["what"]) for one in found["findings"] if not one["is_kept"]}
    assert {(1, "model.vocab_size"), (4, "model.kv_heads"), (5, "parallel.tensor")} <= wrong


def test_a_mixture_of_experts_is_profiled(capsys, tmp_path):
    path = tmp_path / "moe.yaml"
    path.write_text(MOE, encoding="utf-8")
    words = ["perf", "profile", str(path), "--steps", "1", "--batch", "1x32x1", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "GEMM" in out
    assert "2 passes in a step, 1 were profiled" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"profile.json", "trace.json.gz"}


def test_a_batch_that_is_longer_than_the_model_is_refused(capsys, tmp_path):
    path = tmp_path / "moe.yaml"
    path.write_text(MOE, encoding="utf-8")
    assert main(["perf", "profile", str(path), "--batch", "1x128x1", "--out", str(tmp_path / "out")]) == 2
    assert "max_seq_len" in capsys.readouterr().err
