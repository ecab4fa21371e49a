"""What is measured: operators, whole training steps with one thing changed at a time, this machine, a run's record."""
