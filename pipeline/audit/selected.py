"""The selected documents of a selection: sorted and written in pieces, however many there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import PurePath

import pyarrow as pa

from pipeline.store.files import Store
from pipeline.store.pieces import SortedRows, copy_file, replaced, write_pieces

ORDER = ("p_value", "source", "row")
"""Columns by which selected documents ascend; no two documents share source and row."""

_PLACES = pa.schema([("task", pa.string()), ("row", pa.int64())])


def write_selected(store: Store, folder: str, selected: SortedRows, clean: bool) -> None:
    """Write the selected documents of a selection.

    Args:
        store: the run directory.
        folder: of the selection.
        selected: their rows.
        clean: whether the list of clean documents is written too, as Parquet and as indices for a harness.

    Raises:
        UserError: the run directory cannot be written to.
    """
    write_pieces(store, f"{folder}/selected.parquet", selected.schema, selected.pieces())
    if clean:
        copy_file(store, f"{folder}/selected.parquet", f"{folder}/clean.parquet")
        _write_clean_ids(store, f"{folder}/clean_ids.json", selected)


def _write_clean_ids(store: Store, name: str, selected: SortedRows) -> None:
    """Write the selected as `{"task": [indices]}`, which lm-evaluation-harness takes for --samples.

    A task is an input file, by its name without endings; an index is a row of it.
    """
    places = SortedRows(_PLACES, ["task", "row"])
    try:
        for piece in selected.pieces():
            sources = piece["source"].combine_chunks().dictionary_encode()
            tasks = pa.array([_task_of(source) for source in sources.dictionary.to_pylist()], pa.string())
            places.add(pa.table([tasks.take(sources.indices), piece["row"].cast(pa.int64())], schema=_PLACES))
        with replaced(store, name) as file:
            for text in _as_json(places):
                file.write(text.encode())
    finally:
        places.close()


def _task_of(source: str) -> str:
    return PurePath(source).name.split(".")[0]


def _as_json(places: SortedRows) -> Iterator[str]:
    """The lines that `to_json` would give for the whole mapping, a piece at a time."""
    if not len(places):
        yield "{}\n"
        return
    last = None
    for piece in places.pieces():
        for task, rows in groupby(zip(piece["task"].to_pylist(), piece["row"].to_pylist(), strict=True), itemgetter(0)):
            lines = ",\n    ".join(str(row) for _, row in rows)
            if task == last:
                yield f",\n    {lines}"
            else:
                ending = "{" if last is None else "\n  ],"
                yield f"{ending}\n  {json.dumps(task, ensure_ascii=False)}: [\n    {lines}"
                last = task
    yield "\n  ]\n}\n"
