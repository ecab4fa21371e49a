"""In which order the processes of a pipeline compute, and how long they wait for each other.

A stage is a range of blocks; stage s is on process s % processes. A schedule is one list of actions per process: the
forward or the backward pass of one micro-batch in one stage.

gpipe        all forward passes, then all backward passes: simple, but every micro-batch is in memory at once
1f1b         as few forward passes as fill the pipeline, then one forward and one backward in turn: as fast as gpipe,
             but at most as many micro-batches as stages are in memory
interleaved  each process has several stages (chunks), so that the pipeline fills in smaller pieces
zero_bubble  1f1b in which a backward pass computes only the gradients that the stage before waits for; those of the
             matrices are computed when the process would otherwise wait (ZB-H1 of Qi et al., 2023)

With p processes, v chunks, m micro-batches and equal stages, where f, b and w are the times of a whole process for
forward, backward by inputs and backward by weights, a process waits

    gpipe, 1f1b   (p - 1) (f + b + w)
    interleaved   (p - 1) (f + b + w) / v     where p divides m
    zero_bubble   (p - 1) (f + b - w)         where m >= p

of a step that takes m (f + b + w) without it. `idle_shares` plays the actions with any costs instead of these formulas.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """What a process does next."""

    kind: Literal["forward", "backward", "weights"]
    """weights, in zero_bubble: the gradients of matrices that the backward pass has left out."""
    stage: int
    micro: int  # the number of the micro-batch


Orders = list[list[Action]]
"""The actions of each process, in order."""


def make_orders(schedule: str, processes: int, chunks: int, micros: int) -> Orders:
    """The actions of a step with this many micro-batches."""
    return [make_order(schedule, rank, processes, chunks, micros) for rank in range(processes)]


def make_order(schedule: str, rank: int, processes: int, chunks: int, micros: int) -> list[Action]:
    """Those of one process: some forward passes, then a forward and a backward in turn, then the backward passes that
    are left."""
    turns = list(_turns(processes, chunks, micros))
    forwards = [Action("forward", chunk * processes + rank, micro) for chunk, micro in turns]
    backwards = [Action("backward", (chunks - 1 - chunk) * processes + rank, micro) for chunk, micro in turns]
    behind = processes - 1 - rank  # processes that a micro-batch still passes before its backward pass can begin
    longest_round = next((at for at, (chunk, _) in enumerate(turns) if chunk), 0)
    filling = behind if chunks == 1 else 2 * behind + (chunks - 1) * longest_round
    filling = len(turns) if schedule == "gpipe" else min(filling, len(turns))
    found = forwards[:filling]
    for number, backward in enumerate(backwards):
        found += [*forwards[filling + number : filling + number + 1], backward]
        # A later process begins its backward passes earlier, so more of the gradients of matrices can wait.
        if schedule == "zero_bubble" and number >= rank:
            found.append(Action("weights", rank, number - rank))
    if schedule == "zero_bubble":
        found += [Action("weights", rank, micro) for micro in range(max(0, micros - rank), micros)]
    return found


def _turns(processes: int, chunks: int, micros: int) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which a process computes them: a round of micro-batches, at least as many as
    there are processes, goes through one of its stages before the next stage has its turn. The longest round is the
    first."""
    rounds = max(1, micros // processes)
    first = 0
    for number in range(rounds):
        length = -(-(micros - first) // (rounds - number))
        for chunk in range(chunks):
            for micro in range(first, first + length):
                yield chunk, micro
        first += length


def _needed(action: Action, stages: int) -> list[Action]:
    """The actions that must have ended before this one can begin."""
    kind, stage, micro = action
    if kind == "forward":
        return [Action("forward", stage - 1, micro)] if stage else []
    if kind == "weights":
        return [Action("backward", stage, micro)]
    before = [Action("forward", stage, micro)]
    return before if stage + 1 == stages else [*before, Action("backward", stage + 1, micro)]


def idle_shares(orders: Orders, stages: int, seconds: Callable[[Action], float]) -> list[float]:
    """The share of a step that each process waits, by the time that each action takes; sending takes none."""
    ended: dict[Action, float] = {}
    clocks, busy, at = [0.0] * len(orders), [0.0] * len(orders), [0] * len(orders)
    total = sum(map(len, orders))
    while len(ended) < total:
        before = len(ended)
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and all(one in ended for one in _needed(order[at[rank]], stages)):
                action = order[at[rank]]
                ready = max((ended[one] for one in _needed(action, stages)), default=0.0)
                clocks[rank] = ended[action] = max(clocks[rank], ready) + seconds(action)
                busy[rank] += seconds(action)
                at[rank] += 1
        assert len(ended) > before, f"the processes wait for each other: {at} of {total} actions"
    return [1.0 - each / max(clocks) for each in busy]


def predicted_bubble(schedule: str, processes: int, chunks: int, micros: int, costs: Sequence[float]) -> float:
    """The share of a step that processes wait, on average; `costs`: those of each stage, forward and backward, in any
    unit. A backward pass takes twice as long as a forward pass, half of it for the gradients of matrices."""
    assert len(costs) == processes * chunks, f"{len(costs)} costs for {processes} x {chunks} stages"
    thirds = {"forward": 1.0, "backward": 1.0 if schedule == "zero_bubble" else 2.0, "weights": 1.0}
    orders = make_orders(schedule, processes, chunks, micros)
    shares = idle_shares(orders, len(costs), lambda action: thirds[action.kind] * costs[action.stage] / 3.0)
    return sum(shares) / processes
