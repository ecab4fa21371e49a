"""The page of a run's evaluations: figures, plots, counts of what was left out, two languages and no script."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from zero2all.common.files import read_json, write_json
from zero2all.evals.evaluation_page import evaluation_page, line_chart, write_page
from zero2all.evals.options import report_path
from zero2all.evals.scores import Curve, Point

VOID = {"meta", "input"}


def report(step: int) -> dict:
    rise = step / 1000
    return {
        "run": "r",
        "step": step,
        "tokens": 100 * step,
        "held_out": {"en": {"bits_per_byte": 3 - rise, "documents": 7}},
        "documents": {"en": {"bits_per_byte": 3.1 - rise, "loss": 2.0}},
        "probes": {
            "accuracy": rise,
            "channels": {"zh": {"groups": {"<首都>": {"accuracy": rise, "interval": [rise - 0.1, rise + 0.1]}}}},
            "skipped": {"longer than the <context>": 3},
        },
        "pairs": {"channels": {"en": {"accuracy": 0.5 + rise / 2, "nats": rise, "pairs": 40}}, "skipped": {}},
        "tasks": [{"task": "quiz", "form": "choice", "shots": 5, "chance": 0.25, "items": 90, "accuracy": 0.25}],
    }


def shown(page: str, language: str) -> str:
    """What a person reads who has chosen this language."""
    other = {"en": "zh", "zh": "en"}[language]
    return re.sub("<[^>]*>", "", re.sub(rf'<span class="{other}".*?</span>', "", page))


REPORTS = [report(step) for step in range(100, 900, 100)]


class Balance(HTMLParser):
    """Whether every tag that was opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, _):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_escaped_and_has_every_section_once_in_both_languages():
    page = evaluation_page("a <run>", REPORTS)
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    for words in (
        "Held-out text",
        "验证集",
        "Contrast pairs",
        "对照句对",
        "Benchmarks",
        "基准测试",
        "Probes",
        "探针",
    ):
        assert page.count(f">{words}</span></h2>") + page.count(f">{words}</span><") >= 1, words
    assert "<run>" not in page
    assert "<首都>" not in page
    assert "<script" not in page
    assert page.count('class="en"') == page.count('class="zh"')


def test_every_table_says_what_was_left_out():
    page = evaluation_page("r", REPORTS)
    sections = re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL)
    tables = {name: body for name, body in sections if "<table>" in body}
    assert set(tables) == {"held_out", "documents", "probes", "pairs", "tasks"}
    assert all("left out" in body for body in tables.values())
    assert "3 left out" in tables["probes"]
    assert "3 × longer than the &lt;context&gt;" in shown(tables["probes"], "en")
    assert "No item was left out." in tables["pairs"]


def test_an_item_counts_once_however_many_forms_ask_it_and_its_reason_is_in_both_languages():
    asked = {"task": "quiz", "accuracy": 0.5, "items": 3, "skipped": {"duplicate id": 2}}
    results = [{**asked, "form": "cloze"}, {**asked, "form": "bits", "skipped": {"duplicate id": 2, "odd": 1}}]
    other = {**asked, "task": "other", "form": "cloze"}
    page = evaluation_page("r", [{**report(100), "tasks": {"results": [*results, other], "summary": {}}}])
    assert "5 left out: 4 × duplicate id, 1 × odd" in shown(page, "en")
    assert "跳过 5 题: 4 × id 重复, 1 × odd" in shown(page, "zh")


def test_rewrites_stand_beside_their_originals_with_the_gap():
    row = {"rewrite": "R1", "form": "choice", "items": 50, "original": 0.6, "rewritten": 0.4, "gap": 0.2}
    section = {"tasks": {"quiz": {"rows": [{**row, "gap_interval": [0.1, 0.3], "skipped": {"no labels": 2}}]}}}
    page = evaluation_page("r", [{**report(100), "rewrites": section}])
    (body,) = re.findall(r'<section id="rewrites">(.*?)</section>', page, re.DOTALL)
    for words in (
        "quiz · R1 · choice",
        "<b>60.0%</b>",
        "<b>40.0%</b>",
        "<b>20.0%</b>",
        "10.0% – 30.0%",
        "2 × no labels",
    ):
        assert words in body or words in shown(body, "en")


def test_curves_and_verdicts_come_with_several_checkpoints():
    page = evaluation_page("r", REPORTS)
    assert page.count("<svg") == page.count("</svg>") == 7
    assert "carries signal" in page
    assert "guessing gives 0.25" in page
    one = evaluation_page("r", REPORTS[:1])
    assert "<svg" not in one
    assert "Curves and verdicts need several checkpoints" in one
    assert "3 left out" in one


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.0, 0.0], [math.nan, 1.0], [1e-9, 2e-9], [-5.0, 1e6]])
def test_any_values_can_be_drawn(values):
    curve = Curve("held_out/en/bits_per_byte", tuple(Point(step, value) for step, value in enumerate(values)))
    drawn = line_chart([curve], ["en"], "bits")
    assert "nan" not in drawn
    numbers = [float(text) for text in re.findall(r' c?[xy][12]?="([^"]+)"', drawn)]
    assert all(-1 <= number <= 521 for number in numbers)


def test_a_curve_without_a_number_is_no_picture():
    assert line_chart([Curve("x/y", (Point(1, math.nan),))], ["y"], "x") == ""


def test_the_page_and_the_verdicts_are_written_beside_the_reports(tmp_path):
    for each in REPORTS:
        write_json(report_path(tmp_path, each["step"]), each)
    (tmp_path / "eval/step-00000050.json").write_text("{")  # no report
    path, signals = write_page(tmp_path)
    assert path == tmp_path / "eval/report.html"
    assert "8 checkpoints, steps 100 to 800" in path.read_text()
    verdicts = {each["name"]: each["verdict"] for each in read_json(tmp_path / "eval/signal.json")}
    assert verdicts == {signal.name: signal.verdict for signal in signals}
    assert verdicts["held_out/en/bits_per_byte"] == "carries signal"
    assert verdicts["tasks/quiz/choice/5-shot/accuracy"] == "at chance"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_nothing_is_cut_off_and_the_language_can_be_switched(browser, tmp_path, width, scheme):
    path = tmp_path / "page.html"
    path.write_text(evaluation_page("r", REPORTS))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    heading = page.locator("#pairs h2")
    assert heading.inner_text() == "Contrast pairs"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert heading.inner_text() == "对照句对"
    page.click("label[for=show-en]")
    assert heading.inner_text() == "Contrast pairs"
    context.close()
