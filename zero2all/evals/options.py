"""What an evaluation does, and how to tell that it was done already. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import crc32c_of, read_json_object, write_json
from zero2all.common.workspace import Workspace
from zero2all.evals.tasks.list import TaskQuestions
from zero2all.evals.text_files import text_files

OWN_PROBES = Path(__file__).parent / "probes.yaml"
OWN_PAIRS = Path(__file__).parent / "pairs.yaml"


@dataclass(frozen=True)
class EvalOptions:
    """What to score and ask."""

    max_bytes: int = 1_000_000
    """Bytes of held-out documents to score per source, and bytes of each text file."""
    stride: int = 0
    """Tokens between the windows of a long text; 0: windows without overlap."""
    probes: Path | None = None
    pairs: Path | None = None
    texts: tuple[Path, ...] = ()
    """Text files, or folders of them, of one's own."""
    tasks: TaskQuestions | None = None
    """Benchmarks to ask."""
    held_out: bool = True
    """Score the held-out text and the rows that training scores."""
    int8: bool = False
    """Score the held-out text once more with 8-bit weights."""

    def record(self) -> dict[str, Any]:
        """These settings as a report keeps them: files by their checksum, so that one may be moved."""
        return {
            "max_bytes": self.max_bytes,
            "stride": self.stride,
            "probes": None if self.probes is None else crc32c_of(self.probes),
            "pairs": None if self.pairs is None else crc32c_of(self.pairs),
            "texts": {name: crc32c_of(path) for name, path in text_files(self.texts).items()},
            "tasks": None if self.tasks is None else self.tasks.record(),
            "int8": self.int8,
            "held_out": "rows of training" if self.held_out else False,  # reports of earlier versions meant documents
        }


def default_file(workspace: Workspace, name: str) -> Path:
    """The probes or pairs to ask unless told: what the workspace brings with it (the quickstart's does), or our own."""
    brought = workspace.raw / f"{name}.jsonl"
    return brought if brought.is_file() else {"probes": OWN_PROBES, "pairs": OWN_PAIRS}[name]


def report_path(run: Path, step: int, kind: str = "") -> Path:
    """Where the report of a checkpoint lies; `harness-` is the kind of lm-eval's."""
    return run / "eval" / f"{kind}step-{step:08d}.json"


def write_report(path: Path, report: dict[str, Any], say: Callable[[str], None]) -> None:
    """Write the report of a checkpoint. An earlier one with other settings is kept beside it under another name."""
    earlier = _settings_of(path)
    if earlier is not None and earlier != _as_kept(report.get("settings")):
        numbers = itertools.count(1)
        kept = next(name for n in numbers if not (name := path.with_name(f"{path.stem}.earlier-{n}.json")).exists())
        path.rename(kept)
        say(f"step {report['step']}: the earlier report had other settings; it is kept as {kept}")
    write_json(path, report)


def _as_kept(settings: Any) -> Any:
    """As a file keeps them."""
    return jsonio.loads(jsonio.dumps_line(settings))


def _settings_of(path: Path) -> Any:
    """The settings of a report; None where there is none that can be read."""
    try:
        return read_json_object(path).get("settings", {}) if path.is_file() else None
    except BadInputError:
        return None


def kept_report(run: Path, step: int, options: EvalOptions) -> dict[str, Any] | None:
    """The report of this checkpoint, where it was made with these settings."""
    path = report_path(run, step)
    try:
        report = read_json_object(path) if path.is_file() else {}
    except BadInputError:
        return None
    return report if report.get("settings") == _as_kept(options.record()) else None
