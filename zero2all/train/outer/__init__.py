"""Training over a slow link: groups of processes that synchronise their weights every H steps instead of every step.

`fragments` says which weights are sent when, `compress` turns values into bytes, `optimizer` holds the outer weights
and updates them, over a `Link` that carries bytes between groups (docs/slow-link.md).
"""
