"""Findings of the reader of each input before any model is loaded: documents that it cannot read, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import Field

from pipeline.config.corpus import Role
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.input_files import suggested_encoding
from pipeline.corpus.notes import Notes
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.run.records import Record
from pipeline.run.remedies import other_encoding

NOTE, WARNING = "note: ", "warning: "
"""Prefix of the line of a check that did not pass."""

_LEAST = 3  # undecodable documents that stop a run


class Undecodable(Record):
    """An input with documents that are not in its configured encoding, where another encoding is recognised."""

    name: str = Field(description="Name of the input in the configuration.")
    documents: int = Field(description="Number of its documents that were read.")
    undecodable: int = Field(description="Number of these that are not in the configured encoding.")
    unit: str = Field(description="Unit of a document: a line or a file.")
    label: str = Field(description="The configured encoding.")
    encoding: str = Field(description="The recognised encoding.")

    @property
    def sentence(self) -> str:
        """States the fault and the setting that corrects it."""
        counts = self.undecodable, self.documents
        return other_encoding(self.name, counts, self.unit, self.label, self.encoding)

    @property
    def stops(self) -> bool:
        """Whether the whole input is in another encoding: at least half of its documents are."""
        return self.undecodable >= max(_LEAST, self.documents / 2)


class InputFindings(Record):
    """Findings of the reader of an input: documents that it cannot read, and notes."""

    name: str = Field(description="Name of the input in the configuration.")
    documents: int = Field(description="Number of its documents that were read.")
    reasons: dict[str, int] = Field({}, description="Reason of the quarantine -> number of these documents.")
    problem: str = Field("", description="The first problem in words.")
    left_out: dict[str, int] = Field(
        {},
        exclude_if=lambda left_out: not left_out,
        description="Cause -> number of documents that are not permutable; left out where there are none.",
    )
    example: str = Field("", exclude_if=lambda text: not text, description="The message of the first of them.")
    notes: dict[str, tuple[int, int]] = Field({}, description="Kind of note -> their number, and the first place.")

    @property
    def problems(self) -> str:
        """States how many documents cannot be read, and why."""
        bad = sum(self.reasons.values())
        counted = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in self.reasons.items())
        return (
            f"{bad:,} of {self.documents:,} sampled documents of {self.name} cannot be read: {counted} "
            f"(first: {self.problem})"
        )

    @property
    def stops(self) -> bool:
        """Whether the input is not what its settings say: no document can be read, or half of them are broken."""
        bad = sum(self.reasons.values())
        return bad == self.documents or self.reasons.get(Reason.UNDECODABLE, 0) >= max(_LEAST, self.documents / 2)

    def _items_left_out(self) -> str:
        """States how many items or runs of rows an answer cannot use, and why."""
        counts = ", ".join(f"{count:,} with {cause}" for cause, count in self.left_out.items())
        return (
            f"{sum(self.left_out.values()):,} of {self.documents:,} documents of {self.name} are left out, because "
            f"their orders are not equally likely or not different: {counts} (first: {self.example})"
        )

    def lines(self, error_budget: float) -> list[str]:
        """A line for each finding, with the prefix of a warning or a note."""
        notes = Notes(dict(self.notes))
        lines = [f"{WARNING}{line}" for line in notes.sentences(self.name, doubts=True)]
        if self.reasons:
            over = sum(self.reasons.values()) > error_budget * self.documents
            lines.append(f"{WARNING if over else NOTE}{self.problems}")
        if self.left_out:
            every = sum(self.left_out.values()) == self.documents
            lines.append(f"{WARNING if every else NOTE}{self._items_left_out()}")
        return lines + [f"{NOTE}{line}" for line in notes.sentences(self.name, doubts=False)]


@dataclass(slots=True)
class _Tally:
    """What was read of one input so far."""

    shard: Shard
    documents: int = 0
    misfits: int = 0  # documents that are not in the encoding of the input
    reasons: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    left_out: Counter[str] = field(default_factory=Counter)  # documents that are not permutable, by cause
    example: str = ""
    notes: Notes = field(default_factory=Notes)


class DocumentTally:
    """Counts, per input, of the documents that were read and of those that cannot be, with the notes of its reader."""

    def __init__(self) -> None:
        self._inputs: dict[str, _Tally] = {}

    def readable(self, shard: Shard) -> Iterator[Document]:
        """The documents of a shard without a problem; all are counted."""
        tally = self._inputs.setdefault(f"{shard.role} {shard.path}", _Tally(shard))
        encoded = "encoding" in format_named(shard.format).settings
        for document in read_shard(shard, notes=tally.notes):
            tally.documents += 1
            if document.problem is None:
                tally.misfits += encoded and "\0" in document.text  # as in UTF-16 that is read as UTF-8
                yield document
                continue
            reason, message = document.problem
            tally.misfits += reason == Reason.UNDECODABLE
            if reason == Reason.NOT_PERMUTABLE:
                tally.example = tally.example or message
                tally.left_out[document.cause] += 1
            else:
                tally.problem = tally.problem or message
                tally.reasons[reason] += 1

    def count(self, role: Role) -> int:
        """Number of documents of a role that were read."""
        return sum(one.documents for one in self._inputs.values() if one.shard.role == role)

    def undecodable(self) -> list[Undecodable]:
        """The inputs with documents of another encoding."""
        tallies = (tally for tally in self._inputs.values() if tally.misfits)
        described = (_described(one.shard, one.documents, one.misfits) for one in tallies)
        return [one for one in described if one is not None]

    def findings(self) -> list[InputFindings]:
        """The findings of each input; inputs without findings are omitted."""
        return [
            InputFindings(
                name=one.shard.name,
                documents=one.documents,
                reasons=dict(one.reasons.most_common()),
                problem=one.problem,
                left_out=dict(one.left_out.most_common()),
                example=one.example,
                notes=one.notes.counts,
            )
            for one in self._inputs.values()
            if one.reasons or one.left_out or one.notes.counts
        ]


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
