"""Values from rules: what `optim.kind: muon` needs and nobody set follows from the model, the batch and the tokens.

D is the token budget (train.tokens, or train.steps x train.tokens_per_step), B the tokens of a step, d the hidden size,
s = sqrt(B / 2^19) and w = (d / 768)^-0.5. A rule fills a field only where the config leaves it out or null. The values
were found at one size and transfer: spectral steps of Muon keep their rate over width, AdamW's tables need w, noise
grows as 1/sqrt(B), and depth needs nothing while output projections start at zero. docs/learning.md has the reasons.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from zero2all.common.schema import MISSING, Problem
from zero2all.config.training import RunConfig, StageConfig

REFERENCE_STEP, REFERENCE_TOKENS, REFERENCE_WIDTH = 2**19, 1.3e9, 768
"""B, D and d at which the rates below were found: a model of 12 layers with 12 tokens a parameter."""
MATRIX_RATE = 0.02
SHORT_RUN_POWER, SHORT_RUN_MOST = 1 / 3, 8.0
"""A run of fewer tokens takes larger steps, because it has fewer of them: (1.3e9/D)^(1/3), at most 8, at least 1."""
EMBEDDING_RATE, HEAD_RATE = 0.3, 0.008
"""A row of the embedding sees a gradient only where its id occurs; the head sees one for every token. A tied table is
both, and takes the head's."""
SMALL_RATE = 0.005
"""Norms, biases and routers: few values, all of them in every token, so neither width nor batch counts."""
MEMORY_SHARE, MEMORY_STEPS = 0.07, 20
"""tau = 1 / (lr decay steps), the share of the run that a matrix remembers; 0.14 and 0.035 both learned worse. In a run
of few steps it remembers at least 20 of them: more decay would leave nothing."""
REFERENCE_BATCH, BATCH_POWER, SMALLEST_STEP, LARGEST_STEP = 2**18, 0.571, 2**13, 2**21
"""The batch beyond which a step learns little more grows with the tokens of the run: 2^18 at 1.3e9, so 32,768 at 35 M,
which learned more from the same tokens than 65,536 and than 16,384."""
WARMUP_STEPS, WARMUP_SHARE = 40, 0.05
SHORT_ROWS_SHARE, SHORT_ROWS_PARTS, SHORTEST_ROW = 0.5, 8, 256
"""A run begins with rows of an eighth of data.seq_len, but of at least 256 tokens: attention costs little there, and a
batch of many short rows is more varied than one of few long rows."""
FIXED: dict[str, tuple[Any, str]] = {
    "optim.beta1": (0.8, "0.9, 0.95 and eps 1e-8 together learned worse"),
    "optim.beta2": (0.96, "as beta1"),
    "optim.embedding_beta2": (0.995, "most ids are rare"),
    "optim.eps": (1e-10, "as beta1"),
    "optim.decay_embeddings": (False, "a row whose id does not occur would vanish"),
    "optim.decay_schedule": ("cosine", "a constant decay learned worse"),
    "schedule.kind": ("wsd", "the rates were found with it"),
    "schedule.decay_share": (0.65, "the rates were found with it"),
    "schedule.decay_shape": ("linear", "the rates were found with it"),
    "schedule.min_lr_ratio": (0.05, "the rates were found with it"),
}
SHAPE = {name for name in FIXED if name.startswith("schedule.")} | {"schedule.decay_steps"}
RULED = {
    *("train.tokens_per_step", "optim.lr_max", "optim.lr_multipliers", "optim.weight_decay", "schedule.warmup_steps"),
    *FIXED,
}
"""Fields that a rule may fill. A run that goes on keeps what it began with."""


class Filled(NamedTuple):
    """A value that a rule gave."""

    name: str
    value: Any
    words: str


def fill(
    config: RunConfig, given: set[str], nulls: set[str], saved: RunConfig | None, problems: list[Problem]
) -> tuple[RunConfig, list[Filled]]:
    """The config with every field that no one has `given`, and where each value comes from. `nulls`: fields that were
    set to null. `saved`: the config of a run that goes on, which keeps its values. What is wrong is added to
    `problems`."""
    filled: list[Filled] = []

    def put(name: str, value: Any, words: str) -> None:
        nonlocal config
        if name not in given:
            filled.append(Filled(name, value, words))
            config = with_value(config, name, value)

    is_muon = config.optim.kind == "muon"
    if saved is not None and is_muon and "stages" not in given:
        config, given = dataclasses.replace(config, stages=saved.stages), given | {"stages"}
    if saved is not None and is_muon and saved.optim.kind == "muon":
        for section, _, field in (name.partition(".") for name in RULED - given):
            value, own = (getattr(getattr(of, section), field) for of in (saved, config))
            config = with_value(config, f"{section}.{field}", value | own if isinstance(value, dict) else value)
        given = given | RULED
    if not is_muon and "optim.lr_max" in nulls:
        expected = "a number above 0, such as 3e-4: only optim.kind muon has a rule for it"
        problems.append(Problem("optim.lr_max", None, expected))
    has_steps, tokens = "train.steps" in given, config.train.tokens
    if is_muon and not has_steps and tokens is None and not given >= RULED:
        expected = "the tokens of the run, such as 40M or 2B, or train.steps: the rules of optim.kind muon need it"
        problems.append(Problem("train.tokens", MISSING, expected))
        return config, filled
    if is_muon:
        put("train.tokens_per_step", *_tokens_per_step(config))
    per_step = config.train.tokens_per_step
    if tokens is not None:
        steps = max(1, tokens // per_step)
        if has_steps and steps != config.train.steps:
            expected = f"{steps} (train.tokens / train.tokens_per_step), or null for one of steps and tokens"
            problems.append(Problem("train.steps", config.train.steps, expected))
        put("train.steps", steps, "train.tokens / train.tokens_per_step")
    if not is_muon:
        return config, filled
    steps, budget = config.train.steps, tokens or config.train.steps * per_step
    s = math.sqrt(per_step / REFERENCE_STEP)
    longer = min(SHORT_RUN_MOST, max(1.0, (REFERENCE_TOKENS / budget) ** SHORT_RUN_POWER))
    words = f"{MATRIX_RATE} sqrt(B/2^19) (1.3e9/D)^(1/3), the last from 1 to {SHORT_RUN_MOST:g}"
    put("optim.lr_max", _rounded(MATRIX_RATE * s * longer), words)
    rates = {kind: rate for kind, rate in _rates(config, s).items() if kind not in config.optim.lr_multipliers}
    if rates:
        ours = {kind: _rounded(rate / config.optim.lr_max) for kind, (rate, _) in rates.items()}
        words = ", ".join(f"{kind} {words}" for kind, (_, words) in rates.items())
        words += f", over lr_max; s = sqrt(B/2^19), w = ({REFERENCE_WIDTH}/d)^0.5"
        put("optim.lr_multipliers", ours | config.optim.lr_multipliers, words)
    decay = 1 / (config.optim.lr_max * max(MEMORY_STEPS, MEMORY_SHARE * steps))
    put("optim.weight_decay", _rounded(decay), f"1 / ({MEMORY_SHARE} lr_max steps), at least {MEMORY_STEPS} steps")
    warmup = min(WARMUP_STEPS, int(WARMUP_SHARE * steps))
    put("schedule.warmup_steps", warmup, f"{WARMUP_STEPS}, at most {WARMUP_SHARE:.0%} of the steps")
    if stages := [] if "stages" in given else _short_rows_first(config):
        words = f"rows of 1/{SHORT_ROWS_PARTS}, at least {SHORTEST_ROW} tokens, for {SHORT_ROWS_SHARE:g} of the steps"
        config = dataclasses.replace(config, stages=stages)
        filled.append(Filled("stages", stages, words))
    # Parts of two shapes do not fit together, nor do the betas of two recipes.
    left = {*(SHAPE if given & SHAPE else ()), *(["optim.embedding_beta2"] if "optim.beta2" in given else ())}
    for name in (name for name in FIXED if name not in left):
        put(name, *FIXED[name])
    return config, filled


def _tokens_per_step(config: RunConfig) -> tuple[int, str]:
    """A power of two, in whole rows of every stage. Where the steps are given instead of D, D = steps x B."""
    train, power = config.train, BATCH_POWER
    best = REFERENCE_BATCH * ((train.tokens or train.steps) / REFERENCE_TOKENS) ** power
    if train.tokens is None:
        best **= 1 / (1 - power)
    best = 2 ** round(math.log2(min(LARGEST_STEP, max(SMALLEST_STEP, best))))
    row = math.lcm(config.data.seq_len, *(stage.seq_len for stage in config.stages if stage.seq_len))
    words = f"2^18 (D/1.3e9)^{power} to a power of two, from {SMALLEST_STEP} to {LARGEST_STEP}, in whole rows"
    return max(1, round(best / row)) * row, words


def _short_rows_first(config: RunConfig) -> list[StageConfig]:
    """The stages of a run that begins with short rows; none where rows are conversations, or already short."""
    whole, per_step = config.data.seq_len, config.train.tokens_per_step
    short, steps = max(SHORTEST_ROW, whole // SHORT_ROWS_PARTS), int(SHORT_ROWS_SHARE * config.train.steps)
    fits = (
        whole % short == 0 and per_step % short == 0 and short % (config.parallel.context * config.parallel.tensor) == 0
    )
    if config.data.packing != "concat" or short >= whole or not fits or not steps:
        return []
    return [StageConfig("short rows", 0, seq_len=short), StageConfig("whole rows", steps, seq_len=whole)]


def _rates(config: RunConfig, s: float) -> dict[str, tuple[float, str]]:
    """The rate of each kind that AdamW updates, and the rule."""
    model, w = config.model, math.sqrt(REFERENCE_WIDTH / config.model.hidden_size)
    head, small = (HEAD_RATE * s * w, f"{HEAD_RATE} s w"), (SMALL_RATE, f"{SMALL_RATE}")
    tables = {"embedding": (EMBEDDING_RATE * s * w, f"{EMBEDDING_RATE} s w"), "head": head}
    rest = {"norm": small, "bias": small, **({"router": small} if model.moe.experts else {})}
    return ({"embedding": head} if model.tied_embeddings else tables) | rest


def with_value(config: RunConfig, name: str, value: Any) -> RunConfig:
    """The config with another value of a field, by its dotted name."""
    section, field = name.split(".")
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: value})})


def _rounded(value: float) -> float:
    """To four digits: more would claim a precision that the rules do not have."""
    return float(f"{value:.4g}")
