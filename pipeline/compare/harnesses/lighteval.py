"""Details of lighteval: a Parquet file for each task, with what was asked (`doc`) and its metrics (`metric`).

lighteval shuffles the items of a task; `doc.id` is the row of an item before that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.compare.harnesses.base import (
    METRICS,
    Harness,
    ItemResults,
    ResultOptions,
    ResultPlace,
    find_metric,
    item_id,
)
from pipeline.errors import UserError, error_line

_DETAILS = re.compile(r"details_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.parquet$")
_ASKED = ("query", "choices", "instruction")
_BATCH = 256


def _place(path: str) -> ResultPlace:
    """The place of a file: details/MODEL/DATE/details_TASK_DATE.parquet, where MODEL may be several folders."""
    *folders, base = path.split("/")
    named = _DETAILS.search(base)
    assert named is not None  # as `owns` says
    model = folders[:-1] if folders and folders[-1] == named["date"] else folders
    start = len(model) - model[::-1].index("details") if "details" in model else max(0, len(model) - 1)
    task = named["task"].split("|")
    name = "/".join(model[start:]) or "model"
    return ResultPlace("/".join(model[:start]), name, task[1] if len(task) > 1 else task[0], named["date"])


def _read(path: str, options: ResultOptions) -> list[ItemResults]:
    place = _place(path)
    results = ItemResults(place.model, place.task, path, options.id_field is not None)
    try:
        with fsspec.open(path, "rb") as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            if missing := {"doc", "metric"} - {*parquet.schema_arrow.names}:
                raise UserError(
                    f"{path} has no column {min(missing)!r}, as lighteval writes it from version 0.10 on; columns: "
                    f"{', '.join(parquet.schema_arrow.names)}"
                )
            row = 0
            for batch in parquet.iter_batches(_BATCH, columns=["doc", "metric"]):
                for sample in batch.to_pylist():
                    row += 1
                    _add(results, sample, f"{path} row {row}", options)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"cannot read results {path}: {error_line(error)}") from None
    if not results.values:
        raise UserError(f"{path} holds no results")
    return [results]


def _add(results: ItemResults, sample: Mapping[str, Any], where: str, options: ResultOptions) -> None:
    doc, metrics = sample["doc"] or {}, sample["metric"] or {}
    if not isinstance(doc, Mapping) or not isinstance(metrics, Mapping):
        raise UserError(
            f"{where}: doc and metric must be objects, got {type(doc).__name__} and {type(metrics).__name__}"
        )
    if not results.values:
        known = [name for name, value in metrics.items() if name in METRICS or isinstance(value, bool | int | float)]
        results.metric = find_metric(known, options.metric, where)
    fields = {**doc, **specific} if isinstance(specific := doc.get("specific"), Mapping) else doc
    item = doc.get("id") if options.id_field is None else item_id(fields, options.id_field, where)
    if options.id_field is None and not str(item).isdecimal():
        raise UserError(f"{where}: doc.id must be the row of the item, got {item!r}; --id FIELD matches by an id")
    results.add(item, metrics.get(results.metric), [doc.get(name) for name in _ASKED], None, where)


LIGHTEVAL = Harness(
    "lighteval",
    "details of lighteval (details_TASK_DATE.parquet, written with --save-details)",
    lambda name: _DETAILS.search(name) is not None,
    _read,
    _place,
)
