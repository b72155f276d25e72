"""Tables that a receipt names: written with a digest, and checked against it when they are read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import DamagedError, UserError
from pipeline.store.files import Store
from pipeline.store.receipts import REMADE, FileRecord, Receipt

_checked: set[tuple[str, str, object]] = set()
"""What this process has checked: address, digest, and on a local disk the file's time of change.

Selection reads a score file several times over; its digest is taken the first time. On a local disk a file that was
changed since is checked again. An object store's objects never change under their name: each attempt has its own.
"""


def write_filed(store: Store, name: str, table: pa.Table) -> FileRecord:
    """Write a Parquet file, atomically, and say what its receipt is to say of it."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    data = buffer.getvalue()
    store.write(name, data)
    return FileRecord(len(table), len(data), hashlib.sha256(data).hexdigest())


def read_filed(
    store: Store, receipt: Receipt, columns: Sequence[str] | None = None, name: str | None = None
) -> pa.Table:
    """A table that a receipt names, by default its data.

    Raises:
        DamagedError: the file is gone, or is not the one that was filed.
        UserError: it cannot be read now.
    """
    name = receipt.data if name is None else name
    record = receipt.files[name]
    where = f"{store.url}/{name}"
    try:
        data = check_filed(store, name, record)
        table = _table_of(data, columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"cannot read {where}: {' '.join(str(error).split())}") from None
    if len(table) != record.rows:
        raise DamagedError(f"{where} is damaged: {len(table)} rows, {record.rows} were filed; {REMADE}")
    return table


def _table_of(data: bytes, columns: Sequence[str] | None) -> pa.Table:
    """A table of a few thousand rows: `pq.read_table` takes four times as long, for threads that it has no use for.

    Raises:
        pa.ArrowInvalid: it is no such table, or a column is not in it.
    """
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        for name in columns or ():
            if name not in file.schema_arrow.names:
                raise pa.ArrowInvalid(f"it has no column {name!r}")
        table = file.read(columns=None if columns is None else list(columns), use_threads=False)
    return table if columns is None else table.select(list(columns))


def check_filed(store: Store, name: str, record: FileRecord) -> bytes:
    """The content of a file, which has the digest that its receipt gives.

    Raises:
        DamagedError: the file is gone, or is not the one that was filed.
        OSError: it cannot be read now.
    """
    where = f"{store.url}/{name}"
    try:
        # Before it is read: a change in between is seen the next time.
        state = (where, record.sha256, os.stat(store.path(name)).st_mtime_ns if store.local else None)
        data = store.read_fixed(name)
    except FileNotFoundError:
        raise DamagedError(f"{where} is gone, and its receipt names it; {REMADE}") from None
    if state not in _checked:
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise DamagedError(f"{where} is damaged: its content is not what was filed; {REMADE}")
        _checked.add(state)
    return data
