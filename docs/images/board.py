"""Takes `board-light.png` and `board-dark.png`: the page of `z2a board` over real runs.

    python docs/images/board.py quickstart

Give a folder with runs in it, for example the workspace that `z2a quickstart` made. The newest run is shown, or the
view named with --view (what stands after the # in the page's address). Needs Chromium and playwright, as the browser
tests do. Each picture is at most 200 KB.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from zero2all.track.api import Board, BoardOptions

MAX_BYTES = 200_000
SIZE = {"width": 1440, "height": 980}


def main() -> None:
    """Read the command line, serve the runs, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", help="folder with runs in it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the pictures go")
    parser.add_argument("--view", default="", help="what stands after the # in the address")
    arguments = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        sys.exit("There is no Chromium on the PATH; scripts/install_browser.sh installs one.")
    board = Board([arguments.runs], BoardOptions(port=0))
    threading.Thread(target=board.serve, daemon=True).start()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, locale="en-US")
            page.goto(f"{board.url}#{arguments.view}{'&' if arguments.view else ''}theme={theme}")
            page.wait_for_selector('[data-group="config"]', state="attached")
            page.wait_for_load_state("load")
            page.wait_for_timeout(1500)  # charts further down, markers
            path = arguments.out / f"board-{theme}.png"
            path.write_bytes(small(page.screenshot()))
            print(f"{path}: {path.stat().st_size / 1000:.0f} KB")
            page.close()
        browser.close()
    board.stop()


def small(png: bytes) -> bytes:
    """The same picture with as few colours as it takes to fit."""
    for colors in (None, 256, 128, 64):
        picture = Image.open(io.BytesIO(png)).convert("RGB")
        packed = io.BytesIO()
        (picture if colors is None else picture.quantize(colors)).save(packed, "PNG", optimize=True)
        if packed.tell() <= MAX_BYTES:
            return packed.getvalue()
    raise ValueError(f"The picture does not fit into {MAX_BYTES:,} bytes.")


if __name__ == "__main__":
    main()
