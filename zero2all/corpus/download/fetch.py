"""Data sets and models from a Hugging Face-style hub: whole, checked and of one commit.

    request = DownloadRequest("wikimedia/wikipedia", Path("raw/wiki_zh"), include=("20231101.zh/*",))
    result = download(request, announce=print)

First the hub is asked which commit the revision stands for and what files that commit has; everything after speaks of
that commit only, so that a branch which moves during the night does not mix two versions of a data set. What is known
about the folder lies in its `.download/`, a hidden folder that `z2a corpus build` does not read:

    plan.json       a download that is under way: repo, commit, files wanted, files finished before
    finished.jsonl  files finished since, a line each
    <key>.part      a file that is half here, and beside it what has arrived (transfer.py)
    download.json   the manifest. Written last: while it is absent, the folder is not whole

A file under its own name has had its checksum checked. A second download into the same folder adds to it; a newer
commit replaces the old one only on request (`update`), file by file, keeping what has not changed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from zero2all import __version__
from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, DiskError, UsageError
from zero2all.common.files import human_bytes, read_json, write_json
from zero2all.common.lock import folder_lock
from zero2all.common.progress import counted, progress
from zero2all.corpus.download.hub import Announce, Hub, HubFile, Patience, RepoKind
from zero2all.corpus.download.transfer import DONE_SUFFIX, PART_SUFFIX, PIECE_BYTES, Fleet, Transfer, digest_of

STATE_FOLDER = ".download"
PLAN_NAME, FINISHED_NAME, MANIFEST_NAME = "plan.json", "finished.jsonl", "download.json"
FORMAT = 1
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
    """What the repo is."""
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
    """How many files, or pieces of files, are fetched at a time."""
    verify: bool = False
    """Read the files that are here already and compare their checksums, instead of looking at their sizes."""
    update: bool = False
    """When the folder holds another commit of the repo, replace it."""
    dry_run: bool = False
    """Only list."""
    retries: int = 6
    """How often in a row a request may fail before the download stops."""
    first_wait_seconds: float = 0.5
    """The wait after the first failure; it doubles with each further one."""
    piece_bytes: int = PIECE_BYTES
    """Larger files are cut into pieces of this size, which are fetched side by side."""


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
    """How often a connection was lost."""
    seconds: float = 0.0


@dataclass
class _State:
    """What `.download/` says about a folder."""

    repo: str
    kind: str
    revision: str
    commit: str
    is_whole: bool
    finished: dict[str, str]
    """Name -> checksum of every file that stands under its name because we put it there."""


def download(request: DownloadRequest, announce: Announce = lambda _: None) -> DownloadResult:
    """Fetch what is missing of a request; whatever ends it, the same call goes on where it ended."""
    patience = Patience(request.retries, request.first_wait_seconds, announce)
    hub = Hub(request.repo, request.kind, request.endpoint, request.token_env, patience)
    if request.dry_run:
        return _Download(request, hub, announce).survey()
    home = request.folder / STATE_FOLDER
    was_there = request.folder.exists()
    home.mkdir(parents=True, exist_ok=True)
    busy = f"Another process is downloading into {home.parent}. Wait for it, stop it, or choose another --to."
    with folder_lock(home, busy):
        try:
            return _Download(request, hub, announce).run()
        finally:
            if not any(home.iterdir()):  # nothing was found or begun: leave no trace
                home.rmdir()
                if not was_there:
                    request.folder.rmdir()


class _Download:
    """One download, step by step."""

    def __init__(self, request: DownloadRequest, hub: Hub, announce: Announce) -> None:
        self.request, self.hub, self.announce = request, hub, announce
        self.home = request.folder / STATE_FOLDER
        self.state = _read_state(self.home)
        self.finished = self.state.finished if self.state else {}

    def survey(self) -> DownloadResult:
        """Ask the hub, look at the disk, and say what is missing."""
        self._refuse_another_repo()
        commit = self._commit()
        listing = {file.name: file for file in self.hub.list_files(commit)}
        chosen = self._choose(list(listing.values()))
        # What the folder holds from before stays part of it, so that it is never of two commits.
        files = [file for name, file in listing.items() if name in chosen or name in self.finished]
        _refuse_unsafe_names(files)
        extra = len(files) - len(chosen)
        self.announce(
            f"{self.request.repo} ({self.request.kind}) at commit {commit[:12]}: wanted are {len(chosen):,} of "
            f"{counted(len(listing), 'file')}, {human_bytes(sum(file.size_bytes for file in chosen.values()))}"
            + (f"; {extra:,} more are here from earlier downloads" if extra else "")
        )
        return DownloadResult(commit, files, self._missing(files))

    def run(self) -> DownloadResult:
        """Survey, fetch, write the manifest."""
        result = self.survey()
        # What has arrived lies on the same disk, so this is a lower bound; and it comes before any piece is planned.
        self._require_room(sum(file.size_bytes for file in result.missing), shutil.disk_usage(self.home).total)
        transfers = [Transfer(file, self.home, self.request.piece_bytes) for file in result.missing]
        left = sum(transfer.file.size_bytes - transfer.bytes_done for transfer in transfers)
        self._require_room(left, shutil.disk_usage(self.home).free)
        here = {file.name: file.digest for file in result.files}
        is_whole = self.state is not None and self.state.is_whole and self.state.commit == result.commit
        if is_whole and here == self.finished and not transfers:
            return result
        self._begin(result, transfers)
        self._fetch(result, transfers)
        _write_state(self.home / MANIFEST_NAME, self._facts(result))
        for name in (PLAN_NAME, FINISHED_NAME):
            (self.home / name).unlink(missing_ok=True)
        return result

    # ---- which commit ------------------------------------------------------------------------------------------

    def _refuse_another_repo(self) -> None:
        state, request = self.state, self.request
        if state is not None and (state.repo, state.kind) != (request.repo, request.kind):
            raise UsageError(
                f"{request.folder} holds the {state.kind} {state.repo}, and the {request.kind} {request.repo} would be "
                f"mixed with it. Choose another folder with --to."
            )

    def _commit(self) -> str:
        """The commit this download is of: that of an earlier one into this folder, else what the revision is now."""
        now = self.hub.resolve(self.request.revision)
        state, revision = self.state, self.request.revision
        if state is None or state.commit == now:
            return now
        if self.request.update:
            self.announce(f"going from commit {state.commit[:12]} to {now[:12]}")
            return now
        if revision not in (state.revision, state.commit):
            raise UsageError(
                f"{self.request.folder} holds commit {state.commit[:12]} ({state.revision}) of {state.repo}, and "
                f"{revision} is {now[:12]}. Replace it with --update, or choose another folder with --to."
            )
        deed = "nothing is taken from the newer one" if state.is_whole else "the download goes on with the older one"
        self.announce(
            f"{revision} has moved from {state.commit[:12]} to {now[:12]} since this download began; {deed}, so that "
            f"two revisions are not mixed. For the newer one add --update, or choose another folder with --to."
        )
        return state.commit

    # ---- which files -------------------------------------------------------------------------------------------

    def _choose(self, listing: Sequence[HubFile]) -> dict[str, HubFile]:
        from huggingface_hub.utils import filter_repo_objects

        chosen = filter_repo_objects(
            listing,
            allow_patterns=list(self.request.include) or None,
            ignore_patterns=list(self.request.exclude) or None,
            key=lambda file: file.name,
        )
        found = {file.name: file for file in chosen}
        if not found:
            raise UsageError(
                f"No file of {self.request.repo} is wanted: of {counted(len(listing), 'file')} none matches --include "
                f"{' '.join(self.request.include) or '*'}"
                + (f" without --exclude {' '.join(self.request.exclude)}" if self.request.exclude else "")
                + f". It has: {_outline(listing)}."
            )
        return found

    def _missing(self, files: Sequence[HubFile]) -> list[HubFile]:
        """The files that do not stand here, or not as the hub has them."""
        right = self._right_after_reading([file for file in files if self._must_be_read(file)])
        missing = [
            file for file in files if file.name not in right and (self.request.verify or not self._looks_finished(file))
        ]
        damaged = [file.name for file in missing if self.finished.get(file.name) == file.digest]
        if damaged:
            self.announce(f"changed or removed since the last download: {_names(damaged)}")
        foreign = [
            file.name
            for file in missing
            if file.name not in self.finished and (self.request.folder / file.name).exists()
        ]
        if foreign:
            raise BadInputError(
                f"{self.request.folder} has files that were not downloaded by us and are not what the hub has: "
                f"{_names(foreign)}. Move them away, or choose another folder with --to."
            )
        return missing

    def _looks_finished(self, file: HubFile) -> bool:
        return self.finished.get(file.name) == file.digest and self._has_its_size(file)

    def _has_its_size(self, file: HubFile) -> bool:
        path = self.request.folder / file.name
        return path.is_file() and path.stat().st_size == file.size_bytes

    def _must_be_read(self, file: HubFile) -> bool:
        """Whether a file is here with the right size, and only its bytes can tell if it is the right one.

        Without `verify` these are files we have no record of: copied here by hand, or finished in the instant before
        the process was killed.
        """
        return self._has_its_size(file) and (self.request.verify or not self._looks_finished(file))

    def _right_after_reading(self, files: Sequence[HubFile]) -> set[str]:
        """Names of those whose checksum is right."""
        if not files:
            return set()
        right = set()
        with progress("verify", total=sum(file.size_bytes for file in files), unit="B") as bar:
            for file in files:
                if digest_of(self.request.folder / file.name, file.algorithm) == file.digest:
                    right.add(file.name)
                bar.advance(file.size_bytes)
        return right

    # ---- fetching ----------------------------------------------------------------------------------------------

    def _require_room(self, needed: int, room: int) -> None:
        if needed > room:
            free = shutil.disk_usage(self.home).free
            raise DiskError(
                f"Not enough disk space under {self.request.folder}: {human_bytes(needed)} are still to be fetched, "
                f"{human_bytes(free)} are free. Free some space, choose another disk with --to, or fewer files with "
                f"--include and --exclude."
            )

    def _begin(self, result: DownloadResult, transfers: Sequence[Transfer]) -> None:
        """Write down what is going to happen, and remove what belongs to no part of it."""
        missing = {file.name for file in result.missing}
        finished = self.finished | {file.name: file.digest for file in result.files if file.name not in missing}
        _write_state(self.home / PLAN_NAME, self._facts(result) | {"finished": finished})
        (self.home / MANIFEST_NAME).unlink(missing_ok=True)
        (self.home / FINISHED_NAME).unlink(missing_ok=True)  # its lines stand in the plan now
        used = {path.name for transfer in transfers for path in (transfer.part, transfer.done)}
        for path in self.home.iterdir():
            if path.suffix in (PART_SUFFIX, DONE_SUFFIX) and path.name not in used:
                path.unlink()
        gone = sorted(finished.keys() - {file.name for file in result.files})
        for name in gone:
            (self.request.folder / name).unlink(missing_ok=True)
        if gone:
            self.announce(f"removed, since commit {result.commit[:12]} no longer has it: {_names(gone)}")

    def _fetch(self, result: DownloadResult, transfers: Sequence[Transfer]) -> None:
        started = time.monotonic()
        total = sum(file.size_bytes for file in result.missing)
        here = sum(transfer.bytes_done for transfer in transfers)
        if here:
            self.announce(f"going on: {human_bytes(here)} of {human_bytes(total)} are here already")
        with open(self.home / FINISHED_NAME, "ab", buffering=0) as log:

            def note(file: HubFile) -> None:
                log.write(jsonio.dumps_line({"name": file.name, "digest": file.digest}))

            fleet = Fleet(self.hub, result.commit, self.request.folder, transfers, note)
            if transfers:
                with progress("download", total=total, unit="B", done=here) as bar:
                    fleet.run(self.request.connections, bar)
        result.bytes_fetched, result.interruptions = fleet.bytes_fetched, fleet.interruptions
        result.seconds = time.monotonic() - started
        if fleet.failures:
            reasons = [f"{name} {reason}" for name, reason in sorted(fleet.failures.items())]
            raise BadInputError(
                f"{len(reasons):,} of {counted(len(result.files), 'file')} could not be downloaded: "
                f"{_names(reasons, '; ')}. The others are here and checked, and none stands under its name with wrong "
                f"bytes. The copy on {self.hub.endpoint} may be damaged: run the command again with another "
                f"--endpoint, or leave these files out with --exclude."
            )

    def _facts(self, result: DownloadResult) -> dict[str, Any]:
        return {
            "repo": self.request.repo,
            "type": self.request.kind,
            "endpoint": self.hub.endpoint,
            "revision": self.request.revision,
            "commit": result.commit,
            "files": {file.name: {"bytes": file.size_bytes, file.algorithm: file.digest} for file in result.files},
        }


# ---- the state of a folder -------------------------------------------------------------------------------------


def _write_state(path: Path, facts: dict[str, Any]) -> None:
    write_json(path, {"kind": "download", "format": FORMAT, "zero2all": __version__, **facts})


def _read_state(home: Path) -> _State | None:
    """What an earlier download left: its plan if it did not end, else its manifest."""
    path = home / PLAN_NAME if (home / PLAN_NAME).exists() else home / MANIFEST_NAME
    try:
        facts = read_json(path)
    except FileNotFoundError:
        return None
    is_whole = path.name == MANIFEST_NAME
    try:
        if (facts["kind"], facts["format"]) != ("download", FORMAT):
            raise ValueError(f"it says {facts['kind']}, format {facts['format']}")
        if is_whole:
            finished = {name: file.get("sha256") or file["git_sha1"] for name, file in facts["files"].items()}
        else:
            finished = facts["finished"] | _read_finished(home / FINISHED_NAME)
        return _State(facts["repo"], facts["type"], facts["revision"], facts["commit"], is_whole, finished)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(
            f"{path} is not what this version of zero2all ({__version__}) writes ({error}). Use the version that wrote "
            f"it, or delete {home}: files that are whole are then recognised by their checksums."
        ) from error


def _read_finished(path: Path) -> dict[str, str]:
    """The log of finished files; a line that a crash cut off is left out, and its file known by its checksum."""
    finished = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = jsonio.loads(line)
            finished[str(entry["name"])] = str(entry["digest"])
        except (ValueError, TypeError, KeyError):
            continue
    return finished


# ---- names -----------------------------------------------------------------------------------------------------


def _refuse_unsafe_names(files: Sequence[HubFile]) -> None:
    """Names come from the hub, and a name such as `../../.bashrc` would be written outside the folder."""
    unsafe = [file.name for file in files if not _is_safe(file.name)]
    if unsafe:
        raise BadInputError(
            f"The hub lists names that would be written outside the folder, or over our own records in {STATE_FOLDER}: "
            f"{_names([repr(name) for name in unsafe])}. No honest repo does that. If you trust it all the same, leave "
            f"these files out with --exclude."
        )


def _is_safe(name: str) -> bool:
    parts = name.split("/")
    return (
        bool(name)
        and "\\" not in name
        and name.isprintable()
        and all(part not in ("", ".", "..") for part in parts)
        and not (os.name == "nt" and ":" in name)
        and parts[0] != STATE_FOLDER
    )


def in_words(files: Sequence[HubFile]) -> str:
    """How many they are and how large: '3 files, 600.0 KB'."""
    return f"{counted(len(files), 'file')}, {human_bytes(sum(file.size_bytes for file in files))}"


def _outline(files: Sequence[HubFile]) -> str:
    """What a repo has at its top: folders with their weight, and files."""
    tops: dict[str, list[HubFile]] = {}
    for file in files:
        parts = PurePosixPath(file.name).parts
        tops.setdefault(f"{parts[0]}/" if len(parts) > 1 else file.name, []).append(file)
    lines = [
        f"{top} ({in_words(inner) if top.endswith('/') else human_bytes(inner[0].size_bytes)})"
        for top, inner in tops.items()
    ]
    return _names(lines) if lines else "no files at all"


def _names(names: Sequence[str], separator: str = ", ") -> str:
    rest = len(names) - NAMES_SHOWN
    return separator.join(names[:NAMES_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
