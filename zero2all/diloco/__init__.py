"""DiLoCo: groups of processes that train one model, each a copy of its own, and exchange weights every H steps.

`config` says which weights are sent when, `compress` turns values into bytes, `outer_optimizer` holds the weights
that all groups agree on and updates them. `ranks` joins the ranks of a group, and rank 0 has the `link`, which waits
for all groups at the start and carries payloads between them over `transport`; `coordinator` decides whose are used in
a round, with `messages` (docs/diloco.md).
"""
