"""What Prometheus reads at /metrics: how requests ended, tokens, the queue, and the time to the first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from zero2all.infer.text import Piece


class Metrics:
    """Counts since the start. Written in the engine's thread alone."""

    def __init__(self) -> None:
        self._ends: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def note(self, piece: Piece, first_after: float | None) -> None:
        """A piece of a choice; the seconds to its first token, where that is in it."""
        if first_after is not None:
            self._counts["time_to_first_token_seconds_sum"] += first_after  # type: ignore[assignment]
            self._counts["time_to_first_token_seconds_count"] += 1
        if piece.finish is not None:
            self._ends[piece.finish] += 1
            self._counts["prompt_tokens_total"] += piece.usage.prompt_tokens if piece.usage else 0

    def page(self, stats: Mapping[str, Any]) -> str:
        """In Prometheus' text format."""
        values = {f'requests_total{{finish="{name}"}}': count for name, count in sorted(self._ends.items())}
        values |= {"generated_tokens_total": stats.get("generated_tokens", 0), **self._counts}
        values |= {f"requests_{name}": stats[name] for name in ("running", "waiting")}
        return "".join(f"z2a_{name} {value}\n" for name, value in values.items())
