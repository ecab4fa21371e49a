"""What axe finds on every page of the board, in both languages, light and dark: nothing.

axe-core comes from npm (`scripts/vendor_web.sh dev`); without it these tests are skipped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero2all.track import MetricsWriter

from .conftest import ServedBoard

AXE = Path(__file__).parents[3] / "node_modules" / "axe-core" / "axe.min.js"
PHONE = {"width": 390, "height": 844}
LOOK = """async () => (await axe.run(document, {resultTypes: ['violations']})).violations.flatMap(({id, nodes}) =>
    nodes.map((node) => `${id}: ${node.html.slice(0, 200)} ${node.failureSummary}`))"""
SPIKE = '[data-chart="loss"] .marker[data-kind="spike"]'


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed; scripts/vendor_web.sh dev fetches it with npm")
    return AXE.read_text("utf-8")


@pytest.fixture
def odd(serve: Callable[..., ServedBoard], tmp_path: Path) -> ServedBoard:
    """Two workspaces with a run of the same name and one point, and one that ended in NaN; and a place with none."""
    root = tmp_path / "odd"
    for place in ("left", "right"):
        with MetricsWriter(root / place / "runs" / "same") as run:
            run.log({"loss": 2.0}, step=1, tokens=1)
            run.event("sanity", 0, {"notes": ["disk: enough", "memory: enough"]})
    with MetricsWriter(root / "left" / "runs" / "nan") as run:
        for step in range(80):
            run.log({"loss": float("nan") if step > 60 else 2.0}, step=step, tokens=step)
    with MetricsWriter(root / "left" / "runs" / "nan", resumed_from=70) as run:
        run.log({"loss": 2.0}, step=71, tokens=71)
        run.close(reason="failed", message="out of memory")
    return serve(root / "left", root / "right", root / "nowhere")


def go_to(page: Any, address: str, wait_for: str) -> None:
    page.goto("about:blank")  # another part after the # alone would not load the page anew
    page.goto(address)
    page.wait_for_selector(wait_for)


@pytest.mark.parametrize(
    ("locale", "theme"), [("en-US", "dark"), pytest.param("zh-CN", "light", marks=pytest.mark.slow)]
)
def test_axe_finds_nothing_in_either_language_and_theme(page, served, serve, odd, tmp_path, axe, locale, theme):
    def finds_nothing(where: str) -> None:
        if not page.evaluate("'axe' in globalThis"):
            page.evaluate(axe)
        assert page.evaluate(LOOK) == [], where

    go_to(page, f"{served.url}#runs=0/base&theme={theme}", '[data-group="config"]')
    page.set_viewport_size({"width": 1280, "height": 1800})
    page.click(SPIKE)
    page.wait_for_selector("#drawer .bars")
    finds_nothing("a run, and the panel of a spike")
    page.keyboard.press("Escape")
    page.set_viewport_size(PHONE)
    page.click("#menu")
    finds_nothing("the list on a phone")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("dialog")
    finds_nothing("the help")
    compared = "runs=0/runs/same,1/runs/same,0/runs/nan&base=0/runs/nan"
    go_to(page, f"{odd.url}#{compared}&theme={theme}", '[data-group="config"]')
    finds_nothing("runs compared, on a phone")
    places = page.locator(".only .where").all_text_contents()
    assert sorted(places) == ["", "left", "right"], "runs of the same name are told apart"
    page.set_viewport_size({"width": 1280, "height": 1000})
    go_to(page, f"{odd.url}#runs=0/runs/nan&theme={theme}", '[data-group="config"]')
    finds_nothing("a run that failed with NaN")
    go_to(page, f"{serve(tmp_path / 'empty').url}#theme={theme}", ".blank pre")
    finds_nothing("no runs")
