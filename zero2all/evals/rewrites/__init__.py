"""Benchmarks asked in another way: an answer that was remembered is lost, one that was understood is not. `list.py`
names the rewrites, `measure.py` compares."""
