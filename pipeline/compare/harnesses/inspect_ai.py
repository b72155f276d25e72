"""Logs of inspect_ai (`.eval`), read by its own library: an extra of this package installs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.compare.harnesses.base import Harness, ItemResults, ResultOptions, ResultPlace, find_metric, item_id
from pipeline.corpus.inspect_logs import EvalItem, EvalLog, open_log
from pipeline.errors import UserError


def _place(path: str) -> ResultPlace:
    log = open_log(path)
    return ResultPlace(path.rpartition("/")[0], log.model, log.task, log.created)


def _read(path: str, options: ResultOptions) -> list[ItemResults]:
    log = open_log(path)
    results = ItemResults(log.model, log.task, path, options.id_field is not None)
    rows = None if options.id_field is not None else _rows(log, path)
    for item in log.items():
        _add(results, item, rows, f"{path} sample {item.id!r}", options)
    return [results]


def _rows(log: EvalLog, path: str) -> Mapping[Any, int]:
    """The row of each item in its data set.

    Raises:
        UserError: the log does not tell, as the data set was shuffled or only some of its items were asked.
    """
    if log.shuffled or len(log.ids) < log.size:
        why = "was shuffled" if log.shuffled else f"has {log.size:,} items, of which {len(log.ids):,} were asked"
        raise UserError(f"{path}: its data set {why}, so that rows are unknown; --id FIELD matches by an id (--id id)")
    return {name: row for row, name in enumerate(log.ids)}


def _add(
    results: ItemResults, item: EvalItem, rows: Mapping[Any, int] | None, where: str, options: ResultOptions
) -> None:
    if item.error is not None:
        raise UserError(f"{where} ended with an error ({item.error}), and has no result: inspect eval-retry asks again")
    if not results.values:
        results.metric = find_metric(item.scores, options.metric, where)
    fields = {"id": item.id, **item.metadata}
    name = rows[item.id] if rows is not None else item_id(fields, options.id_field or "id", where)
    results.add(name, item.mean_score(results.metric), [item.input, item.choices], None, where)


INSPECT = Harness("inspect", "logs of inspect_ai (.eval)", lambda name: name.endswith(".eval"), _read, _place)
