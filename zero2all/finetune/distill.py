"""Distillation: the objective of `z2a sft … --teacher`, and what the teacher says, kept beside the conversations.

Of each learned token the teacher's k likeliest ids are kept with their probabilities q_j; q_rest is the sum of all
others. With p_j and p_rest of the model, and CE the usual loss,

    KL   = sum_j q_j log(q_j / p_j) + q_rest log(q_rest / p_rest)
    loss = alpha CE + (1 - alpha) KL, the mean over the learned tokens of a step

The rest is one bucket: without it a model would learn to leave nothing to the ids that were not kept. As p_rest is
1 - sum_j p_j, the loss depends on the model through -log p_j alone (`train.objective`).
Legend: B rows, T targets of a row, S those in this process, K ids, N learned tokens of a split, D conversations.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import staged_folder
from zero2all.common.manifest import fingerprint, write_manifest
from zero2all.common.progress import progress
from zero2all.common.records import SPLITS
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.finetune.data import SOURCE
from zero2all.finetune.preference import KIND, batches_of, is_whole, rows_of, sum_once
from zero2all.infer.load import LoadedModel, load_model
from zero2all.packed.loader import Batch
from zero2all.packed.samples import BestFitSamples
from zero2all.packed.shard_format import PackedSplit, open_split
from zero2all.train.context import RunContext
from zero2all.train.objective import Scored
from zero2all.train.state import TrainState
from zero2all.train.train_step import score

KEPT = ("firsts", "ids", "logps")
"""Of each split: where conversations begin (D + 1,), ids and log-probabilities (N, K) of one after the other."""
LOGITS_AT_ONCE = 1 << 27
"""Of a pass of the teacher, if every token were learned: 512 MB in float32."""


class Distillation:
    """The objective of a run with a teacher."""

    metrics: tuple[str, ...] = ("tokens", "loss/distill", "kl")
    shown = "loss/distill"

    def __init__(self, context: RunContext) -> None:
        self.context, self.alpha = context, context.config.finetune.distill.alpha
        self.folder, self.key, self.splits = _place(context.config)
        self.kept: dict[str, dict[str, np.ndarray]] = {}

    def begin(self, _state: TrainState, /) -> None:
        """Check what was kept of the teacher."""
        if not self.context.world.run_on_rank0(lambda: is_whole(self.folder, self.key)):
            raise BadInputError(
                f"{self.folder} is missing or damaged: it has what the teacher says of each token. Restore it, or "
                f"delete {self.context.run} and run `z2a sft` again."
            )
        for split in (name for name, each in self.splits.items() if each.tokens):
            self.kept[split] = {name: np.load(self.folder / f"{split}-{name}.npy", mmap_mode="r") for name in KEPT}

    def batches(self, _state: TrainState) -> None:
        """Conversations, from the packed data."""

    def further_targets(self, batch: Batch) -> Tensor:
        """The teacher's ids."""
        return self._kept_of("train", "ids", batch)

    def _kept_of(self, split: str, name: str, batch: Batch) -> Tensor:
        """(B, T, K) for the targets of a batch; where nothing is learned stands anything."""
        kept, device = self.kept[split], self.context.world.device
        found = torch.from_numpy(kept[name][np.append(places_of(batch, kept["firsts"]), 0)]).to(device)
        learned = torch.as_tensor(batch.weights).to(device) > 0
        return found[(learned.flatten().cumsum(0) - 1).clamp(min=0).view(learned.shape)]

    def weights(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """The derivative of the mean loss by the loss of each id."""
        slopes, numbers = self._losses("train", scored)
        slopes = torch.cat((torch.full_like(slopes[..., :1], self.alpha), (1 - self.alpha) * slopes), dim=-1)
        return slopes * (scored.counts / scored.sum_rows(numbers[0].clone()).clamp(min=1)).unsqueeze(-1), numbers

    def _losses(self, split: str, scored: Scored) -> tuple[Tensor, Tensor]:
        """The derivative of each KL (B, S, K), and the sums behind the metrics."""
        nats, counts = scored.nats.double(), scored.counts.double()
        logps = scored.own(self._kept_of(split, "logps", scored.batch)).double()
        kl, slopes = divergence(nats[..., 1:], logps, torch.finfo(scored.nats.dtype).eps)
        loss = self.alpha * nats[..., 0] + (1 - self.alpha) * kl
        return slopes, scored.sum_parts(torch.stack([counts.sum(), (loss * counts).sum(), (kl * counts).sum()]))

    def report(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over the learned tokens."""
        return {name: sums[name] / max(1.0, sums["tokens"]) for name in self.metrics[1:]}

    def held_out(self, state: TrainState) -> dict[str, float]:
        """The same of the held-out conversations."""
        context, world = self.context, self.context.world
        total = torch.zeros(len(self.metrics), dtype=torch.float64, device=world.device)
        for batch in batches_of(self.splits["valid"], context, state):
            ids = self._kept_of("valid", "ids", batch)
            total += self._losses("valid", score(state, batch, context.config, world, ids))[1]
        found = self.report(dict(zip(self.metrics, sum_once(total, context).tolist(), strict=True)))
        return {f"eval/valid/{name}": value for name, value in found.items()} if self.splits["valid"].tokens else {}


def divergence(nats: Tensor, logps: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """KL (B, S) of the teacher's log-probabilities of K ids and the model's losses (B, S, K), and its derivative by
    each of these losses. `eps`: their precision; a smaller rest cannot be told from none."""
    q, p = logps.exp(), (-nats).exp()
    q_rest, p_rest = (1 - q.sum(-1)).clamp(min=0), (1 - p.sum(-1)).clamp(min=16 * eps)
    kl = (q * (logps + nats)).sum(-1) + torch.xlogy(q_rest, q_rest / p_rest)
    return kl, q - (q_rest / p_rest).unsqueeze(-1) * p


# ---- what the teacher says ------------------------------------------------------------------------------------


def places_of(batch: Batch, firsts: np.ndarray) -> np.ndarray:
    """Where the learned tokens of a batch, row by row, stand in what is kept."""
    assert batch.documents is not None, "the config refuses rows without documents"
    numbers = batch.documents.numbers[batch.documents.numbers >= 0]
    return np.concatenate([np.arange(0), *(np.arange(firsts[n], firsts[n + 1]) for n in numbers)])


def _place(config: RunConfig) -> tuple[Path, str, dict[str, PackedSplit]]:
    """Where it is kept, a key that follows from all that decides it, and the splits."""
    packed, distill = Path(str(config.data.packed)), config.finetune.distill
    splits = {split: open_split(packed, SOURCE, split) for split in SPLITS}
    told = [distill.teacher, distill.top_k, config.data.seq_len, splits["train"].manifest["tokenizer"]]
    key = fingerprint([*told, *(split.fingerprint for split in splits.values())])
    return packed / f"teacher-{key}", key, splits


def keep_teacher(config: RunConfig, student: LoadedModel, workspace: Workspace) -> None:
    """Let the teacher read all conversations, and keep what it says; what is there already stays."""
    (folder, key, splits), k, ours = _place(config), config.finetune.distill.top_k, student.tokenizer
    if is_whole(folder, key):
        return
    if k >= ours.vocab_size:
        raise UsageError(f"finetune.distill.top_k is {k}; expected fewer than the {ours.vocab_size:,} ids there are.")
    teacher = load_model(str(config.finetune.distill.teacher), workspace)
    theirs, longest = teacher.tokenizer, teacher.model.config.max_seq_len
    if (ours.text_pieces, ours.control) != (theirs.text_pieces, theirs.control):
        raise UsageError(
            f"The teacher {teacher.name} has another vocabulary than {student.name}: the same ids mean other text. "
            f"Choose a teacher with the same one, or let it write answers and teach these with `z2a sft`."
        )
    if config.data.seq_len > longest:
        raise UsageError(f"The teacher {teacher.name} reads at most {longest:,} tokens. Lower --seq-len to that.")
    with staged_folder(folder) as partial:
        for name, split in splits.items():
            if split.tokens:
                _read(teacher, split, config, partial / name)
        write_manifest(partial, KIND, key, {"teacher": teacher.name, "step": teacher.step})
    del teacher
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the model that is trained next


@torch.no_grad()
def _read(teacher: LoadedModel, split: PackedSplit, config: RunConfig, path: Path) -> None:
    """Write what the teacher says of a split; `path`: how the files begin."""
    seq_len, model, k = config.data.seq_len, teacher.model, config.finetune.distill.top_k
    starts, _ = split.documents_in(0, split.tokens)
    if np.diff(starts, append=split.tokens).max() > seq_len + 1:
        raise UsageError("data.seq_len is shorter than conversations that were packed. Set it by --seq-len.")
    mask = split.read_mask(0, split.tokens)
    mask[starts] = 0  # nothing predicts the first token of a conversation
    firsts = np.append(0, np.add.reduceat(mask, starts, dtype=np.int64).cumsum())
    ids, logps = np.empty((firsts[-1], k), np.int32), np.empty((firsts[-1], k), np.float32)
    samples, rows = BestFitSamples(split, seq_len), max(1, LOGITS_AT_ONCE // (model.config.vocab_rows * seq_len))
    with progress("teacher", samples.count, "rows") as bar:
        for first in range(0, samples.count, rows):
            batch = rows_of(samples, range(first, min(first + rows, samples.count)), rows)
            tokens = torch.as_tensor(batch.tokens[:, :-1]).to(teacher.device)
            documents = torch.as_tensor(batch.document_ids)[:, :-1].to(teacher.device)
            hidden = model(tokens, document_ids=documents)[torch.as_tensor(batch.weights) > 0]  # (learned, C)
            logits = model.logits(hidden)[:, : teacher.tokenizer.vocab_size]
            likely, places = logits.float().log_softmax(-1).topk(k), places_of(batch, firsts)
            ids[places], logps[places] = likely.indices.cpu(), likely.values.cpu()
            bar.advance(min(rows, samples.count - first))
    for name, values in zip(KEPT, (firsts, ids, logps), strict=True):
        np.save(f"{path}-{name}.npy", values)
