"""A profile of a real step on this CPU, and the memory of each block."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from torch import nn
from zero2all.measure.block_memory import block_memory
from zero2all.measure.shape_widths import measure_shape, shape_of

from zero2all.estimate.kernel_groups import GROUPS
from zero2all.estimate.run.batch import BatchShape
from zero2all.measure.profile import (
    Profile,
    ProfileOptions,
    as_json,
    default_batch,
    profile_config,
    tables_of,
    write_profile,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def profile(tiny, folder) -> Profile:
    kept: list[tuple[bool, bool]] = []

    def keep(so_far: Profile) -> None:
        json.dumps(as_json(so_far))
        kept.append((bool(so_far.memory.points), bool(so_far.blocks)))

    found = profile_config(tiny, ProfileOptions("tiny", folder, BatchShape(2, 32, 2), steps=2, seconds=60), keep)
    assert kept == [(False, False), (True, False)]  # what was found is kept before the next part begins
    return found


def test_the_groups_of_a_real_step_add_up_to_it(profile):
    anatomy = profile.anatomy
    assert (anatomy.kind, anatomy.steps) == ("cpu", 2)
    assert sum(anatomy.groups.values()) == pytest.approx(anatomy.seconds)
    busy = {name for name in GROUPS if anatomy.groups[name] > 0}
    assert busy == set(GROUPS) - {"communication"}
    assert {"forward", "loss", "backward", "update"} <= set(anatomy.phases)


def test_products_have_the_floor_of_the_measured_matmul_rate(profile):
    product = next(row for row in profile.anatomy.rows if row.name == "aten::mm")
    # 4 matrices of a block, forward and twice backward, and the head, in two passes
    assert product.calls == 2 * 3 * 5
    assert product.flops == pytest.approx(6 * 128 * (32 * 64 + 32 * 32 + 3 * 32 * 64 + 32 * 256))
    assert product.floor_seconds == pytest.approx(product.flops / profile.ceilings.matmul_flops_per_second)
    assert product.floor_percent == pytest.approx(100 * product.floor_seconds / product.seconds)


def test_memory_is_highest_between_forward_and_backward(profile):
    seconds, peak = profile.memory.peak
    start = profile.memory.points[0][1]
    assert profile.memory.phase_at(seconds) in ("forward", "loss", "backward")
    assert peak > start > 16 * 200 * 32  # the states of the embedding alone
    assert [name for name, _, _ in profile.memory.phases] == 2 * ["forward", "loss", "backward"] + ["update"]


def test_the_files_are_complete(profile, folder):
    pytest.importorskip("matplotlib")
    written = write_profile(profile, folder)
    assert {path.name for path in folder.iterdir()} == {
        *("trace.json.gz", "profile.json", "anatomy.png", "memory.png"),
    }
    assert len(written) == 4
    assert json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    found = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    assert found["anatomy"]["groups"]["GEMM"] > 0
    assert found["memory"]["peak_bytes"] == profile.memory.peak[1]
    assert "aten::mm" in str(tables_of(profile))


def test_by_default_a_cpu_gets_a_small_batch(tiny):
    assert default_batch(tiny, CPU) == BatchShape(2, 32, 2)
    assert default_batch(tiny, torch.device("cuda")) == BatchShape(2, 32, 2)


def test_blocks_of_the_model_keep_activations_until_their_backward(profile):
    rows = {row.name: row for row in profile.blocks}
    block = rows["blocks.0"]
    assert block.forward_peak >= block.forward_kept > 2 * 32 * 32 * 4  # at least its result
    assert block.backward_kept < 0  # freed


def test_block_memory_counts_bytes_prints_and_leaves_no_hooks(capsys):
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    x = torch.randn(8, 16, requires_grad=True)
    with block_memory(model) as found:
        model(x).sum().backward()
    first, middle, last = found
    assert [row.name for row in found] == ["0", "1", "2"]
    assert first.forward_kept == first.forward_peak == 8 * 32 * 4
    assert middle.forward_kept == 8 * 32 * 4
    assert last.forward_kept == 8 * 4 * 4
    assert last.backward_kept == 32 * 4 * 4 + 8 * 32 * 4  # the gradients of the weight and of the input
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "MiB" in lines[0]
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        assert not any(hooks)


def test_block_memory_removes_its_hooks_after_an_error_and_prints_nothing(capsys):
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError), block_memory(model):
        model(torch.randn(2, 5))
    assert not model[0]._forward_pre_hooks
    assert capsys.readouterr().out == ""


def test_widths_are_measured_nearest_first_until_the_time_is_over(tiny):
    found, shape = [], shape_of(tiny)
    widths = [64, 85, 96]  # 8/3 of 32 is 85.3
    rows = measure_shape(
        tiny, shape, widths, 60.0, lambda so_far: found.append([row.width for row in so_far.rows])
    ).rows
    assert found == [[85], [85, 96], [64, 85, 96]]
    assert [row.is_aligned for row in rows] == [True, False, True]
    assert all(row.is_measured and row.tflops > 0 and len(row.seconds) == 6 for row in rows)
    assert measure_shape(tiny, shape, widths, 0.0, found.append).rows == []
    assert shape.tokens == 64
