"""`z2a anneal`: let the learning rate of a run fall from its current value to the end of the run.

`z2a anneal RUN` writes a request into the run's folder. A run that is training finds it after its step, of several
processes within about half a second, any other run when it is started again; it then records the step from which the
rate falls. From then on the rate is a function of that record, which is in the run's folder and in every checkpoint, so
a resumed run anneals the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json_object, write_json
from zero2all.common.schema import Problem, build
from zero2all.config.training import AnnealConfig, DecayShape

ANNEAL_FILE = "anneal.json"
ANNEAL_STAGE = "anneal"
"""The name of the stage of an anneal with a mixture of its own."""


def request_anneal(
    run: Path, steps: int, shape: DecayShape, to_share: float, mixture: dict[str, float] | None = None
) -> None:
    """Ask a run to anneal; replaces an earlier request that has not begun."""
    values = {"from_step": None, "steps": steps, "shape": shape, "to_share": to_share, "mixture": mixture}
    write_json(run / ANNEAL_FILE, values)


def is_requested(run: Path) -> bool:
    """Whether a run is asked to anneal, or to end its anneal elsewhere."""
    try:
        return read_json_object(run / ANNEAL_FILE).get("from_step", 0) is None
    except (BadInputError, FileNotFoundError):  # a begun anneal does not need its file
        return False


def anneal_from(values: Mapping[str, Any] | None) -> AnnealConfig | None:
    """A record that was sent, or is in a checkpoint."""
    return None if values is None else AnnealConfig(**{**values, "before": anneal_from(values.get("before"))})


def read_anneal(
    run: Path,
    step: int,
    check: Callable[[AnnealConfig], object] = lambda _: None,
    before: AnnealConfig | None = None,
) -> AnnealConfig | None:
    """The record of a run at `step`, which a request becomes here unless `check` raises; None when there is neither.
    `before`: the anneal that the run has begun, which a request ends elsewhere."""
    found = _read(run / ANNEAL_FILE, step)
    if found is None:
        return None
    record, is_request = found
    if is_request:
        record = replace(record, before=before)
        check(record)
        write_json(run / ANNEAL_FILE, asdict(record))
    return record


def anneal_in_words(anneal: AnnealConfig) -> str:
    """A line for the log of the run."""
    first, end = anneal.from_step, anneal.from_step + anneal.steps
    return f"anneal: from step {first} the learning rate falls ({anneal.shape}); the run ends at step {end}"


def withdraw_request(run: Path, begun: AnnealConfig | None = None) -> None:
    """Delete a request that cannot be met; the anneal that has `begun` goes on."""
    if begun is not None:
        write_json(run / ANNEAL_FILE, asdict(begun))
    else:
        (run / ANNEAL_FILE).unlink(missing_ok=True)


def begun_anneal(run: Path) -> AnnealConfig | None:
    """The record of a run that has begun to anneal, without changing anything; None for a request and for no file."""
    found = _read(run / ANNEAL_FILE, 0)
    return None if found is None or found[1] else found[0]


def _read(path: Path, step: int) -> tuple[AnnealConfig, bool] | None:
    """The record (of a request: from `step` on), and whether it is a request."""
    remedy = "Write it again with `z2a anneal`, or delete it to continue with the schedule."
    try:
        values = read_json_object(path, remedy)
    except FileNotFoundError:
        return None
    is_request = values.get("from_step", 0) is None
    problems: list[Problem] = []
    record = build(AnnealConfig, {**values, "from_step": step} if is_request else values, "", problems)
    if problems:
        reasons = " ".join(str(problem) for problem in problems)
        raise BadInputError(f"{path} is not a valid anneal record. {reasons} {remedy}")
    return record, is_request
