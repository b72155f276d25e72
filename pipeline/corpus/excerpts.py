"""How documents begin, for people: one line of bounded length in which nothing hides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from pipeline.corpus.documents import collapsed, read_shard
from pipeline.corpus.keys import document_key
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, visible


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
