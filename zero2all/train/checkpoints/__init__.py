"""Checkpoints that are either whole or absent, written beside training, readable at any number of ranks.

`store` is what the training loop uses; `find` and `load` what tools use; `run_lock` keeps a second trainer out. The
other modules hold one idea each: `layout` names, `documents` exact JSON, `manifest` the seal, `index` where tensors
lie, `tensor_file` safetensors, `planning` who writes what, `reads` what is read, `snapshot` the copy in host memory,
`finite` and `replicas` what is not worth saving, `commit` the protocol, `latest` a hint, `writer` the thread, `verify`
what is refused, `retention` what stays, `set_aside` what is moved, `peers` how ranks talk.

Nothing is imported here: reading a checkpoint must not pay for torch's planners, which take more than a second.
"""
