"""Keeping a run alive. For now: its settings; the supervisor comes with the multi-process trainer."""
