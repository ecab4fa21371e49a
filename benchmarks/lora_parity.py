"""Adapters beside peft's: the same logits both ways, and the same step, on the CPU.

    python3 -m venv ENV; ENV/bin/pip install torch peft transformers -e .
    ENV/bin/python benchmarks/lora_parity.py

peft is no dependency of the project, so this runs in an environment of its own. For each model (random
weights): an adapter that peft saved is read by ours, one that ours wrote after a step of training is
loaded by peft, a merged model is compared with the adapters beside it (float32, largest difference of a logit), and one
step of AdamW with equal settings is compared with peft and torch (float64, largest difference of a weight).
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.export_engines import MODELS
from benchmarks.machine import save_result
from zero2all.common.progress import say, show_log
from zero2all.config.training import OptimConfig
from zero2all.model.config import LORA_TARGETS, LoraConfig, ModelConfig
from zero2all.model.hf import write_hf_folder
from zero2all.model.lora import add_adapters, merge, read_adapter_folder, write_adapter_folder
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.parameter_table import init_weights, model_parts
from zero2all.train.optimizers.base import Optimizer
from zero2all.train.state import TrainState, new_state

MOST_LOGITS, MOST_STEP = 1e-5, 1e-9
RATE, EPS = 1e-3, 1e-4
"""Of AdamW. Its first step is gradient / (|gradient| + eps): a small eps would compare roundings of gradients."""
INIT_STD, B_STD = 0.05, 0.02
"""Logits of a few units, which adapters change by about one."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, all linear": ("llama", {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}),
    "qwen2 (biases, tied), q and v": ("qwen2", {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "qwen3 (qk_norm), rsLoRA": ("qwen3", {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"}),
    "qwen3_moe, attention": ("qwen3_moe", {"r": 8, "lora_alpha": 16, "target_modules": list(LORA_TARGETS[:4])}),
}


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """Random weights, none of them plain, by logical name."""
    model = Z2all(config, resolve(OpsConfig(), "cpu"))
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator))
    return {name: part.values for name, part in model_parts(model).items()}


def training(
    config: ModelConfig, weights: dict[str, Tensor], lora: LoraConfig, adapters: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Z2all, TrainState]:
    """Our model with these adapters, and its training."""
    model = Z2all(config, resolve(OpsConfig(), "cpu")).to(dtype)
    with torch.no_grad():
        for name, part in model_parts(model).items():
            part.values.copy_(weights[name])
    add_adapters(model, lora, config)
    state = new_state(model, OptimConfig(lr_max=RATE, eps=EPS, weight_decay=0.0), dtype)
    with state.weights.masters_between_steps() as masters:
        for name, part in masters.items():
            part.values.copy_(adapters[name])
    state.weights.publish_masters()
    return model, state


def compare(name: str, folder: Path) -> dict[str, Any]:
    """All differences of one case."""
    import transformers
    from peft import LoraConfig as TheirConfig
    from peft import PeftModel, get_peft_model

    layout, settings = CASES[name]
    config = dataclasses.replace(MODELS[layout], init_std=INIT_STD)
    weights = weights_of(config)
    base = folder / "base"
    base.mkdir()
    write_hf_folder(base, config, weights, "float32", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None})

    def their_base(dtype: torch.dtype) -> Any:
        how = {"attn_implementation": "sdpa"} | ({"experts_implementation": "eager"} if config.moe.experts else {})
        return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **how)

    ids = torch.randint(config.vocab_ids, (4, 97), generator=torch.Generator().manual_seed(2))

    # Theirs in ours.
    torch.manual_seed(4)  # peft draws A
    theirs = get_peft_model(their_base(torch.float32), TheirConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, B_STD, generator=generator)
    theirs.save_pretrained(folder / "theirs")
    lora, adapters = read_adapter_folder(folder / "theirs", config, weights)
    model, _ = training(config, weights, lora, adapters, torch.float32)
    with torch.no_grad():
        expected, plain = theirs(ids).logits, their_base(torch.float32)(ids).logits
        found = model.eval().logits(model(ids))
        sums = {key: one.clone() for key, one in weights.items()}
        merge(sums, adapters, config, lora)
        whole = Z2all(config, resolve(OpsConfig(), "cpu")).eval()
        for key, part in model_parts(whole).items():
            part.values.copy_(sums[key])
        merged = whole.logits(whole(ids))
    result = {
        "largest logit": float(expected.abs().max()),
        "effect": float((expected - plain).abs().max()),
        "theirs in ours": float((found - expected).abs().max()),
        "merged and unmerged": float((merged - found).abs().max()),
        "merged and their merged": float((merged - theirs.merge_and_unload()(ids).logits).abs().max()),
    }

    # One step in float64, and ours in theirs.
    reference = PeftModel.from_pretrained(
        their_base(torch.float64), folder / "theirs", is_trainable=True, autocast_adapter_dtype=False
    ).double()
    for module in reference.modules():
        if type(module).__name__.endswith("RMSNorm"):  # transformers computes it in float32 whatever the dtype
            module.forward = partial(_norm, module)
    trained = {key: one for key, one in reference.named_parameters() if one.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    logits = reference(ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    optimizer.step()
    stepped, state = training(config, weights, lora, adapters, torch.float64)
    stepped.train().loss(ids[:, :-1], ids[:, 1:])[0].backward()
    assert isinstance(state.optimizer, Optimizer)
    state.optimizer.step()
    with state.weights.masters_between_steps() as masters:
        ours = {key: part.values.detach().clone() for key, part in masters.items()}
    by_theirs = {key.replace(".default", ""): one.detach() for key, one in trained.items()}
    assert len(by_theirs) == len(ours)
    exact = "one step" if not config.moe.experts else "one step, their router in float32"
    result[exact] = max(float((ours[key] - _like(by_theirs, key)).abs().max()) for key in ours)
    result["a step moves"] = max(float((ours[key] - adapters[key]).abs().max()) for key in ours)
    (folder / "ours").mkdir()
    write_adapter_folder(folder / "ours", config, lora, weights | ours, "base")
    loaded = PeftModel.from_pretrained(their_base(torch.float32), folder / "ours")
    model, _ = training(config, weights, lora, ours, torch.float32)
    with torch.no_grad():
        result["ours in theirs"] = float((model.eval().logits(model(ids)) - loaded(ids).logits).abs().max())
    return result


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def _like(theirs: dict[str, Tensor], name: str) -> Tensor:
    """Their tensor of our name: blocks.2.attention.qkv.lora.q_proj_a."""
    layer, (target, end) = name.split(".")[1], name.rpartition(".")[2].rsplit("_", 1)
    (key,) = (key for key in theirs if f".layers.{layer}." in key and f".{target}.lora_{end.upper()}." in key)
    return theirs[key]


def main() -> int:
    """Compare every case and save what was found."""
    import peft
    import transformers

    show_log()
    found, wrong = {}, []
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = compare(name, Path(folder))
        for what, difference in found[name].items():
            say(f"{name}: {what} {difference:.2e}")
        limits = {what: MOST_STEP if what == "one step" else MOST_LOGITS for what in found[name]}
        known = ("largest logit", "effect", "a step moves")
        wrong += [f"{name}: {what}" for what, most in limits.items() if what not in known and found[name][what] > most]
    versions = {"torch": torch.__version__, "peft": peft.__version__, "transformers": transformers.__version__}
    save_result("lora_parity", {"versions": versions, "largest differences": found, "wrong": wrong})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
