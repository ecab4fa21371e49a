"""What an evaluation does, whether all it needs is there, and how to tell that it was done already. No torch here."""

import codecs
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import crc32c_of, read_json_object, write_json
from zero2all.common.manifest import read_manifest
from zero2all.common.records import corpus_sources
from zero2all.common.workspace import Workspace
from zero2all.evals.question_files import read_pairs, read_probes
from zero2all.evals.suites import SuiteQuestions
from zero2all.evals.tasks.list import TaskQuestions
from zero2all.infer import WeightKind
from zero2all.train.checkpoints.layout import require_checkpoint
from zero2all.train.checkpoints.manifest import Step, chosen_step

OWN_PROBES = Path(__file__).parent / "probes.yaml"
OWN_PAIRS = Path(__file__).parent / "pairs.yaml"
OWN_TEXTS = Path(__file__).parent / "neutral"  # written for this purpose in 2026: no corpus from before has them


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
    suites: SuiteQuestions | None = None
    """Suites of them to ask, for their scores."""
    held_out: bool = True
    """Score the held-out text and the rows that training scores."""
    weights: tuple[WeightKind, ...] = ()
    """Score the held-out text once more with the weights kept so."""

    def record(self) -> dict[str, Any]:
        """These settings as a report keeps them: files by their checksum, so that one may be moved."""
        return {
            **({} if self.suites is None else {"suites": self.suites.record()}),  # as in earlier reports, without
            "max_bytes": self.max_bytes,
            "stride": self.stride,
            "probes": None if self.probes is None else crc32c_of(self.probes),
            "pairs": None if self.pairs is None else crc32c_of(self.pairs),
            "texts": {name: crc32c_of(path) for name, path in text_files(self.texts).items()},
            "tasks": None if self.tasks is None else self.tasks.record(),
            "int8": "int8" in self.weights,
            **({"int4": True} if "int4" in self.weights else {}),
            "held_out": "contiguous rows" if self.held_out else False,  # earlier versions measured otherwise
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
    earlier = _report_at(path)
    if earlier is not None and earlier.get("settings", {}) != _as_kept(report.get("settings")):
        numbers = itertools.count(1)
        kept = next(name for n in numbers if not (name := path.with_name(f"{path.stem}.earlier-{n}.json")).exists())
        path.rename(kept)
        say(f"step {report['step']}: the earlier report had other settings; it is kept as {kept}")
    write_json(path, report)


def _as_kept(settings: Any) -> Any:
    """As a file keeps them."""
    return jsonio.loads(jsonio.dumps_line(settings))


def _report_at(path: Path) -> dict[str, Any] | None:
    """The report that lies there; None where there is none that can be read."""
    try:
        return read_json_object(path) if path.is_file() else None
    except BadInputError:
        return None


def kept_report(run: Path, step: int, options: EvalOptions) -> dict[str, Any] | None:
    """The report of this checkpoint, where it was made with these settings."""
    report = _report_at(report_path(run, step))
    return report if report is not None and report.get("settings") == _as_kept(options.record()) else None


def check_inputs(workspace: Workspace, name: str, step: Step, options: EvalOptions, is_coming: bool = False) -> None:
    """Raise one error that names everything an evaluation of this run would miss; with `is_coming` it need not have a
    checkpoint yet."""
    if is_coming:
        problems = _problems_of(lambda: workspace.existing_run(name))
    else:
        run = workspace.existing_run
        problems = _problems_of(lambda: require_checkpoint(run(name), chosen_step(run(name), step)))
    problems += _problems_of(lambda: read_manifest(workspace.tokenizer, "tokenizer", "z2a tokenizer train"))
    problems += _problems_of(lambda: _check_corpus(workspace.corpus, options))
    if options.probes is not None:
        problems += _problems_of(lambda: read_probes(options.probes or Path()))
    if options.pairs is not None:
        problems += _problems_of(lambda: read_pairs(options.pairs or Path()))
    problems += _problems_of(lambda: text_files(options.texts))
    problems += [words for each in (options.tasks, options.suites) if each for words in _problems_of(each.read)]
    if len(problems) == 1:
        raise BadInputError(problems[0])
    if problems:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise BadInputError(f"{name} cannot be evaluated. Problems found: {len(problems)}.\n{lines}")


def _problems_of(check: Callable[[], Any]) -> list[str]:
    try:
        check()
    except BadInputError as error:
        return [str(error)]
    return []


def _check_corpus(corpus: Path, options: EvalOptions) -> None:
    sources = corpus_sources(corpus)
    has_more = options.probes or options.pairs or options.texts or options.tasks or options.suites
    if not has_more and not options.held_out:
        raise BadInputError(
            "There is nothing to score: with --held-out none, ask --probes, --pairs, --tasks, --suite or a --text."
        )
    if not has_more and not any(manifest["report"]["valid_records"] for manifest in sources.values()):
        raise BadInputError(
            f"The corpus in {corpus} has no held-out text, so there is nothing to score. Build it with a larger "
            f"--valid-share, or from more documents (a source of fewer than 20 holds none out), or ask --probes, "
            f"or score a --text."
        )


# Text files that a person names, to be scored one by one. No torch here.


def text_files(places: Sequence[Path]) -> dict[str, Path]:
    """The files in these places by name: files themselves, and all files below folders but hidden ones; each once."""
    found: dict[str, Path] = {}
    for place in places:
        given = {path.resolve() for path in found.values()}
        if place.is_file():
            inside = {place.name if place.name not in found else str(place): place}
        else:
            below = {path: path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file()}
            is_hidden = {path for path, name in below.items() if any(part.startswith(".") for part in name.parts)}
            inside = {os.path.join(place.name, below[path]): path for path in below if path not in is_hidden}  # noqa: PTH118
        if not inside:
            raise BadInputError(
                f"There is no text file {place}, nor a folder with any. Give --text a file or a folder of text files."
            )
        found |= {name: path for name, path in inside.items() if path.resolve() not in given}
    return found


def read_text(path: Path, max_bytes: int) -> tuple[str, bool] | str:
    """The first max_bytes of a file as text, and whether that is all of it; or, in words, why it is no text. A cut
    falls between characters, and there is at least one."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 4)  # a character has at most 4 bytes
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    is_whole = len(data) <= max_bytes
    if not data:
        return "is empty"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    if b"\0" in data:
        return "is not text (it has zero bytes)"
    decoder = codecs.getincrementaldecoder("utf-8")
    try:
        return decoder().decode(data[:max_bytes], is_whole) or decoder().decode(data)[:1], is_whole
    except UnicodeDecodeError:
        return "is not UTF-8"
