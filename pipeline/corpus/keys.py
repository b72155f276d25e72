"""By what two documents are one, or near copies of one another: keys and sketches of texts and of pictures."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.corpus.documents import Document, text_key
from pipeline.corpus.near_copies import sketches_of_texts
from pipeline.corpus.pictures import open_picture, picture_key, picture_sketches

Content = tuple[int, bytes]
"""A 64-bit key, equal for equal documents, and a sketch of 128 bytes, alike for near copies."""


def contents_of(documents: Sequence[Document]) -> list[Content | None]:
    """Key and sketch of each document, of its picture if it has one; None where that cannot be decoded.

    Args:
        documents: without a problem, all texts or all pictures.
    """
    if not any(document.picture is not None for document in documents):
        keys = [text_key(document.text) for document in documents]
        return list(zip(keys, sketches_of_texts([document.text for document in documents]), strict=True))
    return [_content_of_picture(document.picture) for document in documents]


def document_key(document: Document) -> int | None:
    """The key of a document; None for a picture that cannot be decoded."""
    if document.picture is None:
        return text_key(document.text)
    content = _content_of_picture(document.picture)
    return None if content is None else content[0]


def _content_of_picture(data: bytes | None) -> Content | None:
    if data is None:
        return None
    try:
        picture = open_picture(data)
    except ValueError:
        return None
    return picture_key(picture), picture_sketches([picture])[0]
