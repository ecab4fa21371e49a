"""Settings of how a run reacts to signals."""
