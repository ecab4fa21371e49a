"""Adapter folders: the names and fields that peft loads, and nothing of one is left out silently."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.model.test_lora import BASE, LORA, adapted
from zero2all.common.errors import BadInputError
from zero2all.model.lora import read_adapter_folder, write_adapter_folder

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def made(tmp_path):
    """An adapter folder, the weights of its base, and the adapters."""
    _, weights, adapters, _ = adapted(dtype=torch.float32)
    write_adapter_folder(tmp_path, BASE, LORA, weights | adapters, "mine")
    return tmp_path, weights, adapters


def change(folder, tensors=None, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        known, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    changed = {name: tensor for name, tensor in (known | (tensors or {})).items() if tensor is not None}
    save_file(changed, folder / "adapter_model.safetensors", metadata)


def test_a_folder_has_the_names_of_peft_and_comes_back_as_it_was(made):
    folder, weights, adapters = made
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
        b = file.get_tensor("base_model.model.model.layers.2.mlp.up_proj.lora_B.weight")
    assert len(names) == 2 * 7 * BASE.layers
    assert Q in names
    assert torch.equal(b, adapters["blocks.2.feed_forward.gate_up_pairs.lora.up_proj_b"])
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["task_type"]) == ("LORA", 3, 7, "CAUSAL_LM")
    lora, found = read_adapter_folder(folder, BASE, {name: one.bfloat16() for name, one in weights.items()})
    assert (lora.rank, lora.alpha, lora.targets_of(BASE)) == (3, 7.0, LORA.targets_of(BASE))
    assert found.keys() == adapters.keys()
    assert all(torch.equal(found[name], adapters[name]) for name in found)


def test_four_fields_are_enough_and_a_pattern_of_targets_is_told_by_the_tensors(made):
    folder, weights, _ = made
    fields = {"peft_type": "LORA", "r": 3, "lora_alpha": 7, "target_modules": ".*_proj"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    assert read_adapter_folder(folder, BASE, weights)[0].scale == 7 / 3


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        ({Q: None}, {}, "q_proj.lora_A.weight is missing"),
        ({Q: None, Q.replace("model.model.model", "model.model"): torch.zeros(3, 32)}, {}, "is unknown"),
        ({Q: torch.zeros(3, 48)}, {}, r"shape \(3, 48\) instead of \(3, 32\)"),
        ({Q: torch.full((3, 32), torch.nan)}, {}, "NaN or infinite"),
        ({}, {"r": 4}, r"shape \(3, 32\) instead of \(4, 32\)"),
        ({}, {"r": 0}, "rank: got 0"),
        ({}, {"use_dora": True}, "use_dora: True"),
        ({}, {"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({}, {"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({}, {"target_modules": ["q_proj"]}, "down_proj.lora_A.weight' is unknown"),
        ({}, {"target_modules": ["q_proj", "embed_tokens"]}, "targets\\[0\\]: got 'embed_tokens'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(made, tensors, fields, message):
    folder, weights, _ = made
    change(folder, tensors, **fields)
    with pytest.raises(BadInputError, match=message):
        read_adapter_folder(folder, BASE, weights)


def test_an_adapter_of_another_base_of_the_same_shape_is_refused(made):
    folder, weights, _ = made
    other = {name: one + 0.01 for name, one in weights.items()}
    with pytest.raises(BadInputError, match="belongs to another base: it was trained on mine"):
        read_adapter_folder(folder, BASE, other)
