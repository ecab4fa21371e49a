"""Incidents: everything a page shows, as plain values, and the thread that writes the pages into the run's folder.

`<run>/incidents/<step>-<kind>.json`, `.html` and `.txt`. The loop does not wait for them. Looking up documents reads
the packed data and, for titles, the corpus; no failure in it may stop a run: errors are written on the page, or, where
even that fails, kept in `problems`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue

from zero2all.common import jsonio
from zero2all.common.files import read_json, write_atomic
from zero2all.common.progress import counted
from zero2all.packed.mixture import TrainingData
from zero2all.train.checkpoints.run_lock import Fence, no_fence
from zero2all.train.guards.advice import Facts, advice
from zero2all.train.guards.detector import Detector, GuardFinding
from zero2all.train.guards.documents import Decode, SampleText, Texts, samples_of_step
from zero2all.train.guards.incident_page import Incident, incident_html, incident_text
from zero2all.train.guards.policy import ACTION_NAMES, Action, Rollback, SkipWindow

CURVE_STEPS = 128
MAX_ROWS = 16
"""Rows whose documents are shown."""


def make_incident(
    run: str,
    findings: Sequence[GuardFinding],
    action: Action,
    detector: Detector,
    facts: Facts,
    row_losses: Sequence[float | None] = (),
) -> Incident:
    """Collect what is known about findings. Cheap: it reads no data; the writer adds the documents."""
    first = findings[0]
    before, now = facts.channels_before or {}, first.details.get("channel_losses") or {}
    channels = [[name, before.get(name), now.get(name)] for name in sorted({*before, *now})]
    return Incident(
        run=run,
        step=first.step,
        kind=first.kind,
        findings=[finding.as_json() for finding in findings],
        action=ACTION_NAMES[type(action)],
        done=action.reason,
        curve=[[seen.step, seen.loss, seen.grad_norm, seen.flagged] for seen in detector.history[-CURVE_STEPS:]],
        channels=channels,
        advice=[asdict(line) for line in advice(facts)],
        row_losses=list(row_losses),
        tokens=list(first.tokens),
        skipped=asdict(action.skip) if isinstance(action, SkipWindow | Rollback) and action.skip else None,
    )


def usual_channels(detector: Detector, before_step: int) -> dict[str, float]:
    """The median loss of each channel over the accepted steps that the detector remembers."""
    values: dict[str, list[float]] = {}
    for seen in detector.history:
        if seen.flagged or seen.step >= before_step:
            continue
        for name, loss in seen.channels.items():
            values.setdefault(name, []).append(loss)
    return {name: sorted(losses)[len(losses) // 2] for name, losses in values.items()}


def recorded_row_losses(folder: Path, step: int) -> dict[int, float]:
    """Mean loss by row of a step, from the incidents of a run; empty where nothing was recorded."""
    for path in sorted(folder.glob(f"{step}-*.json")):
        losses = read_json(path).get("row_losses") or []
        if losses:
            return {row: loss for row, loss in enumerate(losses) if loss is not None}
    return {}


class IncidentWriter:
    """The thread. `close` it at the end of the run."""

    def __init__(
        self,
        folder: Path,
        data: TrainingData | None,
        corpus: Path,
        make_decode: Callable[[], Decode] | None = None,
        fence: Fence = no_fence,
    ) -> None:
        """`make_decode` loads the tokenizer when the first incident needs it; without it ids are shown."""
        self._fence = fence
        self.folder, self._data, self._corpus, self._make_decode = folder, data, corpus, make_decode
        self._decode: Decode | None = None
        self.problems: list[str] = []
        self.written: list[Path] = []
        """The pages, in order."""
        self._queue: SimpleQueue[Incident | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="incidents", daemon=True)
        self._thread.start()

    def read_from(self, data: TrainingData) -> None:
        """Look up documents in `data` from now on; what was read so far must be the same in it."""
        self._data = data

    def submit(self, incident: Incident) -> Path:
        """Queue an incident; returns the path of its page. Never blocks, never raises."""
        self._queue.put(incident)
        return self.folder / f"{incident.name()}.html"

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until everything is written; False if that takes too long."""
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (incident := self._queue.get()) is not None:
            try:
                whole = self._with_documents(incident)
                self._fence()
                self.written.append(write_incident(self.folder, whole, self._fence))
            except Exception as error:  # a full disk, a deleted folder: not a reason to stop the run
                self.problems.append(f"the page of step {incident.step} could not be written: {error}")

    def _with_documents(self, incident: Incident) -> Incident:
        if self._data is None or not incident.tokens:
            return incident
        try:
            if self._decode is None and self._make_decode is not None:
                self._decode = self._make_decode()
            samples, note = incident_samples(incident, self._data, self._corpus, self._decode)
        except Exception as error:
            return replace(incident, samples_note=f"The documents could not be read: {error}")
        return replace(incident, samples=[asdict(sample) for sample in samples], samples_note=note)


def write_incident(folder: Path, incident: Incident, fence: Fence = no_fence) -> Path:
    """Write the files of an incident, the fence checked before each; returns the page."""
    page = folder / f"{incident.name()}.html"
    write_atomic(page.with_suffix(".json"), jsonio.dumps_pretty(asdict(incident)), fence)
    write_atomic(page.with_suffix(".txt"), incident_text(incident).encode(errors="replace"), fence)
    write_atomic(page, incident_html(incident).encode(errors="replace"), fence)
    return page


def incident_samples(
    incident: Incident, data: TrainingData, corpus: Path, decode: Decode | None
) -> tuple[list[SampleText], str]:
    """The rows of the step with the most extreme loss, and a sentence that describes them."""
    first, end = incident.tokens
    count = (end - first) // data.segment_at(first).seq_len
    losses = {row: loss for row, loss in enumerate(incident.row_losses) if loss is not None}
    rows: Sequence[int] = range(min(count, MAX_ROWS))
    note = f"The first {len(rows)} of {counted(count, 'row')} of this step."
    if losses:
        is_drop = incident.kind == "loss_drop"
        ranked = sorted(losses, key=lambda row: (losses[row] if is_drop else -losses[row], row))
        rows = ranked[:MAX_ROWS]
        if is_drop:
            note = f"The {len(rows)} of {counted(count, 'row')} of this step with the lowest loss."
        else:
            note = f"The {len(rows)} of {counted(count, 'row')} of this step with the highest loss."
    elif len(rows) == count:
        note = f"All rows of this step: {count}."
    note = f"{note} To see every row: z2a inspect {incident.run} {incident.step}"
    return samples_of_step(data, first, count, Texts(corpus, decode), rows, losses), note
