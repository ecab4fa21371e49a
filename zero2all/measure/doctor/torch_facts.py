"""What torch says of this machine, in a process of its own: a broken driver may kill or hang whoever asks.

    python -m zero2all.measure.doctor.torch_facts

Prints one JSON object a line, as soon as it is known: versions, devices, kernels.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> int:
    """Print the facts."""
    import torch

    has_cuda = torch.cuda.is_available()
    _print(
        "versions",
        {
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
            "nccl": _nccl(torch),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "built_for": torch.cuda.get_arch_list() if has_cuda else [],
            "cuda_problem": None if has_cuda else _cuda_problem(torch),
        },
    )
    devices = []
    for number in range(torch.cuda.device_count() if has_cuda else 0):
        found = torch.cuda.get_device_properties(number)
        devices.append({"name": found.name, "bytes": found.total_memory, "capability": [found.major, found.minor]})
    _print("devices", devices)
    from zero2all.measure.operators import listed_operators

    _print("kernels", listed_operators(None))
    return 0


def _nccl(torch: Any) -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _cuda_problem(torch: Any) -> str | None:
    """Why torch sees no GPU; None for a build without CUDA."""
    if torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()
    except Exception as error:
        return " ".join(str(error).split())[:300]
    return "no GPU is visible to this process"


def _print(name: str, value: Any) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
