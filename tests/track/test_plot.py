"""One PNG per run, from whatever metrics it has."""

import math
import struct
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.track import MetricsWriter
from zero2all.track.plot import COLORS, MAX_PNG_BYTES, PlotOptions, _run_labels, plot_run, plot_runs, thin_out
from zero2all.track.reader import RunReader


def write_run(folder: Path, *rows: dict[str, float]) -> Path:
    """Steps 1, 2, …"""
    with MetricsWriter(folder, queue_rows=100_000) as run:
        for step, values in enumerate(rows, 1):
            run.log(values, step=step, tokens=step)
    return folder


def write_realistic_run(folder: Path, steps: int = 400) -> None:
    """400 steps with three channels, a spike, a NaN and a resume at step 251."""
    noise = np.random.default_rng(0)
    for attempt in (range(270), range(251, steps + 1)):
        with MetricsWriter(folder) as run:
            for step in attempt:
                log_realistic_step(run, step, steps, noise)


def log_realistic_step(run: MetricsWriter, step: int, steps: int, noise: np.random.Generator) -> None:
    base = 2.6 + 6.8 * math.exp(-step / 28) + 1.6 * math.exp(-step / 170)
    channels = {"en": base + 0.25, "zh": base + 0.75, "code": base - 0.7}
    values = {f"loss/{name}": loss + noise.normal(0, 0.12) for name, loss in channels.items()}
    values["loss"] = math.nan if step == 180 else base + noise.normal(0, 0.08) + 1.5 * (step == 233)
    values["lr"] = 1e-3 * min(step / 40, 1, (steps - step) / 100)
    values["grad_norm"] = 0.5 + 2.5 * math.exp(-step / 30) + abs(noise.normal(0, 0.12))
    values["tokens_per_second"] = 18_400 + noise.normal(0, 250)
    if step % 40 == 0:
        values |= {f"eval/valid/bpb/{name}": loss / 3 for name, loss in channels.items()}
    run.log(values, step=step, tokens=step * 32_768)


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart-12m"
    write_realistic_run(folder)
    return folder


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    assert len(data) <= MAX_PNG_BYTES
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_realistic_run_becomes_a_readable_png_within_200_kb_and_of_the_metrics_and_size_that_are_asked_for(
    realistic, tmp_path
):
    plot_run(realistic, tmp_path / "pictures" / "run.png")
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
    plot_run(write_run(tmp_path / "run $x_{ 中文", values), tmp_path / "run.png")
    assert size_of_png(tmp_path / "run.png") == (1610, height)
    assert [str(warning.message) for warning in recwarn] == []


def test_noise_over_many_steps_still_fits_into_the_size(tmp_path):
    noise = np.random.default_rng(1)
    names = ["loss", "grad_norm", *(f"loss/{name}" for name in ("en", "zh", "code", "math"))]
    plot_run(write_run(tmp_path, *({name: noise.normal() for name in names} for _ in range(3_200))), tmp_path / "a.png")
    size_of_png(tmp_path / "a.png")


def test_the_callers_matplotlib_is_left_as_it_was(tmp_path):
    with matplotlib.rc_context({"font.size": 33.0, "backend": "svg"}):
        before = matplotlib.rcParams.copy()
        plot_run(write_run(tmp_path, {"loss": 2.0}), tmp_path / "run.png")
        assert matplotlib.rcParams == before


def test_a_run_without_what_is_to_be_drawn_is_a_clear_error_and_leaves_no_picture(tmp_path):
    with pytest.raises(BadInputError, match="no metrics to draw"):
        plot_run(tmp_path, tmp_path / "run.png")
    with pytest.raises(BadInputError, match="something/else"):
        plot_run(write_run(tmp_path, {"something/else": 1.0}), tmp_path / "run.png")
    write_run(tmp_path / "run", {"loss": 2.5})
    with pytest.raises(BadInputError, match="has no `flops`"):
        plot_runs([tmp_path / "run"], tmp_path / "run.png", PlotOptions(axis="flops"))
    with pytest.raises(UsageError, match=r"\.svg"):
        plot_runs([tmp_path / "run"], tmp_path / "run.gif")
    with pytest.raises(UsageError, match="No metric `los`"):
        plot_runs([tmp_path / "run"], tmp_path / "run.png", PlotOptions(metrics=("los",)))
    assert not list(tmp_path.glob("run.*"))
    plot_runs([tmp_path / "run"], tmp_path / "run.PDF")
    assert (tmp_path / "run.PDF").read_bytes().startswith(b"%PDF-")


def test_several_runs_are_drawn_over_each_other_with_one_color_each(tmp_path):
    for name in ("first", "second"):
        write_run(tmp_path / name, {"loss/en": 2.0, "loss": 2.5})
    drawings = []
    for _ in range(2):
        plot_runs([tmp_path / "first", tmp_path / "second"], tmp_path / "both.svg", PlotOptions(title="two of them"))
        drawings.append((tmp_path / "both.svg").read_text())
    assert drawings[0] == drawings[1], "the same runs give the same bytes"
    assert drawings[0].count(COLORS[1]) >= 2, "a line of the first run in every panel"
    assert drawings[0].count(COLORS[2]) >= 2
    assert drawings[0].count(COLORS[3]) == 0, "two runs, two colors: a channel has a panel of its own"


def test_two_runs_of_the_same_name_are_told_apart(tmp_path):
    readers = [RunReader(write_run(tmp_path / parent / "run", {"loss": 2.0})) for parent in ("a", "b")]
    assert _run_labels(readers) == ["a/run", "b/run"]
    assert _run_labels([readers[0], readers[0]]) == ["run (1)", "run (2)"]


def test_a_short_run_is_drawn_as_it_is_whatever_smoothing_is_asked_for(tmp_path):
    drawings = set()
    write_run(tmp_path / "run", *({"loss": 5 - step / 10} for step in range(49)))
    for smoothing in (None, "auto", 10.0):
        plot_runs([tmp_path / "run"], tmp_path / "run.svg", PlotOptions(smoothing=smoothing))
        drawings.add((tmp_path / "run.svg").read_text())
    assert len(drawings) == 1


@pytest.mark.parametrize("axis", ["time", "flops"])
def test_every_x_axis_draws(tmp_path, axis):
    write_run(tmp_path / "run", *({"loss": 5 - step / 100, "flops": step * 1e15} for step in range(60)))
    options = PlotOptions(axis=axis, log_y=axis == "flops", smoothing=None if axis == "time" else "auto")
    plot_runs([tmp_path / "run"], tmp_path / "run.png", options)
    size_of_png(tmp_path / "run.png")


def test_thinning_a_million_points_keeps_a_one_step_spike():
    steps = np.arange(1_000_000)
    values = np.sin(steps / 1e5)
    values[654_321] = 50.0
    thin_steps, thin_values = thin_out(steps, values, 2_000)
    assert len(thin_steps) <= 2_000
    assert (np.diff(thin_steps) > 0).all()
    assert thin_values[thin_steps == 654_321] == [50.0]
