"""YAML of bounded size: what its aliases stand for is counted before any of it is made."""

from __future__ import annotations

from typing import Any

import yaml

MOST_BYTES = 1 << 22
"""Of a configuration: so many take a minute to read."""

MOST_VALUES = 100_000
"""That a configuration with aliases stands for, each alias counted as all that it stands for."""

MOST_REPEATS = 4
"""Values that a longer configuration may stand for, for each that is written in it."""


def load_bounded(text: str) -> Any:
    """The plain value of a YAML text, as `yaml.safe_load` gives it.

    Raises:
        yaml.YAMLError: not YAML; too long, too deep, or aliases that stand for too many values or for themselves.
    """
    if len(text) > MOST_BYTES:
        raise yaml.YAMLError(f"it has more than {MOST_BYTES:,} bytes")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        counts: dict[int, int | None] = {}
        count = _values(node, counts)
        most = max(MOST_VALUES, MOST_REPEATS * len(counts))
        if count > most:
            raise yaml.YAMLError(f"its aliases make it {count:,} values; it may have {most:,}")
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("its brackets or indents are nested too deeply") from None
    except (ValueError, OverflowError, AttributeError, TypeError, LookupError) as error:  # of a number, date or tag
        raise yaml.YAMLError(f"a value cannot be read: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()


def _values(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """How many values a node stands for.

    Raises:
        yaml.YAMLError: it stands for itself.
    """
    if isinstance(node, yaml.ScalarNode):
        counts[id(node)] = 1
        return 1
    if id(node) in counts:
        count = counts[id(node)]
        if count is None:
            raise yaml.YAMLError(f"an alias stands for itself{node.start_mark}")
        return count
    counts[id(node)] = None
    pairs = isinstance(node, yaml.MappingNode)
    inner = [part for pair in node.value for part in pair] if pairs else node.value
    count = counts[id(node)] = 1 + sum(_values(part, counts) for part in inner)
    return count
