"""Calibration: figures are kept one by one, a profile is made of them, and a stale one is refused with what changed."""

import dataclasses
import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.config.training import OptimConfig
from zero2all.estimate.machine import TimeCurve, named_cluster, read_machine, write_machine
from zero2all.measure import calibrate as module
from zero2all.measure import clock
from zero2all.measure import machine_profiles as profiles
from zero2all.measure.calibrate import FigureStore, calibrate, clock_factor, curve, machine_for
from zero2all.measure.clock import Stopwatch, heats_to_hide, timed
from zero2all.measure.figures import Setting, float8_product
from zero2all.predict.batch import BatchShape, load_measured_config
from zero2all.predict.step_prediction import operators_for, predict

TINY = [
    *("--model.hidden_size", "32", "--model.intermediate_size", "64", "--model.heads", "4", "--model.kv_heads", "2"),
    *("--model.vocab_size", "128", "--parallel.device", "cpu", "--parallel.cpu_threads", "1"),
]
BATCH = BatchShape(2, 32, 2)
CPU = torch.device("cpu")
FIGURES = "zero2all.measure.figures"


def broken(*_):
    raise RuntimeError("no such kernel\nmore")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    monkeypatch.setattr("zero2all.measure.clock.CPU_SECONDS", 1e-4)
    monkeypatch.setattr(f"{FIGURES}.CPU_GRID_WIDTHS", (64,))
    monkeypatch.setattr(f"{FIGURES}.CPU_GRID_TOKENS", (64,))
    monkeypatch.setattr(module, "other_settings", lambda _setting: iter(()))
    for name in ("SECONDS", "WARM_UP_SECONDS", "HOST_SECONDS"):
        monkeypatch.setattr(module, name, 0.0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config():
    return load_measured_config("quickstart", TINY)[0]


def test_a_calibration_is_a_profile_that_predicts(config):
    found = calibrate([(config, BATCH)], most_seconds=60.0)
    assert (found.failed, found.left) == ({}, [])
    machine = read_machine(found.path)
    assert machine == found.machine
    sizes = {(one.kind, one.m, one.n, one.k) for one in machine.matmuls}
    assert {("forward", 64, 64, 32), ("dgrad", 64, 32, 64), ("wgrad", 64, 32, 64)} <= sizes  # qkv on 64 tokens
    assert {"rms_norm", "rms_norm/backward", "swiglu", "linear_cross_entropy", "adamw"} <= machine.operators.keys()
    assert calibrate([(config, BATCH)], most_seconds=60.0).measured == 0  # everything is known
    ops = operators_for(config, machine, BATCH.seq_len)
    own = machine_for(machine, found.path, ops.taken, CPU)
    assert own.operators == machine.operators
    seen = predict(config, BATCH, own, ops, config.parallel.asked_sizes(1))
    assert seen.step.lower <= seen.step.interval[0] <= seen.step.estimate <= seen.step.interval[1] <= seen.step.upper
    assert sum(seen.components.values()) == pytest.approx(seen.step.estimate)
    assert (seen.fits, seen.cost) == (True, None)
    assert json.dumps(seen.as_json())


def test_a_config_with_muon_is_calibrated_with_adamw_whose_update_predictions_know(config, monkeypatch):
    def steps(settings, store, *_):
        seen.extend(each.config.optim.kind for each in settings)
        return [], len(store.figures)

    seen: list[str] = []
    monkeypatch.setattr(module, "_measure_all", steps)
    with pytest.raises(KeyError, match="launch"):  # nothing was measured
        calibrate([(dataclasses.replace(config, optim=OptimConfig(kind)), BATCH) for kind in ("muon", "adamw")], 60.0)
    assert seen == ["adamw", "adamw"]


def test_a_figure_that_cannot_be_measured_does_not_cost_the_others(config, monkeypatch):
    monkeypatch.setattr(f"{FIGURES}._stream", lambda *_: {"bytes_per_second": 1e9, "spread": 0})
    monkeypatch.setattr(f"{FIGURES}._over_gradients", broken)
    found = calibrate([(config, BATCH)], most_seconds=60.0)
    assert {name.split("/")[1] for name in found.failed} == {"grad_norm", "zero"}
    assert set(found.failed.values()) == {"RuntimeError: no such kernel"}
    assert "rms_norm" in found.machine.operators


def test_without_most_figures_there_is_no_profile_and_each_reason_is_one_line(config, monkeypatch):
    monkeypatch.setattr(f"{FIGURES}.product", broken)
    with pytest.raises(BadInputError, match="No profile was written") as refused:
        calibrate([(config, BATCH)], most_seconds=60.0)
    assert str(refused.value).count("RuntimeError: no such kernel (") == 1
    assert not list(profiles.profile_path(profiles.profile_key(CPU)).parent.glob("*[!s].json"))
    failed = {"a": "x", "b": "y", "c": "y"}
    assert module.reasons(failed) == ["y (2, the first: b)", "x (1, the first: a)"]
    module.check_enough(failed, 7)
    with pytest.raises(BadInputError, match="1 of 600"):
        module.check_enough({"launch": "x"}, 600)


def test_the_float8_product_runs_as_the_float8_layer_does(monkeypatch):
    """On a CPU with torch's own rounding in place of the Triton kernels; every name and every shape is the real one."""
    kernels = pytest.importorskip("zero2all.ops.kernels.quantise", reason="needs triton")
    layer = importlib.import_module("zero2all.ops.kernels.linear")
    seen = {}

    def quantise(x, dtype, scale):
        seen.setdefault("inputs", []).append(x)
        straight = (x / scale).to(dtype)
        return straight, straight.t().contiguous()

    def matmul(a, b, scale_a, scale_b, fast, dtype):
        assert a.dtype.itemsize == b.dtype.itemsize == 1
        return (a.float() * scale_a @ (b.float() * scale_b).t()).to(dtype)

    monkeypatch.setattr(kernels, "quantise", quantise)
    monkeypatch.setattr(kernels, "scale_of", lambda x, dtype: kernels.scale_from_peaks(x.abs().flatten(), dtype))
    monkeypatch.setattr(layer, "_matmul", matmul)
    for kind in ("forward", "dgrad", "wgrad"):
        seen.clear()
        found = float8_product(kind, 32, 48, 64, CPU)().float()
        given, other = (x.float() for x in seen["inputs"][:2])
        exact = (given.t() if kind == "wgrad" else given) @ other
        assert found.shape == (32, 48)
        assert (found - exact).norm() < 0.1 * exact.norm()


def test_products_are_brought_to_the_clock_of_a_real_step():
    sizes = {"tokens": 64, "seq_len": 64, "heads": 1, "kv_heads": 1, "head_size": 64}
    figures = {
        "stream": {"bytes_per_second": 1e11},
        "launch": {"launch_seconds": 1e-6, "host_op_seconds": 1e-6},
        "peak/float32": {"flops_per_second": 1e12},
        "matmul/forward/float32/-/64x64x64": {"seconds": 2.0, "spread": 0.0, "clock": 1.1},
        "operator/rms_norm/torch/64": {"bytes": 10.0, "forward": 1.0, "spread": 0.0},
        "attention/sdpa/64": {**sizes, "forward": 1.0, "backward": 2.0},
    }
    taken = {"linear": "plain", "attention": "sdpa", "optimizer": "eager", "swiglu": "torch", "rms_norm": "torch"}
    alone = module.machine_of(figures, {"device": "cpu"}, CPU, taken, {"watts": 400.0})
    assert alone.matmuls[0].seconds == pytest.approx(2.2)  # at a clock 10 % above the settled one
    step = {"seconds": 11.0, "predicted": 10.0, "matmul": 4.0, "attention": 1.0, "watts": 690.0}
    both = module.machine_of({**figures, "anchor/x": step}, {"device": "cpu"}, CPU, taken, {"watts": 400.0})
    assert (clock_factor(step), both.matmuls[0].seconds) == (pytest.approx(1.2), pytest.approx(1.2 * 2.2))
    assert (both.attention[0].forward, both.attention[0].backward) == pytest.approx((1.2, 2.4))
    assert both.operators == alone.operators  # memory does not follow the clock
    assert both.rate_of("float32") == pytest.approx(alone.rate_of("float32") / 1.2)
    assert (alone.watts, both.watts) == (400.0, 690.0)


def test_the_power_of_products_and_attention_follows_from_steps_at_the_power_limit():
    draw, factor = {"matmul": 1.1, "attention": 0.5}, 0.9
    machine = dataclasses.replace(named_cluster("h200"), draw=draw)
    anchors = []
    for matmul, attention, rest in ((7.0, 1.0, 2.0), (4.0, 3.0, 3.0)):
        whole = matmul + attention + rest
        clock = machine.clock_factor(matmul, attention, whole)
        parts = {"matmul": matmul / factor, "attention": attention / factor, "seconds": rest + clock * (whole - rest)}
        anchors.append({**parts, "predicted": rest + (matmul + attention) / factor})
    heater = 1 / (1.1 * factor**3)
    assert module.power_draws(anchors, heater, factor) == pytest.approx(draw)
    assert machine.clock_factor(1.0, 0.0, 1.0) > machine.clock_factor(0.5, 0.5, 1.0) > machine.clock_factor(0.5, 0.0, 1)


def test_an_anchor_is_a_real_step_beside_its_prediction(config, monkeypatch):
    machine = dataclasses.replace(named_cluster("h200"), multiprocessors=0)
    for name, value in {"LAYERS": 2, "PASSES": 2, "BELIEVABLE": (-1e9, 1e9)}.items():
        monkeypatch.setattr(module, name, value)
    setting = Setting(config, operators_for(config, machine, BATCH.seq_len), BATCH, CPU)
    figure = module.anchor_figure(setting, lambda: machine)
    value = figure.measure(Stopwatch(CPU))
    assert value["seconds"] > 0
    assert 0 < value["matmul"] + value["attention"] < value["predicted"]
    monkeypatch.setattr(module, "BELIEVABLE", (1e9, 1e9))
    with pytest.raises(BadInputError, match="more than a clock explains"):
        figure.measure(Stopwatch(CPU))


class MadeDevice:
    """A device whose heater takes `seconds(calls so far)`; its events read the same made time as the host."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.heated = 0.0, 0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def elapsed_time(self, end):
                return 1e3 * (end.at - self.at)

        def heat():
            device.now += seconds(device.heated)
            device.heated += 1

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: device.now))
        self.watch = Stopwatch(CPU)
        self.watch._heater, self.watch._settled = heat, 0.0036

    def call(self):
        """What is timed: 1 ms."""
        self.now += 0.001


def test_a_cooled_device_is_heated_before_it_is_timed_and_one_that_stays_fast_is_corrected_by_its_clock(monkeypatch):
    device = MadeDevice(monkeypatch, lambda calls: 0.0030 if calls < 40 else 0.0036)
    found = device.watch.time(device.call)
    assert device.heated > 40
    assert (found.seconds, found.clock) == pytest.approx((0.001, 1.0))
    device = MadeDevice(monkeypatch, lambda _: 0.0030)
    found = device.watch.time(device.call)
    assert device.now < 2 * clock.MOST_REHEAT_SECONDS  # it is not heated for ever
    assert (found.clock, found.settled_seconds) == pytest.approx((1.2, 0.0012))


def test_figures_of_a_calibration_that_was_cut_off_are_kept(tmp_path):
    store = FigureStore(tmp_path / "x.figures.jsonl", {})
    store.add("stream", {"bytes_per_second": 1.0})
    with open(store.path, "a") as file:
        file.write('{"name": "laun')
    assert FigureStore(store.path, {}).figures == {"stream": {"bytes_per_second": 1.0}}
    assert FigureStore(store.path, {}, again=True).figures == {}


def test_a_stale_profile_is_refused_with_everything_that_changed():
    key = profiles.profile_key(CPU)
    with pytest.raises(BadInputError, match="There is no profile of"):
        profiles.profile_here(CPU)
    path = profiles.profile_path({**key, "torch": "1.0", "threads": "99"})
    write_machine(path, dataclasses.replace(named_cluster("h200"), key={**key, "torch": "1.0", "threads": "99"}))
    with pytest.raises(BadInputError, match=r"stale: threads was 99 and is .* now; torch was 1\.0 and is"):
        profiles.profile_here(CPU)
    with pytest.raises(BadInputError, match="is not of this machine: threads was 99"):
        profiles.profile_from(path, CPU)
    assert profiles.profile_from(path, None).key["torch"] == "1.0"


def test_the_spread_is_the_interquartile_range_points_of_one_size_are_one_and_the_heater_outlasts_the_queueing():
    assert (timed([1.0, 2.0, 3.0, 4.0, 5.0]).spread, timed([2.0]).spread) == (pytest.approx(2 / 3), 0.0)
    assert Stopwatch(CPU).warm_up(1.0) == (1.0, 1.0)
    assert curve([(200.0, 3.0), (100.0, 1.0), (100.5, 2.0)]).points == ((100.0, 1.5), (200.0, 3.0))
    offloaded = module._with_larger(TimeCurve(((1.0, 0.5), (2.0, 0.7))))  # 0.3 s once, and 0.2 s for each
    assert [offloaded.seconds(size) for size in (8.0, 64.0)] == pytest.approx([1.9, 13.1])
    # twice as long as was measured, and once before the clock has settled
    assert [heats_to_hide(*given) for given in ((0.0001, 0.0035), (0.006, 0.0035), (0.006, 0.0))] == [1, 4, 1]
