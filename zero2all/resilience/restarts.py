"""When a run ends: whether a failed one is tried again, and after which pause; and notices that it must end, by a file
that appears, an address of a cloud's metadata service, or a deadline."""

import threading
import time
from pathlib import Path

from zero2all.common.errors import GAVE_UP_CODE, DiskError
from zero2all.common.language import message
from zero2all.resilience.config import ResilienceConfig

LONGEST_WAIT_SECONDS = 60.0
DISK_FULL = "disk full"
"""The error of a restart for which the disk has no room: space may be freed meanwhile."""


class Restarts:
    """Counts the attempts of a run that did not make progress."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.best_step = self._began_at_step = -1
        self._without_progress = 0
        self._last = (-1, "")
        """Step and error of the attempt before."""

    def reason_to_end(self, step: int, began: int, error: str) -> str:
        """Why an attempt that began at step `began` and failed at `step` is the last one; empty: it is not."""
        # A later start than before means that the attempt before has saved; if it was the farthest, that counted then.
        has_saved = began > self._began_at_step and self._without_progress > 1
        progressed = step > self.best_step or has_saved
        self.best_step, self._began_at_step = max(self.best_step, step), max(self._began_at_step, began)
        self._without_progress = 1 if progressed else self._without_progress + 1
        again = self._last == (step, error) and error not in ("", "hang", DISK_FULL)
        self._last = (step, error)
        if self.allowed == 0:
            return message("The run was stopped: restarts are switched off (resilience.restarts is 0).")
        if again:
            return message(
                f"The run was stopped (exit code {GAVE_UP_CODE}): the same error at the same step twice, so that "
                f"another attempt would not help."
            )
        if self._without_progress > self.allowed:
            return message(
                f"The run was stopped (exit code {self.end_code(0)}): {self._without_progress} attempts without "
                f"progress (resilience.restarts)."
            )
        return ""

    def end_code(self, code: int) -> int:
        """The exit code of a run that is not tried again; its last attempt ended with `code`."""
        if self._last[1] == DISK_FULL:
            return DiskError.exit_code
        return GAVE_UP_CODE if self.allowed else code

    def saved_at(self, step: int) -> None:
        """An attempt has saved and was ended on purpose."""
        if step > self.best_step:
            self.best_step, self._without_progress = step, 0

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next attempt: longer after every one without progress."""
        count = self._without_progress
        return 0.0 if count <= 1 else min(2.0 ** (count - 1), LONGEST_WAIT_SECONDS)


LOOK_SECONDS = 0.5
POLL_URL_SECONDS = 5.0
NO_NOTICE = ("", "false", "none")
NO_EVENTS = '"events":[]'
"""Answers of metadata services while nothing is planned; others answer with an error status."""
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}


class Notices:
    """Ask `due` often; it looks seldom enough. The address is asked in a thread: it may not answer."""

    def __init__(self, settings: ResilienceConfig) -> None:
        self._file = Path(settings.preempt_file) if settings.preempt_file else None
        self._url = settings.preempt_url
        self._deadline = time.monotonic() + settings.seconds_left()  # a clock that is set later changes nothing
        self._looked = 0.0
        self._answer = ""
        if self._url is not None:
            threading.Thread(target=self._poll, name="z2a-notice", daemon=True).start()

    def due(self) -> str:
        """Why the run must end, in words; empty: it need not."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return ""
        self._looked = now
        if now >= self._deadline:
            return message("the deadline (resilience.deadline) has come")
        if self._file is not None and self._file.exists():
            return message(f"{self._file} announces that this machine will be taken away")
        if self._answer:
            return message(f"{self._url} announces that this machine will be taken away")
        return ""

    def _poll(self) -> None:
        import http.client  # here, because most runs have no address, and these take a tenth of a second
        import urllib.request

        assert self._url is not None, "the thread is started only with an address"
        request = urllib.request.Request(self._url, headers=HEADERS)
        while not self._answer:
            try:
                with urllib.request.urlopen(request, timeout=POLL_URL_SECONDS) as reply:
                    text = reply.read(10_000).decode(errors="replace").strip()
            except (OSError, ValueError, http.client.HTTPException):  # 404: nothing is planned
                text = ""
            text = "".join(text.lower().split())
            if text not in NO_NOTICE and NO_EVENTS not in text:
                self._answer = text
            time.sleep(POLL_URL_SECONDS)
