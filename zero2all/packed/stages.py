"""The plan of a run's data: which weights and which sequence length hold from which token on.

Token positions count every token slot of every step from the start of the run. A *stage* holds weights; consecutive
stages of one sequence length form a *segment* with one order, in which a change of weights lets every source continue
where it stood. Another sequence length cuts the text into other samples: it begins a new segment with permutations of
its own, and some text is read again. What has been read is never planned again: a run that resumes with other weights
keeps the stages it recorded up to its position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.schema import NaturalInt, PositiveInt, Problem, build
from zero2all.packed.order import WEIGHT_UNITS, Order, OrderedSource, rounded_weights


@dataclass(frozen=True)
class Stage:
    """What a person asks for: a mixture (None: by tokens) and a sequence length from a token on."""

    name: str
    from_token: int
    mixture: dict[str, float] | None
    seq_len: int


@dataclass(frozen=True)
class PlannedStage:
    """The same with weights settled: parts of 65536 per source; sources of weight 0 are left out."""

    name: str
    from_token: NaturalInt
    seq_len: PositiveInt
    units: dict[str, PositiveInt]


SamplesOf = Callable[[str, int], int]
"""(source, seq_len) -> samples it holds."""


@dataclass(frozen=True)
class OrderSegment:
    """A stretch of the run with one sequence length."""

    number: int
    from_token: int
    seq_len: int
    order: Order

    def position_at(self, token: int) -> int:
        """Place in the segment's order of the sample that begins at `token`."""
        return (token - self.from_token) // self.seq_len


def segments_of(
    plan: Sequence[PlannedStage], names: Sequence[str], samples_of: SamplesOf, seed: int
) -> list[OrderSegment]:
    """The orders of a plan. Sources are numbered as in `names`."""
    segments: list[OrderSegment] = []
    first = 0
    while first < len(plan):
        end = first + 1
        while end < len(plan) and plan[end].seq_len == plan[first].seq_len:
            end += 1
        origin, seq_len = plan[first].from_token, plan[first].seq_len
        stages = [
            ((stage.from_token - origin) // seq_len, [stage.units.get(name, 0) for name in names])
            for stage in plan[first:end]
        ]
        sources = [OrderedSource(name, samples_of(name, seq_len)) for name in names]
        segments.append(OrderSegment(len(segments), origin, seq_len, Order(sources, stages, seed, len(segments))))
        first = end
    return segments


def epochs_read(segments: Sequence[OrderSegment], token: int) -> list[list[Fraction]]:
    """How often each source is read before `token`: one row per segment that has begun by then."""
    rows = []
    for number, segment in enumerate(segments):
        if segment.from_token >= token:
            break
        end = min(token, segments[number + 1].from_token) if number + 1 < len(segments) else token
        taken = segment.order.taken(segment.position_at(end))
        counts = zip(taken, segment.order.sources, strict=True)
        rows.append([Fraction(int(count), source.samples or 1) for count, source in counts])
    return rows


@dataclass(frozen=True)
class Planner:
    """Lays out the stages of a run from a position on."""

    names: Sequence[str]
    samples_of: SamplesOf
    seed: int
    max_epochs: Mapping[str, float]
    """Per source; sources without a limit are left out."""
    share_when_used_up: bool

    def plan(
        self, asked: Sequence[PlannedStage], history: Sequence[PlannedStage], now: int, end: int | None
    ) -> list[PlannedStage]:
        """`history` up to `now`, then `asked` (each from its from_token, at the earliest `now`), kept within limits.

        Without `end`, the token at which the run is over, limits are not looked at.
        """
        laid = [stage for stage in history if stage.from_token < now]
        coming = [stage for stage in asked if stage.from_token > now]
        current = [stage for stage in asked if stage.from_token <= now][-1:]
        future = [replace(stage, from_token=now) for stage in current] + coming
        used_up: set[str] = set()
        for index, stage in enumerate(future):
            ends = [later.from_token for later in future[index + 1 : index + 2]] + ([] if end is None else [end])
            stage_end = min(ends, default=None)
            if self.share_when_used_up and stage_end is not None and stage.from_token < stage_end:
                laid = self._within_limits(laid, stage, stage_end, used_up)
            else:
                laid = _appended(laid, stage)
        if self.max_epochs and end is not None and not self.share_when_used_up:
            self._refuse_beyond_limits(laid, end)
        return laid

    def _within_limits(
        self, laid: list[PlannedStage], stage: PlannedStage, stage_end: int, used_up: set[str]
    ) -> list[PlannedStage]:
        """Append `stage`, cut wherever a source is used up; from there on the others share that source's weight."""
        laid = _appended(laid, _without(stage, used_up, stage.from_token))
        while True:
            at, name = self._next_limit(laid, stage.from_token, used_up)
            if name is None or at >= stage_end:
                return laid
            used_up.add(name)
            laid = _appended([one for one in laid if one.from_token < at], _without(stage, used_up, at))

    def _next_limit(self, laid: list[PlannedStage], now: int, used_up: set[str]) -> tuple[int, str | None]:
        """Where, from `now` on, the last stage has read a source as often as it may, and which source that is."""
        segments = segments_of(laid, self.names, self.samples_of, self.seed)
        last = segments[-1]
        before = epochs_read(segments[:-1], last.from_token)
        found: tuple[int, str | None] = (0, None)
        for number, name in enumerate(self.names):
            if name not in self.max_epochs or name in used_up or name not in laid[-1].units:
                continue
            allowed = Fraction(self.max_epochs[name]) - sum(row[number] for row in before)
            place = last.order.place_of(number, int(allowed * last.order.sources[number].samples) - 1)
            token = now if place is None else max(now, last.from_token + (place + 1) * last.seq_len)
            if found[1] is None or token < found[0]:
                found = token, name
        return found

    def _refuse_beyond_limits(self, laid: list[PlannedStage], end: int) -> None:
        rows = epochs_read(segments_of(laid, self.names, self.samples_of, self.seed), end)
        lines = []
        for number, name in enumerate(self.names):
            epochs = sum(row[number] for row in rows)
            if name in self.max_epochs and epochs > Fraction(self.max_epochs[name]):
                lines.append(f"  - {name}: {float(epochs):.2f} epochs, at most {self.max_epochs[name]:g} allowed")
        if lines:
            raise UsageError(
                "The run would read some sources more often than data.max_epochs allows:\n"
                + "\n".join(lines)
                + "\nLower their weight in data.mixture, train fewer steps, raise the limit, or set data.when_used_up "
                "to share, which gives their weight to the other sources from that point on."
            )


def _appended(laid: list[PlannedStage], stage: PlannedStage) -> list[PlannedStage]:
    """A stage that reads as the one before it does is the same stage: cutting there would start its cycle anew."""
    if laid and (laid[-1].seq_len, laid[-1].units) == (stage.seq_len, stage.units):
        return laid
    return [*laid, stage]


def _without(stage: PlannedStage, used_up: set[str], at: int) -> PlannedStage:
    """The stage from `at` on, its weights shared among what is left. Always from the weights as asked: then the result
    does not depend on the order in which sources were used up, nor on when the run was resumed."""
    gone = sorted(used_up & stage.units.keys())
    if not gone:
        return replace(stage, from_token=at)
    left = {name: units for name, units in stage.units.items() if name not in used_up}
    if not left:
        raise UsageError(
            f"data.max_epochs leaves nothing to read from token {at:,} on (stage {stage.name}): every source "
            "of its mixture is used up. Raise the limits, add text, or train fewer steps."
        )
    units = dict(zip(left, rounded_weights([float(value) for value in left.values()]), strict=True))
    return PlannedStage(f"{stage.name} without {', '.join(gone)}", at, stage.seq_len, units)


def stages_from_records(records: Sequence[Mapping[str, Any]]) -> list[PlannedStage]:
    """The plan that a checkpoint recorded; ValueError for what cannot be one."""
    problems: list[Problem] = []
    stages = [build(PlannedStage, record, "stages", problems) for record in records]
    if problems:
        raise ValueError(str(problems[0]))
    return stages


def stage_notes(
    plan: Sequence[PlannedStage], segments: Sequence[OrderSegment], names: Sequence[str], end: int
) -> list[str]:
    """For a person: the shares of each stage after rounding, and how much a new length makes the run read again."""
    notes = []
    begins = {segment.from_token: segment for segment in segments[1:]}
    for stage in plan:
        parts = [f"{name} {stage.units.get(name, 0) / WEIGHT_UNITS:.2%}" for name in names]
        if stage.from_token:
            notes.append(f"mixture ({stage.name}, from token {stage.from_token:,}): {', '.join(parts)}")
        else:
            notes.append(f"mixture ({stage.name}): {', '.join(parts)}")
        if stage.from_token in begins and stage.from_token < end:
            segment = begins[stage.from_token]
            segment_end = min([end, *(other.from_token for other in segments[segment.number + 1 :])])
            again = expected_repeats(segments[: segment.number + 1], segment_end)
            notes.append(
                f"from token {segment.from_token:,} on, sequences have {segment.seq_len:,} tokens: the text "
                f"is cut and shuffled again, and about {again:.1%} of it has been read before"
            )
    return notes


def expected_repeats(segments: Sequence[OrderSegment], end: int) -> float:
    """Expected share of the tokens of the last segment, up to `end`, that the run has read before.

    Segments shuffle independently, so of what a segment reads for the first time itself, a share equal to what the
    segments before it have seen of that source comes as a repeat.
    """
    *earlier, last = epochs_read(segments, end)
    tokens = again = Fraction(0)
    for number, source in enumerate(segments[-1].order.sources):
        unseen = Fraction(1)
        for row in earlier:
            unseen *= 1 - min(Fraction(1), row[number])
        read = last[number]
        tokens += read * source.samples
        again += (min(Fraction(1), read) * (1 - unseen) + max(Fraction(0), read - 1)) * source.samples
    return float(again / tokens) if tokens else 0.0
