"""`z2a perf link`: the shapes are those of the model, and the report names a scheme with its settings."""

from __future__ import annotations

from zero2all.model.config import parameter_counts
from zero2all.perf.batch import load_measured_config
from zero2all.perf.link import link_notes, link_report, link_rows


def test_a_report_of_a_preset():
    config, _ = load_measured_config("z2all-1b", [])
    report = link_report("z2all-1b", [], 1.0, 2, 3.4, None)
    assert report.parameters == parameter_counts(config.model)["total"]
    assert report.fragments == -(-config.model.layers // 3) + 1
    assert [row[0] for row in link_rows(report)[1:]] == [cost.scheme.name for cost in report.costs]
    assert report.best.scheme.name == "streaming, int4, H=100"
    assert link_notes(report)[-1].startswith("--parallel.slow_link.scheme streaming --parallel.slow_link.every 100")
