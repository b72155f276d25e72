"""Inputs with documents that are not of their encoding, found where the documents are read before scoring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from pipeline.audit.records import Record
from pipeline.corpus.dialects import suggested_encoding
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.report.wording.files import other_encoding

_LEAST = 3  # documents that are not of the encoding, before a run stops for it


class Undecodable(Record):
    """An input of which documents that were read are not of its encoding, and another encoding is recognised."""

    name: str = Field(description="The input, as the configuration names it.")
    documents: int = Field(description="Documents of it that were read.")
    undecodable: int = Field(description="How many of these are not of the encoding that is set.")
    unit: str = Field(description="What a document is: a line or a file.")
    label: str = Field(description="The encoding that is set.")
    encoding: str = Field(description="The encoding that was recognised.")

    @property
    def sentence(self) -> str:
        """What is wrong, and the setting that corrects it."""
        counts = self.undecodable, self.documents
        return other_encoding(self.name, counts, self.unit, self.label, self.encoding)

    @property
    def stops(self) -> bool:
        """Whether the input as a whole is of another encoding: at least half of its documents are."""
        return self.undecodable >= max(_LEAST, self.documents / 2)


class DecodingTally:
    """Counts of the documents that were read of every input, and of those that are not of its encoding."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[Shard, list[int]]] = {}

    def readable(self, shard: Shard) -> Iterator[Document]:
        """The documents of a shard that have no problem; all are counted."""
        _, counts = self._counts.setdefault(shard.path, (shard, [0, 0]))
        encoded = "encoding" in format_named(shard.format).settings
        for document in read_shard(shard):
            counts[0] += 1
            if document.problem is None:
                counts[1] += encoded and "\0" in document.text  # as UTF-16 has that is read as UTF-8
                yield document
            elif document.problem[0] == "undecodable":
                counts[1] += 1

    def undecodable(self) -> list[Undecodable]:
        """The inputs with documents of another encoding."""
        described = (_described(shard, *counts) for shard, counts in self._counts.values() if counts[1])
        return [one for one in described if one is not None]


def check_decodable(inputs: Sequence[Undecodable]) -> None:
    """Stop at an input that is of another encoding as a whole: most of its documents would go to quarantine.

    Raises:
        UserError: such an input, with the encoding to be set.
    """
    for one in inputs:
        if one.stops:
            raise UserError(one.sentence)


def _described(shard: Shard, documents: int, undecodable: int) -> Undecodable | None:
    if "encoding" not in format_named(shard.format).settings:
        return None
    path = f"{shard.path}/{shard.files[0]}" if shard.files and shard.files[0] else shard.path
    encoding = suggested_encoding(path, shard.dialect)
    if encoding is None:
        return None
    return Undecodable(
        name=shard.name,
        documents=documents,
        undecodable=undecodable,
        unit=format_named(shard.format).unit,
        label=shard.dialect.label,
        encoding=encoding,
    )
