"""Preference tuning: the objective of `z2a dpo`.

With h = log pi(answer) - log ref(answer), summed over the tokens of an answer, and m = beta (h_chosen - h_rejected):

    loss = -(1 - e) log s(m) - e log s(-m), the mean over the pairs of a step; s the logistic function

e is `label_smoothing`. `normalise` divides each h by the tokens of its answer. `sft_weight` adds the mean loss of the
chosen answers' tokens. The reference is the model at step 0: its sums are computed once, in the layout of the run, and
kept beside the pairs, so no second model is ever in memory.
Legend: B rows, S targets of a row here, P pairs of a row at most; of a pair 0 is the chosen answer, 1 the rejected one.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json_object, staged_folder
from zero2all.common.manifest import fingerprint, is_current, read_manifest, verify_files, write_manifest
from zero2all.common.records import SPLITS
from zero2all.config.finetune import PAIRS, DpoConfig
from zero2all.packed.loader import Batch
from zero2all.packed.samples import BestFitSamples, Borders
from zero2all.packed.shard_format import PackedSplit, open_split
from zero2all.resilience.heartbeat import beat
from zero2all.train.context import RunContext
from zero2all.train.objective import Scored
from zero2all.train.saved_config import FINETUNE_FILE
from zero2all.train.state import TrainState
from zero2all.train.train_step import score

KIND, DPO = "reference", "z2a dpo"
METRICS = (
    *("loss/dpo", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected", "lengths/chosen", "lengths/rejected"),
)


class Answers(NamedTuple):
    """The pairs in the rows of this process."""

    logps: Tensor
    """(B, P, 2) summed log-probability of each answer, float64."""
    lengths: Tensor
    """(B, P, 2) tokens of each."""
    numbers: Tensor
    """(B, P) number of each pair within its split; -1: there is none."""
    places: Tensor
    """(B, S) which answer of its row, of 2 P, each target belongs to; 2 P: none."""


def answers_of(scored: Scored) -> Answers:
    """The answers of pairs that stand side by side as documents 2 i and 2 i + 1."""
    documents, device = scored.batch.documents, scored.nats.device
    assert documents is not None, "rows of pairs have documents"
    rows, first = len(documents.row_starts) - 1, documents.row_starts
    most = max(1, -(-int(np.diff(first).max()) // 2))
    numbers = np.full((rows, 2 * most), -1)
    for row in range(rows):
        numbers[row, : first[row + 1] - first[row]] = documents.numbers[first[row] : first[row + 1]]
    places = scored.own(torch.as_tensor(scored.batch.document_ids)[:, 1:].to(device).long()).clamp(max=2 * most)
    places = torch.where(scored.counts > 0, places, 2 * most)
    here = F.one_hot(places, 2 * most + 1)[..., :-1].to(torch.float64)  # (B, S, 2 P)
    both = torch.stack((-scored.nats.double(), torch.ones_like(scored.nats, dtype=torch.float64)))
    logps, lengths = scored.sum_parts((both.unsqueeze(-1) * here).sum(dim=2)).view(2, rows, most, 2).unbind()
    return Answers(logps, lengths, torch.from_numpy(numbers[:, ::2] // 2).to(device), places)


def losses_of(answers: Answers, reference: Tensor, config: DpoConfig) -> tuple[Tensor, Tensor]:
    """The loss of each pair (B, P), without the SFT term, and the rewards of its answers (B, P, 2)."""
    h = answers.logps - reference
    rewards = config.strength * (h / answers.lengths.clamp(min=1) if config.normalise else h)
    margins, e = rewards[..., 0] - rewards[..., 1], config.label_smoothing
    return -(1 - e) * F.logsigmoid(margins) - e * F.logsigmoid(-margins), rewards


class Preference:
    """The objective of a run on pairs."""

    metrics: tuple[str, ...] = ("pairs", *METRICS)
    shown = "loss/dpo"

    def __init__(self, context: RunContext) -> None:
        self.context, self.config = context, context.config.finetune.dpo
        self.reference: dict[str, Tensor] = {}
        """By split what the base gives: (pairs, 2)."""
        if context.config.data.packed is None or context.checkpoint is None:
            raise UsageError(
                "finetune.method dpo begins with the weights of another run: `z2a dpo` makes such runs, and --fresh "
                "would draw new weights. Choose another --name, or delete the run."
            )
        self.folder = Path(context.config.data.packed)
        self.splits = {split: open_split(self.folder, PAIRS, split) for split in SPLITS}

    def batches(self, _state: TrainState) -> None:
        """Rows of pairs, from the packed data."""

    def weights(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """The derivative of the mean loss by the loss of each token."""
        answers = answers_of(scored)
        answers = answers._replace(logps=answers.logps.requires_grad_())
        is_pair = answers.numbers >= 0
        with torch.enable_grad():
            losses, rewards = losses_of(answers, self._reference("train", answers), self.config)
            (slopes,) = torch.autograd.grad((losses * is_pair).sum(), answers.logps)
        numbers = self._numbers(answers, losses.detach(), rewards.detach())
        totals = scored.sum_rows(numbers.clone())  # pairs, and last but one the tokens of chosen answers
        slopes = -slopes / totals[0].clamp(min=1)
        slopes[..., 0] += self.config.sft_weight / totals[-2].clamp(min=1)
        return F.pad(slopes.flatten(1), (0, 1)).gather(1, answers.places), numbers

    def _reference(self, split: str, answers: Answers) -> Tensor:
        return self.reference[split][answers.numbers]  # of no pair: that of the last

    @staticmethod
    def _numbers(answers: Answers, losses: Tensor, rewards: Tensor) -> Tensor:
        """The sums behind the metrics."""
        is_pair = (answers.numbers >= 0).double()
        margins = rewards[..., 0] - rewards[..., 1]
        each = (losses, *rewards.unbind(-1), margins, (margins > 0).double())
        each = (*each, *answers.logps.detach().unbind(-1), *answers.lengths.unbind(-1))
        return torch.stack((is_pair.sum(), *((value * is_pair).sum() for value in each)))

    def report(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over the pairs."""
        return {name: sums[name] / max(1.0, sums["pairs"]) for name in METRICS}

    def held_out(self, state: TrainState) -> dict[str, float]:
        """The same of the held-out pairs."""
        total = torch.zeros(len(self.metrics), dtype=torch.float64, device=self.context.world.device)
        for answers in self._scored(state, "valid"):
            total += self._numbers(answers, *losses_of(answers, self._reference("valid", answers), self.config))
        found = self.report(dict(zip(self.metrics, sum_once(total, self.context).tolist(), strict=True)))
        return {f"eval/valid/{name}": value for name, value in found.items()} if self.splits["valid"].tokens else {}

    # ---- the reference --------------------------------------------------------------------------------------------

    def begin(self, state: TrainState) -> None:
        """Read what the model at step 0 gives, or compute and keep it before the first step."""
        context, world = self.context, self.context.world
        weights = read_json_object(context.run / FINETUNE_FILE).get("weights")
        told = [self.splits[split].fingerprint for split in SPLITS]  # tokens and masks, so also the template
        settings = [context.config.data.seq_len, context.config.train.precision]
        key = fingerprint([weights, self.splits["train"].manifest["tokenizer"], *told, *settings])
        folder = self.folder / f"reference-{key}"
        if world.run_on_rank0(lambda: is_whole(folder, key)):
            kept = {split: np.fromfile(folder / f"{split}.f64", "<f8").reshape(-1, 2) for split in SPLITS}
            self.reference = {split: torch.from_numpy(each).to(world.device) for split, each in kept.items()}
            return
        if state.step:
            raise BadInputError(
                f"{folder} is missing or damaged: it has what the base gives to each answer, which only the first step "
                f"can compute. Restore it, or delete {context.run} and run `z2a dpo` again."
            )
        self.reference = {split: self._computed(state, split) for split in SPLITS}

        def keep() -> None:
            with staged_folder(folder) as partial:
                for split, values in self.reference.items():
                    values.cpu().numpy().astype("<f8").tofile(partial / f"{split}.f64")
                write_manifest(partial, KIND, key, {})

        world.run_on_rank0(keep)

    def _computed(self, state: TrainState, split: str) -> Tensor:
        """The sum of every answer of a split, (pairs, 2)."""
        values = torch.zeros(sum(self.splits[split].docs.lengths) // 2, 2, dtype=torch.float64)
        values = values.to(self.context.world.device)
        for answers in self._scored(state, split):
            is_pair = answers.numbers >= 0
            values[answers.numbers[is_pair]] = answers.logps[is_pair]
        return sum_once(values, self.context)

    def _scored(self, state: TrainState, split: str) -> Iterator[Answers]:
        """All pairs of a split."""
        for batch in batches_of(self.splits[split], self.context, state):
            yield answers_of(score(state, batch, self.context.config, self.context.world))


def is_whole(folder: Path, key: str) -> bool:
    """Whether what was kept under this key is there, byte for byte."""
    return is_current(folder, KIND, key) and not verify_files(folder, read_manifest(folder, KIND, DPO))


def sum_once(values: Tensor, context: RunContext) -> Tensor:
    """The sum over all processes; of those with the same rows one counts."""
    mesh = context.world.mesh
    counts = mesh.reports and mesh.context.rank == 0
    return mesh.world.sum(values if counts else torch.zeros_like(values))


def batches_of(split: PackedSplit, context: RunContext, state: TrainState) -> Iterator[Batch]:
    """All rows of a split, as many at once as a pass has; every process gets as many batches."""
    if not split.tokens:
        return
    samples, batch = BestFitSamples(split, context.config.data.seq_len), context.world.mesh.batch
    count = state.micro_batch_samples
    for first in range(0, samples.count, count * batch.size):
        beat("validate", state.step)
        start = min(first + count * batch.rank, samples.count)
        yield rows_of(samples, range(start, min(start + count, samples.count)), count)


def rows_of(samples: BestFitSamples, numbers: range, count: int) -> Batch:
    """Some rows of a split, and empty ones up to `count`."""
    tokens = np.zeros((count, samples.seq_len + 1), np.int64)
    weights, borders = np.zeros((count, samples.seq_len), np.float32), Borders()
    for row, number in enumerate(numbers):
        samples.read(number, tokens[row], weights[row], borders, row)
    documents, sources = borders.documents(count, samples.seq_len + 1), np.zeros(count, np.int64)
    return Batch(tokens, sources, sources, 0, weights, documents=documents, document_ids=documents.ids)
