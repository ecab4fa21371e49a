"""The bytes of all tensors that are alive, counted where torch makes them: on a CPU, and of tensors without values."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that were made while it was active and are alive, now and at most. `resizes`: FSDP
    empties storages instead of dropping them, so all are looked at again and again."""

    def __init__(self, resizes: bool = False) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._resizes = resizes
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live(self) -> int:
        """Bytes alive now."""
        if not self._resizes:
            return self._live
        return sum(storage.nbytes() for known in self._known.values() if (storage := known()) is not None)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Note the storages of the results."""
        del types
        result = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage)
            self._live += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self._live -= size
