"""Keys: by what two documents are one, near-duplicates, or of one group, texts or pictures; and how they begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.corpus.documents import Document, collapsed, id_key, read_shard, text_key
from pipeline.corpus.near_duplicates import SKETCH, SKETCH_TYPE, sketches_of_texts, stack_sketches
from pipeline.corpus.pictures import open_picture, picture_key, picture_sketches
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, visible

KEY_COLUMNS = ("id_key", "text_key", "sketch", "group", "n_tokens")
"""Of a score file: what keys are read from."""

_AT_ONCE, _CHARACTERS_AT_ONCE = 256, 1 << 20  # documents of which keys are made together


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """What documents are compared by, in their order. Everything that depends on equal or similar documents reads it.

    A picture that cannot be decoded has length 0, and its text key and sketch mean nothing.
    """

    id: np.ndarray  # int64, (documents,): equal for equal ids
    text: np.ndarray  # int64, (documents,): equal for equal normalised texts, or equal pixels
    sketch: np.ndarray  # uint8, (documents, 128): alike for near-duplicates
    group: pa.ChunkedArray  # string, (documents,); null for none
    length: np.ndarray  # int64, (documents,): words of a text, bytes of a picture; of a scored document its tokens

    @classmethod
    def of(cls, documents: Sequence[Document], text: Callable[[Document], str] = attrgetter("text")) -> Keys:
        """The keys of documents, of their pictures if they have some.

        Args:
            documents: without a problem, all texts or all pictures.
            text: what is compared of a text; by default all of it.
        """
        if any(document.picture is not None for document in documents):
            contents = [_of_picture(document.picture) for document in documents]
        else:
            texts = [text(document) for document in documents]
            lengths = [max(1, len(each.split())) for each in texts]
            contents = list(zip(map(text_key, texts), sketches_of_texts(texts), lengths, strict=True))
        return cls(
            np.array([id_key(document.doc_id) for document in documents], dtype=np.int64),
            np.array([key for key, _, _ in contents], dtype=np.int64),
            stack_sketches([sketch for _, sketch, _ in contents]),
            pa.chunked_array([pa.array([document.group for document in documents], pa.string())]),
            np.array([length for _, _, length in contents], dtype=np.int64),
        )

    @classmethod
    def of_table(cls, table: pa.Table) -> Keys:
        """The keys of scored documents, from a table with `KEY_COLUMNS`."""
        return cls(
            table["id_key"].to_numpy(),
            table["text_key"].to_numpy(),
            stack_sketches(table["sketch"].to_pylist()),
            table["group"].cast(pa.string()),
            table["n_tokens"].to_numpy().astype(np.int64),
        )

    @classmethod
    def joined(cls, parts: Iterable[Keys]) -> Keys:
        """The keys of several parts, one after the other; of none where there is no part."""
        every = [NO_KEYS, *parts]
        id_keys, texts, sketches, lengths = (
            np.concatenate([getattr(part, name) for part in every]) for name in ("id", "text", "sketch", "length")
        )
        group = pa.chunked_array([chunk for part in every for chunk in part.group.chunks], pa.string())
        return cls(id_keys, texts, sketches, group, lengths)

    def __len__(self) -> int:
        """How many documents there are."""
        return int(self.id.size)

    def take(self, chosen: np.ndarray) -> Keys:
        """The keys of some of the documents: bool, (documents,), or int64 places."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        group = self.group.take(pa.array(places))
        return Keys(self.id[places], self.text[places], self.sketch[places], group, self.length[places])

    def equal(self, others: Keys) -> np.ndarray:
        """Which documents have the text, or the pixels, of one of the others: bool, (documents,)."""
        return np.asarray(np.isin(self.text, others.text))

    @property
    def grouped(self) -> np.ndarray:
        """Which documents have a group: bool, (documents,)."""
        return np.asarray(pc.is_valid(self.group).to_numpy(), dtype=bool)

    def group_keys(self) -> np.ndarray:
        """A 64-bit key of each group, equal for equal names; 0 for none: int64, (documents,)."""
        codes, names = self._coded_groups()
        keys = np.array([*map(id_key, names), 0], dtype=np.int64)
        return keys[codes]

    def group_numbers(self) -> np.ndarray:
        """Groups by number from 0, in the order of their first documents; -1 for none: int64, (documents,)."""
        return self._coded_groups()[0]

    def _coded_groups(self) -> tuple[np.ndarray, list[str]]:
        """The number of each document's group, int64, -1 for none; and the names of the groups."""
        encoded = self.group.combine_chunks().dictionary_encode()
        codes = encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        return codes, encoded.dictionary.to_pylist()


NO_KEYS = Keys(
    np.empty(0, dtype=np.int64),
    np.empty(0, dtype=np.int64),
    np.empty((0, SKETCH), dtype=np.uint8),
    pa.chunked_array([], pa.string()),
    np.empty(0, dtype=np.int64),
)
"""Of no document."""


def keyed(
    documents: Iterable[Document], text: Callable[[Document], str] = attrgetter("text")
) -> Iterator[tuple[list[Document], Keys]]:
    """Documents in parts of a bounded size with their keys; those before a damaged place, and then the error.

    Args:
        documents: as of `Keys.of`.
        text: as of `Keys.of`.
    """
    some: list[Document] = []
    characters = 0
    try:
        for document in documents:
            some.append(document)
            characters += content_size(document)
            if len(some) == _AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
                yield some, Keys.of(some, text)
                some, characters = [], 0
    except UserError:
        yield some, Keys.of(some, text)
        raise
    yield some, Keys.of(some, text)


def content_size(document: Document) -> int:
    """Characters of a document's text and bytes of its picture."""
    return len(document.text) + len(document.picture or b"")


def document_key(document: Document) -> int | None:
    """The text key of one document; None for a picture that cannot be decoded."""
    if document.picture is None:
        return text_key(document.text)
    key, _, length = _of_picture(document.picture)
    return key if length else None


def sketch_column(sketches: np.ndarray) -> pa.Array:
    """Sketches, uint8, (documents, 128), as a column of a file."""
    return pa.array(list(map(bytes, sketches)), SKETCH_TYPE)


def _of_picture(data: bytes | None) -> tuple[int, bytes, int]:
    """Text key, sketch and length of a picture."""
    try:
        picture = open_picture(data or b"")
    except ValueError:
        return 0, bytes(SKETCH), 0
    return picture_key(picture), picture_sketches([picture])[0], len(data or b"")


def excerpt_of(text: str, characters: int) -> str:
    """The beginning of a text in one line: at most so many characters, and an ellipsis where it goes on."""
    start = collapsed(text[: 8 * characters])
    cut = len(start) > characters or len(text) > 8 * characters
    return visible(start[:characters].rstrip()) + ("…" if cut else "")


def excerpts_of(shard: Shard, rows: Sequence[int], keys: Sequence[int], characters: int) -> list[str | None]:
    """How single documents of a shard begin. Memory holds one batch of texts.

    Args:
        shard: that holds them.
        rows: their numbers in the input.
        keys: of their texts when they were scored (`text_key`).
        characters: of an excerpt, at most.

    Returns:
        One excerpt a row; None where the text is gone, or is no longer the one that was scored.
    """
    excerpts = {
        row: excerpt_of(text, characters) for row, text in same_texts(shard, dict(zip(rows, keys, strict=True)))
    }
    return [excerpts.get(row) for row in rows]


def same_texts(shard: Shard, keys: Mapping[int, int]) -> Iterator[tuple[int, str]]:
    """The texts of single documents of a shard that are still those that were scored. Memory holds one batch of texts.

    Args:
        shard: that holds them.
        keys: number of the row in the input -> key of its text when it was scored (`text_key`).

    Returns:
        Row and text, in the order of the shard; it ends early where the file is gone or another.
    """
    wanted = dict(keys)
    if not wanted:
        return
    try:
        with closing(read_shard(shard, wanted=keys)) as documents:
            for document in documents:
                if document.problem is None:
                    if wanted.pop(document.row) == document_key(document):
                        yield document.row, document.text
                    if not wanted:
                        break
    except (UserError, LookupError, ValueError, OSError):  # gone, or another file: an answer needs no text
        return
