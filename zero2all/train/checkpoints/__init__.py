"""Checkpoints that are either complete or absent, written in the background, readable under any layout.

The training loop uses `store`; tools use `find` and `load`; `run_lock` keeps a second trainer out. The other modules
have one task each: `layout` names, `manifest` the sealed list of files, `index` where tensors are, what overlaps and
what is missing, `tensor_file` safetensors, `planning` which rank writes and reads what, `snapshot` the copy in host
memory, `checks` what is checked before a save, `commit` the protocol and its thread, `retention` what is kept, claimed,
moved or deleted. `common.peers` has the messages between ranks.
"""
