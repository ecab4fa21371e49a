"""Fault plans for `z2a chaos`: read and checked as people write them, and put into the form that `common.fault` obeys
in the processes of a run."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.common.fault import KINDS, POINTS
from zero2all.common.files import write_atomic
from zero2all.common.manifest import fingerprint
from zero2all.common.schema import NaturalFloat, PositiveFloat, PositiveInt, Problem, build, nearest_hint
from zero2all.common.yamlio import read_yaml
from zero2all.resilience.slots import RAM_FOLDER

SAVE_POINTS = ("file", "manifest", "rename")
POINTS_OF = {"disk_full": SAVE_POINTS, "io_error": SAVE_POINTS, "poison_batch": ("step",), "weight_bit": ("step",)}
"""Where some faults can happen, the usual place first; the others happen anywhere, usually before a step."""


@dataclass(frozen=True)
class PlannedFault:
    """One entry of a plan."""

    fault: str
    """What happens; one of KINDS."""
    rank: int | str | None = None
    """To which rank; all: to each of them; none: to the first that comes there."""
    step: PositiveInt | None = None
    """At which step; none: at any."""
    point: str | None = None
    """Where in it; one of POINTS. None: before a step, and for faults of the disk before a file of a checkpoint."""
    after: NaturalFloat | None = None
    """Not before so many seconds after the start of the command."""
    before: PositiveFloat | None = None
    """Not later than so many seconds after the start of the command."""
    every: bool = False
    """Each time, instead of once."""
    seconds: PositiveFloat | None = None
    """How long `slow` takes (5)."""

    def problems(self, place: str, ranks: int, steps: int) -> list[Problem]:
        """What cannot happen in a run of so many ranks and steps."""
        found = []
        if self.fault not in KINDS:
            found.append(Problem(f"{place}.fault", self.fault, "a fault", nearest_hint(self.fault, KINDS)))
        if self.point is not None and self.point not in POINTS:
            found.append(Problem(f"{place}.point", self.point, "a point", nearest_hint(self.point, POINTS)))
        elif self.point not in (None, *POINTS_OF.get(self.fault, POINTS)):
            found.append(Problem(f"{place}.point", self.point, f"one of {', '.join(POINTS_OF[self.fault])}"))
        last_rank = 0 if self.fault == "store_lost" else ranks - 1
        if self.rank not in (None, "all", *range(last_rank + 1)):
            found.append(Problem(f"{place}.rank", self.rank, f"a rank of this run (0 to {last_rank}), or all"))
        if self.step is not None and self.step > steps:
            found.append(Problem(f"{place}.step", self.step, f"at most train.steps, {steps}"))
        if self.step is None and self.point is None and self.after is None:
            found.append(Problem(place, self.fault, "step, point or after: when it happens"))
        return found

    def resolved(self, started: float, run: Path, memory: Path | None) -> dict[str, Any]:
        """As `common.fault` reads it."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        fault = {name: value for name, value in given.items() if name not in ("after", "before")}
        fault["point"] = self.point or POINTS_OF.get(self.fault, ("step",))[0]
        if self.fault == "store_lost":
            fault["rank"] = 0
        if self.after is not None:
            fault["due"] = started + self.after
        if self.before is not None:
            fault["until"] = started + self.before
        return {**fault, "run": str(run), "base": str(memory or RAM_FOLDER)}


def read_plan(path: Path, ranks: int, steps: int) -> list[PlannedFault]:
    """The faults of a YAML or JSON file; UsageError with everything that is wrong with them."""
    try:
        values = read_yaml(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"The plan {path} cannot be read: {error}") from error
    if not isinstance(values, list) or not values:
        raise UsageError(f"The plan {path} is no list of faults. Write one entry such as: - {{fault: kill, step: 8}}")
    problems: list[Problem] = []
    faults = []
    for number, value in enumerate(values, 1):
        found: list[Problem] = []
        fault = build(PlannedFault, value, f"fault {number}", found)
        problems += found or fault.problems(f"fault {number}", ranks, steps)
        faults.append(fault)
    if problems:
        raise UsageError("\n".join([f"The plan {path} cannot be used:", *(f"  {each}" for each in problems)]))
    return faults


def install_plan(faults: Iterable[PlannedFault], folder: Path, run: Path, memory: Path | None, fresh: bool) -> Path:
    """Write the plan for the processes of a run; returns its path, for the variable FAULTS. What has happened in an
    earlier command with the same plan does not happen again, unless `fresh`."""
    started = time.monotonic()
    faults = list(faults)
    path = folder / run.name / f"{fingerprint([asdict(fault) for fault in faults])[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        for mark in marks(path):
            mark.unlink()
    resolved = [fault.resolved(started, run.absolute(), memory) for fault in faults]
    write_atomic(path, json.dumps(resolved, indent=1).encode())
    return path


def marks(path: Path) -> list[Path]:
    """The files that keep what has happened, oldest first."""
    return sorted(path.parent.glob(f"{path.name}.*"), key=lambda mark: mark.stat().st_mtime)


def happened(path: Path) -> dict[int, dict[str, Any]]:
    """By number in the plan, from 0: where and when a fault happened first."""
    found: dict[int, dict[str, Any]] = {}
    for mark in marks(path):
        number = int(mark.name.removeprefix(f"{path.name}.").split("-")[0])
        found.setdefault(number, json.loads(mark.read_text() or "{}"))
    return found
