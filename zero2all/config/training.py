"""The settings of the training loop: length, optimizer, schedule, stages, guards, checkpoints, validation; and the
whole config of a run, whose other sections stand in the `config.py` of their rooms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

from zero2all.common.schema import (
    Amount,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Range,
    Share,
    ShareBelowOne,
)
from zero2all.common.workspace import FOLDER_NAME_WORDS, is_folder_name
from zero2all.config.finetune import FinetuneConfig
from zero2all.diloco.config import DilocoConfig
from zero2all.model.config import PARAMETER_KINDS, Base, ModelConfig, RopeScaling
from zero2all.ops.config import OpsConfig
from zero2all.packed.config import DataConfig, mixture_problems
from zero2all.parallel.config import ParallelConfig
from zero2all.resilience.config import ResilienceConfig
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.track.config import TrackConfig

ScheduleKind = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
DecayShape = Literal["linear", "1-sqrt", "cosine"]


@dataclass(frozen=True)
class TrainConfig:
    """Length and shape of the run."""

    name: str = "run"
    """Folder of the run below <workspace>/runs/."""
    steps: PositiveInt = 10000
    """Optimizer steps of the whole run; where train.tokens is set they follow from it."""
    tokens: Amount | None = None
    """Tokens of the whole run, such as 40M or 2B, instead of steps."""
    tokens_per_step: PositiveInt = 524288
    """Tokens in one optimizer step, over all micro-batches. optim.kind muon: left out or null, by rule."""
    micro_batch_samples: PositiveInt | Literal["auto"] = 8
    """Samples in one forward and backward pass of a process; as many passes as a step needs are accumulated. auto: the
    most that fit into the device's memory, searched once and saved with the run."""
    precision: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """dtype of the weights the forward pass reads; the optimizer works on float32 masters. float16 is for cards without
    bfloat16 and scales the loss; float64 is for tests of exactness."""
    z_loss: NaturalFloat = 0.0
    """Times logsumexp(logits)^2, added to each token's loss: 1e-4 keeps logits from drifting; 0 leaves it out."""
    recompute: Literal["none", "full", "every_n", "selective", "groups"] = "none"
    """Activations recomputed in the backward pass instead of being kept: of no block, of all, of every n-th, all but
    the results of attention and matmuls, or of n consecutive blocks at a time."""
    recompute_every: PositiveInt = 2
    """every_n: recompute one block out of this many. groups: this many blocks are a group. Other kinds
    of recompute ignore it."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Capture a pass as a CUDA graph and replay it, so that the host need not queue its kernels one by one. auto: where
    the host would take longer than the device (small micro-batches), or where memory is plentiful."""
    seed: Annotated[int, Range(minimum=0, maximum=2e9)] = 1234
    """Seed of the initial weights and of dropout."""

    def problems(self, place: str) -> list[Problem]:
        """A run's name becomes a folder. The largest micro-batch that fits leaves no memory for a CUDA graph."""
        found = []
        if not is_folder_name(self.name):
            found.append(Problem(f"{place}.name", self.name, FOLDER_NAME_WORDS))
        if self.cuda_graph == "on" and self.micro_batch_samples == "auto":
            expected = (
                f"auto or off, or a number for {place}.micro_batch_samples, because auto there leaves no memory "
                "for a CUDA graph"
            )
            found.append(Problem(f"{place}.cuda_graph", self.cuda_graph, expected))
        return found


@dataclass(frozen=True)
class MuonConfig:
    """How optim.kind muon makes a step of the momentum of a matrix."""

    iterations: PositiveInt = 5
    """Products of a polynomial that make it nearly orthogonal; from the sixth on only the last digits change."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of those iterations; auto takes bfloat16 on CUDA and float32 elsewhere."""
    beta2: ShareBelowOne = 0.9
    """Decay of the mean square of each line of the orthogonal matrix, by whose root it is divided; 0: no division."""
    cautious_decay: bool = True
    """Whether weights decay only where the step makes them smaller too."""
    momentum_start: ShareBelowOne = 0.85
    """Momentum of the first step; no effect above optim.momentum."""
    momentum_warmup_share: Share = 0.15
    """Share of the steps of the run over which it rises to optim.momentum."""
    momentum_end: ShareBelowOne = 0.9
    """Momentum of the last step, to which it falls while the learning rate decays; no effect above optim.momentum."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and gradient clipping. docs/optimizers.md has the formulas and what each kind costs."""

    kind: Literal["adamw", "muon", "adamw_8bit", "adamw_bf16"] = "adamw"
    """muon: matrices by Muon, the rest by AdamW; rates, betas, decay, batch and schedule that are left out or null
    follow rules (docs/learning.md). adamw_8bit: moments in 8 bits; adamw_bf16: everything in bfloat16."""
    lr_max: PositiveFloat = 3e-4
    """Learning rate at the top of the schedule."""
    lr_multipliers: dict[str, NaturalFloat] = field(default_factory=dict)
    """Factor on the learning rate by kind of parameter (matrix, embedding, head, norm, bias); 1 for those not named."""
    beta1: ShareBelowOne = 0.9
    """Decay of the running mean of gradients (AdamW kinds)."""
    beta2: ShareBelowOne = 0.95
    """Decay of the running mean of squared gradients (AdamW kinds)."""
    embedding_beta2: ShareBelowOne | None = None
    """muon: beta2 of the embedding, which AdamW updates; None takes beta2."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment (AdamW kinds)."""
    momentum: ShareBelowOne = 0.95
    """Decay of the momentum of muon between its warmup and its end (optim.muon)."""
    nesterov: bool = True
    """muon: look one step of momentum ahead."""
    weight_decay: NaturalFloat = 0.1
    """Decoupled decay of matrices; norms, biases and (unless decay_embeddings) embeddings are left alone."""
    decay_embeddings: bool = True
    """Whether weight decay also acts on the embedding and the output head."""
    decay_schedule: Literal["constant", "cosine"] = "constant"
    """Weight decay over the run, on top of the learning rate's schedule; cosine: falls by a half cosine to 0."""
    clip_grad_norm: NaturalFloat = 1.0
    """Largest L2 norm of the whole gradient; 0 turns clipping off."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """How muon updates matrices."""
    bf16_rounding: Literal["stochastic", "kahan"] = "stochastic"
    """adamw_bf16: how small updates survive; stochastic needs no memory, kahan 2 more bytes a parameter."""

    def problems(self, place: str) -> list[Problem]:
        """The multipliers must name kinds of parameters; only muon has a beta2 of the embedding."""
        expected = f"kinds of parameters: {', '.join(PARAMETER_KINDS)}"
        found = [
            Problem(f"{place}.lr_multipliers", name, expected)
            for name in self.lr_multipliers
            if name not in PARAMETER_KINDS
        ]
        if self.embedding_beta2 is not None and self.kind != "muon":
            expected = f"null, because only {place}.kind muon reads it"
            found.append(Problem(f"{place}.embedding_beta2", self.embedding_beta2, expected))
        return found


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps: a linear warmup, then a shape."""

    kind: ScheduleKind = "cosine"
    """What follows the warmup; wsd: stays at the top, then decays."""
    warmup_steps: NaturalInt = 100
    """Steps of linear rise from 0 to lr_max."""
    min_lr_ratio: Share = 0.1
    """Last learning rate divided by lr_max; inverse_sqrt never falls below it, constant ignores it."""
    decay_share: Share = 0.2
    """wsd: the decay takes this share of the steps."""
    decay_steps: NaturalInt | None = None
    """wsd: steps of the decay. None takes decay_share."""
    decay_shape: DecayShape = "1-sqrt"
    """wsd: how the rate falls during the decay."""


@dataclass(frozen=True)
class StageScheduleConfig:
    """The schedule of a stage, over the steps of the stage; it starts from the rate the run has reached."""

    lr_max: PositiveFloat | None = None
    """Where the rate goes during warmup_steps. None keeps the rate the stage before ended with."""
    warmup_steps: NaturalInt = 0
    """Steps over which the rate moves linearly, up or down, from its current value to lr_max."""
    kind: ScheduleKind | None = None
    """As schedule.kind; None takes it from there."""
    min_lr_ratio: Share | None = None
    """As schedule.min_lr_ratio, of this stage's top; None takes it from there."""
    decay_share: Share | None = None
    """As schedule.decay_share, a share of this stage's steps; None takes it from there."""
    decay_steps: NaturalInt | None = None
    """As schedule.decay_steps; None takes it from there, or from decay_share where that is set here."""
    decay_shape: DecayShape | None = None
    """As schedule.decay_shape; None takes it from there."""

    def problems(self, place: str) -> list[Problem]:
        """A new lr_max needs a warmup, so that the rate does not jump."""
        if self.lr_max is None or self.warmup_steps:
            return []
        expected = "at least 1, so that the rate does not jump to lr_max"
        return [Problem(f"{place}.warmup_steps", self.warmup_steps, expected)]


@dataclass(frozen=True)
class AnnealConfig:
    """The record of `z2a anneal`: from a step on, the rate falls from its current value, whatever the schedule says."""

    from_step: NaturalInt
    """First step of the fall."""
    steps: PositiveInt
    """Steps of the fall; the last of them has the lowest rate."""
    shape: DecayShape = "1-sqrt"
    """How the rate falls."""
    to_share: Share = 0.0
    """Last rate as a share of the rate before the fall."""
    mixture: dict[str, NaturalFloat] | None = None
    """Weights of the sources during the fall, as in data.mixture. None keeps those of the run."""
    before: AnnealConfig | None = None
    """The fall that this one goes on from, with another end."""

    def problems(self, place: str) -> list[Problem]:
        """The mixture must leave something to read."""
        return mixture_problems(self.mixture, f"{place}.mixture" if place else "mixture")


@dataclass(frozen=True)
class StageConfig:
    """A part of the run with its own mixture, sequence length, schedule or rotary positions."""

    name: str
    """Name of this stage in logs."""
    from_step: NaturalInt
    """First step of this stage."""
    mixture: dict[str, NaturalFloat] | None = None
    """Weights as in data.mixture; each source continues where it stood. None takes data.mixture."""
    seq_len: PositiveInt | None = None
    """Tokens per sample. None takes data.seq_len. A new length cuts the text into new samples and shuffles them; a step
    keeps its tokens, a pass (micro_batch_samples) about as many."""
    schedule: StageScheduleConfig | None = None
    """A schedule over the steps of this stage. None continues the one before."""
    rope_theta: Base | None = None
    """Base of the rotary frequencies from this stage on. None keeps the one before."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary positions from this stage on. None keeps the one before."""

    def problems(self, place: str) -> list[Problem]:
        """The mixture must leave something to read; a schedule must not jump; a rope scaling must be complete."""
        found = mixture_problems(self.mixture, f"{place}.mixture")
        found += self.schedule.problems(f"{place}.schedule") if self.schedule else []
        found += self.rope_scaling.problems(f"{place}.rope_scaling") if self.rope_scaling else []
        return found


def model_at(step: int, model: ModelConfig, stages: list[StageConfig]) -> ModelConfig:
    """The model config at `step`, with the rotary positions of the stages so far; a scaling stays until the next."""
    for stage in stages:
        if stage.from_step <= step:
            model = dataclasses.replace(
                model,
                rope_theta=stage.rope_theta or model.rope_theta,
                rope_scaling=stage.rope_scaling or model.rope_scaling,
            )
    return model


@dataclass(frozen=True)
class GuardsConfig:
    """What the loop does with a bad step."""

    nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """What to do when a loss or gradient is NaN or Inf. skip: do not apply that step; rollback: skip, and after
    rollback_after_spikes of them go back to the last good checkpoint and skip the data; stop: end the run (exit
    code 12)."""
    max_skips_in_a_row: PositiveInt = 10
    """Stop (exit code 12) after this many skipped updates in a row."""
    loss_spike: Literal["log", "skip", "rollback"] = "rollback"
    """What to do when a loss is far above recent steps. log: record it; skip: do not apply that step; rollback: skip,
    and after rollback_after_spikes of them go back to the last good checkpoint and skip the data."""
    grad_spike: Literal["log", "skip", "rollback"] = "skip"
    """The same for the norm of the gradient."""
    loss_drop: Literal["log", "skip", "rollback"] = "log"
    """The same for a loss far below the steps before it: duplicated or trivial data."""
    spike_window_steps: Annotated[int, Range(minimum=8)] = 128
    """Accepted steps that a step is compared with."""
    spike_min_steps: Annotated[int, Range(minimum=8)] = 64
    """Accepted steps needed before anything is called a spike."""
    spike_from_step: NaturalInt | None = None
    """First step that may be called a spike. None: every step. During the warmup limits are twice as far from
    the usual value."""
    spike_sigmas: PositiveFloat = 6.0
    """Standard deviations above the mean of the window."""
    spike_mads: PositiveFloat = 10.0
    """The same by the robust rule: 1.4826 x median absolute deviation above the median. The lower limit counts."""
    loss_min_rise: NaturalFloat = 0.05
    """A loss spike is at least this share above the median, so that noise in a flat curve is not one."""
    grad_min_rise: NaturalFloat = 2.0
    """A spike of the gradient norm is at least this share above the median (2: three times the median)."""
    loss_min_drop: ShareBelowOne = 0.1
    """A drop is at least this share below the median."""
    rollback_after_spikes: PositiveInt = 3
    """Spikes of a kind set to rollback, within rollback_within_steps, after which the run goes back."""
    rollback_within_steps: PositiveInt = 16
    """See rollback_after_spikes."""
    rollback_margin_steps: NaturalInt = 8
    """A checkpoint is good when the first spike came at least this many steps after it."""
    skip_steps_after: NaturalInt = 16
    """A rollback skips the data from the first spike to the last, and of this many steps more."""
    max_rollbacks: NaturalInt = 3
    """Stop (exit code 12) instead of rolling back more often than this within max_rollbacks_within_steps."""
    max_rollbacks_within_steps: PositiveInt = 2000
    """See max_rollbacks."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of the run is saved, and what is kept."""

    every_steps: NaturalInt = 500
    """Save after this many steps, and always at the end; 0 saves at the end only."""
    keep_last: Annotated[int, Range(minimum=2)] = 2
    """Newest checkpoints that are kept."""
    keep_every_steps: NaturalInt = 0
    """Checkpoints at multiples of this are never deleted; 0 keeps none beyond keep_last."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest held-out loss, of those that are validated when they are saved; verbs
    take it with --step best."""
    when_busy: Literal["wait", "skip"] = "wait"
    """When a save is due and the previous one is still being written: wait for it, or skip this save."""


@dataclass(frozen=True)
class ValidationConfig:
    """How often the held-out loss is computed inside the loop, and on how much text."""

    every_steps: NaturalInt = 500
    """Validate after this many steps, and at the end; 0: at the end only."""
    tokens_per_source: PositiveInt = 262144
    """Held-out tokens scored per source each time: whole rows from its start, the same ones every time."""
    batch_samples: PositiveInt = 16
    """Sequences scored at once."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which packed data is read, and in which proportion."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """How the vocabulary is made, where the run makes one."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The shape of the model."""
    ops: OpsConfig = field(default_factory=OpsConfig)
    """Which implementation each operator uses."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Where the run computes."""
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    """Groups that train one model over a slow network."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""
    stages: list[StageConfig] = field(default_factory=list)
    """Stretches of the run with another mixture or sequence length, in the order of their from_step."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and shape of the run."""
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    """What fine-tuning does beside plain training."""
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    """What happens when a step goes wrong."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """What keeps the run alive, and what it does when it is asked to stop."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """What is logged."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """The held-out loss, computed inside the loop."""

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step of a stage without a sequence length of its own."""
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def groups(self) -> int:
        """Groups that train one model together."""
        return self.diloco.count

    def batch_place(self, rank: int, ranks: int) -> tuple[int, int]:
        """The number of a batch rank among those of all groups, and how many these are."""
        return (self.diloco.group or 0) * ranks + rank, self.groups * ranks
