"""Counts what this process hands to collectives, where torch dispatches them: by kind, and by the axes they go over."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zero2all.parallel.mesh import Mesh, axis_length

GIVEN_AT = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "allgather_": ("all-gather", 1),
    "_allgather_base_": ("all-gather", 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
}
"""torch's operator -> its kind, and which of its arguments this process hands over."""


class CollectiveBytes(TorchDispatchMode):
    """While it is active: bytes by kind of collective (FSDP's too) and the axes of the mesh it goes over."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.by_axes: Counter[tuple[str, str]] = Counter()
        self._axes: dict[str, str] = {}
        self.same_as: dict[str, str] = {}
        """Products of axes with the same processes have one group: the name under which it is counted."""
        for axes, group in mesh.groups.items() if mesh is not None else ():
            assert mesh is not None
            name = self._axes.setdefault(group.group_name, axes_of(mesh, axes))  # dense axes come first
            self.same_as[axes_of(mesh, axes)] = name

    @property
    def bytes(self) -> dict[str, int]:
        """By kind alone."""
        found: Counter[str] = Counter()
        for (kind, _), count in self.by_axes.items():
            found[kind] += count
        return dict(found)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Count, and go on."""
        del types
        if operation.namespace == "c10d" and operation._opname in GIVEN_AT:
            kind, at = GIVEN_AT[operation._opname]
            size = sum(tensor.nbytes for tensor in _tensors(arguments[at]))
            # Stages send over groups of two, which are not those of the mesh.
            self.by_axes[kind, "pipeline" if kind == "send" else self._axes_of_group(arguments)] += size
        return operation(*arguments, **(keywords or {}))

    def _axes_of_group(self, arguments: Any) -> str:
        for argument in arguments:
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                return self._axes.get(dist.ProcessGroup.unbox(argument).group_name, "")
        return ""


def axes_of(mesh: Mesh, names: tuple[str, ...]) -> str:
    """A product of axes, by those that have more than one process."""
    return " x ".join(name for name in names if axis_length(mesh.sizes, name) > 1)


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors(value)]
