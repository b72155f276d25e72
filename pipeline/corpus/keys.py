"""Keys by which documents are equal, near-duplicates or of one group, for texts and pictures; and excerpts."""

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
from pipeline.corpus.picture_files import open_picture, picture_key, picture_sketches
from pipeline.corpus.scripts import count_units
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, visible

KEY_COLUMNS = ("id_key", "text_key", "sketch", "group", "n_tokens")
"""Columns of a score file that keys are read from."""

_AT_ONCE, _CHARACTERS_AT_ONCE = 256, 1 << 20  # documents whose keys are computed together


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Keys of documents, in order: the basis of all comparisons for equal or similar documents.

    A picture that cannot be decoded has length 0; its text key and sketch are meaningless.
    """

    id: np.ndarray  # int64, (documents,): equal for equal ids
    text: np.ndarray  # int64, (documents,): equal for equal normalised texts, or equal pixels
    sketch: np.ndarray  # uint8, (documents, 128): alike for near-duplicates
    group: pa.ChunkedArray  # string, (documents,); null for none
    length: np.ndarray  # int64, (documents,): `units` of a text, bytes of a picture, tokens of a scored document

    @classmethod
    def of(cls, documents: Sequence[Document], text: Callable[[Document], str] = attrgetter("text")) -> Keys:
        """The keys of documents, or of their pictures if they have any.

        Args:
            documents: documents without a problem, all texts or all pictures.
            text: returns the part of a text that is compared; by default all of it.
        """
        if any(document.picture is not None for document in documents):
            contents = [_of_picture(document.picture) for document in documents]
        else:
            texts = [text(document) for document in documents]
            lengths = [max(1, count_units(each)) for each in texts]
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
        """The concatenated keys of several parts; empty if there are none."""
        every = [NO_KEYS, *parts]
        id_keys, texts, sketches, lengths = (
            np.concatenate([getattr(part, name) for part in every]) for name in ("id", "text", "sketch", "length")
        )
        group = pa.chunked_array([chunk for part in every for chunk in part.group.chunks], pa.string())
        return cls(id_keys, texts, sketches, group, lengths)

    def __len__(self) -> int:
        """Number of documents."""
        return int(self.id.size)

    def take(self, chosen: np.ndarray) -> Keys:
        """The keys of some of the documents: bool, (documents,), or int64 places."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        group = self.group.take(pa.array(places))
        return Keys(self.id[places], self.text[places], self.sketch[places], group, self.length[places])

    def equal(self, others: Keys) -> np.ndarray:
        """Whether each document has the text or the pixels of one of the others: bool, (documents,)."""
        return np.asarray(np.isin(self.text, others.text))

    @property
    def grouped(self) -> np.ndarray:
        """Whether each document has a group: bool, (documents,)."""
        return np.asarray(pc.is_valid(self.group).to_numpy(), dtype=bool)

    def group_keys(self) -> np.ndarray:
        """A 64-bit key of each group, equal for equal names; 0 for none: int64, (documents,)."""
        codes, names = self._coded_groups()
        keys = np.array([*map(id_key, names), 0], dtype=np.int64)
        return keys[codes]

    def group_numbers(self) -> np.ndarray:
        """Group numbers from 0, in the order of their first documents; -1 for none: int64, (documents,)."""
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
"""The keys of no documents."""


def keyed(
    documents: Iterable[Document], text: Callable[[Document], str] = attrgetter("text")
) -> Iterator[tuple[list[Document], Keys]]:
    """Documents with their keys, in parts of bounded size; those before a damaged row are returned before the error.

    Args:
        documents: as in `Keys.of`.
        text: as in `Keys.of`.
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
    """Number of characters of a document's text plus bytes of its picture."""
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


def make_excerpt(text: str, characters: int) -> str:
    """The start of a text in one line: at most `characters`, with an ellipsis if it is truncated."""
    start = collapsed(text[: 8 * characters])
    cut = len(start) > characters or len(text) > 8 * characters
    return visible(start[:characters].rstrip()) + ("…" if cut else "")


def make_excerpts(shard: Shard, rows: Sequence[int], keys: Sequence[int], characters: int) -> list[str | None]:
    """Excerpts of single documents of a shard. Memory holds one batch of texts.

    Args:
        shard: shard that holds the documents.
        rows: their row numbers in the input.
        keys: keys (`text_key`) of their texts when they were scored.
        characters: maximum length of an excerpt.

    Returns:
        One excerpt per row; None if the text is missing or differs from the scored one.
    """
    excerpts = {
        row: make_excerpt(text, characters) for row, text in same_texts(shard, dict(zip(rows, keys, strict=True)))
    }
    return [excerpts.get(row) for row in rows]


def same_texts(shard: Shard, keys: Mapping[int, int]) -> Iterator[tuple[int, str]]:
    """The texts of single documents of a shard that are unchanged since scoring. Memory holds one batch of texts.

    Args:
        shard: shard that holds the documents.
        keys: row number in the input -> key (`text_key`) of its text when it was scored.

    Returns:
        Row and text, in the order of the shard; the iteration stops early if the file is missing or was replaced.
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
    except (UserError, LookupError, ValueError, OSError):  # missing or replaced file: results do not need the text
        return
