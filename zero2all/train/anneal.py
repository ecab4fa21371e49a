"""`anneal now`: let the learning rate of a run fall to its end from where it stands.

`z2a anneal RUN` writes a wish into the run's folder. A run that is training reads it within a step, one that is not
when it is started again; either writes down from which step on the rate falls. From then on the rate is a function of
that record, which lies in the run's folder and in every checkpoint, so a resumed run falls alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json_object, write_json
from zero2all.common.schema import Problem, build
from zero2all.config.training import AnnealConfig, DecayShape

ANNEAL_FILE = "anneal.json"


def wish_anneal(run: Path, steps: int, shape: DecayShape, to_share: float) -> None:
    """Ask a run to anneal; replaces an earlier wish that has not begun."""
    write_json(run / ANNEAL_FILE, {"from_step": None, "steps": steps, "shape": shape, "to_share": to_share})


def read_anneal(run: Path, step: int, check: Callable[[AnnealConfig], object] = lambda _: None) -> AnnealConfig | None:
    """The record of a run that stands at `step`; a wish becomes a record here. None when there is neither.

    `check` sees what a wish would become, and by raising keeps it from becoming that.
    """
    found = _read(run / ANNEAL_FILE, step)
    if found is None:
        return None
    record, was_wish = found
    if was_wish:
        check(record)
        write_json(run / ANNEAL_FILE, asdict(record))
    return record


def withdraw_wish(run: Path) -> None:
    """Forget a wish that cannot be met."""
    (run / ANNEAL_FILE).unlink(missing_ok=True)


def begun_anneal(run: Path) -> AnnealConfig | None:
    """The record of a run that has begun to anneal, for those who only look; None for a wish and for nothing."""
    found = _read(run / ANNEAL_FILE, 0)
    return None if found is None or found[1] else found[0]


def _read(path: Path, step: int) -> tuple[AnnealConfig, bool] | None:
    """The record, from `step` on where it is only a wish, and whether it is one."""
    remedy = "Write it anew with `z2a anneal`, or delete it to train on as scheduled."
    try:
        values = read_json_object(path, remedy)
    except FileNotFoundError:
        return None
    was_wish = values.get("from_step", 0) is None
    problems: list[Problem] = []
    record = build(AnnealConfig, {**values, "from_step": step} if was_wish else values, "", problems)
    if problems:
        reasons = " ".join(str(problem) for problem in problems)
        raise BadInputError(f"{path} is no record of an anneal. {reasons} {remedy}")
    return record, was_wish


def anneal_values(anneal: AnnealConfig | None) -> dict[str, Any] | None:
    """For the checkpoint."""
    return None if anneal is None else asdict(anneal)
