"""Checkpoints that are either complete or absent, written in the background, readable with any number of ranks.

The training loop uses `store`; tools use `find` and `load`; `run_lock` keeps a second trainer out. The other modules
have one task each: `layout` names, `documents` exact JSON, `manifest` the sealed list of files, `index` where tensors
are, `tensor_file` safetensors, `planning` which rank writes what, `reads` what is read, `snapshot` the copy in host
memory, `finite` and `replicas` the checks before a save, `commit` the protocol, `latest` a hint, `writer` the thread,
`verify` the checks before a load, `retention` what is kept, `set_aside` what is moved, `peers` messages between ranks.

Nothing is imported here: importing torch's planners takes more than a second, which readers need not pay.
"""
