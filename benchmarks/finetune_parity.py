"""Losses of fine-tuning and their gradients beside trl's, on the same batch, in float32 on the CPU.

    python3 -m venv ENV; ENV/bin/pip install torch trl transformers -e .
    ENV/bin/python benchmarks/finetune_parity.py

trl is no dependency of the project, so this runs in an environment of its own. trl's trainer is given texts and makes
the batch (one answer a row, padded); ours gets the same ids as packed rows, and runs its passes of a training step. The
policy differs from the reference, and the answers differ in length, or length-normalised losses would coincide with
plain ones. trl 1.16 has no label smoothing in its loss `sigmoid`; with share e it is 2 (1 - e) `sigmoid` minus
(1 - 2 e) `robust`, which is what its trainer is asked for.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor

from benchmarks.export_engines import MODELS
from benchmarks.machine import save_result
from zero2all.common.progress import say, show_log
from zero2all.config import RunConfig, config_from_values, config_values
from zero2all.config.finetune import DpoConfig
from zero2all.finetune.dialogues import PAIR_KEYS
from zero2all.finetune.preference import Preference, answers_of
from zero2all.model.config import ModelConfig
from zero2all.model.hf import read_hf_folder, to_hf_tensors, write_hf_folder
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch
from zero2all.packed.samples import Borders
from zero2all.parallel.parameter_table import init_weights, model_parts
from zero2all.parallel.world import World
from zero2all.train.state import TrainState, new_state
from zero2all.train.step_timer import StepTimer
from zero2all.train.train_step import forward_backward, score
from zero2all.train.weights import FlatWeights

MOST = 1e-5
"""Largest difference of a loss, and of a gradient as a share of its largest value."""
SMOOTHING, SFT = 0.1, 0.3
DPO: dict[str, tuple[DpoConfig, dict[str, Any]]] = {
    "dpo, sigmoid": (DpoConfig(beta=0.1), {"beta": 0.1, "loss_type": ["sigmoid"]}),
    "dpo, sigmoid, label smoothing": (
        DpoConfig(beta=0.5, label_smoothing=SMOOTHING),
        {
            **{"beta": 0.5, "label_smoothing": SMOOTHING, "loss_type": ["sigmoid", "robust"]},
            "loss_weights": [2 * (1 - SMOOTHING), -(1 - 2 * SMOOTHING)],
        },
    ),
    "dpo, sigmoid_norm (length-normalised)": (
        DpoConfig(beta=5.0, normalise=True),
        {"beta": 5.0, "loss_type": ["sigmoid_norm"]},
    ),
    "dpo, sigmoid and sft": (
        DpoConfig(beta=0.1, sft_weight=SFT),
        {"beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, SFT]},
    ),
}
SFT_CASE = "sft"
PAIRS = [
    {"prompt": "a b c ", "chosen": "d e f g h", "rejected": "i j"},
    {"prompt": "k l ", "chosen": "m", "rejected": "n o p q r s t"},
    {"prompt": "u v w x y ", "chosen": "z a b", "rejected": "c d e f"},
    {"prompt": "g ", "chosen": "h i j k l m n o p", "rejected": "q"},
]


class OfBatch(Preference):
    """The objective of a run, without its folder: the reference is given."""

    def __init__(self, config: DpoConfig, reference: Tensor) -> None:
        self.config, self.reference = config, {"train": reference}


def their_tokenizer(folder: Path) -> Any:
    """A tokenizer of words, which are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: number for number, name in enumerate(["<s>", "</s>", "<pad>", *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)
    return fast


def rows_of_pairs(inputs: dict[str, Tensor]) -> Batch:
    """trl's batch [all chosen, all rejected], right-padded, as rows of two pairs each."""
    count = len(inputs["input_ids"]) // 2
    width = 1 + 4 * inputs["input_ids"].shape[1]
    tokens, weights = np.zeros((count // 2, width), np.int64), np.zeros((count // 2, width - 1), np.float32)
    borders = Borders()
    for row in range(count // 2):
        columns, numbers, column = [], [], 0
        for document in range(4 * row, 4 * row + 4):
            at = document // 2 + count * (document % 2)
            real = inputs["attention_mask"][at].bool()
            ids, counts = inputs["input_ids"][at][real].numpy(), inputs["completion_mask"][at][real].numpy()
            columns.append(column)
            numbers.append(document)
            tokens[row, column : column + len(ids)] = ids
            weights[row, column : column + len(ids) - 1] = counts[1:]
            column += len(ids)
        borders.add(row, np.array([*columns, column]), np.array([*numbers, -1]))
    documents = borders.documents(count // 2, width)
    sources = np.zeros(count // 2, np.int64)
    return Batch(tokens, sources, sources, 0, weights, documents=documents, document_ids=documents.ids)


def our_state(config: RunConfig, weights: dict[str, Tensor]) -> TrainState:
    """Our model with these weights, as a run has it."""
    model = Z2all(config.model, resolve(OpsConfig(), "cpu"))
    with torch.no_grad():
        for name, part in model_parts(model).items():
            part.values.copy_(weights[name])
    return new_state(model.train(), config.optim, torch.float32)


def their_step(folder: Path, settings: dict[str, Any] | None) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """trl's loss, gradients by name, and batch; without settings of DPO that of SFT on both answers."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig as TheirConfig
    from trl import DPOTrainer, SFTConfig, SFTTrainer

    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("policy", "reference"))
    how = {"report_to": [], "use_cpu": True, "bf16": False, "max_length": None, "gradient_checkpointing": False}
    tokenizer, out = their_tokenizer(folder / "policy"), str(folder / "out")
    trainer: Any
    if settings is not None:
        arguments = TheirConfig(out, per_device_train_batch_size=len(PAIRS), **how, **settings)
        data = Dataset.from_list(PAIRS)
        trainer = DPOTrainer(policy, reference, arguments, train_dataset=data, processing_class=tokenizer)
    else:
        data = Dataset.from_list([{"prompt": p["prompt"], "completion": p[key]} for key in PAIR_KEYS for p in PAIRS])
        arguments = SFTConfig(out, per_device_train_batch_size=2 * len(PAIRS), **how)
        trainer = SFTTrainer(policy, arguments, train_dataset=data, processing_class=tokenizer)
    inputs = dict(next(iter(trainer.get_train_dataloader())))
    policy.train()
    loss = trainer.compute_loss(policy, dict(inputs))
    loss.backward()
    if settings is None:
        inputs["completion_mask"] = (inputs["labels"] >= 0).long()
    gradients = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
    return float(loss), gradients, inputs


def compare(layout: str, name: str, folder: Path) -> dict[str, float]:
    """The differences of one loss for one model."""
    config = MODELS[layout]
    for number, which in enumerate(("reference", "policy")):
        model = Z2all(config, resolve(OpsConfig(), "cpu"))
        init_weights(model, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(number * 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
        (folder / which).mkdir()
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        write_hf_folder(folder / which, config, {n: p.values for n, p in model_parts(model).items()}, "float32", ids)
    ours, theirs = DPO.get(name, (None, None))
    loss, gradients, inputs = their_step(folder, theirs)
    batch, world = rows_of_pairs(inputs), World()
    rows, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    values = {**config_values(RunConfig()), "model": config_values(RunConfig(model=config))["model"]}
    values["data"] |= {"seq_len": length, "document_mask": True}
    values["train"] |= {"tokens_per_step": rows * length, "micro_batch_samples": 1}
    run = config_from_values(values, "of this comparison")
    if ours is None:
        state = our_state(run, read_hf_folder(folder / "policy")[1])
        nats, counts, _ = forward_backward(state, batch, run, world, StepTimer(world.device))
        return differences(config, state, gradients, (loss, float(nats.sum() / counts.sum())))
    reference = our_state(run, read_hf_folder(folder / "reference")[1])
    with torch.no_grad():
        answers = answers_of(score(reference, batch, run, world))
    state = our_state(run, read_hf_folder(folder / "policy")[1])
    objective = OfBatch(ours, answers.logps[answers.numbers >= 0])  # the pairs stand in their order
    _, _, numbers = forward_backward(state, batch, run, world, StepTimer(world.device), objective)
    said = objective.report(dict(zip(objective.metrics, numbers.tolist(), strict=True)))
    found = said["loss/dpo"]
    if ours.sft_weight:
        scored = score(state, batch, run, world)
        chosen = answers_of(scored).places % 2 == 0
        counted = scored.counts * chosen
        found += ours.sft_weight * float((scored.nats * counted).sum() / counted.sum())
    return differences(config, state, gradients, (loss, found))


def differences(
    config: ModelConfig, state: TrainState, gradients: dict[str, Tensor], losses: tuple[float, float]
) -> dict[str, float]:
    """How far our loss and gradients lie from theirs."""
    weights = state.weights
    assert isinstance(weights, FlatWeights), "one process"
    ours = dict(to_hf_tensors(config, {name: part.values for name, part in weights.parts(weights.gradients).items()}))
    apart = max(float((ours[key] - one).abs().max() / one.abs().max()) for key, one in gradients.items())
    return {"loss": losses[0], "loss differs": abs(losses[1] - losses[0]), "gradients differ": apart}


def main() -> None:
    """Compare every loss and save the result."""
    import datasets
    import transformers
    import trl

    show_log()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results = {}
    for layout in ("llama", "qwen2"):
        for name in (SFT_CASE, *DPO):
            with tempfile.TemporaryDirectory() as folder:
                results[f"{name}, {layout}"] = found = compare(layout, name, Path(folder))
            say(f"{name}, {layout}: " + ", ".join(f"{what} {value:.3g}" for what, value in found.items()))
    worst = max(value for found in results.values() for what, value in found.items() if "differ" in what)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    save_result("finetune_parity", {"versions": versions, "allowed": MOST, "worst": worst, "cases": results})
    if worst > MOST:
        sys.exit(f"the largest difference is {worst:.3g}, above {MOST:g}")


if __name__ == "__main__":
    main()
