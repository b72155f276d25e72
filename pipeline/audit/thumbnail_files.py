"""Where a run directory keeps thumbnails, and how they are read: nothing of a model, so that a page is quickly made."""

from __future__ import annotations

import pyarrow as pa

from pipeline.store.files import Store

THUMBNAIL_SCHEMA = pa.schema([("source", pa.string()), ("row", pa.int64()), ("thumbnail", pa.binary())])


def thumbnails_file(selection: str) -> str:
    """Where a run directory keeps the thumbnails of a selection."""
    return f"selection/{selection}/thumbnails.parquet"


def read_thumbnails(store: Store, selection: str) -> dict[tuple[str, int], bytes]:
    """The thumbnails of a selection, JPEG files, by input and row; none where the documents are texts."""
    name = thumbnails_file(selection)
    if not store.exists(name):
        return {}
    table = store.read_table(name)
    places = zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)
    return dict(zip(places, table["thumbnail"].to_pylist(), strict=True))
