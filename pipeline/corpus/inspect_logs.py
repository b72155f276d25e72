"""Logs of inspect_ai (`.eval`), read by its own library, which an extra of this package installs."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import fsspec

from pipeline.errors import UserError, error_line, not_opened

_UNREAD = frozenset(
    {"messages", "events", "events_data", "timelines", "store"}
)  # fields of samples, which may be large
_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Numbers that inspect_ai means by texts: correct, partly, incorrect, no answer."""


@dataclass(slots=True)
class EvalItem:
    """An item of a log, with its results of all epochs."""

    id: str | int
    input: Any  # a text, or messages
    choices: list[str] | None
    target: Any  # a text, or several
    metadata: Mapping[str, Any]
    answers: list[str] = field(default_factory=list)  # of each epoch
    scores: dict[str, list[Any]] = field(default_factory=dict)  # name -> a value for each epoch
    error: str | None = None  # of an epoch that failed

    def mean_score(self, name: str) -> Any:
        """The mean of a score over the epochs; None without one, and a value that is no number as it is."""
        values = self.scores.get(name, [])
        odd = [value for value in values if not isinstance(value, int | float)]
        return odd[0] if odd else fmean(values) if values else None


@dataclass(frozen=True, slots=True)
class EvalLog:
    """The head of a log."""

    path: str
    model: str
    task: str
    created: str
    ids: tuple[str | int, ...]  # of the items that were asked, in order
    size: int  # items of the data set
    shuffled: bool

    def items(self) -> list[EvalItem]:
        """The items with their results, in the order of the data set.

        Raises:
            UserError: the log has no samples.
        """
        items: dict[str | int, EvalItem] = {}
        for sample in _read_log(self.path, samples=True).samples or []:
            new = EvalItem(sample.id, _plain(sample.input), sample.choices, sample.target, sample.metadata or {})
            item = items.setdefault(sample.id, new)
            if sample.error is not None:
                item.error = error_line(Exception(sample.error.message), 80)
            item.answers.append(sample.output.completion if sample.output is not None else "")
            for name, score in (sample.scores or {}).items():
                for part, value in _parts(name, score.value):
                    item.scores.setdefault(part, []).append(value)
        if not items:
            raise UserError(f"{self.path} has no samples: run inspect eval without --no-log-samples")
        order = {name: place for place, name in enumerate(self.ids)}
        return sorted(items.values(), key=lambda item: order.get(item.id, len(order)))


def open_log(path: str) -> EvalLog:
    """The head of a log.

    Args:
        path: local path or fsspec URL.

    Raises:
        UserError: inspect_ai is not installed, or the file is no log.
    """
    spec = _read_log(path, samples=False).eval
    data = spec.dataset
    ids = tuple(data.sample_ids or ())
    return EvalLog(path, spec.model, spec.task, str(spec.created), ids, data.samples or len(ids), bool(data.shuffled))


def _check_archive(path: str) -> None:
    """Check that a file is a zip archive with the head of a log.

    Raises:
        UserError: it is another file.
        OSError: it cannot be read.
    """
    with fsspec.open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                held = archive.namelist()
        except (zipfile.BadZipFile, ValueError):
            raise UserError(f"{path} is no log of inspect_ai: it is no whole zip archive, as .eval files are") from None
    if not {*held} & {"header.json", "_journal/start.json"}:
        first = f"; it holds {', '.join(held[:3])}" if held else ""
        raise UserError(f"{path} is no log of inspect_ai: a zip archive without header.json{first}")


def _read_log(path: str, samples: bool) -> Any:
    try:
        # slow import, needed only here, of an optional package
        from inspect_ai.log import read_eval_log
    except ImportError as error:
        raise UserError(f"cannot read {path}: {not_opened(error)}") from None
    try:
        _check_archive(path)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot read the log {path}: {not_opened(error)}") from None
    try:
        if not samples:
            return read_eval_log(path, header_only=True)
        return read_eval_log(path, resolve_attachments="core", exclude_fields=set(_UNREAD))
    except Exception as error:  # of the library, of zip files, of JSON and of file systems
        raise UserError(f"cannot read the log {path} of inspect_ai: {error_line(error, 200)}") from None


def _plain(value: Any) -> Any:
    """The input of a sample: a text, or the role and the text of each message."""
    if isinstance(value, str):
        return value
    return [{"role": message.role, "content": message.text} for message in value]


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """The values of a score by their names: that of the scorer, and `scorer.part` where it gives several."""
    if isinstance(value, Mapping):
        return [(f"{name}.{part}", _number(one)) for part, one in value.items()]
    return [(name, _number(value))]


def _number(value: Any) -> Any:
    """A value as a number; what is none as it is."""
    if not isinstance(value, str):
        return value
    if (known := _VALUES.get(value, _VALUES.get(value.lower()))) is not None:
        return known
    try:
        return float(value)
    except ValueError:
        return value
