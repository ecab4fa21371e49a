"""A real browser for the tests of pages."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_FLAGS = (
    "--no-sandbox",  # containers seldom allow it, and the page is ours
    "--disable-dev-shm-usage",
    "--renderer-process-limit=1",  # a second of CPU for each page that has a process of its own
)

PATIENCE_MS = 60_000
"""How long a test waits for the page: other tests use the cores at the same time."""


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """Chromium; the test is skipped where there is none."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no Chromium on the PATH; scripts/install_browser.sh installs one")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=BROWSER_FLAGS)
        yield chromium
        chromium.close()


def is_own_error(message: Any, notes: tuple[str, ...]) -> bool:
    """An error of the page, and not one of Chromium's notes."""
    return message.type == "error" and not any(note in message.text for note in notes)


@contextlib.contextmanager
def watched_page(context: Any, refusals: tuple[int, ...] = ()) -> Iterator[Any]:
    """A fresh page; any error in it is a failure. A server may be away for a while, and refuse with these statuses."""
    notes = ("net::ERR_", *(f"responded with a status of {status} " for status in refusals))
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if is_own_error(message, notes) else None)
    opened.on("dialog", lambda dialog: (errors.append(f"a script ran: {dialog.message}"), dialog.dismiss()))
    yield opened
    if opened.url.startswith("http"):
        opened.evaluate("localStorage.clear()")
    opened.close()
    assert errors == []
