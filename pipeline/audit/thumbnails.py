"""Thumbnails of the top selected pictures, for the report: small, and with nothing in them but pixels."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.audit.scored import Scored
from pipeline.audit.thumbnail_files import THUMBNAIL_SCHEMA, thumbnails_file
from pipeline.corpus.documents import read_shard
from pipeline.corpus.pictures import open_picture, picture_key
from pipeline.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST = 500
"""Thumbnails of a selection, at most."""

SIDE = 96
"""Pixels of a thumbnail's longer side."""


def thumbnail_of(picture: Image) -> bytes:
    """A picture, RGB, as a small JPEG file of its pixels alone: nothing that stood in its own file is in it."""
    from PIL import Image

    small = Image.frombytes("RGB", picture.size, picture.tobytes())
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=75)
    return file.getvalue()


def write_thumbnails(scored: Scored, selected: Mapping[str, pa.Table]) -> dict[str, dict[str, str]]:
    """Write the thumbnails of selected pictures that are still those that were scored.

    Args:
        scored: the score shards.
        selected: by name of the selection its top documents, with columns source and row.

    Returns:
        By selection, the SHA-256 of its file of thumbnails, by name; nothing where it has none.
    """
    written: dict[str, dict[str, str]] = {name: {} for name in selected}
    for name, rows in selected.items():
        if len(rows):
            file = thumbnails_file(name)
            written[name][file] = scored.store.write_table(file, _thumbnails_of(scored, rows))
    return written


def _thumbnails_of(scored: Scored, selected: pa.Table) -> pa.Table:
    wanted: defaultdict[str, set[int]] = defaultdict(set)
    for source, row in zip(selected["source"].to_pylist(), selected["row"].to_pylist(), strict=True):
        wanted[source].add(row)
    rows = []
    for receipt in scored.of("audit"):
        shard = scored.shards[receipt.shard]
        if shard.name not in wanted:
            continue
        table = scored.table(receipt, ["row", "text_key"])
        pairs = zip(table["row"].to_pylist(), table["text_key"].to_pylist(), strict=True)
        keys = {row: key for row, key in pairs if row in wanted[shard.name]}
        try:
            for document in read_shard(shard) if keys else ():
                if document.row in keys and document.picture is not None:
                    picture = open_picture(document.picture)
                    if picture_key(picture) == keys[document.row]:
                        row = {"source": shard.name, "row": document.row, "thumbnail": thumbnail_of(picture)}
                        rows.append(row)
        except (UserError, ValueError, LookupError, OSError):  # gone, or another file: an answer needs no picture
            continue
    return pa.Table.from_pylist(rows, schema=THUMBNAIL_SCHEMA)
