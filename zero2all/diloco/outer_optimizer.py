"""The outer optimizer: weights that all groups agree on, moved every H steps by what the groups have learned.

A group trains its own copy of the model (the inner weights). The outer weights are the last ones that all groups had in
common. After H steps a group sends how far it has come, outer - inner; every group takes the mean of what was sent, and
moves the outer weights by it (the outer gradient): all compute the same bits from the same payloads, added in the order
of the groups. Then training goes on from the outer weights.

    momentum = mu momentum + mean;   outer -= lr (mean + mu momentum)
    then          inner = outer;   streaming, tau steps later:   inner = alpha inner + (1 - alpha) outer

Outer weights, momentum and error feedback are float32 in host memory, pinned beside a GPU. Each process has those of
the parts that it holds for the inner optimizer; processes that hold the same part divide it among them, and gather it
when it goes into the model. A thread compares, compresses, sends, waits and updates, on a GPU in a stream of its own:
training waits only for a link that takes longer than tau steps. Groups get the same bits where all of them compute on
the same kind of device.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from zero2all.common.errors import AnomalyError
from zero2all.common.progress import counted
from zero2all.diloco.compress import decode, encode, keeps_error, payload_bytes
from zero2all.diloco.config import DilocoConfig, Due, names_by_fragment
from zero2all.diloco.messages import Key
from zero2all.diloco.ranks import Layout, RankLink
from zero2all.ops.host_memory import REGION_BYTES, PinnedMemory
from zero2all.parallel.mesh import Axis, Spread
from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.parallel.parts import TensorPart
from zero2all.parallel.reduce import all_gather
from zero2all.resilience.heartbeat import waiting_for_groups

PIECE_VALUES = 1 << 22
"""Compressed at once: a multiple of all blocks of `compress`, so that a payload has as many bytes as without pieces."""
PREFIX = "model/"
FEW_ROUNDS, SHORT_MOMENTUM = 200, 0.7
"""With 100 rounds groups lost 2 % and more, least with this momentum (benchmarks/diloco_loss.py)."""

ModelTensors = Callable[[], AbstractContextManager[dict[str, TensorPart]]]


class ModelWeights(Protocol):
    """The weights of the model that is trained."""

    @property
    def table(self) -> Sequence[LogicalParameter]:
        """Its parameters."""

    def copies_axis(self, spread: Spread, /) -> Axis:
        """The processes that hold the same part."""

    def publish_masters(self) -> None:
        """Its master weights have changed."""


@dataclass(frozen=True)
class _OuterState:
    """What this process has of the outer state of a parameter."""

    axis: Axis  # the processes that hold the same part
    count: int  # values of the part
    outer: TensorPart  # one-dimensional or with whole rows, like all parts of a checkpoint
    momentum: Tensor | None
    error: Tensor | None

    @property
    def borders(self) -> list[int]:
        """Which range of the flattened part each of these processes has."""
        return _borders(self.count, self.axis)

    @property
    def own(self) -> slice:
        """The range of this process."""
        return slice(*self.borders[self.axis.rank : self.axis.rank + 2])

    @property
    def values(self) -> Tensor:
        """The outer weights, flat."""
        return self.outer.values.view(-1)

    def tensors(self) -> dict[str, TensorPart]:
        """By the group of names in a checkpoint."""
        found = {"outer": self.outer, "outer_momentum": self.momentum, "outer_error": self.error}
        return {
            group: each if isinstance(each, TensorPart) else self.outer.like(each.view(self.outer.values.shape))
            for group, each in found.items()
            if each is not None
        }


@dataclass(frozen=True)
class RoundReport:
    """How a fragment was synchronised."""

    round: int
    groups: tuple[int, ...]  # whose payloads were used
    waited_seconds: float  # for the link, by the thread
    squared_norm: float  # of this process's share of the outer gradient
    steps: float  # since it was sent last, times its share of the fragments; 0: the others went on without this group
    is_behind: bool  # this group must adopt the state of the others


@dataclass
class _Flight:
    """A fragment that was sent and is not yet in the model."""

    due: Due
    exchanged: Future[RoundReport] | None  # None: the outer weights are updated already


class OuterOptimizer:
    """See the module. `model` gives the parts of the model between two steps, as 'model/<name>'."""

    def __init__(
        self,
        config: DilocoConfig,
        model: ModelTensors,
        weights: ModelWeights,
        layers: int,
        last_step: int | None = None,
    ) -> None:
        """`layers`: blocks of the whole model. The outer weights are the model's, which may be loaded over later."""
        self._config, self._model, self._weights = config, model, weights
        self.ranks: RankLink | None = None
        self.is_behind = False
        """Whether the others went on without this group, which must adopt their state. Equal on all ranks."""
        self.clock = config.clock(layers, last_step)
        self._flights: list[_Flight] = []
        self._sent_at: dict[int, int] = {}  # the step at which a fragment was sent last
        self.missed: dict[str, float] = {}  # by group: steps of which nothing came into the outer weights
        self.stalled_seconds = 0.0  # how long training waited in the last `finish`
        self._place = (0, 0)  # step and tokens of the last update
        self._thread = ThreadPoolExecutor(1, "z2a-outer")
        self._stream: torch.cuda.Stream | None = None  # of that thread
        spreads = {one.name: one.spread for one in weights.table}
        with model() as tensors:
            self._device = next(iter(tensors.values())).values.device
            values = sum(part.values.numel() for part in tensors.values())
            self._memory = PinnedMemory(min(REGION_BYTES, 12 * values))
            self._held = {
                name: self._hold(part, weights.copies_axis(spreads[name]) if name in spreads else Axis())
                for name, part in _by_name(tensors).items()
            }
        self._names = names_by_fragment(self._held, self.clock.fragments)
        pieces = [[piece.stop - piece.start for _, piece, _ in self._places(names)] for names in self._names]
        state = [values.numel() for values in self._state_values()]
        self.layout = Layout(config.compress, pieces, state, len(config.groups))
        """Of what this process sends."""
        self.reset()

    def _hold(self, part: TensorPart, axis: Axis) -> _OuterState:
        count = part.values.numel()
        first, stop = _borders(count, axis)[axis.rank : axis.rank + 2]

        def zeros() -> Tensor:
            if self._device.type != "cuda":
                return torch.zeros(stop - first)
            return self._memory.buffer(4 * (stop - first), self._device).view(torch.float32)

        outer = TensorPart.of_range(zeros(), part.shape, part.start + first, None, part.box)
        momentum = zeros() if self._config.momentum else None
        return _OuterState(axis, count, outer, momentum, zeros() if keeps_error(self._config.compress) else None)

    def notes(self) -> list[str]:
        """What the user should know, in a line or two."""
        config, size = self._config, sum(part.values.nbytes for part in self.tensors().values()) / 1e9
        found = [
            f"DiLoCo: group {config.group} of {len(config.groups)}, {config.scheme}, every {config.every} steps in "
            f"{counted(self.clock.fragments, 'fragment')}, {config.compress}; {size:.2f} GB of outer state in host "
            f"memory"
        ]
        rounds = None if self.clock.last_step is None else self.clock.last_step // config.every
        if config.momentum > SHORT_MOMENTUM and rounds is not None and rounds < FEW_ROUNDS:
            found.append(
                f"DiLoCo: this run has {counted(rounds, 'round')}. With fewer than {FEW_ROUNDS} groups may cost 2 % "
                f"of loss and more, and outer momentum {config.momentum:g} is slow: try --diloco.momentum "
                f"{SHORT_MOMENTUM:g} (docs/diloco.md)"
            )
        return found

    # ---- what the training loop calls ----

    def connect(self, ranks: RankLink) -> None:
        """Before the first step: the way to the other groups."""
        self.ranks, self.is_behind = ranks, ranks.is_behind

    def start(self, step: int, tokens: int) -> None:
        """After a step: begin to synchronise the fragments that are due."""
        for due in self.clock.due(step):
            snapshot, copied = self._snapshot(self._names[due.fragment])
            job = self._thread.submit(self._exchange, due, snapshot, copied, (step, tokens))
            self._flights.append(_Flight(due, job))

    def finish(self, step: int) -> list[RoundReport]:
        """After `start`: bring the outer weights that are due into the model, waiting for the link where needed."""
        due = [flight for flight in self._flights if flight.due.merge_step <= step]
        began = time.perf_counter()
        reports = self._awaited(due)
        self.stalled_seconds = time.perf_counter() - began
        for flight in due:
            self._write(self._names[flight.due.fragment], self._config.alpha if flight.due.mixes else 0.0)
            self._flights.remove(flight)
        self.is_behind |= any(report.is_behind for report in reports)
        return reports

    def end_at(self, last_step: int) -> None:
        """The run has another last step."""
        self.clock = replace(self.clock, last_step=last_step)

    def settle(self) -> None:
        """Wait until every fragment that was sent is in the outer weights. The model gets it when it is due."""
        self._awaited(self._flights)

    def _awaited(self, flights: Sequence[_Flight]) -> list[RoundReport]:
        """How these fragments were synchronised, when they are. A group that waits for another does not hang."""
        jobs = [flight.exchanged for flight in flights if flight.exchanged is not None]
        with nullcontext() if all(job.done() for job in jobs) else waiting_for_groups():
            return [job.result() for job in jobs]

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the outer weights while the block runs, and its own ones after it."""
        self.settle()
        with self._model() as tensors:
            kept = {name: part.values.detach().to("cpu", copy=True) for name, part in tensors.items()}
        self._write(list(self._held), 0.0)
        try:
            yield
        finally:
            with torch.no_grad(), self._model() as tensors:
                for name, part in tensors.items():
                    part.values.copy_(kept[name])
            self._weights.publish_masters()

    def serve_last(self, step: int, tokens: int) -> bool:
        """After the last step: give the outer state to groups that are behind; True: call it again."""
        self._place = (step, tokens)
        return self.ranks is not None and self.ranks.stays(self._state)

    def close(self) -> None:
        """End the link and the thread."""
        if self.ranks is not None:
            self.ranks.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- checkpoints, and groups that come back ----

    def tensors(self) -> dict[str, TensorPart]:
        """The outer state, for the checkpoint; live. `settle` first."""
        return {f"{group}/{name}": part for name, held in self._held.items() for group, part in held.tensors().items()}

    def record(self) -> dict[str, Any]:
        """For the checkpoint: the history of the link, and what is not yet in the model."""
        history = "" if self.ranks is None else self.ranks.history
        due = [asdict(flight.due) for flight in self._flights]
        return {"history": history, "due": due, "missed": self.missed}

    def loaded(self, record: Mapping[str, Any]) -> None:
        """A checkpoint was loaded into the tensors."""
        self._flights = [_Flight(Due(**due), None) for due in record["due"]]
        self.missed = dict(record.get("missed", {}))

    def reset(self) -> None:
        """Begin anew from the model."""
        self._flights = []
        with torch.no_grad(), self._model() as tensors:
            for name, part in _by_name(tensors).items():
                held = self._held[name]
                held.values.copy_(part.values.reshape(-1)[held.own])
                for other in (held.momentum, held.error):
                    if other is not None:
                        other.zero_()

    def adopt(self) -> tuple[int, int]:
        """Take over the outer state of a group that is in step, in outer weights and model; its step and tokens. What
        this group has learned since its last round is lost; its inner optimizer keeps its moments."""
        assert self.ranks is not None, "only the link says that this group is behind"
        self.settle()
        self._flights = []
        self.is_behind, data = False, self.ranks.adopt()
        step, tokens, *missed = self.layout.head.unpack_from(data)
        at = self.layout.head.size
        for held in self._held.values():
            for values in (held.values, held.momentum):
                if values is not None and values.numel():
                    values.copy_(torch.frombuffer(bytearray(data[at : at + 4 * len(values)]), dtype=torch.float32))
                    at += 4 * len(values)
            if held.error is not None:
                held.error.zero_()
        self._place = (step, tokens)
        self.missed = {str(group): steps for group, steps in enumerate(missed) if steps}  # of the weights it has now
        self._write(list(self._held), 0.0)
        return step, tokens

    def _state(self) -> bytes:
        """Step, tokens, what is missing, outer weights and momentum."""
        missed = [self.missed.get(str(group), 0.0) for group in range(len(self._config.groups))]
        found = self.layout.head.pack(*self._place, *missed) + b"".join(
            values.numpy().tobytes() for values in self._state_values()
        )
        if not self.layout.is_sound(None, found):
            raise AnomalyError(
                "A group asked for the outer weights and momentum of this one, but they cannot be used: they hold "
                "values that are not finite, or larger than 1e18. They were not sent. Continue all groups from an "
                "earlier checkpoint, with a smaller learning rate."
            )
        return found

    def _state_values(self) -> list[Tensor]:
        return [each for held in self._held.values() for each in (held.values, held.momentum) if each is not None]

    # ---- between the model and the host ----

    @torch.no_grad()
    def _snapshot(self, names: Sequence[str]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Copies on the host of this process's share of the model's weights; those of a GPU are there when the event
        has passed."""
        found = {}
        with self._model() as tensors:
            for name in names:
                values, own = tensors[PREFIX + name].values, self._held[name].own
                found[name] = torch.empty(own.stop - own.start, pin_memory=values.is_cuda)
                found[name].copy_(values.reshape(-1)[own], non_blocking=True)
        if not any(values.is_pinned() for values in found.values()):
            return found, None
        copied = torch.cuda.Event()
        copied.record()
        return found, copied

    @torch.no_grad()
    def _write(self, names: Sequence[str], alpha: float) -> None:
        """Mix outer weights into the model, which keeps the share `alpha` of its own."""
        with self._model() as tensors:
            for name in names:
                values, held = tensors[PREFIX + name].values, self._held[name]
                new = torch.empty(values.numel(), device=values.device)
                new[held.own].copy_(held.values, non_blocking=True)
                if held.axis.size > 1:
                    for arriving in all_gather(new, held.borders, held.axis):
                        arriving.wait()
                new = new.view(values.shape)
                values.copy_(torch.lerp(new, values.float(), alpha) if alpha else new)
        self._weights.publish_masters()

    # ---- in the thread ----

    @torch.no_grad()
    def _exchange(
        self, due: Due, snapshot: Mapping[str, Tensor], copied: torch.cuda.Event | None, place: tuple[int, int]
    ) -> RoundReport:
        """Send a fragment, wait for those of the other groups, update the outer weights."""
        ranks, group = self.ranks, self._config.group
        assert ranks is not None, "a group is connected before its first step"
        with self._beside_training(copied):
            payload = b"".join(self._payload(self._held[name], inner) for name, inner in snapshot.items())
        started = time.perf_counter()
        found = ranks.exchange(Key(due.number, due.fragment), payload)
        waited = time.perf_counter() - started
        own = payload if group not in found and self.layout.is_sound(due.fragment, payload) else None
        with self._beside_training(copied):
            square = self._update(list(snapshot), own, found, group)
        self._place = place
        steps = min(self.clock.every, place[0] - self._sent_at.get(due.fragment, 0)) / self.clock.fragments
        steps = 0.0 if ranks.is_behind else steps
        self._sent_at[due.fragment] = place[0]
        for absent in set(range(len(self._config.groups))) - set(found):
            self.missed[str(absent)] = self.missed.get(str(absent), 0.0) + steps
        ranks.serve(self._state)
        number = max(0, due.number - 1) // (2 * self.clock.fragments)
        return RoundReport(number, tuple(sorted(found)), waited, square, steps, ranks.is_behind)

    @contextmanager
    def _beside_training(self, copied: torch.cuda.Event | None) -> Iterator[None]:
        """On a GPU: a stream of this thread, once the copies of the weights are there."""
        if copied is None:
            yield
            return
        torch.cuda.set_device(copied.device)  # else this thread would use the first GPU
        copied.synchronize()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            yield

    def _payload(self, held: _OuterState, inner: Tensor) -> bytes:
        payloads = []
        for piece in _pieces(held):
            change = held.values[piece].to(self._device) - inner[piece].to(self._device)
            if held.error is not None:
                error = held.error[piece].to(self._device)
                change.add_(error)
            payload = encode(change, self._config.compress)
            if held.error is not None:
                held.error[piece] = change.sub_(self._decode(payload, change.numel()))
            payloads.append(payload)
        return b"".join(payloads)

    def _decode(self, payload: bytes | memoryview, count: int) -> Tensor:
        return decode(payload, count, self._config.compress, self._device)

    def _places(self, names: Sequence[str]) -> Iterator[tuple[_OuterState, slice, slice]]:
        """The pieces of these parameters, and where each is in the payload."""
        at = 0
        for held in (self._held[name] for name in names):
            for piece in _pieces(held):
                size = payload_bytes(piece.stop - piece.start, self._config.compress)
                yield held, piece, slice(at, at + size)
                at += size

    def _update(self, names: Sequence[str], own: bytes | None, found: Mapping[int, bytes], group: int | None) -> float:
        """One step of the outer optimizer; the square of the outer gradient's norm. `own`: what this group has sent
        too late for this round, and counts in the next; None: nothing that could be used."""
        square = 0.0
        for held, piece, at in self._places(names):
            count = piece.stop - piece.start
            if held.error is not None and own is not None:
                held.error[piece] = self._decode(own[at], count).add_(held.error[piece].to(self._device))
            elif held.error is not None and group not in found:
                held.error[piece] = 0.0
            if found:
                payloads = (self._decode(memoryview(payload)[at], count) for payload in found.values())
                mean = reduce(Tensor.add_, payloads).div_(len(found))
                square += float(torch.linalg.vector_norm(mean)) ** 2
                self._step(held, piece, mean)
        return square

    def _step(self, held: _OuterState, piece: slice, mean: Tensor) -> None:
        if held.momentum is not None:
            mu = self._config.momentum
            momentum = held.momentum[piece].to(self._device).mul_(mu).add_(mean)
            held.momentum[piece] = momentum
            mean.add_(momentum, alpha=mu)
        held.values[piece] = held.values[piece].to(self._device).sub_(mean.mul_(self._config.outer_lr))


def _borders(count: int, axis: Axis) -> list[int]:
    return [count * rank // axis.size for rank in range(axis.size + 1)]


def _pieces(held: _OuterState) -> list[slice]:
    """The values of a part, a few at a time, so that working on them takes little memory of the device."""
    count = held.values.numel()
    return [slice(first, min(first + PIECE_VALUES, count)) for first in range(0, count, PIECE_VALUES)]


def _by_name(tensors: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
    return {name.removeprefix(PREFIX): part for name, part in tensors.items()}


def round_values(reports: Sequence[RoundReport], squared_norm: Any, outer: OuterOptimizer) -> dict[str, Any]:
    """The metrics of what was synchronised after a step; `squared_norm`: over all processes of the group."""
    link = None if outer.ranks is None else outer.ranks.link
    return {
        "diloco/round": reports[-1].round,
        "diloco/groups": min(len(report.groups) for report in reports),
        "diloco/wait_seconds": sum(report.waited_seconds for report in reports),
        "diloco/stall_seconds": outer.stalled_seconds,
        "diloco/sent_bytes": 0 if link is None else link.sent_bytes,
        "diloco/received_bytes": 0 if link is None else link.received_bytes,
        "diloco/outer_grad_norm": squared_norm**0.5,
    }
