"""What a dry run, which is one process, says about a run of several. The rest of it: tests/cli/test_cli_train.py."""

from __future__ import annotations

import pytest

from zero2all.common.errors import UsageError
from zero2all.config import load_config
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.config import ParallelConfig
from zero2all.train.dry_run import mesh_of_run, parallel_notes


@pytest.mark.parametrize(
    ("config", "replicate", "shard"),
    [
        (ParallelConfig(device="cpu"), 1, 1),
        (ParallelConfig(device="cpu", processes=4), 4, 1),
        (ParallelConfig(device="cpu", processes=4, zero=1), 1, 4),
        (ParallelConfig(device="cpu", processes=4, zero=3, replicate=2), 2, 2),
        (ParallelConfig(device="cpu", processes=8, zero=2, replicate=2, shard=8), 2, 8),  # two machines
    ],
    ids=["one", "copies", "zero 1", "hybrid", "more than this machine has"],
)
def test_mesh_is_that_of_the_run(config, replicate, shard):
    mesh = mesh_of_run(config)
    assert (mesh.replicate.size, mesh.shard.size, mesh.batch.size) == (replicate, shard, replicate * shard)


def test_sizes_that_do_not_fit_are_found_by_a_dry_run_too():
    with pytest.raises(UsageError, match=r"3 x 1 = 3 processes, but the run has 4.*Here: replicate 4 or auto"):
        mesh_of_run(ParallelConfig(device="cpu", processes=4, replicate=3))


def test_memory_and_communication_are_those_of_one_process_of_the_run():
    words = ["--model.vocab_size", "4096", "--parallel.device", "cpu", "--parallel.processes", "4"]
    config, ops = load_config("z2all-100m", [*words, "--parallel.zero", "2"]), resolve(OpsConfig(), "cpu")
    lines = parallel_notes(config, mesh_of_run(config.parallel), ops, 4, None)
    assert lines[0].startswith("the run itself will have 4 processes (replicate 1, shard 4, zero 2)")
    assert any(line.split()[0] == "optimizer" and line.endswith("1/4 of them") for line in lines)
    assert [line.split()[0] for line in lines[-2:]] == ["reduce-scatter", "all-gather"]
    alone = load_config("z2all-100m", words[:4])
    assert parallel_notes(alone, mesh_of_run(alone.parallel), ops, 4, None) == []
