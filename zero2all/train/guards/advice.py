"""What to change after a spike, by fixed rules.

First the data: if one channel or a few rows cause the rise, the text is to blame and no setting is changed. Only
otherwise the rules about the optimizer apply, each with the figures it is based on.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LARGE_BETA2 = 0.95
CONCENTRATED_SHARE = 0.6
"""Of the rise, carried by a tenth of the rows: then these rows are to blame."""
CHANNEL_FACTOR = 3.0
"""One channel rose this many times more than the others together."""
TOO_LOOSE_CLIP = 3.0
"""A clip this many times the usual norm seldom acts."""
SMALL_GRADIENT = 10.0
"""Times eps: below that, eps decides the step and not the gradient."""

ALL_LOOKS_SOUND = (
    "Data and settings look right. If the loss recovers from a single spike, nothing needs to change. If it happens "
    "again, lower optim.lr_max."
)


@dataclass(frozen=True)
class Facts:
    """What the rules look at."""

    kind: str
    step: int
    lr: float
    lr_max: float
    warmup_steps: int
    beta1: float | None  # None: the optimizer has no such setting
    beta2: float | None
    eps: float | None
    clip_grad_norm: float
    usual_grad_norm: float | None
    parameters: int
    earlier_incidents: int = 0  # of this run, before this one
    channels_before: Mapping[str, float] | None = None
    channels_now: Mapping[str, float | None] | None = None  # None where a loss was not finite
    row_losses: Sequence[float] = ()  # mean loss of each row of the step, where it is known
    usual_loss: float | None = None


@dataclass(frozen=True)
class Advice:
    """One line of advice."""

    about: str  # data, beta2, eps, clip, lr, warmup, none
    text: str


def data_is_suspect(facts: Facts) -> str | None:
    """Why the data is to blame, or None."""
    if facts.kind == "loss_drop":
        return "learning does not make a loss fall this fast, so the documents may be repeated or trivial"
    channel = _rising_channel(facts.channels_before or {}, facts.channels_now or {})
    if channel is not None:
        return channel
    return _few_rows(facts.row_losses, facts.usual_loss)


def advice(facts: Facts) -> list[Advice]:
    """What to do, the most likely cause first; always at least one line."""
    suspect = data_is_suspect(facts)
    if suspect is not None:
        return [Advice("data", f"The data is to blame: {suspect}. Fix or remove that text; keep the settings.")]
    return list(_about_settings(facts)) or [Advice("none", ALL_LOOKS_SOUND)]


def _about_settings(facts: Facts) -> Iterator[Advice]:
    """Every rule about a setting that applies."""
    if facts.beta1 is not None and facts.beta2 is not None and facts.beta2 > LARGE_BETA2:
        steps, largest = 1 / (1 - facts.beta2), (1 - facts.beta1) / math.sqrt(1 - facts.beta2)
        yield Advice(
            "beta2",
            f"optim.beta2 is {facts.beta2:g}: the running mean of squares covers about {steps:,.0f} steps, so after "
            f"small gradients one large gradient moves a weight by up to {largest:.1f} times the learning rate. Set it "
            f"to {LARGE_BETA2}.",
        )
    usual, clip = facts.usual_grad_norm, facts.clip_grad_norm
    typical = (usual or 0.0) / math.sqrt(max(1, facts.parameters))
    if facts.eps is not None and 0 < typical < SMALL_GRADIENT * facts.eps:
        lower = 10.0 ** math.floor(math.log10(typical / 1000))
        yield Advice(
            "eps",
            f"A gradient component is usually {typical:.1e}, and optim.eps is {facts.eps:g}: eps is not small against "
            f"it, so steps grow suddenly when gradients grow. Set optim.eps to {lower:.0e} or less.",
        )
    if clip == 0:
        yield Advice("clip", "Gradients are not clipped (optim.clip_grad_norm is 0). Set it to 1.0.")
    elif usual and clip > TOO_LOOSE_CLIP * usual:
        yield Advice(
            "clip",
            f"optim.clip_grad_norm is {clip:g}, and the gradient norm is usually {usual:.2g}, so a spike "
            f"{clip / usual:.1f} times as large is not clipped. Set it to about {2 * usual:.1g}.",
        )
    warmup = facts.warmup_steps
    if facts.step <= 2 * warmup or (warmup == 0 and facts.step <= 100):
        longer = max(100, 2 * warmup)
        yield Advice(
            "warmup",
            f"This is close to the warmup ({warmup:,} steps). Set schedule.warmup_steps to {longer:,}, or lower "
            f"optim.lr_max (now {facts.lr_max:g}).",
        )
    elif facts.earlier_incidents:
        yield Advice(
            "lr",
            f"The learning rate is {facts.lr:.2g} (optim.lr_max {facts.lr_max:g}), and this is incident "
            f"{facts.earlier_incidents + 1} of the run. Continue from a checkpoint before it with optim.lr_max "
            f"{facts.lr_max * 0.7:.2g}.",
        )


def _rising_channel(before: Mapping[str, float], now: Mapping[str, float | None]) -> str | None:
    finite = {name: loss for name, loss in now.items() if loss is not None}
    rises = {name: loss - before[name] for name, loss in finite.items() if name in before}
    if len(rises) < 2:
        return None
    top = max(rises, key=lambda name: rises[name])
    others = [max(0.0, rise) for name, rise in rises.items() if name != top]
    if rises[top] > 0.1 * before[top] and rises[top] > CHANNEL_FACTOR * max(others):
        return f"the channel {top} rose from {before[top]:.3g} to {finite[top]:.3g}, the others hardly changed"
    return None


def _few_rows(losses: Sequence[float], usual: float | None) -> str | None:
    excess = sorted((max(0.0, loss - usual) for loss in losses if math.isfinite(loss)), reverse=True) if usual else []
    few = max(1, len(excess) // 10)
    total = sum(excess)
    if len(excess) < 10 or total <= 0 or usual is None:
        return None
    share = sum(excess[:few]) / total
    if share < CONCENTRATED_SHARE or excess[0] < 0.5 * usual:
        return None
    return f"{few} of {len(excess)} rows cause {share:.0%} of the rise"
