"""Per-item results of models, from sample files of lm-evaluation-harness or from Parquet with model, item, correct."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import UserError, error_line, nearest, not_opened

COLUMNS = ("model", "item", "correct")
METRICS = ("acc", "exact_match")
"""Default metrics of a file with several, in order of preference."""

LOOKED_AT = 50
"""Number of items of a file whose fields are compared with the audited texts."""

_SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.:+-]+)\.jsonl$")
_NOT_METRICS = {"doc_id", "doc_hash", "prompt_hash", "target_hash", "target", "doc", "filter", "metrics"}


@dataclass(slots=True)
class ItemResults:
    """Results of one model on the items of one task."""

    model: str
    task: str
    path: str
    by_id: bool  # whether items are ids of documents; otherwise rows of the task
    metric: str = "correct"
    filter: str | None = None
    values: dict[str, float] = field(default_factory=dict)  # item -> result in [0, 1]
    hashes: dict[str, str] = field(default_factory=dict)  # item -> hash of the prompt, from the file
    fields: dict[str, list[str]] = field(default_factory=dict)  # the first LOOKED_AT items -> texts of their fields


def read_all_results(
    paths: Sequence[str], metric: str | None = None, filter_: str | None = None, id_field: str | None = None
) -> list[ItemResults]:
    """Read results of models: one entry per model and task, in the order of the files.

    Args:
        paths: sample files, folders of sample files, or Parquet files; `NAME=path` names the model of a sample file.
        metric: metric of sample files, in [0, 1]; None: acc, else exact_match, else the only one.
        filter_: filter of sample files; None: the only one.
        id_field: field of each `doc` with the id of the document; None: items are rows of the task.

    Raises:
        UserError: no results, an unknown file format, an unknown metric or filter, or two results of one item.
    """
    results: dict[tuple[str, str], ItemResults] = {}
    for path in paths:
        for one in _read(path, metric, filter_, id_field):
            earlier = results.setdefault((one.model, one.task), one)
            if earlier is not one:
                raise UserError(
                    f"model {one.model!r} has two files of task {one.task!r}: {earlier.path} and {one.path}; "
                    "NAME=FILE names the model of a file"
                )
    return list(results.values())


def task_inputs(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `TASK=INPUT` pairs: task -> input.

    Raises:
        UserError: a pair has another form.
    """
    inputs = {}
    for pair in pairs:
        task, equals, source = pair.partition("=")
        if not (task and equals and source):
            raise UserError(f"--task must be TASK=INPUT, got {pair!r}")
        inputs[task] = source
    return inputs


def _read(path: str, metric: str | None, filter_: str | None, id_field: str | None) -> Iterator[ItemResults]:
    if path.endswith(".parquet"):
        task = path.rsplit("/", 1)[-1].removesuffix(".parquet")
        for model, values in read_results_table(path).items():
            yield ItemResults(model, task, path, True, values=values)
        return
    name, where = _named(path)
    for file in _sample_files(where):
        yield _read_samples(file, name, metric, filter_, id_field)


def read_results_table(path: str) -> dict[str, dict[str, float]]:
    """Results from a Parquet file with columns model, item and correct (a bool or a share), by model and item.

    Args:
        path: local path or fsspec URL.

    Raises:
        UserError: no such file or column, a value outside [0, 1], or two results of one item.
    """
    try:
        with fsspec.open(path, "rb") as file:
            table = pq.read_table(io.BytesIO(file.read()), page_checksum_verification=True)
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise UserError(f"cannot read results {path}: {error_line(error)}") from None
    for column in COLUMNS:
        if column not in table.column_names:
            raise UserError(f"no column {column!r} in {path}; columns: {', '.join(table.column_names)}")
    results: dict[str, dict[str, float]] = {}
    for model, item, value in zip(*(table[column].to_pylist() for column in COLUMNS), strict=True):
        values = results.setdefault(str(model), {})
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            raise UserError(f"correct must be true, false or in [0, 1], got {value} for item {item!r} in {path}")
        if str(item) in values:
            raise UserError(f"model {str(model)!r} has two results for item {item!r} in {path}")
        values[str(item)] = float(value)
    if not results:
        raise UserError(f"{path} holds no results")
    return dict(sorted(results.items()))


def _named(path: str) -> tuple[str | None, str]:
    """The model's name in front of a path, if one is given."""
    name, equals, rest = path.partition("=")
    if not equals or "/" in name or not name or not rest:
        return None, path
    return name, rest


def _sample_files(path: str) -> list[str]:
    """A sample file, or those in a folder: the last of each model and task."""
    try:
        fs, root = fsspec.core.url_to_fs(path)
        if not fs.exists(root):
            raise UserError(f"no results {path}: no such file or folder")
        if not fs.isdir(root):
            return [path]
        files = sorted(fs.find(root))
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot read results {path}: {not_opened(error)}") from None
    last: dict[tuple[str, str], tuple[str, str]] = {}
    for file in files:
        if match := _SAMPLES.search(file.rsplit("/", 1)[-1]):
            key = (file.rsplit("/", 1)[0], match["task"])
            last[key] = max(last.get(key, ("", "")), (match["date"], file))
    if not last:
        raise UserError(f"{path} holds no sample files (samples_TASK_DATE.jsonl): run lm-eval with --log_samples")
    return [fs.unstrip_protocol(file) if "://" in path else file for _, file in last.values()]


def _read_samples(
    path: str, model: str | None, metric: str | None, filter_: str | None, id_field: str | None
) -> ItemResults:
    """One sample file of lm-evaluation-harness: one line per item and filter."""
    folder, _, base = path.rpartition("/")
    named = _SAMPLES.search(base)
    if named is None:
        raise UserError(f"{path} is not a sample file of lm-eval: its name is not samples_TASK_DATE.jsonl")
    model = model or folder.rpartition("/")[2] or "model"
    results = ItemResults(model, named["task"], path, id_field is not None, filter=filter_)
    filters: dict[str, None] = {}
    for number, sample in _lines(path):
        filters.setdefault(str(sample.get("filter", "none")))
        if results.filter is None:
            results.filter = next(iter(filters))
        if len(filters) > 1 and filter_ is None:
            raise UserError(f"{path} has results of several filters: choose with --filter one of {', '.join(filters)}")
        if str(sample.get("filter", "none")) == results.filter:
            _add(results, sample, f"{path} line {number}", metric, id_field)
    if not results.values:
        if filter_ is not None and filters:
            raise UserError(f"no filter {filter_!r} in {path}; {nearest(filter_, filters, 'it has')}")
        raise UserError(f"{path} holds no results")
    return results


def _lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    sample = json.loads(line)
                except ValueError:
                    raise UserError(f"{path} line {number} is not JSON") from None
                if not isinstance(sample, dict) or "doc_id" not in sample:
                    raise UserError(f"{path} line {number} is not a sample of lm-eval: it has no doc_id")
                yield number, sample
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read results {path}: {error_line(error)}") from None


def _add(results: ItemResults, sample: Mapping[str, Any], where: str, metric: str | None, id_field: str | None) -> None:
    if not results.values:
        results.metric = _find_metric(sample, metric, where)
    doc = sample.get("doc")
    item = sample["doc_id"]
    if id_field is not None:
        if not isinstance(doc, dict) or id_field not in doc:
            known = doc if isinstance(doc, dict) else []
            raise UserError(
                f"{where}: no field {id_field!r} in its doc; {nearest(id_field, map(str, known), 'it has')}"
            )
        item = doc[id_field]
    value = sample.get(results.metric)
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise UserError(f"{where}: {results.metric} must be a number in [0, 1], got {value!r}; --metric names another")
    if str(item) in results.values:
        raise UserError(f"{where}: a second result for item {item!r}")
    results.values[str(item)] = float(value)
    if isinstance(sample.get("doc_hash"), str):
        results.hashes[str(item)] = sample["doc_hash"]
    if len(results.fields) < LOOKED_AT:
        results.fields[str(item)] = list(_strings(doc))


def _find_metric(sample: Mapping[str, Any], metric: str | None, where: str) -> str:
    listed = sample.get("metrics")
    known = [str(name) for name in listed] if isinstance(listed, list) else []
    if not known:  # files of older versions have no list of metrics
        known = [
            name for name, value in sample.items() if name not in _NOT_METRICS and isinstance(value, bool | int | float)
        ]
    if metric is not None:
        if metric not in known:
            raise UserError(f"{where}: no metric {metric!r}; {nearest(metric, known, 'it has')}")
        return metric
    for name in METRICS:
        if name in known:
            return name
    if len(known) != 1:
        raise UserError(f"{where}: choose with --metric one of {', '.join(known) or '(no metric there)'}")
    return known[0]


def _strings(value: Any) -> Iterator[str]:
    """All texts in a document of a task, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
