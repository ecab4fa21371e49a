"""The page in a real browser: what a person sees and does."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.track.logged import logged
from zero2all.track import MetricsWriter
from zero2all.track.api import page_files
from zero2all.track.chart_library import CHART_LIBRARY

from .conftest import HOSTILE, SPIKE_STEP, ServedBoard

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)").expect

LOSS = '[data-chart="loss"]'


def open_page(page: Any, served: ServedBoard, view: str) -> None:
    """Open a view and wait until its first chart is painted."""
    page.goto(f"{served.url}#{view}")
    page.wait_for_selector('[data-state="painted"]')


def wait_in(page: Any, is_so: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_so():
            return
        page.wait_for_timeout(100)
    pytest.fail("waited too long")


def test_a_live_run_moves_the_curve_and_ends_as_finished(page, served, live_root):
    run = MetricsWriter(live_root / "live")
    for step in range(1, 21):
        run.log({"loss": 1 / step}, step=step)
    open_page(page, served, "runs=1/live")
    page.wait_for_selector(f'{LOSS}[data-end="20"]')
    page.get_by_role("main").get_by_text("running").wait_for()
    run.log({"loss": 0.03}, step=35)
    page.wait_for_selector(f'{LOSS}[data-end="35"]')  # nobody reloaded: the stream brought it
    run.close()
    page.get_by_role("main").get_by_text("finished").wait_for()


@pytest.mark.parametrize("locale", ["zh-CN"])
def test_compared_runs_are_overlaid_and_their_difference_and_configs_shown(page, served, locale):
    open_page(page, served, "runs=0/base,0/other")
    legend = page.locator(f"{LOSS} .legend li")
    expect(legend).to_have_text([re.compile(r"^\s*base"), re.compile(r"^\s*other")])
    page.locator('[data-run="0/base"] [data-tool="base"]').click()
    expect(legend).to_have_count(1)
    expect(page).to_have_url(re.compile("base=0/base&diff=1"))
    row = page.locator('[data-group="config"] tr', has_text="optim.lr_max")
    expect(row.locator("td")).to_have_text(["0.0001", "0.0002"])


def test_a_chart_says_in_legend_and_words_what_it_shows_and_its_points_are_saved(page, served):
    open_page(page, served, "runs=0/base")
    canvas = page.locator(f"{LOSS} canvas")
    assert canvas.get_attribute("role") == "img"
    label = canvas.get_attribute("aria-label")
    assert re.search(r"^loss nats per token.*4\.9\d+.*400.*lowest [12]\.\d+.*highest 7\.\d+", label), label
    card = page.locator('[data-chart="time/*"]')  # parts of a step: stacked once, and their sum is a line
    card.scroll_into_view_if_needed()
    page.wait_for_selector('[data-chart="time/*"][data-state="painted"]')
    expect(card.locator(".legend .name")).to_have_text(["backward", "forward", "Σ step"])
    columns = card.evaluate("(element) => element.card.chart.plot.data.slice(1).map((column) => column.at(-1))")
    assert columns == pytest.approx([0.4, 0.6, 0.6], abs=1e-6)
    assert card.evaluate("(element) => element.card.chart.plot.scales.y.max") < 0.7
    assert card.locator(".unit").inner_text() == "seconds"
    page.hover(LOSS)
    with page.expect_download() as png:
        page.click(f'{LOSS} [data-tool="png"]')
    assert png.value.suggested_filename == "loss.png"
    assert Path(png.value.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with page.expect_download() as csv:
        page.click(f'{LOSS} [data-tool="csv"]')
    assert len(Path(csv.value.path()).read_text().splitlines()) == 401
    legend = page.locator(f"{LOSS} .legend li")
    page.mouse.move(0, 0)
    expect(legend).to_have_text(re.compile(r"lossraw2\.\d+smoothed 2\.\d+"))
    spike = page.locator(f'{LOSS} .marker[data-kind="spike"]').bounding_box()
    page.mouse.move(spike["x"] + spike["width"] / 2, spike["y"] + 100)
    expect(legend).to_have_text(re.compile(r"lossraw7\.\d+smoothed 2\.\d+"))
    page.get_by_role("slider").first.fill("0")
    expect(legend).to_have_text(re.compile(r"^Training loss\d\.\d+$"))  # nothing is smoothed


def test_an_idle_page_moves_no_bytes_markup_stays_text_and_what_was_left_out_is_said(page, served):
    open_page(page, served, "runs=0/base")
    page.wait_for_selector('[data-group="config"]')
    page.wait_for_load_state("load")
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    moved: list[Any] = []
    for kind in ("Network.dataReceived", "Network.requestWillBeSent"):
        session.on(kind, lambda event: moved.append(event))

    def nothing_moves() -> bool:
        moved.clear()
        page.wait_for_timeout(1000)  # silence cannot be waited for in another way
        return not moved

    wait_in(page, nothing_moves)  # on a busy machine what was begun before may still come
    page.get_by_text("step 400: <script>alert(2)</script>").wait_for()
    page.locator(".run-list").get_by_text(HOSTILE).click()
    page.get_by_role("heading", name=HOSTILE).wait_for()
    assert page.locator("main script, main img[src=x], aside img[src=x]").count() == 0
    page.locator('[data-run="0/torn"] .only').click()
    page.get_by_text(re.compile(r"Left out: damaged lines: [23]")).wait_for()
    page.locator(LOSS).get_by_text("1 not finite").wait_for()
    shown = page.evaluate(
        """async () => {
            const {count, duration, number} = await import('/format.js');
            return [
                [999999, 1000, 1234567, 15, 2e12, -52300].map(count),
                [0, 2.5, -0.00012345, 81890, NaN, Infinity, 1000].map(number),
                [0.5, 59, 61, 3725, 200000].map(duration),
            ];
        }"""
    )
    numbers = ["0", "2.500", "−1.23e−4", "81.9k", "–", "∞", "1000"]
    assert shown[:2] == [["1000k", "1k", "1.23M", "15", "2T", "−52.3k"], numbers]
    assert shown[2:] == [["0.5s", "59s", "1m01", "1h02", "2d07h"]]


@pytest.mark.parametrize("locale", ["zh-CN"])
def test_held_out_loss_stands_beside_training_loss_and_no_name_turns_the_text_around(page, served, live_root, locale):
    with MetricsWriter(live_root / "judged") as run:
        run.log({"loss": 5.0, "loss/en": 5.0, "lr": 0.1}, step=1)
        run.log({"eval/valid/loss/en": 0.5, "eval/valid/bpb/en": 0.3, "memory/gib": 1.0}, step=1)
    (live_root / "judged/config.yaml").write_text('train:\n  name: "cat\u202egpj.exe"\n', "utf-8")
    open_page(page, served, "runs=1/judged")
    expect(page.locator(f"{LOSS} .legend .name")).to_have_text(["训练损失", "验证集 en"])
    expect(page.locator(".facts")).to_contain_text("最近更新")
    assert "\u202e" not in page.content()
    expect(page.locator('[data-group="config"]')).to_contain_text(r"cat\u202egpj.exe")
    shutil.rmtree(live_root / "judged")


@pytest.mark.parametrize("locale", ["zh-CN"])
def test_no_button_of_the_bar_is_cut_off_with_three_runs(page, served, locale):
    open_page(page, served, "runs=0/base,0/other,0/torn&zoom=10~200")
    page.wait_for_selector(".reset")
    cut = """() => [...document.querySelectorAll('#bar button')].filter((each) => each.offsetWidth).filter((button) => {
        const {left, right, top, bottom} = button.getBoundingClientRect();
        return [left + 2, right - 2].some((x) => !button.contains(document.elementFromPoint(x, (top + bottom) / 2)));
    }).map((button) => button.textContent || button.title)"""
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(cut) == [], width


def test_markers_are_reached_by_mouse_and_keys_show_losses_and_documents_and_stay_below_bar_and_drawer(page, served):
    open_page(page, served, "runs=0/base")
    marker, drawer = page.locator(f'{LOSS} .marker[data-kind="spike"]'), page.locator("#drawer")
    marker.click()
    drawer.get_by_text(f"Spike · Step {SPIKE_STEP}").wait_for()
    expect(drawer.get_by_role("cell", name="4242")).to_be_visible()  # the document
    expect(drawer.locator(".bars").get_by_text("7.900")).to_be_visible()  # the loss of zh
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    stops = page.locator(f'{LOSS} .marker[tabindex="0"]')
    expect(stops).to_have_count(1)
    stops.focus()
    for _ in range(2):  # over the checkpoints of 100 and 200
        page.keyboard.press("ArrowRight")
    expect(page.locator(":focus")).to_have_attribute("data-kind", "spike")
    page.keyboard.press("Enter")
    page.locator("#drawer .bars").wait_for()
    page.keyboard.press("Escape")
    expect(page.locator(":focus")).to_have_attribute("data-kind", "spike")
    at_marker = """(marker) => {
        const {x, y, width, height} = marker.getBoundingClientRect();
        const top = document.elementFromPoint(x + width / 2, y + height / 2);
        return top?.closest('#bar, #runs, .marker')?.id ?? 'nothing';
    }"""
    page.evaluate("(by) => scrollBy(0, by)", marker.bounding_box()["y"] - 20)
    assert marker.evaluate(at_marker) == "bar"
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    marker.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "on a phone nothing is wider than the screen"
    first = page.locator(f"{LOSS} .marker").first
    page.click("#menu")
    wait_in(page, lambda: first.evaluate(at_marker) == "runs")  # it slides in
    page.locator('[data-run="0/other"] .only').click()
    page.get_by_role("heading", name="other").wait_for()


def test_zoom_axis_scales_search_and_theme_are_in_the_address(page, served):
    open_page(page, served, "runs=0/base")
    plot = page.locator(f"{LOSS} .u-over").bounding_box()
    page.mouse.move(plot["x"] + 100, plot["y"] + 80)
    page.mouse.down()
    page.mouse.move(plot["x"] + 300, plot["y"] + 80, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile("zoom="))
    low, high = map(float, re.search(r"zoom=([\d.]+)~([\d.]+)", page.url).groups())
    assert 1 < low < high < 400
    page.keyboard.press("0")
    page.click('[data-axis="tokens"]')
    page.wait_for_selector(f'{LOSS}[data-end="40000"]')
    page.keyboard.press("l")
    page.click('[data-tool="theme"]')
    page.keyboard.press("/")
    page.keyboard.type("grad")
    expect(page.locator(".groups .card")).to_have_count(1)
    expect(page).to_have_url(re.compile("q=grad"))
    assert [part for part in ("x=tokens", "ylog=1", "theme=dark") if part not in page.url] == []
    page.reload()
    page.wait_for_selector('[data-chart="grad_norm"][data-state="painted"]')
    expect(page.locator(".groups .card")).to_have_count(1)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_keyboard_reaches_everything_and_help_lists_it(page, served):
    open_page(page, served, "runs=0/base")
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("Find a metric").wait_for()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.locator(f'{LOSS} .marker[data-kind="spike"]').wait_for()  # events come after the first curve
    page.keyboard.press("n")
    page.locator("#drawer h2").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_role("checkbox")
    expect(page.locator(":focus")).to_have_css("outline-style", "solid")
    page.keyboard.press("Space")
    expect(page.locator(".run.on")).not_to_have_count(1)


def test_without_the_chart_library_the_page_says_what_is_missing(page, served):
    page.route("**/uPlot.iife.min.js", lambda route: route.fulfill(status=200, body=""))
    page.goto(served.url)
    page.get_by_text("z2a board --fetch-charts").wait_for()


def test_an_empty_folder_says_where_it_looked_and_notices_the_first_run(page, serve, tmp_path):
    root = tmp_path / "empty-workspace"
    root.mkdir()
    page.goto(serve(root).url)
    page.get_by_text(f"Searched in {root}").wait_for()
    page.get_by_text(f"z2a quickstart --work {root}", exact=True).wait_for()  # and what to do next
    logged(root / "runs" / "first", {"loss": 3.0}, {"loss": 2.0})
    page.wait_for_selector(f'{LOSS}[data-end="2"]')


def test_the_page_comes_back_by_itself_when_the_server_was_restarted(page, serve, tmp_path):
    served = serve(logged(tmp_path / "long", {"loss": 3.0}).parent)
    open_page(page, served, "runs=0/long")
    port = served.board.socket.getsockname()[1]
    served.stop()
    logged(tmp_path / "long", {"loss": 2.0}, first=7, writer="late")
    serve(tmp_path, port=port)
    page.wait_for_selector(f'{LOSS}[data-end="7"]')


def test_the_front_end_is_small():
    if not CHART_LIBRARY.is_file():
        pytest.skip("the chart library is missing; z2a board --fetch-charts fetches it")
    sizes = {path.name: path.stat().st_size for path in page_files().values()}
    assert sum(sizes.values()) <= 150_000, json.dumps(sizes)
