"""Which curve to believe: whether a score over the checkpoints of a run says anything about training.

For each score:

- *Spearman*: how well the order of the values is the order of the steps (1: rises all the way, -1: falls, 0: neither),
  and how likely chance alone would give such an order (p, by shuffling).
- *Signal to noise*: the change from the first third of the checkpoints to the last third, divided by the noise. Noise
  is how far a value lies from the line between its neighbours: a smooth curve of any shape has little.
- *Change over interval*: the same change, divided by half of the score's own 95 % confidence interval. Below 1, other
  questions of the same kind could have given another picture.
- *Above chance*: the last third, less what guessing gives.

The rules follow those by which tasks for small models were chosen elsewhere (Spearman at least 0.5, better than chance,
signal above noise), with a test of chance, because a run has few checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from zero2all.common.language import language
from zero2all.common.language import translate as t
from zero2all.common.progress import terminal_safe
from zero2all.evals.scores import Curve

SIGNAL, NOISE, CHANCE, TOO_FEW = "carries signal", "noise", "at chance", "too few checkpoints"
LEAST_CHECKPOINTS = 5
"""Four are in order by luck once in 12 times."""
LEAST_SPEARMAN = 0.5
LARGEST_P = 0.05
LEAST_SIGNAL_TO_NOISE = 2.0
MOST_SIGNAL_TO_NOISE = 1000.0
"""A curve without any noise is shown with this."""
SHUFFLES = 2000
MOST_LINES = 20
NOISES_OF_CHANCE = 3.0
"""Without an interval, so many standard errors from chance are not above it."""


@dataclass(frozen=True)
class Signal:
    """What can be said of a curve."""

    name: str
    checkpoints: int
    left_out: int
    """Checkpoints whose value is not a number."""
    verdict: str
    reason: str
    reason_zh: str
    spearman: float | None = None
    p: float | None = None
    change: float | None = None
    noise: float | None = None
    signal_to_noise: float | None = None
    change_over_interval: float | None = None
    above_chance: float | None = None


def judge_curves(curves: Sequence[Curve]) -> list[Signal]:
    """The verdict on each of them."""
    return [judge_curve(curve) for curve in curves]


def signals_json(signals: Sequence[Signal]) -> list[dict[str, Any]]:
    """For a file."""
    return [asdict(signal) for signal in signals]


def signal_lines(signals: Sequence[Signal]) -> list[str]:
    """The verdicts for a terminal: those of whole channels and tasks first, as many as fit on a screen."""
    if not signals:
        return []
    if all(signal.verdict == TOO_FEW for signal in signals):
        return ["", t(f"no verdict on the curves yet: {_reason(signals[0])}")]
    lines = ["", t("which curves to believe                 Spearman   signal/noise   verdict")]
    shown = sorted(signals, key=lambda each: each.name.count("/"))
    for signal in shown[:MOST_LINES]:
        spearman = "-" if signal.spearman is None else f"{signal.spearman:+.2f}"
        ratio = "-" if signal.signal_to_noise is None else f"{signal.signal_to_noise:.1f}"
        lines.append(f"  {terminal_safe(signal.name):<38} {spearman:>7} {ratio:>14}   {t(signal.verdict)}")
    if len(signals) > MOST_LINES:
        counts = Counter(signal.verdict for signal in shown[MOST_LINES:])
        rest = ", ".join(f"{times} {t(verdict)}" for verdict, times in counts.most_common())
        lines.append(t(f"  and {len(signals) - MOST_LINES} more: {rest}"))
    return lines


def _reason(signal: Signal) -> str:
    return signal.reason_zh if language() == "zh" else signal.reason


def judge_curve(curve: Curve) -> Signal:
    """Whether a curve carries signal, and why."""
    points = [point for point in curve.points if np.isfinite(point.value)]
    left_out = len(curve.points) - len(points)
    if len(points) < LEAST_CHECKPOINTS:
        not_numbers = f" ({left_out} more are not numbers)" if left_out else ""
        return Signal(
            curve.name,
            len(points),
            left_out,
            TOO_FEW,
            f"{len(points)} checkpoints{not_numbers}; {LEAST_CHECKPOINTS} are needed to see a trend",
            f"只有 {len(points)} 个检查点{f'（另有 {left_out} 个不是数值）' if left_out else ''}，"
            f"至少要 {LEAST_CHECKPOINTS} 个才能区分趋势与偶然",
        )
    steps = np.array([point.step for point in points], dtype=np.float64)
    values = np.array([point.value for point in points], dtype=np.float64)
    half_width = _half_width(curve)
    spearman, p = _spearman(values)
    third = max(2, len(values) // 3)
    first, last = float(values[:third].mean()), float(values[-third:].mean())
    change, noise = last - first, _noise(steps, values)
    figures = _Figures(
        spearman=spearman,
        p=p,
        first=first,
        last=last,
        noise=noise,
        signal_to_noise=min(abs(change) / noise if noise else MOST_SIGNAL_TO_NOISE, MOST_SIGNAL_TO_NOISE),
        half_width=half_width,
        error=half_width if half_width is not None else NOISES_OF_CHANCE * noise / third**0.5,
        is_flat=float(np.ptp(values)) <= 1e-12 * float(np.abs(values).max()),
    )
    verdict, reason, reason_zh = _verdict(curve, figures)
    return Signal(
        curve.name,
        len(points),
        left_out,
        verdict,
        reason,
        reason_zh,
        spearman=spearman,
        p=p,
        change=change,
        noise=noise,
        signal_to_noise=0.0 if figures.is_flat else figures.signal_to_noise,
        change_over_interval=abs(change) / half_width if half_width else None,
        above_chance=None if curve.chance is None else last - curve.chance,
    )


@dataclass(frozen=True)
class _Figures:
    spearman: float
    p: float
    first: float
    last: float
    noise: float
    signal_to_noise: float
    half_width: float | None
    error: float
    """How far from chance a value may lie and still be no better."""
    is_flat: bool


def _verdict(curve: Curve, found: _Figures) -> tuple[str, str, str]:
    """The verdict, and the reason in English and in Chinese."""
    chance = curve.chance
    if chance is not None and abs(found.last - chance) <= found.error and abs(found.first - chance) <= found.error:
        return (
            CHANCE,
            f"{found.last:.4g} at the end, and guessing gives {chance:.4g}: within ±{found.error:.2g}",
            f"末段为 {found.last:.4g}，随机猜测为 {chance:.4g}：相差在 ±{found.error:.2g} 以内",
        )
    if found.is_flat:
        return NOISE, "the value is the same at every checkpoint", "每个检查点的值都相同，无法区分"
    if abs(found.spearman) < LEAST_SPEARMAN or found.p > LARGEST_P:
        return (
            NOISE,
            f"no trend: Spearman with the step is {found.spearman:+.2f}; chance gives that in {found.p:.0%} of cases",
            f"没有次序：与步数的 Spearman 为 {found.spearman:+.2f}，偶然达到的概率为 {found.p:.0%}",
        )
    if found.signal_to_noise < LEAST_SIGNAL_TO_NOISE:
        return (
            NOISE,
            f"the trend is {found.signal_to_noise:.1f} times the noise around it; {LEAST_SIGNAL_TO_NOISE:g} are needed",
            f"趋势只有噪声的 {found.signal_to_noise:.1f} 倍，至少要 {LEAST_SIGNAL_TO_NOISE:g} 倍",
        )
    is_better = (found.last > found.first) == curve.kind.is_better_high
    words = "rises" if found.last > found.first else "falls"
    words_zh = "上升" if found.last > found.first else "下降"
    reason = (
        f"{words} with the step ({found.first:.4g} to {found.last:.4g}), {found.signal_to_noise:.3g} times the noise"
    )
    reason_zh = f"随步数{words_zh}（{found.first:.4g} 到 {found.last:.4g}），是噪声的 {found.signal_to_noise:.3g} 倍"
    if not is_better:
        reason, reason_zh = f"{reason}: the model gets worse at it", f"{reason_zh}：模型在变差"
    if found.half_width and abs(found.last - found.first) < found.half_width:
        reason += f"; less than its confidence interval of ±{found.half_width:.2g}: other questions may say otherwise"
        reason_zh += f"；但小于置信区间 ±{found.half_width:.2g}：换一批题目结论可能不同"
    return SIGNAL, reason, reason_zh


def _half_width(curve: Curve) -> float | None:
    """Half of the confidence interval, in the mean over the checkpoints that have one."""
    widths = [(point.interval[1] - point.interval[0]) / 2 for point in curve.points if point.interval is not None]
    return float(np.mean(widths)) if widths else None


def _spearman(values: np.ndarray) -> tuple[float, float]:
    """The correlation of the ranks of the values with their order, and how often shuffled values reach it."""
    ranks = _ranks(values)
    spread = ranks - ranks.mean()
    norm = float(np.sqrt((spread**2).sum()))
    if norm == 0.0:
        return 0.0, 1.0
    order = _unit_order(len(values))
    found = float(order @ spread / norm)
    shuffled = spread[_shuffles(len(values))] @ order / norm
    as_much = int((np.abs(shuffled) >= abs(found) - 1e-9).sum())
    return round(found, 12), (1 + as_much) / (1 + SHUFFLES)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts + 1) / 2)[places], dtype=np.float64)


def _unit_order(count: int) -> np.ndarray:
    order = np.arange(count) - (count - 1) / 2
    return np.asarray(order / np.sqrt((order**2).sum()))


@cache
def _shuffles(count: int) -> np.ndarray:
    """The same every time, so that a verdict is."""
    return np.argsort(np.random.default_rng(0).random((SHUFFLES, count)), axis=1)


def _noise(steps: np.ndarray, values: np.ndarray) -> float:
    """The standard deviation of a value around the line between its neighbours, corrected for their own noise."""
    share = (steps[1:-1] - steps[:-2]) / (steps[2:] - steps[:-2])
    off = values[1:-1] - (1 - share) * values[:-2] - share * values[2:]
    return float(np.sqrt(np.mean(off**2 / (1 + (1 - share) ** 2 + share**2))))
