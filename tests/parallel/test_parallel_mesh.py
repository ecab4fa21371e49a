"""The sizes of the mesh from the config, and what is refused."""

from __future__ import annotations

import pytest

from zero2all.common.errors import UsageError
from zero2all.config import ConfigError, config_from_values
from zero2all.parallel.config import ParallelConfig


@pytest.mark.parametrize(
    ("fields", "processes", "sizes"),
    [
        ({}, 1, (1, 1)),
        ({}, 8, (8, 1)),
        ({"zero": 1}, 8, (1, 8)),
        ({"zero": 3, "shard": 2}, 8, (4, 2)),
        ({"zero": 2, "replicate": 2}, 8, (2, 4)),
        ({"zero": 1, "replicate": 2, "shard": 4}, 8, (2, 4)),
        ({"zero": 3}, 1, (1, 1)),
    ],
)
def test_auto_takes_what_is_left(fields, processes, sizes):
    found = ParallelConfig(**fields).sizes(processes)
    assert (found.replicate, found.shard) == sizes


@pytest.mark.parametrize(
    ("fields", "processes", "product"),
    [
        ({"zero": 1, "shard": 2}, 3, "1 x 2 = 2 processes, but the run has 3"),
        ({"replicate": 2}, 3, "2 x 1 = 2 processes, but the run has 3"),
        ({"zero": 3, "replicate": 4, "shard": 4}, 8, "= 16 processes, but the run has 8.*: 8 x 1, 4 x 2, 2 x 4, 1 x 8"),
    ],
)
def test_a_mesh_that_is_not_the_number_of_processes_is_refused(fields, processes, product):
    with pytest.raises(UsageError, match=product):
        ParallelConfig(**fields).sizes(processes)


def test_settings_that_contradict_each_other_are_reported_together():
    parallel = {"zero": 3, "offload": "optimizer", "chunks": 2}
    said = r"(?s)parallel.offload: got 'optimizer'.*0, 1 or 2 can offload.*parallel.chunks: got 2"
    with pytest.raises(ConfigError, match=said):
        config_from_values({"parallel": parallel}, "of a test")
