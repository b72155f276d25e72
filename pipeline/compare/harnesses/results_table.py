"""Tables of results in Parquet or CSV, with the columns model, item and correct."""

from __future__ import annotations

import io
from collections.abc import Iterator
from decimal import Decimal
from shlex import quote
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from pipeline.compare.harnesses.base import Harness, ItemResults, ResultOptions
from pipeline.config.dialect import LONGEST_MARK, mark_of
from pipeline.errors import UserError, error_line

COLUMNS = ("model", "item", "correct")
_SUFFIXES = (".parquet", ".csv")
_WORDS = {"true": 1.0, "false": 0.0}


def read_results_table(path: str) -> dict[str, dict[str, float]]:
    """Results from a table with columns model, item and correct (a bool or a share), by model and item.

    Args:
        path: local path or fsspec URL of a Parquet or CSV file.

    Raises:
        UserError: no such file or column, a value outside [0, 1], or two results of one item.
    """
    try:
        with fsspec.open(path, "rb") as file:
            names, table = _parsed(path, file.read())
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise UserError(f"cannot read results {path}: {error_line(error)}") from None
    for column in COLUMNS:
        if (times := names.count(column)) > 1:
            raise UserError(f"column {column!r} occurs {times} times in {path}: rename all but one")
        if column not in names:
            raise UserError(f"no column {column!r} in {path}; columns: {', '.join(names)}")
    results: dict[str, dict[str, float]] = {}
    for row, (model, item, value) in enumerate(zip(*(table[column].to_pylist() for column in COLUMNS), strict=True), 1):
        if model in (None, "") or item in (None, ""):
            raise UserError(f"{path}: row {row} has no {'model' if model in (None, '') else 'item'}")
        values, share = results.setdefault(str(model), {}), _share(value)
        if share is None:
            raise UserError(f"correct must be true, false or in [0, 1], got {value} for item {item!r} in {path}")
        if str(item) in values:
            raise UserError(f"model {str(model)!r} has two results for item {item!r} in {path}")
        values[str(item)] = share
    if not results:
        raise UserError(f"{path} holds no results")
    return dict(sorted(results.items()))


def _parsed(path: str, data: bytes) -> tuple[list[str], pa.Table]:
    """The names of all columns of a file, and the columns that count.

    Those of CSV are texts without the blanks around them, so that ids such as 007 stay as they are.
    """
    if not path.endswith(".csv"):
        # not pq.read_table, which refuses a repeated column even if it is not read
        parquet = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
        names = parquet.schema_arrow.names
        return names, parquet.read(columns=[name for name in COLUMNS if name in names])
    encoding, _ = mark_of(data[:LONGEST_MARK]) or ("utf-8", b"")
    try:
        data = data.decode(encoding).removeprefix("\ufeff").encode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read results {path}: byte {error.start} is not {encoding.upper()}; save the file in UTF-8: "
            f"iconv -f cp1252 -t utf-8 {quote(path)} > utf8.csv"
        ) from None
    names = pa.csv.open_csv(io.BytesIO(data)).schema.names
    texts = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    table = pa.csv.read_csv(io.BytesIO(data), convert_options=texts)
    columns = [pc.utf8_trim_whitespace(column) for column in table.columns]
    names = [name.strip() for name in table.column_names]
    return names, pa.Table.from_arrays(columns, names=names)


def _share(value: Any) -> float | None:
    """A result in [0, 1]; None for another value."""
    if isinstance(value, str):
        try:
            value = _WORDS[word] if (word := value.strip().lower()) in _WORDS else float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, bool | int | float | Decimal) and 0 <= value <= 1 else None


def _read(path: str, options: ResultOptions) -> Iterator[ItemResults]:
    task = path.rsplit("/", 1)[-1].rpartition(".")[0]
    for model, values in read_results_table(path).items():
        yield ItemResults(model, task, path, True, any_input=True, values=values)


TABLE = Harness(
    "table", "Parquet or CSV with the columns model, item, correct", lambda name: name.endswith(_SUFFIXES), _read
)
