"""One PNG per run, from whatever metrics it has."""

import math
import struct
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.track.logged import logged
from zero2all.common.errors import BadInputError, UsageError
from zero2all.track import MetricsWriter, plot
from zero2all.track.plot import PlotOptions, plot_runs, png_bytes
from zero2all.track.reader import RunReader


def write_realistic_run(folder: Path) -> Path:
    """400 steps with three channels, a spike, a NaN and a resume at step 251."""
    noise = np.random.default_rng(0)
    for attempt in (range(270), range(251, 401)):
        with MetricsWriter(folder) as run:
            for step in attempt:
                base = 2.6 + 6.8 * math.exp(-step / 28)
                values = {f"loss/{name}": base + noise.normal(0, 0.12) for name in ("en", "zh", "code")}
                values["loss"] = math.nan if step == 180 else base + noise.normal(0, 0.08) + 1.5 * (step == 233)
                values |= {"lr": 1e-3, "grad_norm": abs(noise.normal()), "tokens_per_second": noise.normal(1e4, 250)}
                if step % 40 == 0:
                    values |= {"eval/valid/bpb/en": base / 3, "eval/valid/bpb/zh": base / 4}
                run.log(values, step=step, tokens=step * 32_768)
    return folder


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert (data[:8], data[-8:-4]) == (b"\x89PNG\r\n\x1a\n", b"IEND")
    assert len(data) <= plot.MAX_PNG_BYTES
    return struct.unpack(">II", data[16:24])


def test_a_realistic_run_becomes_a_readable_png_within_200_kb_and_of_the_metrics_and_size_that_are_asked_for(tmp_path):
    realistic = write_realistic_run(tmp_path / "quickstart-12m")
    plot_runs([realistic], tmp_path / "pictures" / "run.png")
    assert size_of_png(tmp_path / "pictures" / "run.png") == (1610, 1400)
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["run.png"], "no leftovers"
    options = PlotOptions(metrics=("lr", "loss"), smoothing=9.0, width_inches=4, height_inches=3, dpi=300)
    plot_runs([realistic], tmp_path / "run.png", options)
    assert size_of_png(tmp_path / "run.png") == (1200, 900)


@pytest.mark.parametrize(
    ("values", "height"),
    [
        ({"loss": math.nan}, 560),
        ({"lr": 0.0, "grad_norm": 1.0, "tokens_per_second": 0.0}, 980),
        ({f"loss/{name}": 2.0 for name in ("中文", "_hidden", *(f"channel-{n}" for n in range(28)))}, 560),
    ],
)
def test_any_subset_of_metrics_and_a_single_step_are_enough(tmp_path, recwarn, values, height):
    plot_runs([logged(tmp_path / "run $x_{ 中文", values)], tmp_path / "run.png")
    assert size_of_png(tmp_path / "run.png") == (1610, height)
    assert [str(warning.message) for warning in recwarn] == []


def test_a_picture_full_of_noise_gets_fewer_dots_until_it_fits_into_the_size():
    figure = Figure(figsize=(5, 5))
    figure.add_axes((0, 0, 1, 1)).imshow(np.random.default_rng(1).random((500, 500, 3)))
    assert len(png_bytes(figure, (100, 30))) <= plot.MAX_PNG_BYTES < len(png_bytes(figure, (100,)))


def test_the_callers_matplotlib_is_left_as_it_was(tmp_path):
    with matplotlib.rc_context({"font.size": 33.0, "backend": "svg"}):
        before = matplotlib.rcParams.copy()
        plot_runs([logged(tmp_path, {"loss": 2.0})], tmp_path / "run.png")
        assert matplotlib.rcParams == before


def test_a_run_without_what_is_to_be_drawn_is_a_clear_error_and_leaves_no_picture(tmp_path):
    with pytest.raises(BadInputError, match="no metrics to draw"):
        plot_runs([tmp_path], tmp_path / "run.png")
    with pytest.raises(BadInputError, match="something/else"):
        plot_runs([logged(tmp_path, {"something/else": 1.0})], tmp_path / "run.png")
    logged(tmp_path / "run", {"loss": 2.5})
    for error, said, name, options in (
        (BadInputError, "has no `flops`", "run.png", PlotOptions(axis="flops")),
        (UsageError, r"\.svg", "run.gif", PlotOptions()),
        (UsageError, "No metric `los`", "run.png", PlotOptions(metrics=("los",))),
    ):
        with pytest.raises(error, match=said):
            plot_runs([tmp_path / "run"], tmp_path / name, options)
    assert not list(tmp_path.glob("run.*"))
    plot_runs([tmp_path / "run"], tmp_path / "run.PDF")
    assert (tmp_path / "run.PDF").read_bytes().startswith(b"%PDF-")


def test_several_runs_are_drawn_over_each_other_with_one_color_each(tmp_path):
    runs = [logged(tmp_path / name, {"loss/en": 2.0, "loss": 2.5}) for name in ("first", "second")]
    drawings = []
    for _ in range(2):
        plot_runs(runs, tmp_path / "both.svg", PlotOptions(title="two of them"))
        drawings.append((tmp_path / "both.svg").read_text())
    assert drawings[0] == drawings[1], "the same runs give the same bytes"
    counts = [drawings[0].count(color) for color in plot.COLORS[1:4]]
    assert min(counts[:2]) >= 2, "a line of each run in every panel"
    assert counts[2] == 0, "two runs, two colors: a channel has a panel of its own"


def test_two_runs_of_the_same_name_are_told_apart_and_other_x_axes_draw(tmp_path):
    readers = [RunReader(logged(tmp_path / parent / "run", {"loss": 2.0})) for parent in ("a", "b")]
    assert plot._run_labels(readers) == ["a/run", "b/run"]
    assert plot._run_labels([readers[0], readers[0]]) == ["run (1)", "run (2)"]
    logged(tmp_path / "run", *({"loss": 5 - step / 100, "flops": step * 1e15} for step in range(60)))
    for options in (PlotOptions(axis="time", smoothing=None), PlotOptions(axis="flops", log_y=True, smoothing="auto")):
        plot_runs([tmp_path / "run"], tmp_path / "run.png", options)
        size_of_png(tmp_path / "run.png")


def test_thinning_a_million_points_keeps_a_one_step_spike():
    steps = np.arange(1_000_000)
    values = np.sin(steps / 1e5)
    values[654_321] = 50.0
    thin_steps, thin_values = plot.thin_out(steps, values, 2_000)
    assert len(thin_steps) <= 2_000
    assert (np.diff(thin_steps) > 0).all()
    assert thin_values[thin_steps == 654_321] == [50.0]
