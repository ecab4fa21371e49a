"""Reinforcement learning on rewards: the objective of `z2a rl`.

Of the G answers to a prompt, with rewards r_i, the advantage of answer i is A_i = (r_i - mean r) / (std r + 1e-4); of
dr_grpo r_i - mean r. With rho_t = pi(token) / pi(token when it was drawn), the loss of a token is

    dapo, grpo, dr_grpo    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
    cispo                  -min(rho, clip_high) A log pi, the factor held constant

averaged over all tokens of the step (dapo, cispo), over the tokens of each answer and then over answers (grpo), or
divided by answers x max_new_tokens (dr_grpo). `kl_weight` adds that much of rho (e^d - d - 1), d = log ref - log pi,
ref the model at step 0. Every step draws its own answers, so rho differs from 1 only by the rounding of two programs,
the engine and the trainer; that is what it corrects.

An answer that could not be judged counts neither in the mean of its prompt nor in the loss. The rows of a
step are the drawn answers, packed best-fit, each target with the advantage of its answer and its share of the mean.
Legend: B rows, T targets of a row.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.progress import say
from zero2all.common.records import SPLITS
from zero2all.config.finetune import PROMPTS, GrpoConfig
from zero2all.finetune.data import records_name
from zero2all.finetune.rewards import JudgedAnswer, Rewards
from zero2all.finetune.rollouts import Answer, Sampler, answer_from, answer_values
from zero2all.infer.load import LoadedModel, empty_model, load_model
from zero2all.model.lora import merge
from zero2all.model.z2all import Z2all
from zero2all.packed.bestfit import best_fit_rows
from zero2all.packed.loader import Batch, rank_rows
from zero2all.packed.samples import NO_DOCUMENT, PADDING_ID, Borders
from zero2all.packed.shard_format import open_split
from zero2all.parallel.parameter_table import model_parts
from zero2all.resilience.heartbeat import beat
from zero2all.tokenizer.load import load_tokenizer
from zero2all.tokenizer.template import chat_of
from zero2all.train.context import RunContext
from zero2all.train.objective import Scored
from zero2all.train.state import TrainState

SPREAD_FLOOR = 1e-4
FACTS = (
    *("rollout/reward", "rollout/reward_std", "rollout/right", "rollout/length", "rollout/ended", "rollout/calls"),
    *("rollout/not_judged", "rollout/groups_without_advantage", "rollout/entropy"),
    *("time/rollout", "time/reward"),
)
"""What is known of the answers of a step, all processes together."""
LARGEST_LOG_RATIO = 10.0
OF_TOKENS = ("tokens", "loss/grpo", "policy/sampler_gap", "policy/clipped_low", "policy/clipped_high", "policy/kl")
ROWS_AT_ONCE = 8
"""That the reference scores."""
MOST_REASONS = 3
"""Of a process and a step, why answers could not be judged; a run says ten times as many."""


def policy_losses(
    logps: Tensor, old: Tensor, advantages: Tensor, config: GrpoConfig, reference: Tensor | None = None
) -> Tensor:
    """The loss of each token (B, T), from log-probabilities now and when it was drawn."""
    ratio = (logps - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if config.loss == "cispo":
        losses = -ratio.detach().clamp(max=config.clip_high) * advantages * logps
    else:
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if reference is not None and config.kl_weight:
        losses = losses + config.kl_weight * ratio * divergence(logps, reference)
    return losses


def divergence(logps: Tensor, reference: Tensor) -> Tensor:
    """An estimate of the KL divergence from the reference, of each token; never below 0."""
    d = reference - logps
    return d.exp() - d - 1


class Prompts:
    """The packed prompts of a split, and what rewards know of each."""

    def __init__(self, folder: Path, split: str) -> None:
        self._packed = open_split(folder, PROMPTS, split)
        shards = range(len(self._packed.docs))
        starts = [self._packed.docs[shard].astype(np.int64) + self._packed.shard_starts[shard] for shard in shards]
        self._borders = np.concatenate([*starts, [self._packed.tokens]])
        with open(folder / records_name(split), encoding="utf-8") as lines:
            self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if len(self.records) != len(self):
            raise BadInputError(
                f"{folder / records_name(split)} has {len(self.records):,} lines, but there are {len(self):,} prompts. "
                f"Delete {folder} and run `z2a rl` again."
            )

    def __len__(self) -> int:
        return len(self._borders) - 1

    def ids(self, number: int) -> list[int]:
        """The ids of a prompt."""
        start, end = self._borders[number : number + 2].tolist()
        found: list[int] = self._packed.read(start, end - start).tolist()
        return found

    def of_step(self, step: int, count: int, seed: int) -> list[int]:
        """The prompts of a step: shuffled anew each time all have been asked."""
        places, total = np.arange(step * count, (step + 1) * count), len(self)
        orders = {
            epoch: np.random.default_rng([seed, epoch]).permutation(total) for epoch in set((places // total).tolist())
        }
        return list(dict.fromkeys(int(orders[place // total][place % total]) for place in places.tolist()))


class PolicyGradient:
    """The objective of a run on prompts."""

    metrics: tuple[str, ...] = (*OF_TOKENS, *FACTS)
    shown = "rollout/reward"

    def __init__(self, context: RunContext) -> None:
        config = context.config
        self.context, self.config = context, config.finetune.grpo
        if config.data.packed is None or context.checkpoint is None:
            raise UsageError(
                "finetune.method grpo begins with the weights of another run: `z2a rl` makes such runs, and --fresh "
                "would draw new weights. Choose another --name, or delete the run."
            )
        self.rewards = Rewards(self.config)
        self.tokenizer = load_tokenizer(context.workspace.tokenizer)
        self.template = chat_of(context.workspace.tokenizer, self.tokenizer)
        self.prompts = {split: Prompts(Path(config.data.packed), split) for split in SPLITS}
        self.reference: Z2all | None = None
        self.said: set[str] = set()

    def begin(self, state: TrainState) -> None:
        """Make the sampler; with adapters it has a model of its own, in which they are merged."""
        config, model = self.context.config, state.model
        if config.finetune.lora.rank:
            model = empty_model(config.model, config.ops, self.context.world.device, model.embedding.weight.dtype)
        loaded = LoadedModel(config.train.name, state.step, model, self.tokenizer)
        self.sampler = Sampler(loaded, self.template, self.config, config.data.seq_len + 1)

    def batches(self, state: TrainState) -> Rollouts:
        """Rows of answers, drawn when they are asked for."""
        return Rollouts(self, state)

    # ---- answers --------------------------------------------------------------------------------------------------

    def step_batch(self, state: TrainState) -> RolloutBatch:
        """This process's rows of the next step."""
        config, batch = self.context.config, self.context.world.mesh.batch
        prompts = self.prompts["train"].of_step(state.step, self.config.prompts, config.train.seed)
        drawn = self.draw(state, "train", prompts, self.config.answers)
        place = config.batch_place(batch.rank, batch.size)
        return rollout_rows(drawn, self.config, config.data.seq_len, place, state.tokens)

    def draw(
        self, state: TrainState, split: str, numbers: Sequence[int], answers: int, likeliest: bool = False
    ) -> Drawn:
        """Answers to these prompts. Each process draws and judges some; then all have all of them."""
        world, prompts, started = self.context.world, self.prompts[split], time.perf_counter()
        self._merge_adapters(state)
        key = f"{self.context.config.train.seed}/{split}/{state.step}"
        mine = {number: prompts.ids(number) for number in numbers[world.rank :: world.size]}
        alive = partial(beat, "data", state.step)
        found = self.sampler.draw(mine, answers, key, likeliest, alive)
        judging = time.perf_counter()
        judged = [JudgedAnswer(a.text, "\n".join(a.texts), a.calls, prompts.records[a.prompt]) for a in found]
        values = self.rewards.values(judged, alive)
        totals, right = list(map(self.rewards.total, values)), list(map(self.rewards.is_right, values))
        seconds = (judging - started, time.perf_counter() - judging)
        own = [*map(list, zip(map(answer_values, found), totals, right, strict=True))]
        said = world.gather([own, seconds, [reason for reason, _ in self.rewards.failures.most_common(MOST_REASONS)]])
        places = {number: place for place, number in enumerate(numbers)}
        together = [(answer_from(values), *judgement) for rows, *_ in said for values, *judgement in rows]
        together.sort(key=lambda each: places[each[0].prompt])  # the answers to a prompt stay in their order
        slowest = [max(each) for each in zip(*(row[1] for row in said), strict=True)]
        drawn = Drawn(*map(list, zip(*together, strict=True)), slowest)  # type: ignore[call-arg]
        self._check_judged(drawn, [reason for *_, reasons in said for reason in reasons], state.step)
        return drawn

    def _check_judged(self, drawn: Drawn, reasons: Sequence[str], step: int) -> None:
        """Say once why answers could not be judged; stop where none could."""
        if all(total is None for total in drawn.totals):
            raise BadInputError(
                f"None of the {len(drawn.answers):,} answers of step {step:,} could be judged "
                f"({'; '.join(reasons[:MOST_REASONS])}). Correct the reward function, and run the same command: "
                "the run continues."
            )
        for reason in reasons:
            if reason not in self.said and len(self.said) < 10 * MOST_REASONS:
                self.said.add(reason)
                if self.context.world.is_first:
                    say(f"warning: answers that a reward cannot judge are left out: {reason}")

    def _merge_adapters(self, state: TrainState) -> None:
        if (model := self.sampler.model) is state.model:
            return
        frozen, weights = model_parts(state.model), {name: each.values for name, each in model_parts(model).items()}
        for name, values in weights.items():
            values.copy_(frozen[name].values)
        merge(weights, dict(state.model.named_parameters()), model.config, self.context.config.finetune.lora)

    # ---- the loss -------------------------------------------------------------------------------------------------

    def weights(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """The derivative of the loss by the loss of each token."""
        batch, device, config = scored.batch, scored.nats.device, self.config
        assert isinstance(batch, RolloutBatch), "its own batches"
        arrays = (batch.old, batch.advantages, batch.shares)
        old, advantages, shares = (torch.as_tensor(each).to(device) for each in arrays)
        reference = -self._reference_nats(batch) if config.kl_weight else None
        nats = scored.nats.double().requires_grad_()
        with torch.enable_grad():
            loss = (policy_losses(-nats, old, advantages, config, reference) * shares).sum()
            (slopes,) = torch.autograd.grad(loss, nats)
        drawn, gap = (shares != 0).double(), -nats.detach() - old
        low = (gap.exp() < 1 - config.clip_low) & (advantages < 0)
        high = (gap.exp() > 1 + config.clip_high) & (advantages > 0)
        kl = torch.zeros_like(old) if reference is None else divergence(-nats.detach(), reference)
        sums = (drawn.sum(), loss.detach(), *((each * drawn).sum() for each in (gap.abs(), low, high, kl)))
        facts = batch.facts if batch.first_row == 0 else (0.0,) * len(FACTS)  # of all rows, so they are said once
        return slopes, torch.cat((torch.stack(sums), torch.tensor(facts, dtype=torch.float64, device=device)))

    def report(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over tokens, and what is known of the answers."""
        tokens = max(1.0, sums["tokens"])
        values = {name: sums[name] / (1.0 if name == "loss/grpo" else tokens) for name in OF_TOKENS[1:]}
        if not self.config.kl_weight:
            del values["policy/kl"]
        return values | {name: sums[name] for name in FACTS}

    @torch.no_grad()
    def _reference_nats(self, batch: Batch) -> Tensor:
        """The loss of each target under the model at step 0, (B, T)."""
        device, run = self.context.world.device, self.context.run
        if self.reference is None:
            dtype = self.sampler.model.embedding.weight.dtype
            narrow = torch.float32 if dtype == torch.float64 else dtype
            self.reference = load_model(str(run), step=0, device=device, dtype=narrow).model.to(dtype)
        model, found = self.reference, []
        tokens, ids = (torch.as_tensor(each).to(device) for each in (batch.tokens, batch.document_ids))
        for first in range(0, len(tokens), ROWS_AT_ONCE):
            here = slice(first, first + ROWS_AT_ONCE)
            hidden, targets = model(tokens[here, :-1], document_ids=ids[here, :-1]), tokens[here, 1:]
            found.append(model.head_loss(hidden, targets, torch.ones(targets.shape, device=device))[1].double())
        return torch.cat(found)

    # ---- held-out prompts -----------------------------------------------------------------------------------------

    def held_out(self, state: TrainState) -> dict[str, float]:
        """How held-out prompts are answered: rightly by the likeliest answer (greedy), by one that is drawn (pass@1),
        by one of k (pass@k); how far the model has moved from the base (kl)."""
        k, numbers = self.config.valid_answers, range(min(self.config.valid_prompts, len(self.prompts["valid"])))
        if not numbers:
            return {}
        likeliest = self.draw(state, "valid", numbers, 1, likeliest=True)
        drawn = self.draw(state, "valid", numbers, k)
        batch = rollout_rows(drawn, self.config, self.context.config.data.seq_len, (0, 1), state.tokens)
        is_drawn = torch.as_tensor(batch.weights) > 0
        logps, reference = torch.as_tensor(batch.old)[is_drawn], -self._reference_nats(batch).cpu()[is_drawn]
        by_prompt = [[right for at in group if (right := drawn.right[at]) is not None] for group in drawn.groups]
        facts = dict(zip(FACTS, drawn.facts(), strict=True))
        found = {
            "greedy": likeliest.mean(likeliest.right),
            "pass@1": drawn.mean([float(np.mean(group)) for group in by_prompt if group]),
            f"pass@{k}": drawn.mean([any(group) for group in by_prompt if group]),
            "reward": facts["rollout/reward"],
            "calls": float(np.mean([answer.calls for answer in likeliest.answers])),
            "length": facts["rollout/length"],
            "entropy": -float(logps.mean()),
            "kl": float(divergence(logps, reference).mean()),
        }
        return {f"eval/valid/{name}": value for name, value in found.items()}


class Rollouts:
    """The batches of a run: drawn from the weights as they are when the step begins."""

    def __init__(self, objective: PolicyGradient, state: TrainState) -> None:
        self.objective, self.state, self.wait_seconds = objective, state, 0.0

    def __iter__(self) -> Iterator[Batch]:
        """One batch for each step that is left."""
        while self.state.step < self.state.last_step:
            started = time.perf_counter()
            batch = self.objective.step_batch(self.state)
            self.wait_seconds = time.perf_counter() - started
            yield batch

    def close(self) -> None:
        """Nothing is read ahead."""


@dataclass(frozen=True)
class RolloutBatch(Batch):
    """Rows of answers. (B, T) each; zeros where nobody drew the target."""

    old: np.ndarray | None = None
    """Log-probability of each target when it was drawn."""
    advantages: np.ndarray | None = None
    shares: np.ndarray | None = None
    """Of each target in the mean; over all rows of the step they sum to 1 (dr_grpo: to less)."""
    facts: tuple[float, ...] = ()
    """The values of FACTS."""


@dataclass(frozen=True)
class Drawn:
    """Answers in order of their prompts, and what rewards say of each."""

    answers: Sequence[Answer]
    totals: Sequence[float | None]
    """The weighted sum of the rewards; None: it could not be judged."""
    right: Sequence[bool | None]
    """Whether the first reward is at least 1; None: it could not be judged."""
    seconds: Sequence[float]
    """For drawing and for judging, of the slowest process."""

    def mean(self, values: Sequence[float | None]) -> float:
        """Over the answers that have a value; 0 where none has."""
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else 0.0

    @property
    def groups(self) -> list[list[int]]:
        """The places of the answers to each prompt."""
        found: dict[int, list[int]] = defaultdict(list)
        for at, answer in enumerate(self.answers):
            found[answer.prompt].append(at)
        return list(found.values())

    def facts(self) -> tuple[float, ...]:
        """The values of FACTS."""
        judged = [[value for at in group if (value := self.totals[at]) is not None] for group in self.groups]
        spreads = [float(np.std(rewards)) for rewards in judged if rewards]
        logps = [logp for answer in self.answers for logp in answer.logps if logp is not None]
        return (
            self.mean(self.totals),
            self.mean(spreads),
            self.mean(self.right),
            self.mean([float(answer.drawn) for answer in self.answers]),
            self.mean([float(answer.ended) for answer in self.answers]),
            self.mean([float(answer.calls) for answer in self.answers]),
            float(sum(total is None for total in self.totals)),
            self.mean([float(spread == 0) for spread in spreads]),
            -self.mean(logps),
            *self.seconds,
        )


def advantages_of(rewards: Sequence[float | None], loss: str) -> list[float | None]:
    """The advantages of the answers to one prompt."""
    known = np.array([reward for reward in rewards if reward is not None])
    if not known.size:
        return [None] * len(rewards)
    spread = 1.0 if loss == "dr_grpo" else (known.std(ddof=1) if known.size > 1 else 0.0) + SPREAD_FLOOR
    return [None if reward is None else float((reward - known.mean()) / spread) for reward in rewards]


def shares_of(lengths: Sequence[int], config: GrpoConfig) -> list[float]:
    """The share of each token of an answer in the mean, by answer; from the tokens of each."""
    if config.loss == "grpo":
        return [1 / max(1, length) / len(lengths) for length in lengths]
    if config.loss == "dr_grpo":
        return [1 / len(lengths) / config.max_new_tokens] * len(lengths)
    return [1 / max(1, sum(lengths))] * len(lengths)


def rollout_rows(
    drawn: Drawn, config: GrpoConfig, seq_len: int, place: tuple[int, int], first_token: int
) -> RolloutBatch:
    """The rows of one process, `place` (rank, ranks), of a step that begins at `first_token` of the run."""
    advantages: dict[int, float] = {}
    for group in drawn.groups:
        values = advantages_of([drawn.totals[at] for at in group], config.loss)
        advantages |= {at: value for at, value in zip(group, values, strict=True) if value is not None}
    each = shares_of([drawn.answers[at].drawn for at in advantages], config)
    shares = dict(zip(advantages, each, strict=True))
    row_of = best_fit_rows(np.array([len(answer.ids) for answer in drawn.answers]), seq_len + 1)
    count = int(row_of.max()) + 1
    first, own, rows = rank_rows(count, *place)
    tokens = np.full((rows, seq_len + 1), PADDING_ID, np.int64)
    old, advantage, share = (np.zeros((rows, seq_len)) for _ in range(3))
    weights, borders = np.zeros((rows, seq_len), np.float32), Borders()
    for row in range(own):
        column, columns, numbers = 0, [], []
        for at in np.flatnonzero(row_of == first + row).tolist():
            answer = drawn.answers[at]
            end = column + len(answer.ids)
            tokens[row, column:end] = answer.ids
            targets = slice(end - len(answer.logps) - 1, end - 1)  # they are shifted by one
            is_drawn = np.array([logp is not None for logp in answer.logps])
            weights[row, targets] = is_drawn
            old[row, targets] = [logp or 0.0 for logp in answer.logps]
            advantage[row, targets] = is_drawn * advantages.get(at, 0.0)
            share[row, targets] = is_drawn * shares.get(at, 0.0)
            columns.append(column)
            numbers.append(at)
            column = end
        if column <= seq_len:
            columns.append(column)
            numbers.append(NO_DOCUMENT)
        borders.add(row, np.array(columns), np.array(numbers))
    documents, sources = borders.documents(rows, seq_len + 1), np.zeros(rows, np.int64)
    return RolloutBatch(
        *(tokens, sources, sources, 0, weights, float(weights.sum(dtype=np.float64)), documents, documents.ids),
        *(first_token, count, own, first, old, advantage, share, drawn.facts()),
    )
