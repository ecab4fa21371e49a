"""Which rank is slow: its own time in a step beside that of ranks with the same work.

All ranks end a step together, so the time of a step does not tell. What a rank needs by itself is the wait for its data
and its forward pass with the loss; in all other parts it may wait for others. Both figures travel in the sum that ends
the next step, so nothing is sent besides. Where the forward pass itself has collectives (tensor, context and expert
parallelism, ZeRO-3), the ranks that wait for each other there are slow together.
"""

import socket
from collections import deque

import numpy as np

from zero2all.common.language import message
from zero2all.parallel.world import World
from zero2all.train.hooks import Hook
from zero2all.train.hooks.reports import RunLog
from zero2all.train.step_stats import StepResult

HALF = 8
"""A rank is named when it is slow in the last HALF steps, and in the HALF before; the slowest step of each is left out,
because one long pause is no slow rank."""
SLOW = 0.75
"""A score is the usual time (that of the middle rank, or of the faster of two) over that of the rank."""
FAST_AGAIN = 0.85
PARTS = ("data", "forward pass")


class Stragglers(Hook):
    """Compares the ranks after every step; all of them have the same stats, and rank 0 reports."""

    def __init__(self, world: World, log: RunLog) -> None:
        self._log = log
        self.own = (0.0, 0.0)
        """Seconds of each of PARTS in the last step that this rank has read."""
        self._known = world.gather((socket.gethostname(), world.mesh.pipeline.rank)) if world.size > 1 else []
        self._stages = np.array([stage for _, stage in self._known])
        self._steps: deque[np.ndarray] = deque(maxlen=2 * HALF)
        self._named: set[int] = set()

    def after_result(self, result: StepResult, data_seconds: float) -> None:
        """Keep the times of a step: own ones for the next sum, and those of all ranks that came with this one."""
        self.own = (data_seconds, result.seconds["forward"] + result.seconds["loss"])
        if result.paces is not None and result.paces.any():
            self._steps.append(result.paces)
            if len(self._steps) == 2 * HALF:
                self._judge(np.stack(self._steps))

    def _judge(self, steps: np.ndarray) -> None:
        before, _, _ = scores(steps[:HALF].sum(axis=2), self._stages)
        now, own, usual = scores(steps[HALF:].sum(axis=2), self._stages)
        slow = set(np.flatnonzero((before < SLOW) & (now < SLOW)).tolist())
        parts = np.median(steps[HALF:], axis=0)  # so that one long pause does not decide
        for rank in sorted(slow - self._named):
            self._report(rank, float(now[rank]), float(own[rank]), float(usual[rank]), parts)
        self._named = slow | {rank for rank in self._named if now[rank] < FAST_AGAIN}

    def _report(self, rank: int, score: float, own: float, usual: float, parts: np.ndarray) -> None:
        host, stage = self._known[rank]
        part = PARTS[int((parts[rank] - np.median(parts[self._stages == stage], axis=0)).argmax())]
        text = message(
            f"rank {rank} on {host} is slow: score {score:.2f} ({usual:.3g} s in a step are usual, it needs {own:.3g} "
            f"s); most of the difference: {part}"
        )
        self._log.event("straggler", {"text": text, "rank": rank, "host": host, "score": score, "part": part})
        self._log.say(text)


def scores(totals: np.ndarray, stages: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From (steps, ranks) seconds: the score of each rank, its own seconds in a step, and the usual ones; ranks of one
    pipeline stage are compared with each other."""
    own = np.maximum((totals.sum(axis=0) - totals.max(axis=0)) / (len(totals) - 1), 1e-9)
    usual = np.empty_like(own)
    for stage in np.unique(stages):
        alike = np.sort(own[stages == stage])
        usual[stages == stage] = alike[(len(alike) - 1) // 2]
    return usual / own, own, usual
