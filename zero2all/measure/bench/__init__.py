"""`z2a perf bench`: small measurements of one choice each, and the advice that follows from the figures."""
