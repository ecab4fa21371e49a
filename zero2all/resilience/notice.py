"""Notices that the run must end: a file that appears, an address of a cloud's metadata service, a deadline."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from zero2all.common.language import message
from zero2all.resilience.config import ResilienceConfig

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
