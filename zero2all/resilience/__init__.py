"""What keeps a run alive. `MemoryCheckpoint` serves any PyTorch loop."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The library, which needs torch; the rest of the room does not."""
    if name in ("MemoryCheckpoint", "memory_callback", "memory_folder"):
        from zero2all.resilience import library

        return getattr(library, name)
    raise AttributeError(name)
