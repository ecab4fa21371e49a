"""Which errors mean that another process has died, which are our own, and which all ranks raise together."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zero2all.common.errors import BadInputError, DiskError, error_values
from zero2all.parallel.mesh import wait_for
from zero2all.parallel.world import World, is_failed_collective


def raised(work: Callable[[], Any]) -> BaseException:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def in_module(name: str, code: str) -> Callable[[], Any]:
    """A function of a module of that name."""
    module: dict[str, Any] = {"__name__": name, "torch": torch}
    exec(f"def work(inner=None):\n    {code}", module)
    return module["work"]


@pytest.mark.parametrize("kind", [dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError])
def test_errors_of_nccl_and_of_the_store_have_types(kind):
    assert is_failed_collective(kind("whatever it says"))


class Lost:
    def __init__(self, kind):
        self.kind = kind

    def wait(self):
        raise self.kind("Connection reset by peer")


def test_a_collective_that_was_waited_for_is_one_though_our_own_code_waited():
    assert is_failed_collective(raised(lambda: wait_for([Lost(RuntimeError)])))
    assert not is_failed_collective(raised(lambda: wait_for([Lost(torch.OutOfMemoryError)])))


def test_our_own_errors_are_none_also_behind_a_door_of_torch_distributed_nor_is_too_little_memory_in_a_collective():
    assert not is_failed_collective(RuntimeError("Connection reset by peer"))
    assert not is_failed_collective(raised(lambda: torch.zeros(2) @ torch.zeros(3)))
    behind_fsdp = in_module("torch.distributed.fsdp.made_up", "inner()")
    assert not is_failed_collective(raised(lambda: behind_fsdp(lambda: torch.zeros(2) @ torch.zeros(3))))
    no_memory = in_module("torch.distributed.fsdp.made_up", "raise torch.OutOfMemoryError('CUDA out of memory')")
    assert not is_failed_collective(raised(no_memory))


class ThreeRanks(World):
    """Rank 1 of three that end with these errors."""

    def __init__(self, *errors):
        super().__init__(rank=1, size=3)
        object.__setattr__(self, "errors", errors)

    def gather(self, value):
        said = [None if each is None else error_values(each) for each in self.errors]
        assert value == (None if said[1] is None else [said[1], socket.gethostname()])
        return [each and [each, host] for each, host in zip(said, ("one", "two", "three"), strict=True)]


def fails_with(text: str) -> Callable[[], Any]:
    def work():
        raise DiskError(text)

    return work


def test_an_error_of_one_rank_is_raised_by_all_and_names_it():
    world = ThreeRanks(None, None, DiskError("it is full"))
    with pytest.raises(DiskError, match=r"^Rank 2 on three: it is full$") as raised:
        world.run_together(lambda: 7)
    assert raised.value.of_all_ranks
    assert ThreeRanks(None, None, None).run_together(lambda: 7) == 7


@pytest.mark.parametrize(("on_each", "is_of_all"), [(3, True), (1, False)])
def test_the_rank_with_the_error_says_it_too_where_rank_0_is_on_another_machine(monkeypatch, on_each, is_of_all):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_each))
    with pytest.raises(DiskError, match=r"^Rank 1 on two: it is full$") as raised:
        ThreeRanks(None, DiskError("it is full"), None).run_together(fails_with("it is full"))
    assert raised.value.of_all_ranks is is_of_all


def test_an_error_of_all_ranks_is_that_of_the_first_and_names_none():
    world = ThreeRanks(DiskError("full there"), DiskError("full here"), BadInputError("no folder"))
    with pytest.raises(DiskError, match=r"^full there$") as raised:
        world.run_together(fails_with("full here"))
    assert raised.value.of_all_ranks
