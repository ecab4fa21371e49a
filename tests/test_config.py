"""The run config: YAML and overrides in, one typed object or all problems at once out."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero2all.common.errors import UsageError
from zero2all.common.schema import field_docs
from zero2all.common.workspace import FOLDER_NAME_WORDS
from zero2all.config import (
    ConfigError,
    RunConfig,
    config_from_values,
    config_values,
    config_yaml,
    find_config,
    load_config,
    with_new_names,
)
from zero2all.config.training import StageConfig


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(values: dict[str, Any], overrides: list[str] | None = None, folder: Path | None = None) -> list[str]:
    """The numbered lines of the message, without their numbers."""
    path = None if folder is None else write(folder, yaml.safe_dump(values))
    with pytest.raises(ConfigError) as caught:
        config_from_values(values, "of the test") if path is None else load_config(path, overrides)
    assert caught.value.exit_code == 2
    first, *lines = str(caught.value).splitlines()
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    assert first.endswith(f"has {count}; nothing was started.")
    numbered = [line.strip().partition(". ") for line in lines]
    assert [number for number, _, _ in numbered] == [str(place) for place in range(1, len(lines) + 1)]
    return [problem for _, _, problem in numbered]


def nested_types(section: Any) -> Iterator[Any]:
    yield section
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.default_factory):
            yield from nested_types(field.default_factory)


def test_every_field_of_every_section_has_a_doc_line_and_no_section_can_be_changed_after_loading():
    for section in (*nested_types(RunConfig), StageConfig):
        docs = field_docs(section)
        assert [field.name for field in dataclasses.fields(section) if not docs.get(field.name, "").strip()] == []
        assert all(doc.endswith(".") for doc in docs.values()), "doc lines are sentences"
        assert section.__dataclass_params__.frozen, section


def test_overrides_stand_over_the_file_and_the_last_one_wins(tmp_path):
    for text in ("", "optim:\nmodel:\n"):
        assert load_config(write(tmp_path, text)) == RunConfig() == config_from_values({}, "of the test")
    path = write(tmp_path, "optim: {lr_max: 1.0e-3, beta1: 0.8}")
    config = load_config(path, ["--optim.lr_max", "3e-4", "--train.steps=7", "--train.steps", "200"])
    assert (config.optim.lr_max, config.optim.beta1, config.train.steps) == (3e-4, 0.8, 200)
    assert load_config(path).optim.lr_max == 1e-3, "the file has not changed"


def test_true_false_null_negative_numbers_nested_sections_and_lists_can_be_set(tmp_path):
    words = "--model.tied_embeddings true --ops.strict=false --model.head_dim null --model.rope_scaling.factor 2"
    stages = ["--stages", "[{name: cool, from_step: 9000, mixture: {zh: 1}}]", "--data.seed", "-5"]
    config = load_config(write(tmp_path, ""), [*words.split(), *stages])
    assert (config.model.tied_embeddings, config.ops.strict, config.model.head_dim) == (True, False, None)
    assert (config.model.rope_scaling.factor, config.data.seed) == (2.0, -5)
    assert config.stages == [StageConfig("cool", 9000, {"zh": 1.0})]


def test_a_mixture_can_be_given_as_yaml_as_json_or_weight_by_weight(tmp_path):
    path = write(tmp_path, "data: {mixture: {en: 1, zh: 1}}")
    for words, found in (
        (["--data.mixture", "{en: 2, zh: 1}"], {"en": 2.0, "zh": 1.0}),
        (['--data.mixture={"en": 2.0, "zh": 1}'], {"en": 2.0, "zh": 1.0}),
        (["--data.mixture.en", "2", "--data.mixture.zh=0"], {"en": 2.0, "zh": 0.0}),
        (["--data.mixture", "null"], None),
    ):
        assert load_config(path, words).data.mixture == found


def test_a_name_is_taken_letter_by_letter_even_where_yaml_would_see_a_number_but_must_be_able_to_be_a_folder(tmp_path):
    for name in ("1.10", "007", "2024-01-01", "1_000", "3e-4", "0x10", "a b", "运行 α-1.5", "a: b: c", "7"):
        assert load_config(write(tmp_path, ""), ["--train.name", name]).train.name == name
    for name in ("a\0b", "a/b", "..", ".hidden", "", "a\nb", "a\x1b[31m", "n" * 300, "run.partial-7"):
        (problem,) = problems_of({"train": {"name": name}})
        assert problem.startswith("train.name: got")
        assert "expected a plain folder name" in problem


def test_all_problems_are_reported_together_with_field_value_expectation_and_nearest_name(tmp_path):
    values = {"optim": {"lr_maxx": 0.1, "beta1": 2}, "schedul": {"warmup_steps": 1}, "ops": {"attention": "sdpaa"}}
    overrides = ["--modle.heads", "3", "--parallel.device", "gpu", "--data.seed", "true"]
    assert problems_of({**values, "train": {"steps": "many"}}, overrides, tmp_path) == [
        "There is no section `schedul`. Did you mean `schedule`?",
        "There is no section `modle`. Did you mean `model`?",
        "data.seed: got True, expected a whole number.",
        "ops.attention: got 'sdpaa', expected one of 'auto', 'math', 'sdpa', 'sdpa_flash', "
        "'sdpa_cudnn', 'flex', 'varlen', 'fa3', 'fa4'. Did you mean `sdpa`?",
        "parallel.device: got 'gpu', expected one of 'auto', 'cpu', 'cuda'. Did you mean `cpu`?",
        "`optim` has no field `lr_maxx`. Did you mean `lr_max`?",
        "optim.beta1: got 2, expected a number at least 0 and below 1.",
        "train.steps: got 'many', expected a whole number at least 1.",
    ]


def test_a_field_under_the_wrong_section_is_answered_with_the_right_one():
    (found,) = problems_of({"train": {"lr_max": 0.1}})
    assert found.endswith("Another section has this field: `optim.lr_max`.")
    (found,) = problems_of({"every_steps": 5})
    assert found.endswith("Another section has this field: `checkpoint.every_steps`, `validation.every_steps`.")
    # Nothing is concluded from a section with problems: heads 12 does not divide the default hidden_size.
    found = problems_of({"model": {"hiden_size": 768, "heads": 12, "kv_heads": 4}})
    assert found == ["`model` has no field `hiden_size`. Did you mean `hidden_size`?"]
    assert len(problems_of({"modle": {"max_seq_len": 4096}, "data": {"seq_len": 4096}})) == 1


def test_what_does_not_fit_together_is_found_beside_what_is_wrong_alone():
    values = {
        **{"optim": {"lr_max": "fast"}, "schedule": {"warmup_steps": 20}},
        "data": {"seq_len": 128, "mixture": {"en": 0}},
        "model": {"hidden_size": 100, "heads": 7, "kv_heads": 3, "max_seq_len": 64},
        "train": {"name": "a/b", "tokens_per_step": 1000, "steps": 10},
    }
    assert problems_of(values) == [
        "optim.lr_max: got 'fast', expected a number above 0.",
        "data.mixture: got {'en': 0.0}, expected at least one weight above 0.",
        "model.hidden_size: got 100, expected a multiple of model.heads (7).",
        "model.kv_heads: got 3, expected a divisor of model.heads (7).",
        f"train.name: got 'a/b', expected {FOLDER_NAME_WORDS}.",
        "data.seq_len: got 128, expected at most model.max_seq_len (64).",
        "train.tokens_per_step: got 1000, expected a multiple of data.seq_len (128). The nearest is 1024.",
        "schedule.warmup_steps: got 20, expected at most 10, the number of steps of this schedule.",
    ]


OLD_NAMES = {
    "schedule": {"lr_min_share": 0.2},
    "stages": [{"name": "end", "from_step": 5000, "schedule": {"lr_min_share": 0.0}}],
    "ops": {"linear": "into32"},
    "parallel": {"data": "shard"},
    "optim": {"muon_iterations": 4, "muon_precision": "float32", "muon_update_rms": 0.2},
}


def test_a_field_or_choice_by_its_old_name_is_answered_with_the_new_one(tmp_path):
    assert problems_of(OLD_NAMES) == [
        "ops.linear: got 'into32', expected one of 'auto', 'plain', 'fp32_wgrad', 'fp8'. "
        "It is now called `fp32_wgrad`.",
        "`parallel` has no field `data`. It is now `parallel.zero`: 0 replaces replicate, 3 replaces shard.",
        "`optim` has no field `muon_iterations`. It is now called `optim.muon.iterations`.",
        "`optim` has no field `muon_precision`. It is now called `optim.muon.precision`.",
        "`optim` has no field `muon_update_rms`. Muon's steps now have a spectral scale: delete this field and set "
        "optim.lr_max to about 0.02 at 524,288 tokens a step.",
        "`schedule` has no field `lr_min_share`. It is now called `min_lr_ratio`.",
        "`stages[0].schedule` has no field `lr_min_share`. It is now called `min_lr_ratio`.",
    ]
    with pytest.raises(ConfigError, match="It is now called `min_lr_ratio`"):
        load_config(write(tmp_path, ""), ["--schedule.lr_min_share", "0.2"])


def test_what_is_gone_is_answered_with_what_to_use_and_runs_that_used_it_can_still_be_read():
    found = problems_of({"parallel": {"slow_link": {"every": 9}, "compress": "powersgd", "powersgd_rank": 4}})
    gone = "PowerSGD is gone. Take bf16, or `diloco` for a slow network."
    assert [text.partition(". ")[2] for text in found] == ["It is now `diloco`: a section of its own.", gone, gone]
    (text,) = problems_of({"diloco": {"scheme": "local_sgd"}})
    assert "set diloco.scheme to diloco, outer_lr to 1 and momentum to 0" in text
    words = "--optim.kind lion --train.recompute swap --parallel.offload weights --parallel.slow_link.every 9"
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", words.split())
    for instead in ("removed. Use `adamw`", "removed. Use `full`", "removed. Use `optimizer`", "It is now `diloco`"):
        assert instead in str(caught.value)
    old = {"optim": {"kind": "lion", "adafactor_beta1": 0.0}, "parallel": {"offload_folder": None}}
    assert with_new_names(old) == {"optim": {"kind": "adamw", "muon": {}}, "parallel": {}}


def test_the_config_that_a_run_of_an_earlier_version_kept_is_understood(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(OLD_NAMES))
    config = load_config(path)
    assert (config.schedule.min_lr_ratio, config.ops.linear, config.parallel.zero) == (0.2, "fp32_wgrad", 3)
    assert (config.optim.muon.iterations, config.optim.muon.precision) == (4, "float32")
    assert config.stages[0].schedule.min_lr_ratio == 0.0
    for groups in ([], ["a:1", "b:1"]):
        link = {"groups": groups, "every": 9, "top_k_share": 0.02}
        path.write_text(yaml.safe_dump({"parallel": {"slow_link": link, "powersgd_rank": 4}}))
        diloco = load_config(path).diloco
        assert (diloco.groups, diloco.every) == (groups, 9 if groups else 30)


REFUSED = {
    "model: {hidden_size: 30, heads: 2, kv_heads: 2}": "model.head_dim: got 15, expected an even width",
    "model: {moe: {router: random}}": "model.moe.router: got 'random', expected one of 'sigmoid', 'softmax'",
    "model: {attention_dropout: 1}": "model.attention_dropout: got 1, expected a number at least 0 and below",
    "checkpoint: {keep_last: 1}": "checkpoint.keep_last: got 1, expected a whole number at least 2",
    "track: {log_every_steps: 0}": "track.log_every_steps: got 0, expected a whole number at least 1",
    "track: {close_timeout_seconds: -1}": "track.close_timeout_seconds: got -1",
    "tokenizer: {vocab_size: 100}": "tokenizer.vocab_size: got 100, expected at least 271",
    "validation: {tokens_per_source: 0}": "validation.tokens_per_source: got 0",
    "guards: {nonfinite: ignore}": "guards.nonfinite: got 'ignore', expected one of 'skip', 'rollback', 'stop'",
    "resilience: {save_on_signal: 'yes'}": "resilience.save_on_signal: got 'yes', expected true or false",
    "data: {question_frames: {en: '{question}{answer}!'}}": "data.question_frames.en: got '{question}{answer}!', exp",
    "data: {mixture: {no: 1}}": "data.mixture.False: got False, expected a name",
    "stages: {name: a}": "stages: got {'name': 'a'}, expected a list of mappings",
    "stages: [{name: a, from_step: 9, mixture: {en: 0}}]": "stages[0].mixture: got {'en': 0.0}, expected at least one",
    "stages: [{name: a, from_step: 9, mixture: {}}]": "stages[0].mixture: got {}, expected at least one weight above 0",
    "stages: [{name: a, from_step: 9}, {name: b, from_step: 9}]": "stages[1].from_step: got 9, expected a step after",
}


@pytest.mark.parametrize("text", REFUSED)
def test_each_section_refuses_what_it_cannot_use(text):
    (found,) = problems_of(yaml.safe_load(text))
    assert found.startswith(REFUSED[text])


SENSELESS = {
    "--train.steps": "train.steps: got nothing, expected a value after the name.",
    "--train.steps --optim.beta1 0.9": "train.steps: got nothing, expected a value after the name.",
    "lr_max=3": "lr_max=3: got 'lr_max=3', expected an override such as --optim.lr_max 3e-4.",
    "--stages.mixture 1": "stages: got {'mixture': 1}, expected a list of mappings.",
    "--train.steps.more 1": "train.steps.more: got '1', expected a field of a section; `steps` is not a section.",
    "--train.steps [1": "train.steps: got '[1', expected a whole number at least 1.",
}


@pytest.mark.parametrize("words", SENSELESS)
def test_overrides_that_make_no_sense_are_problems_like_any_other(tmp_path, words):
    (found,) = problems_of({"train": {"steps": 200}}, words.split(), tmp_path)
    assert found.startswith(SENSELESS[words])


def refused(source: str | Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(source)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_an_unknown_preset_is_answered_with_the_nearest_and_the_list(tmp_path):
    message = refused("quikstart")
    assert "There is no config file or preset `quikstart`. Did you mean `quickstart`?" in message
    assert "quickstart, z2all-100m, z2all-1b" in message
    assert "There is no config file" in refused(tmp_path / "configs" / "quickstart.yaml"), "never replaced by a preset"


def test_a_preset_is_found_by_name_from_any_folder_behind_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml", "./configs/quickstart.yml"):
        assert find_config(source).name == "quickstart.yaml"
    (tmp_path / "quickstart").mkdir()
    assert find_config("quickstart").is_absolute(), "a folder of that name, such as a workspace, is no config"
    (tmp_path / "quickstart.yaml").write_text("train: {steps: 300}")
    assert load_config("quickstart.yaml").train.steps == 300


UNREADABLE = {
    "optim:\n  lr_max: 1\nmodel: [\n": ("cannot be read as YAML; nothing was started", "run.yaml", "line 4"),
    "optim: {lr_max: 1.0e-3}\nmodel: {}\noptim: {beta1: 0.8}\n": ("`optim` is listed twice", "line 3"),
    "optim:\n  lr_max: 1\n  lr_max: 2\n": ("`lr_max` is listed twice",),
    "- 1\n": ("holds a list; expected sections such as `model:`",),
    "train: {name: !!python/object/apply:os.getcwd []}": ("could not determine a constructor",),
    "\udcff\udcfe\0": ("cannot be read as YAML",),
}


def test_a_file_that_holds_no_sections_is_refused_with_its_line(tmp_path):
    path = tmp_path / "run.yaml"
    for text, words in UNREADABLE.items():
        path.write_bytes(text.encode(errors="surrogateescape"))
        message = refused(path)
        assert [each for each in words if each not in message] == []


def test_the_printed_config_loads_back_to_an_equal_config_and_shows_every_field_with_its_doc_line(tmp_path):
    values = {
        "train": {"name": "1.10: a, 中文 # not a comment", "tokens_per_step": 1024},
        "optim": {"lr_max": "3e-4", "eps": 1e-12},
        "data": {"mixture": {"no": 1, "a: b": 0.5, "2023": 1e-3}, "seq_len": 128},
        "model": {"vocab_size": None, "rope_scaling": {"kind": "yarn", "original_seq_len": 2048, "factor": 4}},
        "stages": [{"name": "on", "from_step": 10, "mixture": {"zh": 1}}],
    }
    config = config_from_values(values, "of the test")
    assert config.samples_per_step == 8
    for with_docs in (True, False):
        text = config_yaml(config, with_docs)
        assert load_config(write(tmp_path, text)) == config
        assert ("# " in text.replace("# not", "")) == with_docs
    text = config_yaml(RunConfig())
    assert "# Learning rate at the top of the schedule.\n  lr_max: 0.0003\n" in text
    assert yaml.safe_load(text) == config_values(RunConfig())
