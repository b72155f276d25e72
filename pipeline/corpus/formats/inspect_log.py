"""Logs of inspect_ai (`.eval`): a row for each item, with the means of its scores over epochs.

The columns are those of an item, `id`, `input` (of messages their texts), `target`, `choices` and `metadata`, with
`scores`, an object of numbers by the names of scorers, and `answer`, the model's first one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.formats import base
from pipeline.corpus.inspect_logs import EvalItem, open_log
from pipeline.corpus.notes import Notes
from pipeline.corpus.shard import InputFile, Shard


@lru_cache(maxsize=1)
def _rows_of_log(path: str, mark: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The rows of a log, which is read whole; the mark is that of its version."""
    return [_row(item) for item in open_log(path).items()]


def _row(item: EvalItem) -> dict[str, Any]:
    text = item.input if isinstance(item.input, str) else "\n\n".join(message["content"] for message in item.input)
    return {
        "id": item.id,
        "input": text,
        "target": item.target,
        "choices": item.choices,
        "answer": item.answers[0] if item.answers else None,
        "scores": {name: item.mean_score(name) for name in item.scores},
        "metadata": dict(item.metadata),
    }


def _column_names(rows: list[dict[str, Any]]) -> list[str]:
    """The columns, with the names of scores and of metadata."""
    nested = [f"{name}.{inner}" for name in ("scores", "metadata") for row in rows for inner in row[name]]
    return list(dict.fromkeys([*(rows[0] if rows else ()), *nested]))


def _all(shard: Shard) -> list[dict[str, Any]]:
    return _rows_of_log(shard.path, (shard.content,))


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    rows = _rows_of_log(entry.path, (entry.content,))
    columns = _column_names(rows)
    base.check_columns(source, entry.name, columns)
    base.check_texts(source, entry.name, rows, columns)
    return replace(entry, rows=len(rows))


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    start = shard.start
    for number, row in enumerate(_all(shard)[start : shard.stop], start):
        if watch(number, False):
            yield number, base.DEADLY, *base.NOTHING
        else:
            yield number, base.field_value(row, shard.text, base.MISSING), *base.other_fields(row, shard)


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Write the kept rows as JSONL: a log of another data set would not be one of inspect_ai."""
    with open_file(f"{source.name}.jsonl") as sink:
        for _, row in base.kept_numbered(enumerate(_all(source.first)), marks):
            sink.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")


def _records(source: base.ExportSource) -> base.Records:
    yield from enumerate(_all(source.first))


INSPECT_LOG = base.Format(
    "eval",
    "row",
    _inspect,
    _rows,
    export=base.Exporter(_copy, lambda source: [f"{source.name}.jsonl"], records=_records),
    columns=lambda shard: _column_names(_all(shard)),
    suffixes=(".eval",),
    inside=".zip",
)
