"""YAML that strangers may have written: plain values only, within bounds of size, depth and number.

Aliases of aliases can stand for billions of values. So the text is first read as a stream of events, and only what
keeps within the bounds is built. A name that stands twice in a mapping is refused too.
"""

from functools import cache
from pathlib import Path
from typing import Any

from zero2all.common.files import read_regular

LARGEST_BYTES = 1 << 20  # a run's config with every field and its comments has about 20 KB
DEEPEST = 50
MOST_VALUES = 100_000  # counting what aliases stand for


class YamlError(ValueError):
    """The text is no YAML."""


class YamlRefusedError(YamlError):
    """The text is YAML, but not of a kind that is read here."""


def loads(text: str, path: Path | None = None) -> Any:
    """The plain value of a YAML text, of the file `path` if it has one; raises YamlError for anything else."""
    import yaml

    if len(text) > LARGEST_BYTES:
        raise YamlRefusedError(f"it has {len(text):,} characters; the limit is {LARGEST_BYTES:,}")
    try:
        _check_bounds(text)
        return yaml.load(text, _loader())
    except yaml.YAMLError as error:
        place = "" if path is None else f'in "{path}", '
        raise YamlError(str(error).replace('in "<unicode string>", ', place)) from error
    except YamlError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:  # a number or a date that cannot be
        raise YamlError(f"a value cannot be read: {error}") from error


def read_yaml(path: Path) -> Any:
    """The plain value of a YAML file; OSError or ValueError where there is none."""
    return loads(read_regular(path, LARGEST_BYTES).decode("utf-8"), path)


@cache
def _loader() -> Any:
    import yaml

    class OnceOnly(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Refuses a name that stands twice in a mapping."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in seen:
                    raise YamlRefusedError(f"{_line(key)}: `{key.value}` is listed twice")
                seen.add(key.value)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    return OnceOnly


def _check_bounds(text: str) -> None:
    """Refuse a text whose values, aliases expanded, are too many or too deep."""
    import yaml

    sizes: dict[str | None, tuple[int, int]] = {}
    """Anchor -> how many values it stands for, and how deep they go; only once its value is complete."""
    total, open_nodes = 0, [_OpenNode(None)]
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            total += 1
            open_nodes.append(_OpenNode(event.anchor))
            _refuse_depth(len(open_nodes) - 1, event)
        elif isinstance(event, yaml.CollectionEndEvent):
            node = open_nodes.pop()
            if node.anchor is not None:
                sizes[node.anchor] = (node.values + 1, node.depth + 1)
            open_nodes[-1].add(node.values + 1, node.depth + 1)
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.anchor is not None:
                sizes[event.anchor] = (1, 1)
            open_nodes[-1].add(1, 1)
        elif isinstance(event, yaml.AliasEvent):
            if any(node.anchor == event.anchor for node in open_nodes[1:]):
                raise YamlRefusedError(f"{_line(event)}: *{event.anchor} refers to itself")
            values, depth = sizes.get(event.anchor, (1, 1))  # one that nothing stands for is found when it is built
            total += values
            _refuse_depth(len(open_nodes) - 1 + depth, event)
            open_nodes[-1].add(values, depth)
        if total > MOST_VALUES:
            raise YamlRefusedError(f"{_line(event)}: more than {MOST_VALUES:,} values once aliases are expanded")


class _OpenNode:
    """A mapping or list whose end has not been read: what it holds so far."""

    def __init__(self, anchor: str | None) -> None:
        self.anchor, self.values, self.depth = anchor, 0, 0

    def add(self, values: int, depth: int) -> None:
        self.values += values
        self.depth = max(self.depth, depth)


def _refuse_depth(depth: int, event: Any) -> None:
    if depth > DEEPEST:
        raise YamlRefusedError(f"{_line(event)}: nested deeper than {DEEPEST} levels")


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
