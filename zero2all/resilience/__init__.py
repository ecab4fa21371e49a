"""What keeps a run alive. In the processes of a run: heartbeat, and slots (checkpoints in memory). Outside of them:
supervisor, with notice (requests to stop), diagnosis (what is known about a failure) and page (where that is written).

For other people's loops: `beat()` under `z2a supervise`, and `MemoryCheckpoint`.
"""

from __future__ import annotations

from typing import Any

from zero2all.resilience.heartbeat import beat as beat


def __getattr__(name: str) -> Any:
    """The library, which needs torch; the rest of the room does not."""
    if name in ("MemoryCheckpoint", "memory_callback", "memory_folder"):
        from zero2all.resilience import library

        return getattr(library, name)
    raise AttributeError(name)
