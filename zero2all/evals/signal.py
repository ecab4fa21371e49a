"""Which curve to believe: whether a score over the checkpoints of a run says anything about training.

A score carries signal if its curve has a shape: a trend, a step, a rise and a plateau, a rise and a fall. Any curve has
something like one, a random walk above all, whose neighbours are close because each value begins where the last one
was. So the best-fitting shape is compared with what the same search finds in curves without one:

- *Shapes*: lines with up to two bends, up to two steps, a step and a slope, a parabola.
- *Without shape*: a random walk seen through noise. Flat noise and a pure walk are the two ends of this family.
- *Statistic*: how much likelier the values are as a shape with independent noise than as a walk with noise. It has no
  unit, so that curves simulated once serve for all scores. *p* is the share of them, at the worst mixture of walk and
  noise, that look at least as much like a shape.

An accuracy has the error of its items as well. The same items are asked at every checkpoint, so that a change is as
sure as the items that changed: fewer than four of them could be luck (McNemar).

The curves come from the reports of a run. A report is a tree (`held_out` → channel → figures; `probes` → channel →
group → figures; `tasks` → list of results). Wherever a node holds one of KINDS, that is a score; its name is the path
to it. Parts of a report that later versions add are found the same way.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json_object, write_json
from zero2all.common.language import cells, message, table_lines
from zero2all.common.language import translate as t
from zero2all.common.progress import terminal_safe
from zero2all.train.checkpoints.layout import FOLDER_NAME

SECTIONS = ("held_out", "documents", "texts", "probes", "pairs", "tasks", "suites", "rewrites")
SECTION_CHANCE = {"pairs": 0.5}
"""Accuracy of guessing, where the report itself does not say."""
TRANSPARENT = ("channels", "groups", "kinds", "results", "tasks", "rows")
"""Levels of a report that say nothing in the name of a score."""
OPAQUE = ("skipped", "settings")
NAMED_BY = ("task", "rewrite", "name", "form")
"""Fields that name a result in a list of them."""


@dataclass(frozen=True)
class ScoreKind:
    """What kind of figure a field is."""

    is_better_high: bool
    interval: str = ""
    """The field with its 95 % confidence interval."""
    has_chance: bool = False
    only_in: str = ""
    """The section that has such a score; elsewhere the same word means something else."""


KINDS = {
    "bits_per_byte": ScoreKind(is_better_high=False),
    "accuracy": ScoreKind(is_better_high=True, interval="interval", has_chance=True),
    "share_among_foils": ScoreKind(is_better_high=True, interval="share_interval"),
    "logprob": ScoreKind(is_better_high=True, interval="logprob_interval"),
    "nats": ScoreKind(is_better_high=True, only_in="pairs"),
    "original": ScoreKind(is_better_high=True, only_in="rewrites"),
    "rewritten": ScoreKind(is_better_high=True, only_in="rewrites"),
    "gap": ScoreKind(is_better_high=False, interval="gap_interval", only_in="rewrites"),
    "score": ScoreKind(is_better_high=True, interval="interval"),
}


@dataclass(frozen=True)
class Point:
    """A score of one checkpoint."""

    step: int
    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScoreCurve:
    """A score over checkpoints, oldest first."""

    name: str
    """Path in the report: `probes/en/capital/accuracy`."""
    points: tuple[Point, ...]
    chance: float | None = None

    @property
    def kind(self) -> ScoreKind:
        """What kind of figure it is, by the last word of its name."""
        return KINDS.get(self.name.rpartition("/")[2], ScoreKind(is_better_high=True))


def read_reports(run: Path) -> list[dict[str, Any]]:
    """The reports of a run, oldest checkpoint first; files that are none are left out."""
    found = []
    for path in sorted((run / "eval").glob("step-*.json")):
        if FOLDER_NAME.fullmatch(path.stem):
            try:
                report = read_json_object(path)
            except (BadInputError, OSError):
                continue
            if type(report.get("step")) is int:
                found.append(report)
    return sorted(found, key=lambda report: int(report["step"]))


def curves_of(reports: Sequence[Mapping[str, Any]]) -> list[ScoreCurve]:
    """Every score of the reports, in the order in which the newest one has them."""
    points: dict[str, list[Point]] = {}
    chances: dict[str, float | None] = {}
    for report in reversed(reports):
        for name, value, interval, chance in _scores(report):
            points.setdefault(name, []).insert(0, Point(int(report["step"]), value, interval))
            chances.setdefault(name, chance)
    return [ScoreCurve(name, tuple(found), chances[name]) for name, found in points.items()]


def _scores(report: Mapping[str, Any]) -> Iterator[tuple[str, float, tuple[float, float] | None, float | None]]:
    for section in SECTIONS:
        for name, node, chance in _nodes(section, report.get(section), SECTION_CHANCE.get(section)):
            for field, kind in KINDS.items():
                if _is_number(node.get(field)) and kind.only_in in ("", section):
                    interval = _interval(node.get(kind.interval))
                    yield f"{name}/{field}", float(node[field]), interval, chance if kind.has_chance else None


def _nodes(name: str, node: Any, chance: float | None) -> Iterator[tuple[str, Mapping[str, Any], float | None]]:
    """Every object below a node of a report, with its path and the chance that holds for it."""
    if isinstance(node, list):
        for number, each in enumerate(node):
            if isinstance(each, dict):
                yield from _nodes(f"{name}/{_name_of(each, number)}", each, chance)
    if not isinstance(node, dict):
        return
    if _is_number(node.get("chance")):
        chance = float(node["chance"])
    yield name, node, chance
    for key, inner in node.items():
        if key in TRANSPARENT and isinstance(inner, list):
            yield from _nodes(name, inner, chance)
        elif key in TRANSPARENT and isinstance(inner, dict):
            for below, each in inner.items():
                yield from _nodes(f"{name}/{below}", each, chance)
        elif isinstance(inner, dict) and key not in OPAQUE:
            yield from _nodes(f"{name}/{key}", inner, chance)


def _name_of(result: Mapping[str, Any], number: int) -> str:
    words = [str(result[field]) for field in NAMED_BY if result.get(field)]
    if _is_number(result.get("shots")):
        words.append(f"{result['shots']}-shot")
    return "/".join(words) or str(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _interval(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_number, value)):
        return None
    low, high = float(value[0]), float(value[1])
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


SIGNAL, NOISE, CHANCE, TOO_FEW = "carries signal", "noise", "at chance", "too few checkpoints"
SIGNAL_NAME = "signal.json"
LEAST_CHECKPOINTS = 7
"""Of random walks over six checkpoints, one in 16 only rises or only falls."""
MOST_POINTS = 24
"""Longer curves are averaged to so many points first."""
LARGEST_P = 0.05
MOST_SIGNAL_TO_NOISE = 1000.0
"""A curve without any noise is shown with this."""
SIMULATED = 1000
"""Curves without a shape, for each mixture of walk and noise."""
SIMULATED_WALKS = (0.0, 0.3, 1.0, 3.0, np.inf)
"""Step of the random walk, in units of the noise."""
FITTED_WALKS = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5, 4.0, 8.0, 1e3)
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
    spearman: float | None = None
    p: float | None = None
    noise: float | None = None
    signal_to_noise: float | None = None


def write_signals(run: Path) -> list[Signal]:
    """Write `signal.json` beside the reports of a run; returns the verdicts where there are several checkpoints."""
    reports = read_reports(run)
    signals = [judge_curve(curve) for curve in curves_of(reports)] if len(reports) > 1 else []
    write_json(run / "eval" / SIGNAL_NAME, [asdict(signal) for signal in signals])
    return signals


def signal_lines(signals: Sequence[Signal]) -> list[str]:
    """The verdicts for a terminal: those of whole channels and tasks first, as many as fit on a screen."""
    if not signals:
        return []
    if all(signal.verdict == TOO_FEW for signal in signals):
        return ["", t(f"no verdict on the curves yet: {signals[0].reason}")]
    shown = sorted(signals, key=lambda each: each.name.count("/"))
    rows = []
    for signal in shown[:MOST_LINES]:
        figures = cells(asdict(signal), {"spearman": "+.2f", "signal_to_noise": ".1f"})
        rows.append([terminal_safe(signal.name), *figures, f"{t(signal.verdict)}: {t(signal.reason)}"])
    lines = ["", *table_lines(t("which curves to believe | Spearman | signal/noise | verdict"), rows)]
    if len(signals) > MOST_LINES:
        counts = Counter(signal.verdict for signal in shown[MOST_LINES:])
        rest = ", ".join(f"{times} {t(verdict)}" for verdict, times in counts.most_common())
        lines.append(t(f"  and {len(signals) - MOST_LINES} more: {rest}"))
    return lines


def judge_curve(curve: ScoreCurve) -> Signal:
    """Whether a curve carries signal, and why."""
    points = [point for point in curve.points if np.isfinite(point.value)]
    left_out = len(curve.points) - len(points)
    if len(points) < LEAST_CHECKPOINTS:
        known = (
            f"{len(points)} checkpoints ({left_out} more are not numbers)" if left_out else f"{len(points)} checkpoints"
        )
        reason = message(f"{known}; {LEAST_CHECKPOINTS} are needed to see a trend")
        return Signal(curve.name, len(points), left_out, TOO_FEW, reason)
    steps = np.array([point.step for point in points], dtype=np.float64)
    values = np.array([point.value for point in points], dtype=np.float64)
    third = max(2, len(values) // 3)
    is_flat = float(np.ptp(values)) <= 1e-12 * float(np.abs(values).max())
    shape, noise, p = (values, 0.0, 1.0) if is_flat else _best_shape(steps, values)
    half_width = _half_width(curve)
    move = float(np.ptp(shape))
    figures = _Figures(
        p=p,
        shape=shape,
        steps=steps,
        signal_to_noise=min(move / noise if noise else MOST_SIGNAL_TO_NOISE, MOST_SIGNAL_TO_NOISE),
        half_width=half_width,
        error=half_width if half_width is not None else NOISES_OF_CHANCE * noise / third**0.5,
        mean=float(values.mean()),
        is_flat=is_flat,
    )
    verdict, reason = _verdict(curve, figures)
    return Signal(
        curve.name,
        len(points),
        left_out,
        verdict,
        reason,
        spearman=_spearman(values),
        p=p,
        noise=noise,
        signal_to_noise=0.0 if is_flat else figures.signal_to_noise,
    )


@dataclass(frozen=True)
class _Figures:
    p: float
    shape: np.ndarray
    """The best-fitting shape at each of the steps."""
    steps: np.ndarray
    signal_to_noise: float
    half_width: float | None
    error: float
    """How far from chance a value may lie and still be no better."""
    mean: float
    is_flat: bool


def _verdict(curve: ScoreCurve, found: _Figures) -> tuple[str, str]:
    """The verdict and its reason."""
    chance, shape, move = curve.chance, found.shape, float(np.ptp(found.shape))
    has_shape = found.p <= LARGEST_P
    if chance is not None and np.abs((shape if has_shape else found.mean) - chance).max() <= found.error:
        return CHANCE, message(
            f"{found.mean:.4g} in the mean, and guessing gives {chance:.4g}: within ±{found.error:.2g}"
        )
    if found.is_flat:
        return NOISE, message("the value is the same at every checkpoint")
    if not has_shape:
        return NOISE, message(f"no shape: {found.p:.0%} of random walks with noise look as orderly")
    least = _least_change(curve, found)
    if move < least:
        return NOISE, message(f"it moves by {move:.2g}; with so few items {least:.2g} could be luck")
    reason = _course(curve, found)
    if found.half_width and move < found.half_width:
        reason = message(
            f"{reason}; less than its confidence interval of ±{found.half_width:.2g}: other questions may say otherwise"
        )
    return SIGNAL, reason


def _least_change(curve: ScoreCurve, found: _Figures) -> float:
    """The least change of an accuracy that its items can show: Z95^2, about four, of them in one direction. Half of an
    interval is Z95 * sqrt(mean * (1 - mean) / items)."""
    spread = found.mean * (1 - found.mean)
    if not curve.kind.has_chance or found.half_width is None or spread <= 0:
        return 0.0
    return found.half_width**2 / spread


def _course(curve: ScoreCurve, found: _Figures) -> str:
    """How the shape goes: up, down, or one after the other."""
    shape = found.shape
    first, last = float(shape[0]), float(shape[-1])
    low, high = int(shape.argmin()), int(shape.argmax())
    turn = max((low, high), key=lambda place: min(abs(shape[place] - first), abs(shape[place] - last)))
    middle, step = float(shape[turn]), int(found.steps[turn])
    back = min(abs(middle - first), abs(middle - last)) / float(np.ptp(shape))
    if back < 0.25:
        is_up = last > first
        is_worse = is_up != curve.kind.is_better_high
        way = message(f"({first:.4g} to {last:.4g}), {found.signal_to_noise:.3g} times the noise")
        reason = message(f"rises with the step {way}") if is_up else message(f"falls with the step {way}")
    else:
        is_peak = middle > last
        is_worse = is_peak == curve.kind.is_better_high
        way = message(
            f"({first:.4g}, {middle:.4g} at step {step:,}, {last:.4g}), {found.signal_to_noise:.3g} times the noise"
        )
        reason = message(f"rises and falls again {way}") if is_peak else message(f"falls and rises again {way}")
    return message(f"{reason}; the model gets worse at it") if is_worse else reason


def _half_width(curve: ScoreCurve) -> float | None:
    """Half of the confidence interval, in the mean over the checkpoints that have one."""
    widths = [(point.interval[1] - point.interval[0]) / 2 for point in curve.points if point.interval is not None]
    return float(np.mean(widths)) if widths else None


def _spearman(values: np.ndarray) -> float:
    """The correlation of the ranks of the values with their order; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts + 1) / 2)[places]
    order = np.arange(len(values)) - (len(values) - 1) / 2
    norm = float(np.sqrt((order**2).sum() * ((ranks - ranks.mean()) ** 2).sum()))
    return round(float(order @ ranks) / norm, 12) if norm else 0.0


# ---- shapes, and curves without one ---------------------------------------------------------------------------


def _best_shape(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float, float]:
    """The shape that fits a curve best, how far the values lie from it, and p."""
    groups = np.array_split(np.arange(len(values)), min(len(values), MOST_POINTS))
    x = np.array([steps[group].mean() for group in groups])
    y = np.array([values[group].mean() for group in groups])
    search = _search_for(tuple(((x - x[0]) / (x[-1] - x[0])).tolist()))
    p, family = search.p(y)
    shape, parameters = search.fitted(y, family)
    fitted = np.interp(steps, x, shape)  # from averaged points back to the checkpoints
    off = values - fitted
    return fitted, float(np.sqrt((off @ off) / max(1, len(values) - parameters))), p


class _ShapeSearch:
    """Looks for shapes in curves over some steps, and knows what it finds where there is none."""

    def __init__(self, x: np.ndarray) -> None:
        self.bases = _bases(x)
        self.rarer = 2.0 ** (np.array([basis.shape[2] for basis in self.bases]) - 1)
        """The more freely a family bends, the rarer its fit must be to count as much."""
        rng = np.random.default_rng(0)  # the same every time, so that a verdict is
        without = []
        for walk in SIMULATED_WALKS:
            noise, steps = rng.normal(size=(2, SIMULATED, len(x)))
            walked = np.cumsum(steps, axis=1)
            without.append(self.statistics(walked if np.isinf(walk) else noise + walk * walked))
        self.without = np.sort(np.stack(without), axis=2)  # (walks, families, curves)
        self.least = np.sort([self._family_p(found).min(axis=0) for found in without], axis=1)

    def p(self, values: np.ndarray) -> tuple[float, int]:
        """How likely a curve without a shape is to look as much like one, and the family of shapes that fits best."""
        by_family = self._family_p(self.statistics(values[None]))[:, 0]
        reached = [np.searchsorted(each, by_family.min() + 1e-12, side="right") for each in self.least]
        return float((1 + max(reached)) / (1 + SIMULATED)), int(by_family.argmin())

    def _family_p(self, found: np.ndarray) -> np.ndarray:
        """For each family: p of its own statistic, times what its freedom costs. (families, curves)"""
        p = np.zeros(found.shape)
        for without in self.without:
            for family, (own, each) in enumerate(zip(found, without, strict=True)):
                beyond = SIMULATED - np.searchsorted(each, own - 1e-9)
                p[family] = np.maximum(p[family], (1 + beyond) / (1 + SIMULATED))
        return p * self.rarer[:, None]

    def statistics(self, values: np.ndarray) -> np.ndarray:
        """For each family and curve: log of the variance as a walk over that around the best shape."""
        values = values - values.mean(axis=1, keepdims=True)
        total = (values**2).sum(axis=1)
        left = [total - (np.matmul(values, basis) ** 2).sum(axis=2).max(axis=0) for basis in self.bases]
        return _walk_variance(values) - np.log(np.maximum(np.stack(left), 1e-12 * total))

    def fitted(self, values: np.ndarray, family: int) -> tuple[np.ndarray, int]:
        """The best shape of a family, and how many parameters it has."""
        mean, centred = values.mean(), values - values.mean()
        explained = (np.matmul(centred, self.bases[family]) ** 2).sum(axis=1)
        basis = self.bases[family][int(explained.argmax())]
        return mean + basis @ (basis.T @ centred), basis.shape[1] + 1


@cache
def _search_for(x: tuple[float, ...]) -> _ShapeSearch:
    return _ShapeSearch(np.array(x))


def _bases(x: np.ndarray) -> list[np.ndarray]:
    """The families of shapes. Of each: orthonormal bases, without the constant. (members, points, parameters)"""
    places = range(1, len(x))
    step = {place: (np.arange(len(x)) >= place).astype(float) for place in places}
    bend = {place: np.maximum(0.0, x - x[place]) for place in places[:-1]}
    families = [
        [[x]],
        [[x, (x - x.mean()) ** 2]],
        [[x, np.maximum(0.0, x - place)] for place in (*x[1:-1], *((x[1:] + x[:-1]) / 2)[1:-1])],
        [[x, bend[one], bend[two]] for one, two in combinations(bend, 2)],
        [[step[place]] for place in places],
        [[step[one], step[two]] for one, two in combinations(places, 2)],
        [[x - bend[one] if one < two else bend[one], step[two]] for one in bend for two in places]
        + [[x, step[place]] for place in places[1:-1]],
    ]
    return [np.stack([_orthonormal(shape) for shape in shapes]) for shapes in families]


def _orthonormal(shape: Sequence[np.ndarray]) -> np.ndarray:
    columns = np.stack(shape, axis=1)
    return np.asarray(np.linalg.qr(columns - columns.mean(axis=0))[0])


def _walk_variance(values: np.ndarray) -> np.ndarray:
    """Log of the variance of curves as random walks with noise, at the likeliest mixture of the two. The differences
    of neighbours are uncorrelated in a basis of sines, whatever the mixture."""
    count = values.shape[1]
    waves = np.arange(1, count)
    of_noise = 2 - 2 * np.cos(np.pi * waves / count)
    sines = np.sqrt(2 / count) * np.sin(np.pi * np.outer(waves, waves) / count)
    power = (np.diff(values, axis=1) @ sines) ** 2
    mixtures = [of_noise + walk**2 for walk in FITTED_WALKS]
    return np.asarray(np.min([np.log((power / each).sum(axis=1)) + np.log(each).mean() for each in mixtures], axis=0))
