"""Losses of fine-tuning and their gradients beside trl's, on the same batch, on the CPU: in float32, and those on
rewards, whose terms cancel, in float64 (where transformers' norms still compute in float32).

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
from zero2all.config.finetune import DpoConfig, GrpoConfig
from zero2all.finetune.dialogues import PAIR_KEYS
from zero2all.finetune.grpo import Drawn, PolicyGradient, advantages_of, rollout_rows
from zero2all.finetune.preference import Preference, answers_of
from zero2all.finetune.rollouts import Answer
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
CLIPS = {"epsilon": 0.2, "epsilon_high": 0.28}
GRPO: dict[str, tuple[GrpoConfig, dict[str, Any]]] = {
    "grpo, dapo": (GrpoConfig(loss="dapo"), CLIPS),
    "grpo, dapo, kl": (GrpoConfig(loss="dapo", kl_weight=0.04), {**CLIPS, "beta": 0.04}),
    "grpo, grpo, kl": (GrpoConfig(loss="grpo", kl_weight=0.04), {**CLIPS, "beta": 0.04}),
    "grpo, dr_grpo": (GrpoConfig(loss="dr_grpo"), CLIPS),
    "grpo, cispo": (GrpoConfig(loss="cispo", clip_high=1.1), {"epsilon_high": 1.1}),
}
SFT_CASE = "sft"
PAIRS = [
    {"prompt": "a b c ", "chosen": "d e f g h", "rejected": "i j"},
    {"prompt": "k l ", "chosen": "m", "rejected": "n o p q r s t"},
    {"prompt": "u v w x y ", "chosen": "z a b", "rejected": "c d e f"},
    {"prompt": "g ", "chosen": "h i j k l m n o p", "rejected": "q"},
]


class OfRows(PolicyGradient):
    """The objective of a run on rewards, without its folder: what the reference gives is known."""

    def __init__(self, config: GrpoConfig, reference: Tensor) -> None:
        self.config, self._known = config, reference

    def _reference_nats(self, _batch: Batch) -> Tensor:
        return self._known


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


def our_state(config: RunConfig, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> TrainState:
    """Our model with these weights, as a run has it."""
    model = Z2all(config.model, resolve(OpsConfig(), "cpu")).to(dtype)
    with torch.no_grad():
        for name, part in model_parts(model).items():
            part.values.copy_(weights[name])
    return new_state(model.train(), config.optim, dtype)


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


def answers_to_compare() -> list[Answer]:
    """Answers of different lengths to two prompts, of which one has called a function."""
    draw = np.random.default_rng(3)
    found = []
    for number, length in enumerate((3, 7, 12, 5, 1, 9, 4, 6)):
        prompt = [0, *(3 + (np.arange(4 + number // 4) * 5 + number // 4) % 26).tolist()]
        logps: list[float | None] = draw.uniform(-3.6, -2.6, length).tolist()
        if number == 2:
            logps[5:8] = [None] * 3  # what the function answered
        found.append(Answer(number // 4, [*prompt, *draw.integers(3, 29, length).tolist()], logps))
    return found


REWARDS = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, -0.5]


def their_rl_step(
    folder: Path, name: str, settings: dict[str, Any], answers: list[Answer], reference: list[list[float]]
) -> tuple[float, dict[str, Tensor]]:
    """trl's loss and gradients of the same answers."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig as TheirConfig
    from trl import GRPOTrainer

    policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float64)
    loss_type = name.split(", ")[1]
    arguments = TheirConfig(
        **{"output_dir": str(folder / "out"), "report_to": [], "use_cpu": True, "bf16": False},
        **{"per_device_train_batch_size": len(answers), "num_generations": len(answers) // 2, "temperature": 1.0},
        **{"max_completion_length": GrpoConfig().max_new_tokens, "gradient_checkpointing": False},
        **{"loss_type": loss_type, "beta": 0.0, **settings},
    )
    trainer: Any = GRPOTrainer(
        policy, lambda **_: [0.0], arguments, train_dataset=Dataset.from_list([{"prompt": "a"}] * len(answers)),
        processing_class=their_tokenizer(folder / "policy"),
    )  # fmt: skip
    starts = [len(each.ids) - len(each.logps) for each in answers]
    before, after = max(starts), max(len(each.logps) for each in answers)

    def table(width: int, rows: list[list[Any]], at_left: bool = False) -> Tensor:
        return torch.tensor(
            [[0] * (width - len(row)) + row if at_left else row + [0] * (width - len(row)) for row in rows]
        )

    advantages = [*advantages_of(REWARDS[:4], loss_type), *advantages_of(REWARDS[4:], loss_type)]
    wanted = [[float(logp is not None) for logp in each.logps] for each in answers]
    inputs = {
        "prompt_ids": table(before, [each.ids[:start] for each, start in zip(answers, starts, strict=True)], True),
        "prompt_mask": table(before, [[1] * start for start in starts], True),
        "completion_ids": table(after, [each.ids[start:] for each, start in zip(answers, starts, strict=True)]),
        "completion_mask": table(after, [[1] * len(each.logps) for each in answers]),
        "tool_mask": table(after, wanted),
        "old_per_token_logps": table(after, [[logp or 0.0 for logp in each.logps] for each in answers]),
        "ref_per_token_logps": table(after, reference),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "num_items_in_batch": torch.tensor(sum(map(sum, wanted))),
    }
    trainer.current_gradient_accumulation_steps = 1
    policy.train()
    loss = trainer._compute_loss(policy, inputs)
    loss.backward()
    return float(loss), {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}


def compare_rl(layout: str, name: str, folder: Path) -> dict[str, float]:
    """The differences of one loss on rewards for one model."""
    config, (ours, theirs) = MODELS[layout], GRPO[name]
    write_models(config, folder)
    answers = answers_to_compare()
    drawn = Drawn(answers, REWARDS, [False] * len(answers), [0.0, 0.0])
    length = 40
    batch = rollout_rows(drawn, ours, length, (0, 1), 0)
    assert batch.tokens.shape[0] < len(answers), "several answers stand in a row"
    run, world = run_of(config, batch.tokens.shape[0], length), World()
    with torch.no_grad():
        reference = score(
            our_state(run, read_hf_folder(folder / "reference")[1], torch.float64), batch, run, world
        ).nats
    given: list[list[float]] = [[] for _ in answers]
    assert batch.documents is not None, "rows of answers have documents"
    for row in range(len(batch.tokens)):
        of_row = batch.documents.numbers[slice(*batch.documents.row_starts[row : row + 2])]
        for place, number in enumerate(of_row.tolist()):
            if number >= 0:
                at = np.flatnonzero(batch.documents.ids[row] == place)[-len(answers[number].logps) :]
                given[number] = (-reference[row, at - 1]).tolist()
    loss, gradients = their_rl_step(folder, name, theirs, answers, given)
    state = our_state(run, read_hf_folder(folder / "policy")[1], torch.float64)
    objective = OfRows(ours, reference)
    _, _, numbers = forward_backward(state, batch, run, world, StepTimer(world.device), objective)
    said = objective.report(dict(zip(objective.metrics, numbers.tolist(), strict=True)))
    return differences(config, state, gradients, (loss, said["loss/grpo"]))


def write_models(config: ModelConfig, folder: Path) -> None:
    """A reference and a policy that has moved from it, as Hugging Face folders."""
    for number, which in enumerate(("reference", "policy")):
        model = Z2all(config, resolve(OpsConfig(), "cpu"))
        init_weights(model, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(number * 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
        (folder / which).mkdir()
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        write_hf_folder(folder / which, config, {n: p.values for n, p in model_parts(model).items()}, "float32", ids)


def run_of(config: ModelConfig, rows: int, length: int) -> RunConfig:
    """A run with steps of so many rows."""
    values = {**config_values(RunConfig()), "model": config_values(RunConfig(model=config))["model"]}
    values["data"] |= {"seq_len": length, "document_mask": True}
    values["train"] |= {"tokens_per_step": rows * length, "micro_batch_samples": 1}
    return config_from_values(values, "of this comparison")


def compare(layout: str, name: str, folder: Path) -> dict[str, float]:
    """The differences of one loss for one model."""
    config = MODELS[layout]
    write_models(config, folder)
    ours, theirs = DPO.get(name, (None, None))
    loss, gradients, inputs = their_step(folder, theirs)
    batch, world = rows_of_pairs(inputs), World()
    rows, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    run = run_of(config, rows, length)
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
        for name in (SFT_CASE, *DPO, *GRPO):
            with tempfile.TemporaryDirectory() as folder:
                measured = (compare_rl if name in GRPO else compare)(layout, name, Path(folder))
            results[f"{name}, {layout}"] = found = measured
            say(f"{name}, {layout}: " + ", ".join(f"{what} {value:.3g}" for what, value in found.items()))
    worst = max(value for found in results.values() for what, value in found.items() if "differ" in what)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    save_result("finetune_parity", {"versions": versions, "allowed": MOST, "worst": worst, "cases": results})
    if worst > MOST:
        sys.exit(f"the largest difference is {worst:.3g}, above {MOST:g}")


if __name__ == "__main__":
    main()
