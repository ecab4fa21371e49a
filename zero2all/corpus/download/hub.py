"""What a Hugging Face-style hub has: the commit a revision stands for, the files of that commit, their checksums.

huggingface_hub knows the addresses, the headers, where a token is kept and what an error of a hub means, so all of that
is left to it. Two things are ours. The pages of a listing are asked for one by one here, because `HfApi.list_repo_tree`
sets no time limit: a mirror that accepts a connection and then says nothing would hold the command for ever. And every
request, of a listing or of a file, fails in one of two ways: as a `UserError`, which no repetition would mend, or as
an `InterruptedTransferError`, which `Patience` waits out.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from zero2all.common.errors import BadInputError, UsageError, UserError
from zero2all.common.progress import human_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

RepoKind = Literal["dataset", "model"]
Announce = Callable[[str], None]
Result = TypeVar("Result")

OFFICIAL_HUB = "https://huggingface.co"
"""Where the token of `hf auth login` and HF_TOKEN belongs."""
PASSING_STATUSES = frozenset({408, 416, 429, 500, 502, 503, 504})
"""Answers after which the same request may succeed. 416 comes from mirrors that hold only a part of a file so far."""
FIRST_RETRIES = 2
"""The very first request gives up early: what fails there is mostly a mistyped endpoint or no network at all."""
LONGEST_WAIT_SECONDS = 30.0
"""The wait after a failure doubles up to here."""
LARGEST_FILE_BYTES = 1 << 50
"""A petabyte, of which no hub holds one file: more is a wrong answer."""
LONGEST_ASKED_WAIT_SECONDS = 900.0
"""A hub that asks for more is not waited for: a command that sits still for an hour looks like one that hangs."""


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
        """How long the hub asked us to stay away; None: it did not say."""


class MissingFileError(Exception):
    """The hub lists a file and does not have it."""


class Patience:
    """How failures are waited out, by all connections together.

    The wait doubles with each failure in a row. When the hub itself names a wait (429 with Retry-After), no connection
    asks for anything before it is over. `stop` ends every wait at once.
    """

    def __init__(self, retries: int, first_wait_seconds: float, announce: Announce) -> None:
        self.retries, self.first_wait_seconds, self.announce = retries, first_wait_seconds, announce
        self.stop = threading.Event()
        self._not_before = 0.0

    def repeat(self, what: str, call: Callable[[], Result], retries: int | None = None) -> Result:
        """`call()`, again and again until it succeeds or patience ends, after `retries` if given."""
        failures = 0
        while True:
            self.wait_turn()
            try:
                return call()
            except InterruptedTransferError as error:
                failures += 1
                if retries is not None and failures > retries:
                    raise UserError(
                        f"{what}: {error}, {failures} times. Check the network and its proxy, --endpoint and "
                        f"HF_ENDPOINT, or try a mirror with --endpoint."
                    ) from error
                self.wait_out(error, failures, what)

    def wait_turn(self) -> None:
        """Return when the hub may be asked again."""
        while (left := self._not_before - time.monotonic()) > 0 and not self.stop.wait(left):
            pass

    def wait_out(self, error: InterruptedTransferError, failures: int, what: str) -> None:
        """Wait after the latest of `failures` in a row; a UserError when there were too many."""
        if failures > self.retries:
            raise UserError(
                f"{what}: {error}; this was try {failures} without getting any further. What has arrived is kept: run "
                f"the same command again to go on, or try another mirror with --endpoint."
            ) from error
        if error.asked_seconds is not None:
            if error.asked_seconds > LONGEST_ASKED_WAIT_SECONDS:
                raise UserError(
                    f"{what}: {error}, and the hub asks us to stay away for {human_seconds(error.asked_seconds)}. What "
                    f"has arrived is kept: run the same command again then. A token, or fewer --connections, may help."
                ) from error
            self.announce(f"{what}: {error}; waiting {human_seconds(error.asked_seconds)}, as the hub asks")
            self._not_before = max(self._not_before, time.monotonic() + error.asked_seconds)
            self.wait_turn()
            return
        seconds = min(self.first_wait_seconds * 2 ** (failures - 1), LONGEST_WAIT_SECONDS)
        if failures > 1:  # a single lost connection is everyday life, counted in the summary and not worth a line
            self.announce(f"{what}: {error}; try {failures + 1} of {self.retries + 1} in {seconds:.1f} s")
        self.stop.wait(seconds * random.uniform(0.75, 1.25))  # so that connections lost together do not return together


class Hub:
    """One repo on one hub."""

    def __init__(
        self, repo: str, kind: RepoKind, endpoint: str | None, token_env: str | None, patience: Patience
    ) -> None:
        _require_library()
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            raise UserError(
                "Offline mode is on (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set), so nothing is downloaded. Unset "
                "the variable and run the command again."
            )
        self.repo, self.kind, self.patience = repo, kind, patience
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        if not re.match(r"https?://[^/]", self.endpoint):
            raise UsageError(
                f"The endpoint {self.endpoint!r} is no address. Expected is one like https://huggingface.co"
            )
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
            commit = self.patience.repeat("asking for the repo", ask, min(FIRST_RETRIES, self.patience.retries))
        except HFValidationError as error:
            raise UsageError(f"{self.repo!r} cannot be the name of a repo: {error} Expected is OWNER/NAME.") from error
        except (KeyError, TypeError, ValueError) as error:
            raise self._strange_answer(f"{type(error).__name__}: {error}") from error
        if not commit:
            raise self._strange_answer("a repo without a commit")
        return commit

    def list_files(self, commit: str) -> list[HubFile]:
        """Every file of a commit, sorted by name."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers(token=self._token, library_name="zero2all")
        files: list[HubFile] = []
        tree = f"{self.endpoint}/api/{self.kind}s/{self.repo}/tree/{commit}"
        address: str | None = f"{tree}?recursive=true"
        asked: set[str] = set()

        def ask() -> Any:
            assert address is not None, "asked for a page after the last one"
            with self._errors_translated():
                answer = get_session().get(address, headers=headers, timeout=self.timeout_seconds)
                hf_raise_for_status(answer)
            return answer

        while address is not None:
            if address in asked:
                raise self._strange_answer("a listing whose pages lead back to themselves")
            asked.add(address)
            answer = self.patience.repeat("the listing", ask)
            try:
                files += [_hub_file(entry) for entry in answer.json() if entry["type"] == "file"]
            except (ValueError, KeyError, TypeError) as error:
                raise self._strange_answer(f"{type(error).__name__}: {error}") from error
            # Of the next page only the cursor is taken: a mirror may hand on the hub's own address, which is perhaps
            # not to be reached from here and must not get the mirror's token.
            next_page = answer.links.get("next", {}).get("url")
            address = f"{tree}?{urlsplit(next_page).query}" if next_page else None
        return sorted(files, key=lambda file: file.name)

    @contextmanager
    def open(self, commit: str, name: str, byte_range: str | None) -> Iterator[Any]:
        """The answer to a request for a file, or for `byte_range` of it, as a stream."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        # Compression on the way would make positions in the stream mean something else than positions in the file.
        headers = {"Accept-Encoding": "identity"} | ({"Range": byte_range} if byte_range else {})
        headers = build_hf_headers(token=self._token, library_name="zero2all", headers=headers)
        url = hf_hub_url(self.repo, name, repo_type=self.kind, revision=commit, endpoint=self.endpoint)
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

        status = error.response.status_code
        if status in PASSING_STATUSES or status >= 500:
            return InterruptedTransferError(
                f"{self.endpoint} answered {status}", _asked_seconds(error.response.headers)
            )
        if status in (401, 403):
            return UserError(self._refusal(status))
        if isinstance(error, RevisionNotFoundError):
            return BadInputError(
                f"{self.repo} has no such revision ({error.response.url}). Give a branch, a tag or a commit of it with "
                f"--revision. If the commit of an earlier download is gone, take the present one with --update."
            )
        if isinstance(error, RepositoryNotFoundError) or (status == 404 and "/resolve/" not in error.response.url.path):
            other = "model" if self.kind == "dataset" else "dataset"
            return BadInputError(
                f"{self.endpoint} has no {self.kind} {self.repo}. Check the spelling (OWNER/NAME); if it is a {other}, "
                f"add --type {other}; if it is private, give a token: {self._token_advice()}"
            )
        if status == 404:
            return MissingFileError(f"{self.endpoint} answered 404")
        return UserError(f"{self.endpoint} refused with {status}: {error.server_message or error}. Try --endpoint.")

    def _refusal(self, status: int) -> str:
        page = f"{self.endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"
        if self._token:
            return (
                f"{self.endpoint} refuses {self.repo} to the owner of this token ({status}). If it is gated, accept "
                f"its terms at {page} with the account of the token; a fine-grained token also needs the right to read "
                f"gated repos. Check the spelling, too: hubs answer so for repos that do not exist."
            )
        return (
            f"{self.endpoint} refuses {self.repo} without a token ({status}): it is gated, or private, or does not "
            f"exist. Check the spelling, accept its terms at {page} if it has any, and give a token: "
            f"{self._token_advice()}"
        )

    def _token_advice(self) -> str:
        if self.endpoint != OFFICIAL_HUB:
            return "put it into a variable and name that with --token-env HF_TOKEN (a mirror gets no token unasked)."
        return "set HF_TOKEN, or log in with `hf auth login`, or name another variable with --token-env."

    def _strange_answer(self, detail: str) -> UserError:
        return UserError(
            f"{self.endpoint} does not answer like a Hugging Face-style hub ({detail}). Check --endpoint and "
            f"HF_ENDPOINT; a page that asks to log in to the network answers like this, too."
        )


def _require_library() -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"Downloads need huggingface_hub, which cannot be imported ({error}). Install it with "
            f"`pip install 'huggingface_hub>=1.0'`."
        ) from error


def _token(token_env: str | None, endpoint: str) -> str | Literal[False]:
    """The token to send. False, which huggingface_hub takes for "none at all", when there is none.

    A token opens the account it belongs to. The hub itself gets the one the person is logged in with; a mirror, which
    may be anybody's, only the one that was named for it.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_token

    if token_env is not None:
        token = os.environ.get(token_env, "").strip()
        if not token:
            raise UsageError(
                f"--token-env names the variable {token_env}, which is not set. Export it, or leave it out."
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
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= LARGEST_FILE_BYTES:
        raise ValueError(f"{entry['path']} with a size of {str(size)[:40]} bytes")
    return HubFile(str(entry["path"]), size, "sha256" if lfs else "git_sha1", digest)


def _asked_seconds(headers: Mapping[str, str]) -> float | None:
    """How long a hub asks us to stay away: Retry-After in either of its forms, or the rate limit's `t=55`."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    if value:
        try:
            until = parsedate_to_datetime(value)
        except ValueError:
            return None
        return max(0.0, (until.astimezone(UTC) - datetime.now(UTC)).total_seconds())
    spent = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""))
    return float(spent[1]) if spent else None
