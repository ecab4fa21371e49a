"""What `z2a perf calibrate` measures: `stopwatch` times calls under load, `figures` says what is called."""
