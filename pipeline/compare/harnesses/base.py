"""Per-item results of models, and the record of a harness that writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from pipeline.errors import UserError, nearest

METRICS = ("acc", "exact_match")
"""Default metrics of a file with several, in order of preference."""

LOOKED_AT = 50
"""Number of items of a file whose fields are compared with the audited texts."""


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What is read of a file of results."""

    metric: str | None = None  # None: acc, else exact_match, else the only one
    filter: str | None = None  # of lm-eval; None: the only one
    id_field: str | None = None  # field of an item with the id of its document; None: items are rows of the task


@dataclass(slots=True)
class ItemResults:
    """Results of one model on the items of one task."""

    model: str
    task: str
    path: str
    by_id: bool  # whether items are ids of documents; otherwise rows of the task
    any_input: bool = False  # whether the ids are of documents of all inputs, and not of those of one task
    metric: str = "correct"
    filter: str | None = None
    values: dict[str, float] = field(default_factory=dict)  # item -> result in [0, 1]
    hashes: dict[str, str] = field(default_factory=dict)  # item -> hash of the prompt, from the file
    fields: dict[str, list[str]] = field(default_factory=dict)  # the first LOOKED_AT items -> texts of their fields

    def add(self, item: Any, value: Any, prompt: Any, digest: str | None, where: str) -> None:
        """Add the result of an item.

        Args:
            item: id or row of the item.
            value: its result.
            prompt: what the model was asked, at any depth of lists and mappings.
            digest: hash of it, as the file has it; None: that of its texts.
            where: place in the file, for messages.

        Raises:
            UserError: a value outside [0, 1], or a second one.
        """
        if item is None:
            raise UserError(f"{where}: its id is null")
        name = str(item)
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            raise UserError(f"{where}: {self.metric} must be a number in [0, 1], got {value!r}; --metric names another")
        if name in self.values:
            raise UserError(f"{where}: a second result for item {item!r}")
        self.values[name] = float(value)
        self.hashes[name] = digest or sha256("\0".join(texts_within(prompt)).encode("utf-8", "replace")).hexdigest()
        if len(self.fields) < LOOKED_AT:
            self.fields[name] = list(texts_within(prompt))


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """What a file of results is of: among those of one model and task in a folder the last one counts."""

    folder: str
    model: str
    task: str
    date: str


@dataclass(frozen=True, slots=True)
class Harness:
    """A format of files of results."""

    name: str
    files: str  # its files in words, for messages
    owns: Callable[[str], bool]  # whether a file of this name is one
    read: Callable[[str, ResultOptions], Iterable[ItemResults]]
    place: Callable[[str], ResultPlace] | None = None  # of a file in a folder; None: files of folders are not read
    filters: bool = False  # whether its files have filters


def find_metric(known: Iterable[str], metric: str | None, where: str) -> str:
    """The metric to read: the wanted one, else acc, else exact_match, else the only one.

    Raises:
        UserError: it is not known, or there are several.
    """
    names = list(known)
    if metric is not None:
        if metric not in names:
            raise UserError(f"{where}: no metric {metric!r}; {nearest(metric, names, 'it has')}")
        return metric
    for name in METRICS:
        if name in names:
            return name
    if len(names) != 1:
        raise UserError(f"{where}: choose with --metric one of {', '.join(names) or '(no metric there)'}")
    return names[0]


def item_id(fields: Any, id_field: str, where: str) -> Any:
    """The field of an item that holds its id. Raises UserError: there is none."""
    if not isinstance(fields, Mapping) or id_field not in fields:
        known = map(str, fields) if isinstance(fields, Mapping) else []
        raise UserError(f"{where}: no field {id_field!r} in its doc; {nearest(id_field, known, 'it has')}")
    return fields[id_field]


def texts_within(value: Any) -> Iterator[str]:
    """All texts in a value, at any depth of lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_within(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_within(inner)
