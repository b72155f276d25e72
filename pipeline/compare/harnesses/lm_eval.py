"""Sample files of lm-evaluation-harness (`--log_samples`): a line for each item and filter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec

from pipeline.compare.harnesses.base import (
    METRICS,
    Harness,
    ItemResults,
    ResultOptions,
    ResultPlace,
    find_metric,
    item_id,
)
from pipeline.errors import UserError, error_line, nearest

_SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.:+-]+)\.jsonl$")
_NOT_METRICS = {"doc_id", "doc_hash", "prompt_hash", "target_hash", "target", "doc", "filter", "metrics"}


def _place(path: str) -> ResultPlace:
    folder, _, base = path.rpartition("/")
    named = _SAMPLES.search(base)
    assert named is not None  # as `owns` says
    return ResultPlace(folder, folder.rpartition("/")[2] or "model", named["task"], named["date"])


def _read(path: str, options: ResultOptions) -> list[ItemResults]:
    place = _place(path)
    results = ItemResults(place.model, place.task, path, options.id_field is not None, filter=options.filter)
    filters = list(dict.fromkeys(str(sample.get("filter", "none")) for _, sample in _lines(path)))
    if len(filters) > 1 and options.filter is None:
        raise UserError(f"{path} has results of several filters: choose with --filter one of {', '.join(filters)}")
    if options.filter is not None and filters and options.filter not in filters:
        raise UserError(f"no filter {options.filter!r} in {path}; {nearest(options.filter, filters, 'it has')}")
    results.filter = options.filter if options.filter is not None else next(iter(filters), None)
    for number, sample in _lines(path):
        if str(sample.get("filter", "none")) == results.filter:
            _add(results, sample, f"{path} line {number}", options)
    if not results.values:
        raise UserError(f"{path} holds no results")
    return [results]


def _lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    sample = json.loads(line)
                except (ValueError, RecursionError):
                    raise UserError(f"{path} line {number} is not JSON") from None
                if not isinstance(sample, dict) or "doc_id" not in sample:
                    raise UserError(f"{path} line {number} is not a sample of lm-eval: it has no doc_id")
                yield number, sample
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read results {path}: {error_line(error)}") from None


def _add(results: ItemResults, sample: Mapping[str, Any], where: str, options: ResultOptions) -> None:
    if not results.values:
        results.metric = find_metric(_metrics(sample), options.metric, where)
    doc = sample.get("doc")
    item = sample["doc_id"] if options.id_field is None else item_id(doc, options.id_field, where)
    digest = sample.get("doc_hash")
    results.add(item, sample.get(results.metric), doc, digest if isinstance(digest, str) else None, where)


def _metrics(sample: Mapping[str, Any]) -> list[str]:
    """The names of the metrics of a sample; files of older versions have no list of them."""
    listed = sample.get("metrics")
    known = [str(name) for name in listed] if isinstance(listed, list) else []
    return known or [
        name
        for name, value in sample.items()
        if name not in _NOT_METRICS and (name in METRICS or isinstance(value, bool | int | float))
    ]


LM_EVAL = Harness(
    "lm-eval",
    "sample files of lm-eval (samples_TASK_DATE.jsonl, written with --log_samples)",
    lambda name: _SAMPLES.search(name) is not None,
    _read,
    _place,
    filters=True,
)
