"""Data sets and models from a Hugging Face-style hub: whole, checked and of one commit.

    request = DownloadRequest("wikimedia/wikipedia", Path("raw/wiki_zh"), include=("20231101.zh/*",))
    result = download(request, announce=print)

The revision is resolved to a commit once, so that a branch that moves does not mix two versions. The state of a folder
lies in its `.download/`, which `z2a corpus build` does not read:

    plan.json       a download that is under way: repo, commit, files wanted, files finished before
    finished.jsonl  files finished since, a line each
    <key>.part      a file that is half here (transfer.py)
    download.json   the manifest. Written last: while it is absent, the folder is not whole

A file under its own name has had its checksum checked. A second download into the same folder adds to it; a newer
commit replaces the old one only with `update`, file by file.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all import __version__
from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, DiskError, UsageError
from zero2all.common.files import as_written, human_bytes, read_json, write_json
from zero2all.common.lock import folder_lock
from zero2all.common.progress import counted, progress
from zero2all.corpus.download.hub import Announce, Hub, HubFile, Patience, RepoKind
from zero2all.corpus.download.transfer import PART_SUFFIX, FileTransfer, Fleet, digest_of

STATE_FOLDER = ".download"
PLAN_NAME, FINISHED_NAME, MANIFEST_NAME = "plan.json", "finished.jsonl", "download.json"
KIND, FORMAT = "download", 1
NAMES_SHOWN = 12
"""How many names an error lists before it says how many more there are."""


@dataclass(frozen=True)
class DownloadRequest:
    """What to fetch, from where, to where."""

    repo: str
    """`OWNER/NAME` on the hub."""
    folder: Path
    """Where the files go, under the names they have in the repo."""
    kind: RepoKind = "dataset"
    include: tuple[str, ...] = ()
    """Patterns such as `data/*.parquet`, of which a file must match one; `*` also matches slashes. Empty: all files."""
    exclude: tuple[str, ...] = ()
    """Patterns of which a file must match none."""
    revision: str = "main"
    """Branch, tag or commit."""
    endpoint: str | None = None
    """Address of the hub or of a mirror. None: that of HF_ENDPOINT, or else huggingface.co."""
    token_env: str | None = None
    """Variable that holds the token. None: the one of HF_TOKEN or `hf auth login`, and for huggingface.co only."""
    connections: int = 4
    """How many files are fetched at a time."""
    verify: bool = False
    """Compare the checksums of the files that are here already, and not only their sizes."""
    update: bool = False
    """When the folder holds another commit of the repo, replace it."""
    dry_run: bool = False
    """Only list."""
    retries: int = 6
    """How often in a row a request may fail before the download stops."""
    first_wait_seconds: float = 0.5
    """The wait after the first failure; it doubles with each further one."""


@dataclass
class DownloadResult:
    """What a download found and did."""

    commit: str
    files: list[HubFile]
    """All files the folder holds now; those it would hold, for a dry run."""
    missing: list[HubFile]
    """Those that were not here yet."""
    bytes_fetched: int = 0
    interruptions: int = 0
    """How many requests failed and were repeated."""
    seconds: float = 0.0


def download(request: DownloadRequest, announce: Announce = lambda _: None) -> DownloadResult:
    """Fetch what is missing of a request; if it is interrupted, the same call continues."""
    if request.dry_run:
        return _Download(request, announce).survey()
    home = request.folder / STATE_FOLDER
    was_there = request.folder.exists()
    home.mkdir(parents=True, exist_ok=True)
    busy = f"Another process is downloading into {home.parent}. Wait for it, stop it, or choose another --out."
    with folder_lock(home, busy):
        try:
            return _Download(request, announce).run()
        finally:
            if not any(home.iterdir()):  # nothing was found or begun: leave no trace
                home.rmdir()
                if not was_there:
                    request.folder.rmdir()


class _Download:
    """One download, step by step."""

    def __init__(self, request: DownloadRequest, announce: Announce) -> None:
        patience = Patience(request.retries, request.first_wait_seconds, announce)
        self.hub = Hub(request.repo, request.kind, request.endpoint, request.token_env, patience)
        self.request, self.announce = request, announce
        self.home = request.folder / STATE_FOLDER
        self.is_whole = not (self.home / PLAN_NAME).exists()
        self.state, self.finished = _read_state(self.home / (MANIFEST_NAME if self.is_whole else PLAN_NAME))

    def survey(self) -> DownloadResult:
        """Ask the hub, look at the disk, and say what is missing."""
        request, state = self.request, self.state
        if state and (state["repo"], state["type"]) != (request.repo, request.kind):
            raise UsageError(
                f"{request.folder} holds the {state['type']} {state['repo']}; the {request.kind} "
                f"{request.repo} would be mixed with it. Choose another folder with --out."
            )
        commit = self._commit()
        listing = {file.name: file for file in self.hub.list_files(commit)}
        chosen = self._choose(list(listing.values()))
        # What the folder holds from before is brought to the same commit.
        files = [file for name, file in listing.items() if name in chosen or name in self.finished]
        _refuse_unsafe_names(files)
        extra = len(files) - len(chosen)
        self.announce(
            f"{request.repo} ({request.kind}) at commit {commit[:12]}: {len(chosen):,} of "
            f"{counted(len(listing), 'file')} selected, "
            f"{human_bytes(sum(file.size_bytes for file in chosen.values()))}"
        )
        if extra:
            self.announce(f"files already here from earlier downloads: {extra:,}")
        return DownloadResult(commit, files, self._missing(files))

    def run(self) -> DownloadResult:
        """Survey, fetch, write the manifest."""
        result = self.survey()
        transfers = [FileTransfer(file, self.home) for file in result.missing]
        self._require_room(sum(transfer.file.size_bytes - transfer.position for transfer in transfers))
        here = {file.name: file.digest for file in result.files}
        if self.is_whole and self.state.get("commit") == result.commit and here == self.finished and not transfers:
            return result
        self._begin(result, transfers)
        self._fetch(result, transfers)
        self._write_state(MANIFEST_NAME, result)
        for name in (PLAN_NAME, FINISHED_NAME):
            (self.home / name).unlink(missing_ok=True)
        return result

    def _commit(self) -> str:
        """The commit this download is of: that of an earlier one into this folder, else what the revision is now."""
        now = self.hub.resolve(self.request.revision)
        old, revision = self.state.get("commit", now), self.request.revision
        if old == now:
            return now
        if self.request.update:
            self.announce(f"updating from commit {old[:12]} to {now[:12]}")
            return now
        if revision not in (self.state["revision"], old):
            raise UsageError(
                f"{self.request.folder} holds commit {old[:12]} ({self.state['revision']}) of "
                f"{self.request.repo}, but {revision} is now {now[:12]}. Replace it with --update, or choose "
                "another folder with --out."
            )
        self.announce(
            f"{revision} has moved from {old[:12]} to {now[:12]} since this download began. The older one is "
            "kept, so that two revisions are not mixed. For the newer one add --update, or choose another "
            "folder with --out."
        )
        return old

    def _choose(self, listing: Sequence[HubFile]) -> dict[str, HubFile]:
        from huggingface_hub.utils import filter_repo_objects

        include, exclude = list(self.request.include), list(self.request.exclude)
        names = [file.name for file in listing]
        wanted = set(filter_repo_objects(names, allow_patterns=include or None, ignore_patterns=exclude or None))
        if not wanted:
            patterns = [f"--include {' '.join(include) or '*'}"]
            patterns += [f"--exclude {' '.join(exclude)}"] if exclude else []
            raise UsageError(
                f"No file of {self.request.repo} matches {' '.join(patterns)}. The repo has: {_outline(listing)}."
            )
        return {file.name: file for file in listing if file.name in wanted}

    def _missing(self, files: Sequence[HubFile]) -> list[HubFile]:
        """The files that are not here, or not as the hub has them."""
        folder, finished = self.request.folder, self.finished
        here = [file for file in files if (folder / file.name).exists()]
        sized = [file for file in here if (folder / file.name).stat().st_size == file.size_bytes]
        right = set() if self.request.verify else {f.name for f in sized if finished.get(f.name) == f.digest}
        # Others must be read: copied here by hand, or finished right before the process was killed.
        unknown = [file for file in sized if file.name not in right]
        if unknown:
            with progress("verify", total=sum(file.size_bytes for file in unknown), unit="B") as bar:
                for file in unknown:
                    if digest_of(folder / file.name, file.algorithm) == file.digest:
                        right.add(file.name)
                    bar.advance(file.size_bytes)
        missing = [file for file in files if file.name not in right]
        damaged = [file.name for file in missing if finished.get(file.name) == file.digest]
        if damaged:
            self.announce(f"changed or removed since the last download: {_names(damaged)}")
        foreign = [file.name for file in here if file.name not in right and file.name not in finished]
        if foreign:
            raise BadInputError(
                f"{folder} has files that zero2all did not download and that differ from the hub: "
                f"{_names(foreign)}. Move them away, or choose another folder with --out."
            )
        return missing

    def _require_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.home).free
        if needed > free:
            raise DiskError(
                f"Not enough disk space under {self.request.folder}: {human_bytes(needed)} are left to "
                f"download, {human_bytes(free)} are free. Free some space, choose another disk with --out, or "
                "fewer files with --include and --exclude."
            )

    def _begin(self, result: DownloadResult, transfers: Sequence[FileTransfer]) -> None:
        """Write the plan, and remove what is not part of it."""
        missing = {file.name for file in result.missing}
        finished = self.finished | {file.name: file.digest for file in result.files if file.name not in missing}
        self._write_state(PLAN_NAME, result, finished=finished)
        (self.home / MANIFEST_NAME).unlink(missing_ok=True)
        (self.home / FINISHED_NAME).unlink(missing_ok=True)  # its lines stand in the plan now
        used = {transfer.path for transfer in transfers}
        for path in self.home.glob(f"*{PART_SUFFIX}"):
            if path not in used:
                path.unlink()
        gone = sorted(finished.keys() - {file.name for file in result.files})
        for name in gone:
            (self.request.folder / name).unlink(missing_ok=True)
        if gone:
            self.announce(f"removed, because commit {result.commit[:12]} no longer has them: {_names(gone)}")

    def _fetch(self, result: DownloadResult, transfers: Sequence[FileTransfer]) -> None:
        started, before = time.monotonic(), self.hub.patience.failures
        total = sum(file.size_bytes for file in result.missing)
        here = sum(transfer.position for transfer in transfers)
        if here:
            self.announce(f"continuing: {human_bytes(here)} of {human_bytes(total)} are already here")
        with (
            open(self.home / FINISHED_NAME, "ab", buffering=0) as log,
            progress("download", total=total, unit="B", done=here, quiet=not transfers) as bar,
        ):

            def note(file: HubFile) -> None:
                log.write(jsonio.dumps_line({"name": file.name, "digest": file.digest}))

            fleet = Fleet(self.hub, result.commit, self.request.folder, transfers, note, bar)
            fleet.run(self.request.connections)
        result.bytes_fetched, result.interruptions = fleet.bytes_fetched, self.hub.patience.failures - before
        result.seconds = time.monotonic() - started
        if fleet.failures:
            reasons = [f"{name}: {reason}" for name, reason in sorted(fleet.failures.items())]
            raise BadInputError(
                f"{len(reasons):,} of {counted(len(result.files), 'file')} could not be downloaded: "
                f"{_names(reasons, '; ')}. The others are complete and checked. The copy on "
                f"{self.hub.endpoint} may be damaged: run the command again with another --endpoint, or leave "
                "these files out with --exclude."
            )

    def _write_state(self, name: str, result: DownloadResult, **more: Any) -> None:
        facts = {
            "kind": KIND,
            "format": FORMAT,
            "zero2all": __version__,
            "repo": self.request.repo,
            "type": self.request.kind,
            "endpoint": self.hub.endpoint,
            "revision": self.request.revision,
            "commit": result.commit,
            "files": {file.name: {"bytes": file.size_bytes, file.algorithm: file.digest} for file in result.files},
        }
        write_json(self.home / name, facts | more)


def _read_state(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What an earlier download left in its plan or manifest, and name -> checksum of the files it finished."""
    try:
        facts = read_json(path)
    except FileNotFoundError:
        return {}, {}
    remedy = (
        f"Use the version that wrote it, or delete {path.parent}: complete files are recognised by their checksums."
    )
    with as_written(path, remedy):
        if (facts["kind"], facts["format"]) != (KIND, FORMAT):
            raise ValueError(f"it says {facts['kind']}, format {facts['format']}")
        state = {name: facts[name] for name in ("repo", "type", "revision", "commit")}
        if path.name == PLAN_NAME:
            return state, facts["finished"] | _read_finished(path.parent / FINISHED_NAME)
        return state, {name: file.get("sha256") or file["git_sha1"] for name, file in facts["files"].items()}


def _read_finished(path: Path) -> dict[str, str]:
    """The log of finished files; a line that a crash cut off is left out."""
    finished = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = jsonio.loads(line)
            finished[str(entry["name"])] = str(entry["digest"])
        except (ValueError, TypeError, KeyError):
            continue
    return finished


def _refuse_unsafe_names(files: Sequence[HubFile]) -> None:
    """Names come from the hub, and a name such as `../../.bashrc` would be written outside the folder."""
    unsafe = [repr(file.name) for file in files if not _is_safe(file.name)]
    if unsafe:
        raise BadInputError(
            "The hub lists names that would be written outside the folder, or over the records in "
            f"{STATE_FOLDER}: {_names(unsafe)}. Such a repo is not trustworthy. To download the other files, "
            "leave these out with --exclude."
        )


def _is_safe(name: str) -> bool:
    parts = name.split("/")
    is_plain = name.isprintable() and "\\" not in name and not (os.name == "nt" and ":" in name)
    return is_plain and parts[0] != STATE_FOLDER and not {"", ".", ".."} & set(parts)


def in_words(files: Sequence[HubFile]) -> str:
    """How many they are and how large: '3 files, 600.0 KB'."""
    return f"{counted(len(files), 'file')}, {human_bytes(sum(file.size_bytes for file in files))}"


def _outline(files: Sequence[HubFile]) -> str:
    """The top folders of a repo with their sizes, and its top files."""
    tops: dict[str, list[HubFile]] = {}
    for file in files:
        top, slash, _ = file.name.partition("/")
        tops.setdefault(top + slash, []).append(file)
    return _names([f"{top} ({in_words(inner)})" for top, inner in tops.items()]) or "no files at all"


def _names(names: Sequence[str], separator: str = ", ") -> str:
    rest = len(names) - NAMES_SHOWN
    return separator.join(names[:NAMES_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
