"""The page in a real browser: a person talks to a model."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bigram import saying
from tests.browser import watched_page
from zero2all.infer.engine import EngineSettings
from zero2all.infer.load import LoadedModel
from zero2all.tokenizer.chat import own_template

from .conftest import MAX_LEN, Served, held, serving

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)").expect

HOSTILE = "<img src=x onerror=alert(1)>"
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
VIOLATIONS = """async () => (await axe.run(document, {resultTypes: ['violations']})).violations.flatMap(({id, nodes}) =>
    nodes.map((node) => `${id}: ${node.html.slice(0, 200)} ${node.failureSummary}`))"""
ANSWER = ".message.assistant .body"


@pytest.fixture(scope="module")
def context_of(browser: Any, served: Served) -> Callable[[str], Any]:
    """A browser context for each language; its pages share a process, which the first page keeps."""

    @functools.cache
    def context(language: str) -> Any:
        made = browser.new_context(viewport={"width": 1280, "height": 800}, locale=language, accept_downloads=True)
        made.new_page().goto(f"{served.server.url}web/before.js")
        return made

    return context


@pytest.fixture
def page(context_of: Callable[[str], Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    language = request.getfixturevalue("locale") if "locale" in request.fixturenames else "en-US"
    with watched_page(context_of(language), refusals=(400, 429)) as opened:
        yield opened


def open_page(page: Any, served: Served, mode: str, **settings: object) -> None:
    """Open the page in one of its modes, and wait until it knows the model."""
    kept = {"mode": mode, "settings": {"temperature": 0, "max_tokens": 24, "seed": 7, **settings}}
    page.add_init_script(f"localStorage['z2a-talk'] ??= JSON.stringify({json.dumps(kept)})")
    page.goto(served.server.url)
    page.wait_for_selector("#load")


def wait_for_end(page: Any) -> None:
    page.wait_for_selector('[data-tool="send"], [data-tool="goOn"]')


def say(page: Any, text: str, ends: bool = True) -> None:
    """And wait for the end of the answer."""
    page.fill("#message", text)
    page.press("#message", "Enter")
    if ends:
        wait_for_end(page)


@pytest.mark.parametrize("locale", ["zh-CN"])
def test_an_answer_streams_with_its_figures_and_markup_stays_text(page, served, locale):
    open_page(page, served, "chat")
    expect(page.locator("#model")).to_contain_text(re.compile("tiny.*第 7 步"))
    say(page, HOSTILE)
    expect(page.locator(ANSWER)).not_to_be_empty()
    expect(page.locator(".message.user .body")).to_have_text(HOSTILE)
    figures = page.locator(".readout")
    for shown in (r"[\d.]+k? 词元/秒", "首词元", rf"\d+ / {MAX_LEN:,}"):
        expect(figures).to_contain_text(re.compile(shown))
    page.reload()  # the conversation was kept
    expect(page.locator(ANSWER)).not_to_be_empty()
    page.locator("#history").get_by_role("button", name=HOSTILE, exact=True).wait_for()
    page.click('[data-tool="new"]')
    expect(page.locator(".message")).to_have_count(0)


def test_escape_stops_an_answer_undo_gives_the_words_back_and_enter_of_an_input_method_does_not_send(page, served):
    open_page(page, served, "chat", max_tokens=MAX_LEN)
    with held(served, after=20):
        say(page, "Go on and on", ends=False)
        expect(page.locator(ANSWER)).not_to_be_empty()
        page.keyboard.press("Escape")
        wait_for_end(page)
        expect(page.locator(".readout")).to_contain_text("stopped by you")
    served.wait_until(lambda: served.model.stats()["running"] == 0)
    assert page.locator(ANSWER).inner_text()
    page.click('[data-tool="undo"]')
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#message")).to_have_value("Go on and on")
    page.fill("#message", "ni hao")
    enter = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true})"
    page.eval_on_selector("#message", f"(box) => box.dispatchEvent({enter})")
    page.press("#message", "Shift+Enter")
    expect(page.locator("#message")).to_have_value("ni hao\n")
    expect(page.locator(".message")).to_have_count(0)
    seen = page.evaluate(
        """async () => {
            const {Clusters, readTokens} = await import('/web/tokens.js');
            const tokens = ['国', 'bytes:\\\\xe5\\\\x8c', 'bytes:\\\\x97', '京。', '<|end|>'];
            const clusters = new Clusters();
            clusters.add(readTokens({tokens, token_logprobs: tokens.map(() => -1), top_logprobs: null}));
            const show = (seen) => seen && seen.map(({text, start, cluster}) => [text, start, cluster.tokens.length]);
            return [show(clusters.seenIn('北京', '中国')), clusters.before(clusters.all[1], '中国'),
                show(clusters.seenIn('南京', '中国'))];
        }"""
    )
    assert seen == [[["北", 0, 2], ["京", 1, 1]], "中国", None], "characters of several tokens are shown whole"


def test_the_model_calculates_and_thinks_where_everybody_sees_it(page, loaded: LoadedModel, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(f"{own_template(loaded.tokenizer)}{{# theirs #}}")
    with serving(dataclasses.replace(loaded, folder=tmp_path)) as served:
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
        saying(served.model.service, f"<think>\nI ask.\n</think>\n\nWell\n{call}", "It is 42.", call, "Again 42.")
        open_page(page, served, "chat", max_tokens=400)
        page.check("#set-tools")
        say(page, "6 * 7?", ends=False)
        for _ in range(2):  # kept over a reload
            expect(page.locator(ANSWER)).to_have_text(["Well", "It is 42."])
            expect(page.locator(".thought .prose")).to_have_text("I ask.")
            expect(page.locator(".call")).to_have_text('calculator({"expression":"6*7"})')
            expect(page.locator(".message.result .body")).to_have_text("42")
            page.reload()
            page.wait_for_selector("#load")
        say(page, "Once more", ends=False)
        expect(page.locator(ANSWER)).to_have_text(["Well", "It is 42.", "", "Again 42."])
        page.click('[data-tool="undo"]')
        expect(page.locator(".message")).to_have_count(4)


@pytest.mark.parametrize("locale", ["zh-CN"])
def test_settings_are_sent_and_a_wrong_one_is_said_to_be_wrong(page, served, locale):
    open_page(page, served, "chat")
    for name, value in {"temperature": "1.5", "top_k": "3", "min_p": "0.2", "max_tokens": "5", "seed": "11"}.items():
        page.fill(f"#set-{name}", value)
    page.fill("#set-top_p", "7")
    expect(page.locator("#wrong-top_p")).to_have_text("取值 0.01 到 1。")
    page.fill("#set-stop", "one\\ntwo\nthree")
    page.fill("#set-system", "Be short.")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Hello", ends=False)
    body = sent.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    assert body["stop"] == ["one\ntwo", "three"]
    expected = {"temperature": 1.5, "top_k": 3, "top_p": 1, "min_p": 0.2, "max_tokens": 5, "seed": 11}
    assert {name: body[name] for name in expected} == expected
    wait_for_end(page)
    expect(page.locator(".notice.bad")).to_have_count(0)


def test_edit_asks_again_from_there_and_files_hold_the_conversation(page, served):
    open_page(page, served, "chat")
    for text in ("First", "Second"):
        say(page, text)
    page.locator(".message.user").first.locator('[data-tool="edit"]').click()
    page.fill("#editing", "Changed")
    page.press("#editing", "Enter")
    wait_for_end(page)
    expect(page.locator(".message.user .body")).to_have_text(["Changed"])
    answer = page.locator(ANSWER).text_content()
    with page.expect_download() as saved:
        page.click('[data-tool="saveJson"]')
    kept = json.loads(Path(saved.value.path()).read_text("utf-8"))
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"]
    assert kept["model"]["id"] == "tiny"
    page.click('[data-tool="regenerate"]')
    wait_for_end(page)
    expect(page.locator(ANSWER)).to_have_text(answer)  # greedy: the same again


@pytest.mark.parametrize("locale", ["zh-CN"])
def test_a_token_shows_its_alternatives_and_another_can_be_taken(page, served, locale):
    open_page(page, served, "continue", temperature=1, max_tokens=12)
    page.click('[data-toggle="probabilities"]')
    page.fill("#text", "The capital")
    page.press("#text", "Control+Enter")
    wait_for_end(page)
    written = page.input_value("#text")
    assert written.startswith("The capital")
    assert page.locator(".behind").text_content() == f"{written}\n"
    panel = page.locator(".alternatives")
    tokens = page.locator(".behind .token")
    for place in range(tokens.count()):  # one whose alternatives are text
        box = tokens.nth(place).bounding_box()
        page.mouse.click(box["x"] + 2, box["y"] + box["height"] / 2)
        if panel.get_by_role("button").count():
            break
    expect(panel.locator(".chosen")).not_to_have_count(0)
    expect(panel).to_contain_text("其余全部")
    other = panel.get_by_role("button").first
    name = other.locator(".name").text_content().replace("␣", " ").replace("↵", "\n")
    other.click()
    wait_for_end(page)
    taken = page.input_value("#text")
    assert name in taken
    assert taken != written
    page.click('[data-tool="undoText"]')
    expect(page.locator("#text")).to_have_value(written)


def test_tokens_of_an_answer_are_reached_and_changed_by_the_keyboard(page, served):
    open_page(page, served, "chat")
    say(page, "Without")
    page.click('[data-toggle="probabilities"]')
    expect(page.locator(ANSWER)).to_contain_text("Written without probabilities")
    plain = page.locator(f"{ANSWER} .prose").text_content()
    page.click('[data-tool="regenerate"]')
    wait_for_end(page)
    expect(page.locator(ANSWER)).to_have_text(plain)  # the same text, token by token
    panel, tokens = page.locator(".alternatives"), page.locator(f"{ANSWER} .token")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(panel.locator(".chosen").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    place = 1
    while not panel.get_by_role("button").count():  # until one has text as an alternative
        place += 1
        page.keyboard.press("ArrowRight")
    kept = "".join(tokens.all_text_contents()[:place])
    page.keyboard.press("Tab")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    wait_for_end(page)
    begun = sent.value.post_data_json["messages"][-1]
    assert begun["role"] == "assistant"
    assert begun["content"].startswith(kept)
    assert len(begun["content"]) > len(kept)
    assert page.locator(ANSWER).text_content().startswith(begun["content"])
    page.click('[data-tool="previous"]')
    expect(page.locator(ANSWER)).to_have_text(plain)


@pytest.mark.parametrize("locale", ["zh-CN"])
def test_a_long_chat_goes_on_without_its_oldest_turns_and_a_paste_that_is_too_long_is_told_so(page, loaded, locale):
    with serving(loaded, settings=EngineSettings(max_batch=8, max_len=256)) as served:
        open_page(page, served, "chat")
        for number in range(8):
            say(page, f"Message {number}: " + "The capital of France is Paris. " * 4)
        expect(page.locator(".notice.bad")).to_have_count(0)
        expect(page.locator(".message.assistant").last).to_contain_text(re.compile(r"上下文已放不下最早的 \d+"))
        say(page, "x" * 1000)
        notice = page.locator(".notice.bad")
        expect(notice).to_contain_text("请缩短消息")
        expect(notice).to_contain_text("256")
        assert not re.search("[A-Za-z]{3}", notice.locator("p").inner_text())
        expect(notice.locator("button")).to_have_attribute("data-tool", "edit")
        page.click(".lang")
        expect(notice).to_contain_text("Shorten the message")
        say(page, "Short")
        expect(page.locator(".message.assistant .body").last).not_to_be_empty()
        expect(page.locator(".message.assistant").last.locator(".notice")).to_have_count(0)


def test_a_busy_server_and_one_that_ended_are_named(page, loaded: LoadedModel):
    with serving(loaded, max_waiting=0) as busy:
        open_page(page, busy, "chat")
        say(page, "Keep this", ends=False)
        notice = page.locator(".message .notice.bad")
        expect(notice).to_contain_text("The server is busy")
    page.click('[data-tool="tryAgain"]')
    expect(notice).to_contain_text("The server cannot be reached")
    expect(page.locator(".message.user .body")).to_have_text("Keep this")


IN_THE_DARK = pytest.param("en-US", "dark", marks=pytest.mark.slow)


@pytest.mark.parametrize(("locale", "theme"), [IN_THE_DARK, ("zh-CN", "light")])
def test_axe_finds_nothing_and_a_phone_shows_it_all(page, served, locale, theme):
    if not AXE.is_file():
        pytest.skip("axe-core is not installed; scripts/vendor_web.sh dev fetches it with npm")
    open_page(page, served, "chat")
    if theme == "dark":
        page.click('[data-tool="theme"]')
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    page.click("#settings .ask >> nth=0")
    page.evaluate(AXE.read_text("utf-8"))
    page.click('[data-toggle="probabilities"]')
    say(page, "Hello")
    page.locator(f"{ANSWER} .token").first.click()
    assert page.evaluate(VIOLATIONS) == [], "a chat, the panel of a token, the settings"
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 390, "height": 844})
    page.click("#open-settings")
    expect(page.locator("#set-seed")).to_be_in_viewport()
    page.keyboard.press("Escape")
    page.click('[data-mode="continue"]')
    page.fill("#text", "The capital")
    page.click('[data-tool="goOn"]')
    wait_for_end(page)
    assert page.evaluate(VIOLATIONS) == [], "a text on a phone"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
