"""Rows that grow: a table holds only what is new, and goes on from the tables of earlier receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from pipeline.store.tables import read_filed

_OUTCOME = ("reason", "problem")
"""Columns of which the latest table says all."""

Rows = dict[int, dict[str, Any]]
"""Columns of each row, by its number."""


def filed_rows(store: Store, receipt: Receipt) -> Rows:
    """The rows of a receipt, by number: its own and what they go on from.

    Raises:
        DamagedError: a file is gone, or is not the one that was filed.
    """
    rows: Rows = {}
    for name in (*receipt.earlier, receipt.data):
        for row in read_filed(store, receipt, name=name).to_pylist():
            earlier = rows.get(row["row"])
            rows[row["row"]] = row if earlier is None else _joined(earlier, row)
    return rows


def new_rows(rows: Rows, earlier: Rows) -> Iterator[dict[str, Any]]:
    """What a table has to hold beside those that it goes on from, in the order of the rows.

    A list goes on from the earlier one; another value that has not changed is left out.
    """
    for number in sorted(rows):
        before = earlier.get(number)
        if before is None:
            yield rows[number]
            continue
        row = {**rows[number], **{name: rows[number].get(name) for name in _OUTCOME}}
        rest = {name: _rest(name, value, before) for name, value in row.items()}
        if any(isinstance(value, list) and value for value in rest.values()) or row["reason"] != before["reason"]:
            yield rest


def _rest(name: str, value: Any, before: Mapping[str, Any]) -> Any:
    if name in ("doc_id", "row", *_OUTCOME):
        return value
    if isinstance(value, list):
        return value[len(before[name] or []) :]
    return None if value == before[name] else value


def _joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(later)
    for name, value in earlier.items():
        if isinstance(value, list):
            row[name] = [*value, *(later[name] or [])]
        elif name not in _OUTCOME and later[name] is None:
            row[name] = value
    return row
