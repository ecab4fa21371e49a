"""Draws `corpus-report.png`: the report of a corpus made of the quickstart's texts and some planted rubbish.

    python docs/images/corpus_report.py          needs Chromium or Chrome

The page is the `report.html` that `z2a corpus build` writes; nothing about it is drawn by hand.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.quickstart.raw import write_raw

PICTURE = Path(__file__).with_name("corpus-report.png")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1100, 1240


def main() -> None:
    """Make the texts, build, take the picture."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"None of {', '.join(BROWSERS)} is installed.")
    with tempfile.TemporaryDirectory() as folder:
        page = build(Path(folder))
        size = f"--window-size={WIDTH},{HEIGHT}"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
        shot = Path(folder) / "shot.png"
        subprocess.run([browser, *flags, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True)
        shrink(shot, PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def build(folder: Path) -> Path:
    """A corpus of four sources; returns its page."""
    raw = folder / "raw"
    write_raw(raw, seed=1, bytes_per_language=1_500_000, code_bytes=1_500_000)
    rubbish(raw / "en.jsonl", raw / "web.jsonl")
    sources = [
        Source("stories", raw / "en.jsonl", "en"),
        Source("故事", raw / "zh.json", "zh"),
        Source("python", raw / "code.parquet", "code"),
        Source("web", raw / "web.jsonl", "en"),
    ]
    build_corpus(folder / "corpus", sources, BuildOptions(max_damaged_share=0.05))
    return folder / "corpus" / "report.html"


def rubbish(stories: Path, out: Path) -> None:
    """Pages as a crawler brings them home: some text, copies with small changes, tables, menus, cut lines."""
    rng = random.Random(7)
    texts = [json.loads(line)["text"] for line in stories.read_text(encoding="utf-8").splitlines()]
    long = [" ".join(rng.sample(texts, 12)) for _ in range(400)]
    rows = [*long, *rng.sample(long, 25)]
    rows += [text.replace(" the ", " that ", 2) for text in rng.sample(long, 60)]
    rows += ["Total: " + " ".join(f"{rng.random() * 1e6:.2f}" for _ in range(90)) for _ in range(30)]
    rows += ["\n".join(f"https://example.com/item/{rng.randrange(10**6)}" for _ in range(20)) for _ in range(18)]
    rows += ["\n".join(rng.sample(["Home", "News", "Sport", "Login", "Weather", "Video"], 6) * 4) for _ in range(14)]
    rows += ["█▓▒░ " * 40 for _ in range(3)] + ["ok" for _ in range(9)]
    rng.shuffle(rows)
    lines = [json.dumps({"url": f"page-{number}", "body": text}) for number, text in enumerate(rows)]
    for place in rng.sample(range(len(lines)), 6):
        lines[place] = lines[place][: len(lines[place]) // 2]
    out.write_text("\n".join(lines), encoding="utf-8")


def shrink(shot: Path, picture: Path) -> None:
    """The same picture with a palette, a third of the size."""
    from PIL import Image  # comes with matplotlib

    Image.open(shot).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    main()
