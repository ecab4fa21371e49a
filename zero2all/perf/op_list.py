"""Every implementation of every operator, and whether it runs on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from zero2all.common.language import translate as t
from zero2all.config import RunConfig
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import OPERATORS, resolve
from zero2all.parallel.device import pick_device
from zero2all.train.setup import op_context
from zero2all.train.state import DTYPES


def context_here(config: RunConfig | None) -> OpContext:
    """The context of a config; without one, that of this machine's device in its usual dtype."""
    if config is not None:
        return op_context(config, pick_device(config.parallel.device).type, DTYPES[config.train.precision])
    device = pick_device("auto").type
    return OpContext(device, torch.bfloat16 if device == "cuda" else torch.float32)


def listed_operators(config: RunConfig | None) -> list[dict[str, Any]]:
    """One entry per implementation: operator, name, why it cannot run (None: it can), flags, and who takes it."""
    where = context_here(config)
    asked = OpsConfig() if config is None else config.ops
    automatic = resolve(OpsConfig(), where).taken
    chosen = resolve(dataclasses.replace(asked, strict=False), where).taken
    return [
        {
            "operator": operator,
            "implementation": implementation.name,
            "why_not": implementation.probe(where),
            "compile_safe": implementation.compile_safe,
            "deterministic": implementation.deterministic,
            "taken_by_auto": automatic[operator] == implementation.name,
            "asked_by_config": getattr(asked, operator) == implementation.name,
            "taken": chosen[operator] == implementation.name,
        }
        for operator, implementations in OPERATORS.items()
        for implementation in implementations
    ]


def describe(where: OpContext) -> str:
    """The context in one line."""
    device = torch.cuda.get_device_name() if where.device == "cuda" else "cpu"
    dtype = str(where.dtype).removeprefix("torch.")
    return f"{device}, {dtype}, inside torch.compile" if where.compiled else f"{device}, {dtype}"


def list_cells(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Heading and rows of the table."""
    rows = []
    before = ""
    for entry in entries:
        shown = entry["operator"] if entry["operator"] != before else ""
        taken = "auto" if entry["taken_by_auto"] else "config" if entry["taken"] else ""
        here = t("runs") if entry["why_not"] is None else t(f"no: {entry['why_not']}")
        flags = (t("yes") if entry[flag] else t("no") for flag in ("compile_safe", "deterministic"))
        rows.append([shown, entry["implementation"], taken, here, *flags])
        before = entry["operator"]
    return [["operator", "implementation", "chosen by", "here", "compile-safe", "deterministic"], *rows]
