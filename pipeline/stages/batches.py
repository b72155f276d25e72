"""The windows of a shard and the batches of a window. They follow from the shard alone, and so do its scores."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.corpus.documents import Document
from pipeline.stages.base import BatchSize, Entry, Window


def windows(documents: Iterator[Document], most: Window) -> Iterator[list[Document]]:
    """A bounded number of documents at a time, in order."""
    window: list[Document] = []
    characters = kept = 0
    for document in documents:
        window.append(document)
        characters += len(document.text) + len(document.picture or b"")
        kept += min(len(document.text), most.kept_of_one)
        if len(window) >= most.documents or characters >= most.characters or kept >= most.kept:
            yield window
            window, characters, kept = [], 0, 0
    if window:
        yield window


def longest_first(entries: list[Entry], size: BatchSize | None) -> list[list[Entry]]:
    """The batches of a window: where memory is too short for one of them, that shows with the first."""
    return list(_batches(entries, size))[::-1]


def _batches(entries: list[Entry], size: BatchSize | None) -> Iterator[list[Entry]]:
    """Documents of like length together, as many as fit the size; at least one."""
    if size is None:
        if entries:
            yield entries
        return
    batch: list[Entry] = []
    unpadded = 0
    for entry in sorted(entries, key=lambda entry: (entry.tokens, entry.document.row)):
        unpadded += entry.tokens
        padded = entry.tokens * (len(batch) + 1)
        if batch and (padded > size.tokens or (size.padding is not None and padded - unpadded > size.padding)):
            yield batch
            batch, unpadded = [], entry.tokens
        batch.append(entry)
    if batch:
        yield batch
