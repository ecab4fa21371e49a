"""What a dry run, which is one process, says about a run of several. The rest of it: tests/cli/test_cli_train.py."""

import pytest

from zero2all.config import load_config
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.config import ParallelConfig
from zero2all.train.plan import parallel_notes, processes_of


@pytest.mark.parametrize(
    ("config", "replicate", "shard"),
    [
        (ParallelConfig(device="cpu"), 1, 1),
        (ParallelConfig(device="cpu", processes=4), 4, 1),
        (ParallelConfig(device="cpu", processes=4, zero=1), 1, 4),
        (ParallelConfig(device="cpu", processes=4, zero=3, replicate=2), 2, 2),
        (ParallelConfig(device="cpu", processes=8, zero=2, replicate=2, shard=8), 2, 8),  # two machines
        (ParallelConfig(device="cpu", tensor=2, context=2), 1, 1),
    ],
    ids=["one", "copies", "zero 1", "hybrid", "more than this machine has", "axes of the model"],
)
def test_mesh_is_that_of_the_run(config, replicate, shard):
    sizes = config.sizes(processes_of(config))
    assert (sizes.replicate, sizes.shard) == (replicate, shard)


def test_memory_and_communication_are_those_of_one_process_of_the_run():
    words = ["--model.vocab_size", "4096", "--parallel.device", "cpu", "--parallel.processes", "4"]
    config, ops = load_config("z2all-100m", [*words, "--parallel.zero", "2"]), resolve(OpsConfig(), "cpu")
    lines = parallel_notes(config, config.parallel.sizes(4), ops, 4, None)
    assert lines[0].startswith("the run has 4 processes (shard 4, zero 2)")
    assert any(line.split()[0] == "optimizer" and line.endswith("1/4 of the parameters") for line in lines)
    assert [line.split()[0] for line in lines if " over 4 ranks" in line] == ["reduce-scatter", "all-gather"]
    assert any(line.startswith("  1. shard: ") and line.endswith("computation can hide all of it") for line in lines)
    alone = load_config("z2all-100m", words[:4])
    assert parallel_notes(alone, alone.parallel.sizes(1), ops, 4, None) == []
