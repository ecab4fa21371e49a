"""The fields of a run's config, as they are named on the command line: `--optim.lr_max`."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from zero2all.cli.parser import closest
from zero2all.common.language import translate as t


def field_names() -> list[str]:
    """Every field of the config by its dotted name, such as `optim.lr_max`."""
    from zero2all.config import RunConfig

    return list(_names(RunConfig, ""))


def _names(section: type, place: str) -> typing.Iterator[str]:
    for name, kind in typing.get_type_hints(section).items():
        inner = _section_in(kind)
        if inner is None:
            yield f"{place}{name}"
        else:
            yield from _names(inner, f"{place}{name}.")


def _section_in(kind: Any) -> type | None:
    """The section that a field holds, also where it may be null; None for a plain field."""
    options = [kind, *typing.get_args(kind)] if typing.get_origin(kind) not in (list, dict) else []
    return next((each for each in options if isinstance(each, type) and dataclasses.is_dataclass(each)), None)


def unknown_field(overrides: list[str], sections_only: bool = False) -> str | None:
    """What is wrong with the first override that names no field; `sections_only`: with its section."""
    known = field_names()
    sections = {name.partition(".")[0] for name in known}
    for word in overrides:
        name = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or (sections_only and name.partition(".")[0] in sections):
            continue
        if any(name == each or name.startswith(f"{each}.") or each.startswith(f"{name}.") for each in known):
            continue
        meant = closest(name, known)
        if meant is None:
            return t(f"There is no config field `{name}`. `z2a train CONFIG --print-config` lists all fields.")
        return t(
            f"There is no config field `{name}`. Did you mean `--{meant}`? `z2a train CONFIG --print-config` lists all "
            f"fields."
        )
    return None


def field_for_flag(flag: str) -> str | None:
    """The config field that a flag without a section probably means: --lr is `--optim.lr_max`."""
    word = flag.removeprefix("--").replace("-", "_")
    leaves = {name.rpartition(".")[2]: name for name in reversed(field_names())}
    begun = [leaf for leaf in leaves if leaf == word or leaf.startswith(f"{word}_")]
    leaf = min(begun, key=len) if begun else closest(word, leaves)
    return None if leaf is None else f"--{leaves[leaf]}"
