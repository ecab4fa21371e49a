"""What a Hugging Face-style hub has: the commit of a revision, the files of that commit, their checksums.

Addresses, headers, tokens and the meaning of errors are left to huggingface_hub. The pages of a listing are asked for
here, because `HfApi.list_repo_tree` has no timeout and follows links away from a mirror. Every request fails either as
a `UserError`, which repeating does not help, or as an `InterruptedTransferError`, which `Patience` waits out.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from zero2all.common.errors import BadInputError, UsageError, UserError
from zero2all.common.progress import human_seconds

RepoKind = Literal["dataset", "model"]
Announce = Callable[[str], None]
Result = TypeVar("Result")

OFFICIAL_HUB = "https://huggingface.co"
"""The only one that gets the token of HF_TOKEN or `hf auth login` without being asked to."""
PASSING_STATUSES = frozenset({408, 416, 429})
"""Beside 5xx, answers after which the same request may succeed. 416: a mirror that holds only part of a file so far."""
FIRST_RETRIES = 2
"""The first request gives up early: it mostly fails because of a wrong endpoint, or without a network."""
LONGEST_WAIT_SECONDS = 30.0
"""The wait after a failure doubles up to here."""
LONGEST_ASKED_WAIT_SECONDS = 900.0
"""If a hub asks for a longer wait, the download stops."""
LARGEST_FILE_BYTES = 1 << 50
"""A larger size is a wrong answer."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a commit."""

    name: str
    """Path inside the repo, with forward slashes."""
    size_bytes: int
    algorithm: Literal["sha256", "git_sha1"]
    """`sha256` of the content for large files (LFS), `git_sha1` of git's blob for the others."""
    digest: str
    """In hexadecimal."""


class InterruptedTransferError(Exception):
    """A request failed in a way that may pass."""

    def __init__(self, reason: str, asked_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.asked_seconds = asked_seconds
        """How long the hub asked us to wait; None: it did not say."""


class MissingFileError(Exception):
    """The hub lists a file and does not have it."""


class DownloadStoppedError(Exception):
    """Another connection met an error, or the user interrupted."""


class Patience:
    """How all connections together wait out failures.

    The wait doubles with each failure in a row. When the hub names a wait (429 with Retry-After), no connection asks
    for anything before it is over. `stop` ends every wait at once.
    """

    def __init__(self, retries: int, first_wait_seconds: float, announce: Announce) -> None:
        self.retries, self.first_wait_seconds, self.announce = retries, first_wait_seconds, announce
        self.stop = threading.Event()
        self.failures = 0
        """How many requests failed, in all."""
        self._not_before = 0.0

    def repeat(
        self, what: str, call: Callable[[], Result], retries: int | None = None, progress: Callable[[], int] = int
    ) -> Result:
        """`call()` until it succeeds, or has failed more than `retries` times in a row without `progress` rising."""
        retries = self.retries if retries is None else min(retries, self.retries)
        failures, most = 0, progress()
        while True:
            while (left := self._not_before - time.monotonic()) > 0 and not self.stop.wait(left):
                pass
            if self.stop.is_set():
                raise DownloadStoppedError
            try:
                return call()
            except InterruptedTransferError as error:
                self.failures += 1
                failures = 1 if progress() > most else failures + 1
                most = max(most, progress())
                self._wait(error, failures, what, retries)

    def _wait(self, error: InterruptedTransferError, failures: int, what: str, retries: int) -> None:
        asked = error.asked_seconds
        if failures > retries:
            raise UserError(
                f"{what}: {error}; {failures} tries in a row brought nothing new. Downloaded parts are kept: "
                "run the same command again to continue. Check the network, its proxy and the endpoint "
                "(HF_ENDPOINT), or try another mirror with --endpoint."
            ) from error
        if asked is not None and asked > LONGEST_ASKED_WAIT_SECONDS:
            raise UserError(
                f"{what}: {error}, and the hub asks to wait {human_seconds(asked)}. Downloaded parts are "
                "kept: run the same command again then. A token, or fewer --connections, may help."
            ) from error
        if asked is not None:
            self.announce(f"{what}: {error}; waiting {human_seconds(asked)}, as the hub asks")
            self._not_before = max(self._not_before, time.monotonic() + asked)
            return
        seconds = min(self.first_wait_seconds * 2 ** (failures - 1), LONGEST_WAIT_SECONDS)
        if failures > 1:  # a single lost connection is common, and counted in the summary
            self.announce(f"{what}: {error}; try {failures + 1} of {retries + 1} in {seconds:.1f} s")
        self.stop.wait(seconds * random.uniform(0.75, 1.25))  # so that connections lost together do not return together


class Hub:
    """One repo on one hub."""

    def __init__(
        self, repo: str, kind: RepoKind, endpoint: str | None, token_env: str | None, patience: Patience
    ) -> None:
        try:
            from huggingface_hub import HfApi, constants
        except ImportError as error:
            raise UserError(
                f"Downloads need huggingface_hub, which cannot be imported ({error}). Install it with "
                f"`pip install 'huggingface_hub>=1.0'`."
            ) from error
        if constants.HF_HUB_OFFLINE:
            raise UserError(
                "Offline mode is on (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set), so nothing is downloaded. Unset "
                "the variable and run the command again."
            )
        self.repo, self.kind, self.patience = repo, kind, patience
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        if not re.match(r"https?://[^/]", self.endpoint):
            raise UsageError(f"The endpoint {self.endpoint!r} is not an address. Expected one like {OFFICIAL_HUB}")
        self.timeout_seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self._token = _token(token_env, self.endpoint)
        self._api = HfApi(endpoint=self.endpoint, token=self._token, library_name="zero2all")

    def resolve(self, revision: str) -> str:
        """The commit that a branch, a tag or a commit stands for now."""
        from huggingface_hub.errors import HFValidationError

        def ask() -> str | None:
            with self._errors_translated():
                wait = self.timeout_seconds
                return self._api.repo_info(self.repo, repo_type=self.kind, revision=revision, timeout=wait).sha

        try:
            commit = self.patience.repeat("asking for the repo", ask, FIRST_RETRIES)
        except HFValidationError as error:
            raise UsageError(f"{self.repo!r} is not a valid repo name: {error} Expected OWNER/NAME.") from error
        except (KeyError, TypeError, ValueError) as error:
            raise self._strange_answer(f"{type(error).__name__}: {error}") from error
        if not commit:
            raise self._strange_answer("a repo without a commit")
        return commit

    def list_files(self, commit: str) -> list[HubFile]:
        """Every file of a commit, sorted by name."""
        files: list[HubFile] = []
        tree = f"{self.endpoint}/api/{self.kind}s/{self.repo}/tree/{commit}"
        queries = ["recursive=true"]

        def ask() -> Any:
            with self._stream(f"{tree}?{queries[-1]}", {}) as answer:
                answer.read()
                return answer

        while True:
            answer = self.patience.repeat("the listing", ask)
            try:
                files += [_hub_file(entry) for entry in answer.json() if entry["type"] == "file"]
            except (ValueError, KeyError, TypeError) as error:
                raise self._strange_answer(f"{type(error).__name__}: {error}") from error
            next_page = answer.links.get("next", {}).get("url")
            if not next_page:
                return sorted(files, key=lambda file: file.name)
            # Only the cursor is taken: a mirror may name the hub's own address, which must not get the mirror's token.
            query = urlsplit(next_page).query
            if query in queries:
                raise self._strange_answer("a listing whose pages lead back to themselves")
            queries.append(query)

    @contextmanager
    def open(self, commit: str, name: str, byte_range: str | None) -> Iterator[Any]:
        """The answer to a request for a file, or for `byte_range` of it, as a stream."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo, name, repo_type=self.kind, revision=commit, endpoint=self.endpoint)
        # With compression, positions in the stream would not be positions in the file.
        headers = {"Accept-Encoding": "identity"} | ({"Range": byte_range} if byte_range else {})
        with self._stream(url, headers) as answer:
            yield answer

    @contextmanager
    def _stream(self, url: str, headers: dict[str, str]) -> Iterator[Any]:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers(token=self._token, library_name="zero2all", headers=headers)
        with (
            self._errors_translated(),
            get_session().stream("GET", url, headers=headers, timeout=self.timeout_seconds) as answer,
        ):
            hf_raise_for_status(answer)
            yield answer

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        # HTTPError is the root of whatever HTTP library huggingface_hub is built on: httpx in 1.x, httpx2 in 2.x.
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        try:
            yield
        except HfHubHTTPError as error:
            raise self._for_status(error) from error
        except HTTPError as error:
            reason = str(error) or type(error).__name__
            raise InterruptedTransferError(f"the connection to {self.endpoint} failed ({reason})") from error

    def _for_status(self, error: Any) -> Exception:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        status, where = error.response.status_code, f"{self.endpoint} answered {error.response.status_code}"
        if status in PASSING_STATUSES or status >= 500:
            return InterruptedTransferError(where, _asked_seconds(error.response.headers))
        if status in (401, 403):
            return UserError(self._refusal(status))
        if isinstance(error, RevisionNotFoundError):
            return BadInputError(
                f"{self.repo} has no such revision ({error.response.url}). Give a branch, a tag or a commit "
                "with --revision. If the commit of an earlier download no longer exists, download the "
                "current one with --update."
            )
        if isinstance(error, RepositoryNotFoundError) or (status == 404 and "/resolve/" not in error.response.url.path):
            other = "model" if self.kind == "dataset" else "dataset"
            return BadInputError(
                f"{self.endpoint} has no {self.kind} {self.repo}. Check the spelling (OWNER/NAME); if it is a {other}, "
                f"add --type {other}; if it is private, use a token. {self._token_advice()}"
            )
        if status == 404:
            return MissingFileError(where)
        return UserError(f"{self.endpoint} refused with {status}: {error.server_message or error}. Try --endpoint.")

    def _refusal(self, status: int) -> str:
        page = f"{self.endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"
        if self._token:
            return (
                f"{self.endpoint} refuses {self.repo} with this token ({status}): the repo is gated, private or does "
                f"not exist. Check the spelling, accept its terms at {page} if it has any, and use a token of that "
                f"account. A fine-grained token also needs the right to read gated repos."
            )
        return (
            f"{self.endpoint} refuses {self.repo} without a token ({status}): the repo is gated, private or does not "
            f"exist. Check the spelling, accept its terms at {page} if it has any, and use a token of that account. "
            f"{self._token_advice()}"
        )

    def _token_advice(self) -> str:
        if self.endpoint != OFFICIAL_HUB:
            return "Put the token into a variable and name it with --token-env HF_TOKEN (a mirror gets no other token)."
        return "Set HF_TOKEN, log in with `hf auth login`, or name another variable with --token-env."

    def _strange_answer(self, detail: str) -> UserError:
        return UserError(
            f"{self.endpoint} does not answer like a Hugging Face hub ({detail}). Check --endpoint and "
            "HF_ENDPOINT. The login page of a network also answers like this."
        )


def _token(token_env: str | None, endpoint: str) -> str | Literal[False]:
    """The token to send; False, as huggingface_hub wants it, for none. A mirror gets only one that was named for it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_token

    if token_env is not None:
        token = os.environ.get(token_env, "").strip()
        if not token:
            raise UsageError(
                f"--token-env names the variable {token_env}, which is not set. Export it, or leave the option out."
            )
        return token
    if endpoint != OFFICIAL_HUB or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return False
    return get_token() or False


def _hub_file(entry: dict[str, Any]) -> HubFile:
    lfs = entry.get("lfs")
    digest = str(lfs["oid"] if lfs else entry["oid"])
    if not re.fullmatch(r"[0-9a-f]{64}" if lfs else r"[0-9a-f]{40}", digest):
        raise ValueError(f"{entry['path']} with the checksum {digest!r}")
    size = (lfs or entry)["size"]
    if type(size) is not int or not 0 <= size <= LARGEST_FILE_BYTES:
        raise ValueError(f"{entry['path']} with a size of {str(size)[:40]} bytes")
    return HubFile(str(entry["path"]), size, "sha256" if lfs else "git_sha1", digest)


def _asked_seconds(headers: Mapping[str, str]) -> float | None:
    """How long a hub asks us to wait: Retry-After in seconds, or the rate limit's `r=0;t=55`."""
    value = headers.get("retry-after", "").strip()
    spent = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""))
    return float(value) if value.isdigit() else float(spent[1]) if spent else None
