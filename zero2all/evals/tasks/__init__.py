"""Readers of the public benchmarks, from the files that people have to items. `list.py` names them."""
