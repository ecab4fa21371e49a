"""The workspace: one folder in which every stage finds what the stage before it wrote.

`workspace.json` marks the folder and names the layout version, so that a workspace of another version is refused
in one sentence instead of failing somewhere inside a stage.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zero2all import __version__
from zero2all.common.errors import BadInputError, UsageError, exceeded_limit, is_disk_full
from zero2all.common.files import (
    LARGEST_JSON_BYTES,
    LONGEST_NAME,
    MANIFEST_NAME,
    PARTIAL_MARK,
    read_json,
    read_regular,
    require_writable,
    write_json,
)
from zero2all.common.language import message
from zero2all.common.schema import nearest_hint

LAYOUT = 1
STAMP_NAME = "workspace.json"
STAGE_FOLDERS = ("raw", "corpus", "taught", "tokenizer", "packed", "runs", "sft")
PICTURES = (".png", ".svg", ".pdf")  # no stage reads them, so one may be drawn again anywhere


FOLDER_NAME_WORDS = "a plain folder name without slashes, control characters or a leading dot, of at most 200 bytes"


def is_folder_name(name: str) -> bool:
    """Whether `name` may become one folder below another, and be printed."""
    is_plain = name.isprintable() and not any(mark in name for mark in "/\\") and not name.startswith(".")
    return is_plain and PARTIAL_MARK not in name and 0 < len(name.encode("utf-8", "surrogatepass")) <= LONGEST_NAME


def _folder(name: str) -> cached_property[Path]:
    """A folder of a workspace."""
    return cached_property(lambda workspace: workspace.root / name)


@dataclass(frozen=True)
class Workspace:
    """Where things are inside a workspace folder. Create one with `open_workspace`."""

    root: Path

    raw = _folder("raw")
    """Raw input files the quickstart makes for itself."""
    corpus = _folder("corpus")
    """`<source>/{train,valid}/part-*.jsonl`, `sources.json`, `report.json`."""
    tokenizer = _folder("tokenizer")
    """A folder that `AutoTokenizer.from_pretrained` loads."""
    packed = _folder("packed")
    """`<source>/{train,valid}/` token shards and document index."""
    runs = _folder("runs")
    """One folder per training run."""

    def run(self, name: str) -> Path:
        """The folder of one run."""
        return self.runs / name

    def existing_run(self, name: str) -> Path:
        """The folder of a run that was started; an error that names the runs there are, when this is none."""
        run = self.run(name)
        if run.is_dir():
            return run
        known = sorted(path.name for path in self.runs.glob("*") if path.is_dir())
        hint = nearest_hint(name, known) if known else "It has no runs yet: train one with `z2a train`."
        raise BadInputError(f"The workspace {self.root.absolute()} has no run `{name}`. {hint}")


def refuse_workspace(name: str | Path, wanted: str = message("a run in it")) -> None:
    """Stop where a workspace is given in the place of what is `wanted`."""
    if (Path(name) / STAMP_NAME).is_file():
        raise BadInputError(f"{name} is a workspace. Name {wanted}, and the workspace with --work {name}.")


def open_workspace(root: Path, create: bool = False) -> Workspace:
    """Check (or, with `create`, make) the stamp of a workspace folder."""
    stamp = root / STAMP_NAME
    if stamp.is_file():
        found = read_json(stamp)
        layout = found.get("layout") if isinstance(found, dict) else None
        if layout != LAYOUT:
            raise BadInputError(
                f"The workspace {root} was written by another version of zero2all (layout {layout}; this version, "
                f"{__version__}, uses layout {LAYOUT}). Choose another folder with --work, or use the version that "
                f"wrote it ({found.get('zero2all', 'unknown') if isinstance(found, dict) else 'unknown'})."
            )
        return Workspace(root)
    if not create:
        raise UsageError(
            f"{root.absolute()} is not a workspace (it has no {STAMP_NAME}). Give the folder with --work, or start "
            f"one with `z2a corpus build NAME=PATH --work {root}` or `z2a quickstart`."
        )
    if root.exists() and not root.is_dir():
        raise BadInputError(f"The workspace path {root} is a file, not a folder. Choose another one with --work.")
    try:
        write_json(stamp, {"layout": LAYOUT, "zero2all": __version__})
    except OSError as error:
        if is_disk_full(error) or exceeded_limit(error):
            raise
        raise BadInputError(
            f"Cannot create a workspace in {root} ({error.strerror}: {error.filename}). Choose a folder you "
            "can write to with --work."
        ) from error
    return Workspace(root)


def require_output(path: Path, flag: str, is_folder: bool = False) -> None:
    """Stop before the work begins when its result cannot be put at `path`, or would replace what a stage wrote."""
    require_writable(path, flag, is_folder)
    if is_folder or not path.is_file() or path.suffix.lower() in PICTURES:
        return
    real = path.resolve()
    for folder in real.parents:
        is_stamped = (folder / STAMP_NAME).is_file() and real.relative_to(folder).parts[0] in (
            STAMP_NAME,
            *STAGE_FOLDERS,
        )
        if is_stamped or _holds_manifest(folder):
            raise BadInputError(
                f"{flag} {path} already exists inside {folder}, where zero2all keeps its own files. Replacing "
                "it could destroy data. Choose another path, or delete the file first if it is yours."
            )


def _holds_manifest(folder: Path) -> bool:
    """Whether its manifest is ours: other programs write files of this name, too."""
    try:
        return b'"zero2all"' in read_regular(folder / MANIFEST_NAME, LARGEST_JSON_BYTES)
    except OSError:
        return False
