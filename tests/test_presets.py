"""The named configs in configs/: each loads, and is what its file says."""

from pathlib import Path

import pytest

from zero2all.config import ConfigError, config_yaml, find_config, load_config, load_with_rules, preset_files
from zero2all.config.rules import RULED
from zero2all.config.schedule import learning_rate
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.parallel.check import check_spread

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_the_presets_of_the_issue_are_there():
    assert {"quickstart", "four-phases", "z2all-100m", "z2all-1b", "llm-zero2all-1b", "z2all-moe"} <= set(NAMES)
    assert sorted(preset_files()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_loads_back_as_printed_is_named_after_itself_and_makes_the_vocabulary_of_its_model(name, tmp_path):
    config = load_config(name)
    assert find_config(name) == CONFIGS / f"{name}.yaml"
    (tmp_path / "printed.yaml").write_text(config_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "printed.yaml") == config
    assert config.train.name == name
    assert (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").startswith("# ")
    rows = 64_320 if name == "llm-zero2all-1b" else config.tokenizer.vocab_size  # there with room to grow
    assert config.model.vocab_size in (None, rows)


def test_the_reference_run_has_the_reference_schedule():
    config = load_config("llm-zero2all-1b")
    plan = (config.train.steps, config.optim.lr_max, config.schedule, config.stages)
    rates = [learning_rate(step, *plan) for step in (1_634, 49_049, 49_050, 54_499)]
    assert rates == pytest.approx([3e-4, 3e-5, 3e-5, 3e-5])


def test_the_1b_preset_trains_with_muon_by_rule_in_steps_that_usual_layouts_share():
    config, filled = load_with_rules("z2all-1b")
    assert (config.optim.kind, config.train.tokens, config.train.steps) == ("muon", 21_000_000_000, 20_027)
    assert config.samples_per_step == 512 == 32 * config.train.micro_batch_samples
    assert {*RULED, "train.steps", "stages"} == {each.name for each in filled}
    for processes in (1, 2, 4, 8, 16, 32):
        check_spread(config, processes)


def test_the_reference_model_has_the_reference_shape_and_1255_5_million_parameters():
    config = load_config("z2all-1b")
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "layers": 22, "heads": 32, "kv_heads": 8, "head_dim": None}
    sizes |= {"max_seq_len": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}
    sizes |= {"qk_norm": True, "embedding_norm": True, "init_std": None, "init_residual": "zero"}
    sizes |= {"init_embedding_std": 0.8, "init_head_std": 0.001}
    plain = {"attention_bias": "none", "mlp_bias": False, "tied_embeddings": False, "fp32_residual": False}
    plain |= dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0)
    assert config.model == ModelConfig(vocab_size=64320, **sizes, **plain)
    assert (config.model.head_size, config.data.seq_len) == (64, 2048)
    in_millions = {part: round(count / 1e6, 1) for part, count in parameter_counts(config.model).items()}
    parts = {"embedding": 131.7, "blocks": 992.0, "head": 131.7}
    assert in_millions == {**parts, "total": 1255.5, "active": 1255.5, "matmul": 1123.7}
    assert 100e6 < parameter_counts(load_config("z2all-100m").model)["total"] < 130e6
    quickstart = load_config("quickstart")  # minutes on two cores
    assert quickstart.model.vocab_size is None, "taken from the tokenizer, which the text may make smaller"
    assert quickstart.train.steps * quickstart.train.tokens_per_step < 2.1e6


def test_the_warmup_of_a_preset_gives_way_where_a_run_has_fewer_steps():
    for steps, kind in ((1, "cosine"), (5, "wsd"), (19, "cosine")):
        config = load_config("quickstart", ["--train.steps", str(steps), "--schedule.kind", kind])
        assert (config.train.steps, config.schedule.warmup_steps) == (steps, 1)
    assert load_config("z2all-moe", ["--train.steps=240"]).schedule.warmup_steps == 10
    assert load_config("quickstart", ["--train.steps", "20"]).schedule.warmup_steps == 20, "it fits"


def test_a_warmup_that_somebody_chose_for_the_run_stays_and_must_fit(tmp_path):
    for word in (["--schedule.warmup_steps", "20"], ["--schedule.warmup_steps=20"]):
        with pytest.raises(ConfigError, match="warmup_steps: got 20, expected at most 5, the number of steps"):
            load_config("quickstart", ["--train.steps", "5", *word])
    own = tmp_path / "own.yaml"
    own.write_text("schedule: {warmup_steps: 20}")
    with pytest.raises(ConfigError, match="warmup_steps: got 20"):
        load_config(own, ["--train.steps", "5"])
    own.write_text("train: {steps: 5}")  # nobody chose the default either
    assert load_config(own).schedule.warmup_steps == 1
    own.write_text("stages: [{name: b, from_step: 50, schedule: {lr_max: 1e-4, warmup_steps: 5}}]")
    with pytest.raises(ConfigError, match="warmup_steps: got 100, expected at most 50, the number of steps"):
        load_config(own)
    for words, problem in (("--optim.lr_maxx=3", "`lr_maxx`"), ("--schedule=5", "schedule: got 5")):
        with pytest.raises(ConfigError, match=problem):
            load_config("quickstart", ["--train.steps", "5", words])
