"""`z2a perf allreduce`: figures of real ranks, and advice that follows from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from zero2all.cli.main import main
from zero2all.measure.allreduce import CPU_SIZES, Reduced, allreduce_advice, allreduce_cells


def test_bus_bandwidth_is_what_a_ring_sends_over_a_link():
    one = Reduced(1 << 20, 4, [1.0, 2.0, 3.0])
    assert one.bus_bandwidth == pytest.approx(2 * 3 / 4 * (1 << 20) / 2.0)
    assert one.spread == pytest.approx(0.5)
    assert allreduce_cells([one])[1] == ["1 MiB", "2,000.00 ms", "±25.0 %", "0.000786 GB/s"]


def test_messages_are_joined_above_half_of_the_best_bandwidth():
    small = [Reduced(1 << 10, 2, [1e-5]), Reduced(1 << 20, 2, [2e-4]), Reduced(1 << 24, 2, [2e-3])]
    assert "8.39 GB/s at 16 MiB, is reached from 1 MiB on. parallel.bucket_mb" in allreduce_advice(small)
    large = [Reduced(1 << 20, 2, [1e-2]), Reduced(1 << 28, 2, [1e-2])]
    assert "from 256 MiB on: raise parallel.bucket_mb" in allreduce_advice(large)


def test_two_processes_reduce_messages_of_several_sizes():
    words = ["perf", "allreduce", "--device", "cpu", "--ranks", "2", "--seconds", "0.5", "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "zero2all", *words], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["bytes"] for each in found][:2] == list(CPU_SIZES[:2])
    assert all(len(each["samples"]) >= 5 for each in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it can run here")
def test_without_a_gpu_nccl_is_refused(capsys):
    assert main(["perf", "allreduce", "--device", "cuda"]) == 2
    assert "--device" in capsys.readouterr().err
