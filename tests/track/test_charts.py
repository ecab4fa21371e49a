"""Which metrics share a chart: those of one unit, and never a sum with its own parts."""

import re
from pathlib import Path

from zero2all.track.facts import LINES_PER_CHART, arrange, channel_names, unit_of
from zero2all.track.plot import COLORS

WEB = Path(__file__).parents[2] / "zero2all" / "track" / "web"
PARTS = ("data_wait", "collate", "forward", "loss", "backward", "reduce", "optimizer", "other")


def charts_of(*names: str) -> dict[str, dict]:
    return {chart["key"]: chart for group in arrange(names) for chart in group["charts"]}


def labels(chart: dict) -> dict[str, str]:
    return {line["label"]: line["name"] for line in chart["metrics"]}


def test_the_time_of_a_step_is_a_line_over_its_parts_and_none_of_them():
    chart = charts_of("time/step", *(f"time/{part}" for part in PARTS))["time/*"]
    assert chart["stacked"]
    assert [line["name"] for line in chart["metrics"] if line["total"]] == ["time/step"]
    assert chart["metrics"][-1]["label"] == "Σ step", "last, so that the parts are a stack without a gap"
    assert chart["unit"] == "seconds"


def test_bits_per_byte_and_loss_never_share_an_axis():
    names = [f"eval/valid/{kind}/{channel}" for kind in ("bpb", "loss") for channel in ("en", "zh", "code")]
    names += ["loss/en", "loss/zh", "bpb/en", "bpb/zh", "eval/wiki/bpb", "eval/wiki/loss", "valid/loss/en", "loss"]
    charts = charts_of(*names)
    for chart in charts.values():
        assert len({unit_of(line["name"]) for line in chart["metrics"]}) == 1, chart["key"]
    assert list(labels(charts["eval/valid/bpb"])) == ["code", "en", "zh"]
    charts = charts_of("eval/wiki/bpb", "eval/code/bpb", "eval/strange/thing", "eval/other/thing")
    assert labels(charts["bpb"]) == {"wiki": "eval/wiki/bpb", "code": "eval/code/bpb"}
    assert {"eval/strange/thing", "eval/other/thing"} <= set(charts)


def test_the_first_chart_has_the_loss_of_training_and_of_held_out_text():
    held_out = ["eval/valid/loss", "eval/valid/loss/en", "eval/valid/loss/zh"]
    groups = arrange([*reversed(held_out), "loss", "loss/en", "lr", "memory/gib", "eval/a/bpb"])
    assert [group["key"] for group in groups] == ["loss", "channels", "eval", "optim", "memory"]
    (chart,) = groups[0]["charts"]
    lines = [(line["name"], line["label"], line["held_out"]) for line in chart["metrics"]]
    labelled = zip(held_out, ("loss", "en", "zh"), strict=True)
    assert lines == [("loss", "loss", False), *((name, label, True) for name, label in labelled)]


def test_the_two_ways_to_measure_held_out_text_are_told_apart_and_stand_before_other_scores():
    names = [f"eval/{kind}/bpb/{channel}" for kind in ("valid", "documents") for channel in ("en", "zh")]
    (group,) = arrange([*names, "eval/valid/bpb", "eval/by_position/en/loss/0000", "eval/probes/accuracy/en"])
    titles = [chart["title"] for chart in group["charts"]]
    assert titles[:2] == ["eval/valid/bpb (z2a train)", "eval/documents/bpb (z2a eval)"]
    assert [line["label"] for line in group["charts"][0]["metrics"]] == ["all", "en", "zh"]


def test_every_metric_is_in_exactly_one_chart_however_many_there_are():
    names = ["loss", "lr", "x", "gpu/power", "host/memory", *(f"loss/c{number}" for number in range(60))]
    groups = arrange(names)
    shown = [line["name"] for group in groups for chart in group["charts"] for line in chart["metrics"]]
    assert sorted(shown) == sorted(names)
    assert max(len(chart["metrics"]) for group in groups for chart in group["charts"]) == LINES_PER_CHART
    assert [group["key"] for group in groups] == ["loss", "channels", "optim", "gpu", "host", "other"]


def test_the_page_has_the_words_for_all_units_and_groups_and_the_colours_of_z2a_plot():
    words = (WEB / "words.js").read_text()
    units = ("nats", "bits", "tokensPerSecond", "seconds", "share", "bytes", "flops")
    for word in (*units, "channels", "mixture", "other"):
        assert re.search(rf"^\t{word}: \[", words, re.MULTILINE), word
    light = (WEB / "style.css").read_text().split("[data-theme")[0]
    assert re.findall(r"--series-\d:(#\w+)", light) == list(COLORS)
    metrics = ["bpb/en", "eval/valid/bpb/late", "loss", "loss/code", "loss/zh"]
    assert channel_names(metrics) == ["code", "zh", "late", "en"]


def test_the_ways_to_ask_a_task_stand_side_by_side_with_what_can_be_believed_of_them():
    names = ["eval/tasks/think/exam", "eval/tasks/cloze/exam", "eval/tasks/bits/exam", "eval/tasks/summary/en"]
    (group,) = arrange(names, {"eval/tasks/think/exam": "noise"})
    lines = {chart["key"]: [line["label"] for line in chart["metrics"]] for chart in group["charts"]}
    assert lines == {
        "eval/tasks/exam": ["cloze", "think (noise)"],
        "eval/tasks/bits/exam": ["eval/tasks/bits/exam"],
        "eval/tasks/summary/en": ["eval/tasks/summary/en"],
    }
