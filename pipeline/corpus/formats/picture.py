"""Picture files: each is a document, with its caption in a file next to it; those of a folder are one input."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.corpus.formats import base
from pipeline.corpus.formats.text import TEXT
from pipeline.corpus.notes import Notes
from pipeline.corpus.picture_files import file_beside
from pipeline.corpus.shard import Shard

IMAGE = "image"
"""Default column of pictures."""

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def is_picture(name: str) -> bool:
    """Whether a file name has the suffix of a picture."""
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES


def beside_pictures(fs: Any, pictures: Sequence[str]) -> list[str]:
    """The files that have a picture's name with another suffix, in order.

    Args:
        fs: the file system.
        pictures: paths of pictures in it.
    """
    stems = {os.path.splitext(path)[0] for path in pictures}
    folders = sorted({stem.rpartition("/")[0] for stem in stems})
    names = (str(name) for folder in folders for name in fs.ls(folder, detail=False))
    return sorted(name for name in names if os.path.splitext(name)[0] in stems and not is_picture(name))


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    most, follow = shard.limits.document_bytes, shard.follow_links
    for row, inner in enumerate(shard.files, shard.first_row):
        if watch(row, False):
            yield row, base.DEADLY, *base.NOTHING
            continue
        place, slash, name = (shard.path, "/", inner) if inner else shard.path.rpartition("/")
        place = place if slash else "."
        caption: Any = None
        if shard.caption_column is not None:
            caption = file_beside(f"{os.path.splitext(name)[0]}.{shard.caption_column}", place, most, follow)
        words = caption.decode("utf-8", "surrogateescape").strip() if isinstance(caption, bytes) else None
        yield row, file_beside(name, place, most, follow or not inner), None, None, None, words


PICTURE = base.Format(
    "picture",
    "file",
    TEXT.inspect,
    _rows,
    base.Exporter(TEXT.export.copy, TEXT.export.names),
    suffixes=PICTURE_SUFFIXES,
    only_pictures=True,
    place=5,
)
