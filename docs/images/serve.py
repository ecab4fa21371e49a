"""Takes `serve-chat-*.png` and `serve-tokens-*.png`: the page of `z2a serve` over a real model, in both languages.

    python docs/images/serve.py quickstart --work quickstart

Give what `z2a serve` takes: the name of a run in a workspace, or a folder. Needs Chromium, playwright and a font with
Chinese characters. Each picture is at most 200 KB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from board import small
from playwright.sync_api import sync_playwright

from zero2all.common.workspace import open_workspace
from zero2all.infer.load import load_model
from zero2all.serve.model import ServedModel
from zero2all.serve.server import ModelServer, ServeOptions

SIZE = {"width": 1360, "height": 800}
LANGUAGES = {
    "en": ("en-US", "light", "What is the capital of France?", "The capital of France is"),
    "zh": ("zh-CN", "dark", "法国的首都是哪里？", "中国的首都是"),
}


def main() -> None:
    """Read the command line, serve the model, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="name or folder of a run, or a Hugging Face folder")
    parser.add_argument("--work", type=Path, default=Path(), help="workspace folder (default: here)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the pictures go")
    parser.add_argument("--seed", type=int, default=1, help="of what the model writes")
    arguments = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        sys.exit("There is no Chromium on the PATH; scripts/install_browser.sh installs one.")
    model = ServedModel(lambda: load_model(arguments.source, open_workspace(arguments.work)))
    server = ModelServer(model, ServeOptions(port=0, grace_seconds=0))
    threading.Thread(target=server.serve, daemon=True).start()
    while model.state != "ready":
        time.sleep(0.1)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for language, (locale, theme, question, beginning) in LANGUAGES.items():
            page = browser.new_context(viewport=SIZE, locale=locale).new_page()
            page.goto(f"{server.url}#theme={theme}")
            page.wait_for_selector("#load")
            page.fill("#set-seed", str(arguments.seed))
            page.fill("#set-max_tokens", "96")
            page.fill("#set-temperature", "0.5")
            _chat(page, question)
            _take(page, arguments.out / f"serve-chat-{language}.png")
            _tokens(page, beginning)
            _take(page, arguments.out / f"serve-tokens-{language}.png")
            page.close()
        browser.close()
    server.stop()


def _chat(page: Any, question: str) -> None:
    page.click('[data-mode="chat"]')
    page.fill("#message", question)
    page.press("#message", "Enter")
    page.wait_for_selector('[data-tool="send"]')


def _tokens(page: Any, beginning: str) -> None:
    """Open the panel of the least likely token that was written."""
    page.click('[data-mode="continue"]')
    page.click('[data-toggle="probabilities"]')
    page.fill("#text", beginning)
    page.press("#text", "Control+Enter")
    page.wait_for_selector('[data-tool="goOn"]')
    unlikely = page.locator(".behind .shade-4, .behind .shade-3").first.bounding_box()
    page.mouse.click(unlikely["x"] + 2, unlikely["y"] + unlikely["height"] / 2)
    page.wait_for_selector(".alternatives")


def _take(page: Any, path: Path) -> None:
    page.wait_for_timeout(300)  # the last frame
    path.write_bytes(small(page.screenshot()))
    print(f"{path}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
