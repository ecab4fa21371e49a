"""Where a process computes, and what two runs must share to agree bit for bit."""

import os

import pytest
import torch

from zero2all.common.errors import UsageError
from zero2all.parallel.device import ALLOCATOR_SETTINGS, environment, pick_device, set_cpu_threads, set_memory_settings


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_gpu_is_named_with_its_number_which_some_of_torch_s_calls_insist_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("auto") == torch.device("cuda", 3)


@pytest.mark.parametrize("name", ALLOCATOR_SETTINGS)
def test_memory_settings_of_the_environment_count(monkeypatch, name):
    for known in ALLOCATOR_SETTINGS:
        monkeypatch.setenv(known, "")  # so that it is put back at the end, however it was
        monkeypatch.delenv(known)
    set_memory_settings(expandable_segments=False)
    assert not any(known in os.environ for known in ALLOCATOR_SETTINGS)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    set_memory_settings(expandable_segments=True)
    assert [os.environ.get(known) for known in ALLOCATOR_SETTINGS].count("max_split_size_mb:128") == 1
    monkeypatch.delenv(name)
    set_memory_settings(expandable_segments=True)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_auto_is_the_cpu_without_a_card_and_a_device_that_is_not_there_or_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UsageError, match="is cuda:2, but this machine has only cuda:0 to cuda:1"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="is cuda:1, but torch sees no CUDA device"):
        pick_device("cuda:1")
    with pytest.raises(UsageError, match=r"no CUDA device.*set parallel\.device to cpu or auto"):
        pick_device("cuda")
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    for name in ("tpu", "mps", "meta", "cpu:5", "", "cuda:", "cuda:x", "cuda:-1", "CUDA"):
        with pytest.raises(UsageError, match=rf"--device is `{name}`. Expected auto, cpu, cuda"):
            pick_device(name, "--device")


def test_threads_are_those_asked_for_then_recorded_then_of_the_environment_then_a_share_of_the_cores(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert set_cpu_threads(3, recorded=2) == torch.get_num_threads() == 3
    assert set_cpu_threads(None, recorded=2) == torch.get_num_threads() == 2
    assert set_cpu_threads(None, recorded=None) == torch.get_num_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert set_cpu_threads(None, recorded=None) == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun sets 1 where nothing was set
    monkeypatch.setattr("zero2all.parallel.device.usable_cores", lambda: 13)
    assert set_cpu_threads(None, recorded=None) == 13
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert set_cpu_threads(None, recorded=None) == torch.get_num_threads() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    assert set_cpu_threads(None, recorded=None) == 1
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")  # srun gave each process its own cores
    assert set_cpu_threads(None, recorded=None) == 13


def test_environment_names_everything_outside_the_config_that_moves_the_last_bit():
    set_cpu_threads(2, None)
    found = environment(torch.device("cpu"))
    assert (found["cpu_threads"], found["torch"], found["device"]) == (2, torch.__version__, "cpu")
    assert sorted(found) == ["cpu_capability", "cpu_threads", "device", "machine", "torch"]
    assert environment(torch.device("cpu")) == found
