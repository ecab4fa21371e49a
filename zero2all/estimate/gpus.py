"""Data sheets of accelerators: dense bfloat16 peak (no sparsity), memory and its bandwidth, links.

Looked up by exact name only, the short one or the device's whole name: `NVIDIA H200 NVL` and a MIG slice begin with the
name of a faster device. An unknown one has no figures here, never those of a similar one.
"""

import re
from dataclasses import dataclass

from zero2all.common.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """One accelerator by its data sheet, except for `matmul_flops`."""

    name: str
    peak_flops: float
    bandwidth: float  # of its memory, bytes/s
    memory_gb: float  # as sold, 10^9 bytes
    link: float  # to its neighbours, bytes/s in one direction
    units: int = 0  # streaming multiprocessors (SM)
    matmul_flops: float = 0.0
    """The best matmul rate that was measured (stas00/ml-engineering: maximum achievable matmul FLOPS); 0: not known."""
    watts: float = 0.0
    float32_flops: float = 0.0
    float8_flops: float = 0.0
    torch_gib: float = 0.0
    """Memory that torch reports, in GiB: less than the data sheet says; 0: not known."""
    generation: int = 0  # major compute capability

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic limits, not memory."""
        return self.peak_flops / self.bandwidth


_SHEETS = (
    Gpu("a100", 312e12, 2.039e12, 80, 300e9, 108, 271.2e12, 400, 19.5e12, 0, 79.1, 8),
    Gpu("a100-40g", 312e12, 1.555e12, 40, 300e9, 108, 271.2e12, 400, 19.5e12, 0, 39.4, 8),
    Gpu("a100-pcie", 312e12, 1.935e12, 80, 32e9, 108, 0, 300),
    Gpu("a100-pcie-40g", 312e12, 1.555e12, 40, 32e9, 108, 0, 250),
    Gpu("a800", 312e12, 2.039e12, 80, 200e9, 108, 0, 400),
    Gpu("a800-pcie", 312e12, 1.935e12, 80, 32e9, 108, 0, 300),
    Gpu("h100", 989e12, 3.35e12, 80, 450e9, 132, 794.5e12, 700, 67e12, 1979e12, 79.1, 9),
    Gpu("h100-pcie", 756e12, 2.0e12, 80, 64e9, 114, 0, 350),
    Gpu("h200", 989e12, 4.8e12, 141, 450e9, 132, 794.5e12, 700, 67e12, 1979e12, 139.7, 9),
    Gpu("h800", 989e12, 3.35e12, 80, 200e9, 132, 0, 700),
    Gpu("h800-pcie", 756e12, 2.0e12, 80, 64e9, 114, 0, 350),
    Gpu("b200", 2250e12, 8.0e12, 180, 900e9, 148, 1745e12, 1000, 75e12, 4500e12, 178.3, 10),
    Gpu("3060", 25.5e12, 0.36e12, 12, 32e9, 28, 0, 170, 12.7e12, 0, 11.6, 8),
    Gpu("3080", 59.5e12, 0.76e12, 10, 32e9, 68, 0, 320, 29.8e12, 0, 9.7, 8),
    Gpu("3090", 71.2e12, 0.936e12, 24, 32e9, 82, 0, 350, 35.6e12, 0, 23.6, 8),
    Gpu("4060", 30.2e12, 0.272e12, 8, 16e9, 24, 0, 115, 15.1e12, 0, 7.7, 8),
    Gpu("4070", 58.3e12, 0.504e12, 12, 32e9, 46, 0, 200, 29.1e12, 0, 11.6, 8),
    Gpu("4080", 97.5e12, 0.717e12, 16, 32e9, 76, 0, 320, 48.7e12, 0, 15.5, 8),
    Gpu("4090", 165.2e12, 1.008e12, 24, 32e9, 128, 0, 450, 82.6e12, 0, 23.6, 8),
    Gpu("5080", 112.6e12, 0.96e12, 16, 64e9, 84, 0, 360, 56.3e12, 0, 15.4, 12),
    Gpu("5090", 209.5e12, 1.792e12, 32, 64e9, 170, 0, 575, 104.8e12, 0, 31.3, 12),
    Gpu("tpu-v4", 275e12, 1.2e12, 32, 45e9),
    Gpu("tpu-v5e", 197e12, 8.2e11, 16, 45e9),
    Gpu("tpu-v5p", 459e12, 2.765e12, 95, 90e9),
)
"""GeForce cards: peak of bfloat16 with sums in float32, twice that of float32. Memory that torch reports: as in public
error messages for 3080, 3090, 4090 and 5090, for the others 3 to 4 % less than is sold."""
GPUS = {gpu.name: gpu for gpu in _SHEETS}
GPUS["a100-80g"] = GPUS["a100"]  # its name among the clusters of `z2a perf plan`

DEVICE_NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40g",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A800-SXM4-80GB": "a800",
    "NVIDIA A800 80GB PCIe": "a800-pcie",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA H800": "h800",
    "NVIDIA H800 PCIe": "h800-pcie",
    **{f"NVIDIA GeForce RTX {name}": name for name in ("3060", "3080", "3090", "4060", "4070", "4080", "4090")},
    **{f"NVIDIA GeForce RTX {name}": name for name in ("5080", "5090")},
}
"""The driver's whole name of a device -> ours."""


def device_of(name: str) -> str:
    """The driver's name of a GPU that may have one of ours."""
    gpu = GPUS.get(name)
    return next((device for device, known in DEVICE_NAMES.items() if gpu and known == gpu.name), name)


GIB = 2**30
CONTEXT_BYTES = 0.5 * GIB
"""CUDA context and loaded kernels of one process."""
NCCL_BYTES = 0.5e9
"""Buffers of one NCCL communicator, outside of torch's memory."""
HOPPER = 9


@dataclass(frozen=True)
class Card:
    """The memory that a process can have of a GPU. `memory_bytes` is what torch reports as the device's total memory,
    which is less than the data sheet says."""

    name: str
    memory_bytes: float
    generation: int  # major compute capability

    @property
    def workspace_bytes(self) -> float:
        """See `cublas_workspace`."""
        return cublas_workspace(self.generation)


def cublas_workspace(generation: int) -> float:
    """Bytes that torch allocates for cuBLAS: one workspace for the thread of the forward pass, one for that of the
    backward pass; 32 MiB each from Hopper on, 8.125 MiB before."""
    return 2.0 * (32 * 2**20 if generation >= HOPPER else 8.125 * 2**20)


CARDS = {name: Card(name, gpu.torch_gib * GIB, gpu.generation) for name, gpu in GPUS.items() if gpu.torch_gib}


def named_card(name: str) -> Card:
    """The card of this name, `rtx 4090` and `4090` alike; an unknown one gets no guess."""
    short = re.sub(r"^(nvidia )?(geforce )?rtx[ -]?", "", name.lower())
    if short not in CARDS:
        raise UsageError(
            f"The memory of a GPU named {name} is not known. Known are {', '.join(CARDS)}. `z2a perf "
            f"memory --memory-gib N` computes for any other."
        )
    return CARDS[short]
