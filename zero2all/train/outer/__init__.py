"""Training over a slow link: groups of processes that synchronise their weights every H steps instead of every step.

`link` is what carries bytes between groups, `fragments` says which weights are sent when, `compress` turns values into
bytes, `optimizer` holds the outer weights and updates them (docs/slow-link.md).
"""
