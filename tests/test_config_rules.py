"""Rates, batch, decay and warmup from the token budget: by hand at two sizes; whoever sets a value has his way."""

import math
from pathlib import Path

import pytest
import yaml

from zero2all.config import ConfigError, config_yaml, load_config, load_with_rules
from zero2all.config.rules import RULED
from zero2all.config.training import OptimConfig, ScheduleConfig, TrainConfig

DOCS = Path(__file__).parent.parent / "docs"
MODEL = {"vocab_size": 1024, "hidden_size": 192, "intermediate_size": 512, "layers": 2, "heads": 2, "kv_heads": 2}
SMALL = {"model": MODEL, "data": {"seq_len": 128}, "optim": {"kind": "muon"}, "train": {"tokens": "13M"}}


def write(folder, **changes) -> Path:
    values = {name: {**SMALL.get(name, {}), **changes.get(name, {})} for name in {*SMALL, *changes}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def problem_of(path, *words) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(words))
    (problem,) = caught.value.problems
    return str(problem)


def test_a_small_model_and_few_tokens_by_hand(tmp_path):
    config = load_config(write(tmp_path))
    # B = 2^18 / 100^0.571 = 18,900, nearest power 2^14; s = sqrt(1 / 32); (1.3e9 / 13e6)^(1/3) = 4.6, at most 8; w = 2
    assert config.train == TrainConfig(steps=793, tokens=13_000_000, tokens_per_step=16384)
    s = math.sqrt(1 / 32)
    lr = 0.02 * s * 100 ** (1 / 3)
    rates = {"embedding": 0.3 * s * 2, "head": 0.008 * s * 2, "norm": 0.005, "bias": 0.005}
    betas = {"beta1": 0.8, "beta2": 0.96, "embedding_beta2": 0.995, "eps": 1e-10}
    assert config.optim == OptimConfig(
        kind="muon",
        lr_max=pytest.approx(lr, rel=1e-3),
        lr_multipliers={name: pytest.approx(rate / lr, rel=1e-3) for name, rate in rates.items()},
        weight_decay=pytest.approx(1 / (0.07 * lr * 793), rel=1e-3),
        **{**betas, "decay_embeddings": False, "decay_schedule": "cosine"},
    )
    shape = ScheduleConfig("wsd", warmup_steps=39, min_lr_ratio=0.05, decay_share=0.65, decay_shape="linear")
    assert config.schedule == shape


def test_at_the_reference_every_factor_is_one_and_longer_runs_do_not_take_smaller_rates(tmp_path):
    path = write(tmp_path, model={"hidden_size": 768})
    assert load_config(path, ["--train.tokens", "1.3B"]).train.tokens_per_step == 2**18
    words = ["--train.tokens_per_step", "524288"]
    config = load_config(path, [*words, "--train.tokens", "1.3B"])
    assert (config.train.tokens_per_step, config.optim.lr_max, config.schedule.warmup_steps) == (2**19, 0.02, 40)
    assert config.optim.lr_multipliers == {"embedding": 15.0, "head": 0.4, "norm": 0.25, "bias": 0.25}
    assert config.optim.weight_decay == pytest.approx(2**19 / (0.07 * 0.02 * 1.3e9), rel=1e-3)
    longer = load_config(path, [*words, "--train.tokens", "13B"])
    assert longer.optim.lr_max == 0.02
    assert longer.optim.weight_decay == pytest.approx(config.optim.weight_decay / 10, rel=1e-3)


def test_the_batch_has_bounds_and_whole_rows_and_follows_from_steps_alone_too(tmp_path):
    for tokens, seq_len, wanted in (("1K", 128, 2**13), ("10T", 128, 2**21), ("13M", 3000, 15000)):
        path = write(tmp_path, model={"max_seq_len": 4096}, data={"seq_len": seq_len}, train={"tokens": tokens})
        config = load_config(path)
        assert config.train.tokens_per_step == wanted
        assert config.train.steps == max(1, config.train.tokens // wanted)
    # The batch solves B = 2^18 (steps B / 1.3e9)^0.571.
    config = load_config(write(tmp_path), ["--train.steps", "600"])  # instead of the file's tokens
    assert (config.train.steps, config.train.tokens, config.train.tokens_per_step) == (600, None, 2**14)
    by_tokens = load_config(write(tmp_path), ["--train.tokens", str(600 * 2**14)])
    assert by_tokens.optim == config.optim
    few = load_config(write(tmp_path), ["--train.steps", "12"]).optim
    assert few.weight_decay * few.lr_max == pytest.approx(1 / 20, rel=1e-3), "it remembers at least 20 steps"


def test_values_that_somebody_gave_stay_and_the_others_follow_them(tmp_path):
    optim = {"lr_max": 0.01, "lr_multipliers": {"head": 3.0}, "beta2": 0.9, "weight_decay": None}
    path = write(tmp_path, optim=optim, schedule={"kind": "cosine"}, train={"tokens_per_step": 2**15})
    config, filled = load_with_rules(path)
    assert (config.optim.lr_max, config.optim.beta2, config.optim.embedding_beta2) == (0.01, 0.9, None)
    s = math.sqrt(2**15 / 2**19)
    wanted = {"head": 3.0, "embedding": pytest.approx(60 * s, rel=1e-3), "norm": 0.5, "bias": 0.5}
    assert config.optim.lr_multipliers == wanted
    assert config.optim.weight_decay == pytest.approx(1 / (0.07 * 0.01 * 396), rel=1e-3)
    assert config.schedule == ScheduleConfig("cosine", warmup_steps=19)
    names = {each.name for each in filled}
    assert names.isdisjoint({"optim.lr_max", "optim.beta2", "schedule.kind", "train.tokens_per_step"})
    (multipliers,) = (each.words for each in filled if each.name == "optim.lr_multipliers")
    assert "head" not in multipliers


def test_a_tied_table_takes_the_rate_of_a_head_and_routers_that_of_norms(tmp_path):
    moe = {"experts": 4, "expert_size": 64}
    optim = load_config(write(tmp_path, model={"tied_embeddings": True, "moe": moe})).optim
    times = optim.lr_multipliers
    assert times.keys() == {"embedding", "norm", "bias", "router"}
    assert times["embedding"] * optim.lr_max == pytest.approx(0.008 / math.sqrt(32) * 2, rel=1e-3)
    assert times["router"] == times["norm"]


def test_a_run_begins_with_short_rows_where_rows_are_text(tmp_path):
    path = write(tmp_path, model={"max_seq_len": 4096}, train={"tokens": "130M"})
    for seq_len, short in ((4096, 512), (2048, 256), (512, 256), (256, None), (600, None)):
        config = load_config(path, ["--data.seq_len", str(seq_len)])
        found = [(stage.from_step, stage.seq_len) for stage in config.stages]
        assert found == ([] if short is None else [(0, short), (config.train.steps // 2, seq_len)])
    for words in ("--data.packing=best_fit", "--stages=[]"):  # whole conversations; the user's own
        assert load_config(path, ["--data.seq_len=2048", words]).stages == []
    saved = load_config(path, ["--data.seq_len=2048"])
    config, filled = load_with_rules(path, ["--data.seq_len=2048", "--train.tokens", "260M"], saved=saved)
    assert (config.stages, config.train.tokens) == (saved.stages, 260_000_000), "a run that goes on keeps its own"
    assert "stages" not in {each.name for each in filled}


def test_every_computed_value_is_printed_with_its_rule_and_loads_back(tmp_path):
    sections = {"data": {"seq_len": 2048}, "model": {"max_seq_len": 2048}, "train": {"tokens": "130M"}}
    config, filled = load_with_rules(write(tmp_path, **sections))
    assert {each.name for each in filled} == {*RULED, "train.steps", "stages"}
    text = config_yaml(config, filled=filled)
    assert f"  lr_max: {config.optim.lr_max}  # rule: 0.02 sqrt(B/2^19) (1.3e9/D)^(1/3), the last from 1 to 8\n" in text
    assert text.count("  # rule: ") == len(filled)
    (tmp_path / "printed.yaml").write_text(text)
    assert load_with_rules(tmp_path / "printed.yaml") == (config, [])


def test_other_optimizers_have_their_defaults_and_no_rules(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optim: {kind: adamw_8bit, weight_decay: null}\nschedule: {warmup_steps: null}\n")
    config, filled = load_with_rules(path)
    assert (config.optim, config.schedule) == (OptimConfig("adamw_8bit"), ScheduleConfig())
    assert (config.train, filled) == (TrainConfig(), [])
    assert load_config(path, ["--train.tokens", "1B"]).train.steps == 10**9 // 524288
    said = problem_of(path, "--optim.lr_max", "null")
    assert said.endswith("such as 3e-4: only optim.kind muon has a rule for it.")
    said = problem_of(write(tmp_path, train={"tokens": None}))
    assert said.startswith("train.tokens: got nothing, expected the tokens of the run, such as 40M or 2B, or train.st")


def test_steps_and_tokens_that_disagree_are_refused_and_the_command_line_replaces_the_file(tmp_path):
    path = write(tmp_path, train={"steps": 793})
    assert load_config(path).train.steps == 793
    assert problem_of(path, "--train.tokens_per_step", "65536").startswith("train.steps: got 793, expected 198 (train")
    assert load_config(path, ["--train.tokens", "14M"]).train.steps == 854
    assert load_config(path, ["--train.steps=99"]).train.tokens is None
    without = load_config(path, ["--train.tokens=null", "--train.tokens_per_step=32768"]).train
    assert (without.steps, without.tokens) == (793, None)
    said = problem_of(path, "--train.tokens", "40Q")
    assert said == "train.tokens: got '40Q', expected a whole number at least 1, such as 40M or 2B or null."


def test_a_config_that_a_run_of_an_earlier_version_wrote_gets_no_rules(tmp_path):
    (tmp_path / "metrics").mkdir()
    optim = "optim: {kind: muon, lr_max: 0.004, muon_iterations: 5}"
    (tmp_path / "config.yaml").write_text(f"{optim}\ntrain: {{steps: 50}}\nmodel: {{}}\ndata: {{}}\n")
    config, filled = load_with_rules(tmp_path)
    assert config.optim == OptimConfig("muon", lr_max=0.004)
    assert (config.train, filled) == (TrainConfig(steps=50), [])


def test_the_table_of_the_guide_is_what_the_rules_give():
    """Columns: preset, D, B, lr_max, embedding, head, decay, steps."""
    for page in ("learning.md", "learning.zh.md"):
        lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
        rows = [line.split("|")[1:-1] for line in lines if line.startswith("| `z2all")]
        assert len(rows) == 5
        assert rows == [_row(row[0].strip(" `"), row[1].strip()) for row in rows]


def _row(name: str, tokens: str) -> list[str]:
    words = ["--optim.kind=muon", f"--train.tokens={tokens}", "--optim.lr_max=null", "--train.tokens_per_step=null"]
    config = load_config(name, [*words, "--optim.weight_decay=null", "--schedule.warmup_steps=null"])
    lr, times = config.optim.lr_max, config.optim.lr_multipliers
    rates = (f"{lr:.4f}", f"{times['embedding'] * lr:.3f}", f"{times['head'] * lr:.4f}")
    cells = (f"`{name}`", tokens, f"{config.train.tokens_per_step:,}", f"{config.train.steps:,}", *rates)
    return [f" {cell} " for cell in (*cells, f"{config.optim.weight_decay:.3f}")]
